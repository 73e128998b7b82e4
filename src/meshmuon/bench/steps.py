"""Step time beside torch.optim.Muon and fused AdamW, in one run; on a GPU also against the hardware's floor."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshmuon.bench.measure import Say, matrices, measure_ceilings, milliseconds, say_ceilings, sustained_flops
from meshmuon.bench.workloads import CPU, GPU, QUICK, Shape, Size, floor_ms
from meshmuon.config import Orthogonalizer
from meshmuon.muon import Muon
from meshmuon.testing.processor import bf16_in_fp32

OURS = "meshmuon.Muon"
_WINDOW_MS = 60.0  # of steps without a pause in between: waiting for the first and the last one is no part of them
_SLOW_MS = 2000.0  # a step on a CPU that takes longer is timed once: bf16 takes seconds on some
Make = Callable[[list[Tensor]], torch.optim.Optimizer]
_OTHERS: dict[str, Make] = {
    "torch.optim.Muon": torch.optim.Muon,
    "torch.optim.AdamW (fused)": lambda params: torch.optim.AdamW(params, fused=True),
}
ON_GPU: dict[str, Make] = {
    OURS: Muon,
    "meshmuon.Muon (CUDA graph)": lambda params: Muon(params, cuda_graph=True),
    **_OTHERS,
}
ON_CPU: dict[str, Make] = {
    OURS: Muon,  # computes in fp32
    "meshmuon.Muon (bfloat16)": lambda params: Muon(params, orthogonalizer=Orthogonalizer(dtype="bfloat16")),
    **_OTHERS,
}
Rows = dict[str, dict[str, float]]


def on_cpu(shapes: list[Shape], *, repeats: int) -> Rows:
    """Time the optimizers in turn, so that a busy moment hits all of them.

    torch.optim.Muon computes in bf16, which some CPUs have instructions for and others imitate: ours is timed in both.

    Args:
        shapes: Of the matrices.
        repeats: Timed rounds; one, if a step takes seconds.

    Returns:
        Optimizer → its numbers.
    """
    optimizers = {name: make(matrices(shapes, "cpu")) for name, make in ON_CPU.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()
    for _ in range(repeats):
        for name, optimizer in optimizers.items():
            if not times[name] or times[name][-1] < _SLOW_MS:
                times[name].append(milliseconds(optimizer.step, "cpu"))
    return {
        name: {"ms": statistics.median(values), "least ms": min(values), "rounds": len(values)}
        for name, values in times.items()
    }


def on_gpu(shapes: list[Shape], *, repeats: int) -> Rows:
    """Time the optimizers one after the other: together they would not fit.

    Args:
        shapes: Of the matrices.
        repeats: Timed rounds, of three steps each.

    Returns:
        Optimizer → its numbers.
    """
    results = {}
    for name, make in ON_GPU.items():
        gc.collect()
        torch.cuda.empty_cache()
        optimizer = make(matrices(shapes, "cuda"))
        first = milliseconds(optimizer.step, "cuda")
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        calls = max(3, math.ceil(_WINDOW_MS / milliseconds(optimizer.step, "cuda")))
        times = [milliseconds(optimizer.step, "cuda", calls=calls) for _ in range(repeats)]
        start = time.perf_counter()
        optimizer.step()
        host = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        results[name] = {
            "ms": statistics.median(times),
            "least ms": min(times),
            "host ms": host,
            "first ms": first,
            "extra GB": (torch.cuda.max_memory_allocated() - held) / 1e9,
        }
        del optimizer
    return results


def cpu_table(workload: str, rows: Rows) -> str:
    """Lay out what was measured on a CPU.

    Args:
        workload: Its name.
        rows: Optimizer → its numbers.

    Returns:
        A table.
    """
    ours = rows[OURS]["ms"]
    lines = [
        f"\n{workload}, {torch.get_num_threads()} threads",
        f"{'optimizer':28s} {'ms / step':>10s} {'x ours':>8s}",
        *(f"{name:28s} {row['ms']:10.1f} {row['ms'] / ours:8.2f}" for name, row in rows.items()),
    ]
    return "\n".join(lines)


def gpu_table(workload: str, rows: Rows, floor: float) -> str:
    """Lay out what was measured on a GPU.

    Args:
        workload: Its name.
        rows: Optimizer → its numbers.
        floor: The least a step could take, in ms.

    Returns:
        A table, 80 columns wide.
    """
    titles = f"{'ms/step':>8s} {'x floor':>7s} {'x ours':>6s} {'host ms':>8s} {'extra GB':>8s} {'first s':>8s}"
    lines = [f"\n{workload}: floor {floor:.2f} ms", f"{'optimizer':26s} {titles}"]
    ours = rows[OURS]["ms"]
    for name, row in rows.items():
        lines.append(
            f"{name:26s} {row['ms']:8.2f} {row['ms'] / floor:7.2f} {row['ms'] / ours:6.2f} {row['host ms']:8.2f} "
            f"{row['extra GB']:8.2f} {row['first ms'] / 1e3:8.2f}"
        )
    return "\n".join(lines)


def run_steps(
    device: str, *, say: Say, only: str | None = None, repeats: int = 9, size: Size = "full"
) -> dict[str, Any]:
    """Measure every workload, telling as it goes.

    Args:
        device: "cpu" or "cuda".
        say: Where progress and tables go.
        only: Workloads whose name contains this.
        repeats: Timed rounds of each optimizer; on a CPU one, if a step takes seconds.
        size: "quick" takes the least, for tests; anything else what suits the device.

    Returns:
        Workload → numbers; with the ceilings of a GPU, or what bf16 costs on a CPU.
    """
    workloads = QUICK if size == "quick" else CPU if device == "cpu" else GPU
    chosen = {name: shapes for name, shapes in workloads.items() if only is None or only in name}
    results: dict[str, Any] = {}
    if device == "cpu":
        bf16 = bf16_in_fp32()
        say(f"products in bf16, as in torch.optim.Muon, take {bf16:.2f}x the time of fp32 here")
        results["ceilings"] = {"bf16 in fp32 products": bf16}
        for number, (name, shapes) in enumerate(chosen.items(), start=1):
            say(f"step {number}/{len(chosen)}: {name} ...")
            results[name] = on_cpu(shapes, repeats=repeats)
            say(cpu_table(name, results[name]))
        return results
    ceilings = measure_ceilings(device, quick=size == "quick")
    say(say_ceilings(ceilings, device))
    results = {"ceilings": {"flops": ceilings.flops, "bandwidth": ceilings.bandwidth}}
    for number, (name, shapes) in enumerate(chosen.items(), start=1):
        say(f"step {number}/{len(chosen)}: {name} ...")
        rows = on_gpu(shapes, repeats=repeats)
        floor = floor_ms(shapes, ceilings)
        say(gpu_table(name, rows, floor))
        results[name] = {"floor ms": floor, "optimizers": rows}
    if size != "quick":
        results["ceilings"]["sustained"] = sustained = sustained_flops()
        rates = ", ".join(f"{rate / 1e12:.0f} TFLOP/s in {dtype}" for dtype, rate in sustained.items())
        say(f"\nthe product of the ceiling for a second, under the card's power bound: {rates}")
    return results

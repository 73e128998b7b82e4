"""Step time beside torch.optim.Muon and fused AdamW, measured in one run; on a GPU also against the hardware's floor.

python -m benchmarks.bench_step [--device cuda] [--only llama-1b] [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import CPU, GPU, Ceilings, Shape, floor_ms
from meshmuon import Muon

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "meshmuon.Muon": Muon,
    "meshmuon.Muon (CUDA graph)": lambda params: Muon(params, cuda_graph=True),
    "torch.optim.Muon": torch.optim.Muon,
    "torch.optim.AdamW (fused)": lambda params: torch.optim.AdamW(params, fused=True),
}


def matrices(shapes: list[Shape], device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.randn(shape, generator=generator, device=device).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device)
    return params


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], device: str, *, calls: int = 1) -> float:
    """Time per call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def measure_ceilings() -> Ceilings:
    """The largest product and the largest copy of the library, on random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product = min(milliseconds(lambda: torch.mm(a, b, out=out), "cuda", calls=20) for _ in range(5))
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = min(milliseconds(lambda: target.copy_(source), "cuda", calls=10) for _ in range(5))
    return Ceilings(2 * 8192**3 / product * 1e3, 2 * source.numel() * 4 / copy * 1e3)


def on_cpu(shapes: list[Shape], *, repeats: int) -> dict[str, dict[str, float]]:
    """Time the optimizers in turn, so that a busy moment hits all of them."""
    optimizers = {name: make(matrices(shapes, "cpu")) for name, make in OPTIMIZERS.items() if "CUDA" not in name}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()
    for _ in range(repeats):
        for name, optimizer in optimizers.items():
            times[name].append(milliseconds(optimizer.step, "cpu"))
    return {name: {"ms": statistics.median(values), "least ms": min(values)} for name, values in times.items()}


def on_gpu(shapes: list[Shape], *, repeats: int) -> dict[str, dict[str, float]]:
    """Time the optimizers one after the other: together they would not fit."""
    results = {}
    for name, make in OPTIMIZERS.items():
        gc.collect()
        torch.cuda.empty_cache()
        optimizer = make(matrices(shapes, "cuda"))
        first = milliseconds(optimizer.step, "cuda")
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [milliseconds(optimizer.step, "cuda", calls=3) for _ in range(repeats)]
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


def print_cpu(workload: str, rows: dict[str, dict[str, float]]) -> None:
    ours = rows["meshmuon.Muon"]["ms"]
    print(f"\n{workload}, fp32, {torch.get_num_threads()} threads")
    print(f"{'optimizer':28s} {'ms / step':>10s} {'x ours':>8s}")
    for name, row in rows.items():
        print(f"{name:28s} {row['ms']:10.1f} {row['ms'] / ours:8.2f}", flush=True)


def print_gpu(workload: str, rows: dict[str, dict[str, float]], floor: float) -> None:
    print(f"\n{workload}: floor {floor:.2f} ms")
    titles = f"{'ms / step':>10s} {'x floor':>8s} {'x ours':>7s} {'host ms':>8s} {'extra GB':>9s} {'first s':>8s}"
    print(f"{'optimizer':28s} {titles}")
    ours = rows["meshmuon.Muon"]["ms"]
    for name, row in rows.items():
        print(
            f"{name:28s} {row['ms']:10.2f} {row['ms'] / floor:8.2f} {row['ms'] / ours:7.2f} {row['host ms']:8.2f} "
            f"{row['extra GB']:9.2f} {row['first ms'] / 1e3:8.2f}",
            flush=True,
        )


def run(device: str, *, only: str | None, repeats: int) -> dict[str, Any]:
    """Measure every workload, printing as it goes."""
    if device == "cpu":
        results: dict[str, Any] = {name: on_cpu(shapes, repeats=repeats) for name, shapes in CPU.items()}
        for name, rows in results.items():
            print_cpu(name, rows)
        return results
    ceilings = measure_ceilings()
    print(f"ceilings: {ceilings.flops / 1e12:.0f} TFLOP/s (8192³ bf16), {ceilings.bandwidth / 1e12:.2f} TB/s (copy)")
    results = {"ceilings": {"flops": ceilings.flops, "bandwidth": ceilings.bandwidth}}
    for name, shapes in GPU.items():
        if only is None or only in name:
            rows = on_gpu(shapes, repeats=repeats)
            floor = floor_ms(shapes, ceilings)
            print_gpu(name, rows, floor)
            results[name] = {"floor ms": floor, "optimizers": rows}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each optimizer")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    results = run(arguments.device, only=arguments.only, repeats=arguments.repeats)
    if arguments.json:
        hardware = torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor() or "CPU"
        record = {
            "date": str(datetime.date.today()),
            "hardware": hardware,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

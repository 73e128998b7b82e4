"""Step time beside torch.optim.Muon and fused AdamW, measured in one run.

python -m benchmarks.bench_step [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshmuon import Muon

WORKLOADS = {
    "a GPT of width 192, 6 blocks with fused q, k, v: 24 matrices of 192...768": [
        shape for _ in range(6) for shape in ((576, 192), (192, 192), (768, 192), (192, 768))
    ],
    "square matrices: 24 of 192...768": [(size, size) for _ in range(6) for size in (192, 384, 576, 768)],
}


def matrices(shapes: list[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def milliseconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def measure(shapes: list[tuple[int, int]], *, repeats: int) -> dict[str, list[float]]:
    """Time the optimizers in turn, so that a busy moment hits all of them."""
    optimizers = {
        "meshmuon.Muon": Muon(matrices(shapes)),
        "torch.optim.Muon": torch.optim.Muon(matrices(shapes)),
        "torch.optim.AdamW (fused)": torch.optim.AdamW(matrices(shapes), fused=True),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()
    for _ in range(repeats):
        for name, optimizer in optimizers.items():
            times[name].append(milliseconds(optimizer.step))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each optimizer")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    results = {}
    for workload, shapes in WORKLOADS.items():
        times = measure(shapes, repeats=arguments.repeats)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ours = medians["meshmuon.Muon"]
        print(f"\n{workload}, fp32, {torch.get_num_threads()} threads")
        print(f"{'optimizer':28s} {'ms / step':>10s} {'x ours':>8s}")
        for name, value in medians.items():
            print(f"{name:28s} {value:10.1f} {value / ours:8.2f}", flush=True)
        results[workload] = {"median_ms": medians, "all_ms": times}
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        record = {
            "date": str(datetime.date.today()),
            "threads": torch.get_num_threads(),
            **versions,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

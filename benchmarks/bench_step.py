"""Step time beside torch.optim.Muon and fused AdamW, measured in one run.

python -m benchmarks.bench_step [--repeats 5] [--json FILE]
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

SHAPES = [(192, 192), (192, 768), (768, 192), (384, 384), (576, 192), (768, 768)] * 4


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def milliseconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each optimizer")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()

    optimizers = {
        "meshmuon.Muon": Muon(matrices()),
        "torch.optim.Muon": torch.optim.Muon(matrices()),
        "torch.optim.AdamW (fused)": torch.optim.AdamW(matrices(), fused=True),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for name, optimizer in optimizers.items():
        print(f"warming up {name} ...", flush=True)
        optimizer.step()
    for _ in range(arguments.repeats):  # in turn, so that a busy moment hits all of them
        for name, optimizer in optimizers.items():
            times[name].append(milliseconds(optimizer.step))

    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians["meshmuon.Muon"]
    count = sum(rows * cols for rows, cols in SHAPES)
    size = f"{count / 1e6:.1f} M parameters"
    print(f"\n{len(SHAPES)} matrices of 192...768, {size}, fp32, {torch.get_num_threads()} threads")
    print(f"{'optimizer':28s} {'ms / step':>10s} {'x ours':>8s}")
    for name, value in medians.items():
        print(f"{name:28s} {value:10.1f} {value / ours:8.2f}")
    print(f"\nmeshmuon.Muon is {medians['torch.optim.Muon'] / ours:.1f}x faster than torch.optim.Muon here")
    if arguments.json:
        result = {
            "date": str(datetime.date.today()),
            "machine": platform.machine(),
            "processor": platform.processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "shapes": SHAPES,
            "median_ms": medians,
            "all_ms": times,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

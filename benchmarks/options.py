"""What our options cost on a GPU: a step with each of them beside a step without, in one run.

python -m benchmarks.options [--only llama-1b] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from meshmuon import Muon
from meshmuon.bench.measure import circumstances, matrices, milliseconds
from meshmuon.bench.workloads import GPU

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "layout_invariant": {"layout_invariant": True},
    "offload": {"offload": True},
    'non_finite="ignore"': {"non_finite": "ignore"},
    "default again": {},
}


def measure(shapes: list[tuple[int, ...]], settings: dict[str, Any], *, repeats: int) -> dict[str, float]:
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = Muon(matrices(shapes, "cuda"), **settings)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = [milliseconds(optimizer.step, "cuda", calls=3) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated()
    state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    buckets = [sum(m.count for m in b.matrices) * math.prod(b.wide_shape) * 4 for b in optimizer.plan.buckets]
    return {
        "ms": statistics.median(times),
        "peak GB": peak / 1e9,
        "state GB": state / 1e9,
        "two buckets GB": 2 * max(buckets) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, shapes in GPU.items():
        if arguments.only and arguments.only not in name:
            continue
        results[name] = {}
        for option, settings in OPTIONS.items():
            row = results[name][option] = measure(shapes, settings, repeats=arguments.repeats)
            beside = results[name]["default"]
            print(
                f"{name:14s} {option:20s} {row['ms']:8.2f} ms  {100 * (row['ms'] / beside['ms'] - 1):+6.1f} %  "
                f"peak {row['peak GB']:6.2f} GB ({row['peak GB'] - beside['peak GB']:+.2f}; "
                f"state {row['state GB']:.2f}, two buckets {row['two buckets GB']:.2f})",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({**circumstances("cuda"), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

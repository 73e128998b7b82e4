"""What fp32 costs small matrices on a GPU: steps of models of them as they are by default and in fp16, beside torch's.

python -m benchmarks.small [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import measure
from meshmuon import Orthogonalizer
from meshmuon.bench.measure import circumstances, matrices, milliseconds

MODELS: dict[str, list[tuple[int, ...]]] = {
    "12 layers, width 192": [(576, 192), (192, 192), (768, 192), (192, 768)] * 12,
    "432 heads of 64x768": [(64, 768)] * 432,
    "384 heads of 128x4096": [(128, 4096)] * 384,
    "128 factors of rank 16": [(16, 4096), (4096, 16)] * 64,
}
WAYS: dict[str, dict[str, Any]] = {
    "fp32, the default": {},
    "fp16": {"orthogonalizer": Orthogonalizer(dtype="float16")},
    "fp32 in a graph": {"cuda_graph": True},
    "fp16 in a graph": {"cuda_graph": True, "orthogonalizer": Orthogonalizer(dtype="float16")},
}


def torchs_ms(shapes: list[tuple[int, ...]], *, repeats: int) -> float:
    optimizer = torch.optim.Muon(matrices(shapes, "cuda"))
    optimizer.step()
    return statistics.median(milliseconds(optimizer.step, "cuda") for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name, shapes in MODELS.items():
        row = {way: measure(shapes, settings, repeats=arguments.repeats)["ms"] for way, settings in WAYS.items()}
        row["torch.optim.Muon"] = torchs_ms(shapes, repeats=arguments.repeats)
        results[name] = row
        print(f"{name:24s}" + "".join(f"  {way} {ms:.2f} ms" for way, ms in row.items()), flush=True)
    if arguments.json:
        record = {**circumstances("cuda"), "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

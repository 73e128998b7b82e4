"""X·Xᵀ by `symmetric_matmul` beside cuBLAS, for one matrix of many sizes and for stacks; time of the device alone.

python -m benchmarks.bench_products [--repeats 5] [--json FILE] [--shapes 1x1024x256 1x1024x4096 ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from meshmuon.bench.measure import circumstances, milliseconds
from meshmuon.kernels.symmetric_matmul import symmetric_matmul

SIDES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
STACKS = ((64, 256, 256), (64, 512, 512), (48, 768, 768), (16, 1024, 1024))
STACKS += ((64, 1408, 2048), (8, 2048, 8192), (2, 4096, 14336))
_TURN_MS = 5.0


def compare(shape: tuple[int, int, int], repeats: int) -> tuple[float, float]:
    """Milliseconds of ours and of cuBLAS, each the median of as many turns of a CUDA graph of many calls.

    A turn replays its graph until the host's part, some 10 us to begin and to notice the end, is lost in it.
    """
    x = torch.randn(shape, device="cuda", dtype=torch.float16)
    out = torch.empty(*shape[:-1], shape[-2], device="cuda", dtype=torch.float16)
    calls = max(3, min(200, int(2e13 / x.numel() / shape[1])))
    ways = (partial(symmetric_matmul, x, out=out), partial(torch.bmm, x, x.mT, out=out))
    graphs = [_captured(way, calls) for way in ways]
    replays = [max(1, round(_TURN_MS / milliseconds(graph.replay, "cuda"))) for graph in graphs]
    turns = [
        [milliseconds(graph.replay, "cuda", calls=n) / calls for graph, n in zip(graphs, replays, strict=True)]
        for _ in range(repeats)
    ]
    ours, theirs = (median(times) for times in zip(*turns, strict=True))
    return ours, theirs


def _shape(text: str) -> tuple[int, int, int]:
    batch, m, k = map(int, text.split("x"))
    return batch, m, k


def _captured(way: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    way()  # compiled, and its tables are there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            way()
    graph.replay()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    shapes = [*((1, side, side) for side in SIDES), *STACKS]
    parser.add_argument("--shapes", nargs="+", type=_shape, default=shapes, help="stacks to multiply, batch x m x k")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for shape in arguments.shapes:
        name = "x".join(map(str, shape))
        ours, theirs = compare(shape, arguments.repeats)
        results[name] = {"ms": ours, "cuBLAS ms": theirs}
        rate = shape[0] * shape[1] ** 2 * shape[2] / ours / 1e9
        print(f"{name:14s} {ours:8.3f} ms, {rate:4.0f} useful TFLOP/s, {theirs / ours:.2f} x cuBLAS", flush=True)
    if arguments.json:
        record = {**circumstances("cuda"), "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Which tiles of `symmetric_matmul` are fastest on this GPU, for the shapes we measure. See [Note: tuned tiles]."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.bench.measure import Say, circumstances
from meshmuon.bench.workloads import STACKS
from meshmuon.errors import message
from meshmuon.kernels.availability import has_triton
from meshmuon.kernels.configs import VARIABLE, Architecture, TileConfig, architecture_of, as_row, choose_config
from meshmuon.kernels.self_check import check_before_use
from meshmuon.kernels.symmetric_matmul import TMA, symmetric_matmul_with

_REPEATS, _CALLS = 5, 10
_WORTH_IT = 0.98  # a new configuration must beat the table's by 2 %: less is noise


@dataclass(frozen=True, slots=True)
class Product:
    """A product to tune: `batch` results of m×m from m×k."""

    batch: int
    m: int
    k: int


@dataclass(frozen=True, slots=True)
class Best:
    """What tuning one product gave.

    Attributes:
        config: The fastest tiles.
        ms: Their time.
        before: The time of the table's.
        refused: How many configurations cannot run on this GPU, or give other bits.
    """

    config: TileConfig
    ms: float
    before: float
    refused: int


def products() -> list[Product]:
    """List the symmetric products of the stacks: Gram matrices, and polynomials of them.

    Returns:
        Each once.
    """
    found = [Product(stack.batch, stack.m, k) for stack in STACKS for k in (stack.n, stack.m)]
    return list(dict.fromkeys(found))


def candidates(architecture: Architecture, product: Product) -> Iterator[TileConfig]:
    """List the tiles to try: first those of the table, then others with its `block_k`, which may decide the bits.

    Args:
        architecture: The kind of GPU.
        product: The product.

    Yields:
        Configurations, each once.
    """
    known = choose_config(architecture, product.batch, product.m, product.k, torch.float16)
    yield known
    for block in (64, 128):
        for warps in (4, 8):
            for stages in (2, 3, 4, 5):
                config = TileConfig(
                    block, known.block_k, warps, stages, known.group, known.tensor_memory, early=known.early
                )
                if config != known:
                    yield config


def event_ms(work: Callable[[], object]) -> float:
    """Time work on a GPU by its own clock, as a CUDA graph: launches from Python would hide short kernels.

    Args:
        work: What to launch.

    Returns:
        The median of several rounds, in ms per call.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            work()
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _CALLS)
    return statistics.median(times)


def best_tiles(
    product: Product,
    configs: Iterator[TileConfig],
    *,
    make: Callable[[Product], Tensor],
    time_of: Callable[[Callable[[], object]], float],
    compute: Callable[..., Tensor] = symmetric_matmul_with,
) -> Best:
    """Time configurations, and take another than the first only if it gives the same bits and is clearly faster.

    Args:
        product: What to compute.
        configs: The table's first, then others.
        make: Gives the operand.
        time_of: Gives ms of a piece of work.
        compute: The kernel.

    Returns:
        What was found.
    """
    x = make(product)
    first = next(configs)
    out = torch.empty(product.batch, product.m, product.m, dtype=x.dtype, device=x.device)
    expected = compute(first, x, out=out.clone())
    before = time_of(lambda: compute(first, x, out=out))
    best, ms, refused = first, before, 0
    check_before_use(TMA, x.device, x.dtype)  # a wrong kernel is no tile that does not fit
    for config in configs:
        try:
            same = torch.equal(compute(config, x, out=out), expected)
        except Exception:  # Triton has several: too little shared memory, too few registers
            same = False
        if not same:
            refused += 1
            continue
        taken = time_of(lambda config=config: compute(config, x, out=out))  # type: ignore[misc]
        if taken < min(ms, _WORTH_IT * before):
            best, ms = config, taken
    return Best(best, ms, before, refused)


def check_can_tune() -> None:
    """Refuse to tune where there is nothing to tune.

    Raises:
        ValueError: With the reason.
    """
    if not torch.cuda.is_available():
        raise ValueError(message("--tune", found="no GPU that torch can use", do="Run it on the machine that trains"))
    if os.environ.get(VARIABLE):
        found = f"{VARIABLE} is set, and would be measured against"
        raise ValueError(message("--tune", found=found, do=f"Unset {VARIABLE}"))
    if not has_triton():
        raise ValueError(message("--tune", found="Triton is not installed", do="pip install triton"))


def run_tune(*, say: Say) -> dict[str, Any]:
    """Tune every product, telling as it goes.

    Args:
        say: Where progress goes.

    Returns:
        The record to save: gpu, architecture, and a row for each product where other tiles are faster.

    Raises:
        ValueError: If there is nothing to tune here.
    """
    check_can_tune()
    device = torch.device("cuda", torch.cuda.current_device())
    architecture = architecture_of(device)
    rows = []
    for product in _to_tune(architecture):
        configs = candidates(architecture, product)
        best = best_tiles(product, configs, make=_operand, time_of=event_ms)
        words = f"{product.batch}x{product.m}x{product.k}: {best.before:.3f} ms"
        if best.ms < best.before:
            rows.append(as_row(product.m, product.k, product.batch if architecture == "hopper" else None, best.config))
            c = best.config
            words += f" -> {best.ms:.3f} ms with {c.block}x{c.block}x{c.block_k} w{c.warps} s{c.stages}"
        say(words + (f" ({best.refused} not usable)" if best.refused else ""))
        torch.cuda.empty_cache()
    return {**circumstances("cuda"), "gpu": torch.cuda.get_device_name(), "architecture": architecture, "rows": rows}


def _to_tune(architecture: Architecture) -> list[Product]:
    """Where tiles may not depend on the batch, the largest batch of each shape stands for all."""
    if architecture == "hopper":
        return products()
    largest = {(product.m, product.k): product for product in sorted(products(), key=lambda p: p.batch)}
    return list(largest.values())


def _operand(product: Product) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(product.batch, product.m, product.k, generator=generator, device="cuda")
    return (x / product.k**0.5).half()

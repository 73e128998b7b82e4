"""How long one device takes for the work of a step: a few constants, and how to fit them to measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshmuon.polar.gram import split_at
from meshmuon.polar.recipe import Recipe

# Classes of products by the short side of the matrix: at least this. Larger ones keep more of the device busy.
SHORT_SIDES = (4096, 2048, 1024, 0)

# Of our symmetric products: operations per second, counting one triangle, against those of cuBLAS on the whole product
# (benchmarks/NOTES.md, at 4096, 2048, 1408 and 768: the last is 48 of them in the eighth round, 1.60x cuBLAS; at 2048
# and 1408 as in the steps of llama-1b of the eleventh and moe of the tenth and eleventh).
_SYMMETRIC_RATE = (0.86, 0.88, 0.84, 0.80)

# What the code does besides products. Change these together with the code, then fit again.
_ENTRY_BYTES = 40  # by number of a matrix, from the buffer to the first product: cast, peak, scale, norm, divide, cast
_ENTRY_CALLS = 12  # the same in calls
_FUSED_ENTRY_BYTES = 6  # where kernels of ours do it: one pass to read and write, the norm came with the momentum
_FUSED_ENTRY_CALLS = 2
_SMALL_CALLS = 2  # by quadratic polynomial of a Gram matrix: the copy in baddbmm, and its diagonal; none in our kernels
_FOLDED_CALLS = 6  # with a folded restart: the Gram matrix, q·r in two, that times q, both factors, the last product
STEP_BYTES = 24  # by number of a parameter in fp32: momentum and update (the floor of bench/workloads.py)
ADAMW_BYTES = 28  # the same for AdamW: gradient and parameter, two moments read and written


@dataclass(frozen=True, slots=True)
class Work:
    """What a device is asked to do.

    Attributes:
        flops: Operations in products, by class of `SHORT_SIDES`; symmetric ones by the time they take.
        bytes: Read and written by everything else.
        calls: Kernels launched.
    """

    flops: tuple[float, ...] = (0.0,) * len(SHORT_SIDES)
    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        flops = tuple(map(float.__add__, self.flops, other.flops))
        return Work(flops, self.bytes + other.bytes, self.calls + other.calls)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants of a device.

    Attributes:
        rates: Operations per second in dense products, by class of `SHORT_SIDES`.
        bandwidth: Bytes per second read and written by element-wise work.
        launch: Seconds that each kernel adds.
    """

    rates: tuple[float, ...]
    bandwidth: float
    launch: float

    def seconds(self, work: Work) -> float:
        """Predict how long work takes."""
        return math.fsum(self._parts(work))

    def _parts(self, work: Work) -> list[float]:
        products = [flops / rate for flops, rate in zip(work.flops, self.rates, strict=True)]
        return [*products, work.bytes / self.bandwidth, work.calls * self.launch]

    def scaled(self, factors: Sequence[float]) -> Calibration:
        """Make every part of a time longer by a factor: the classes of products, then bytes, then launches."""
        *products, by_bytes, by_calls = factors
        rates = tuple(rate / factor for rate, factor in zip(self.rates, products, strict=True))
        return dataclasses.replace(
            self, rates=rates, bandwidth=self.bandwidth / by_bytes, launch=self.launch * by_calls
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """Work that was measured."""

    work: Work
    seconds: float


def products(short_side: int, *, dense: float, symmetric: float = 0.0) -> Work:
    """Put operations into their class.

    Args:
        short_side: Of the matrix they belong to.
        dense: How many in whole products.
        symmetric: How many in our symmetric ones, counting one triangle.

    Returns:
        The work.
    """
    place = next(i for i, least in enumerate(SHORT_SIDES) if short_side >= least)
    total = dense + symmetric / _SYMMETRIC_RATE[place]
    return Work(tuple(total if i == place else 0.0 for i in range(len(SHORT_SIDES))))


def entry_bytes(recipe: Recipe) -> int:
    """Give the bytes read and written, by number of a matrix, before the first product.

    Args:
        recipe: How polar factors are computed.

    Returns:
        Bytes.
    """
    return _FUSED_ENTRY_BYTES if recipe.fused else _ENTRY_BYTES


def polar_work(recipe: Recipe, m: int, n: int, *, batch: int) -> Work:
    """Say what it takes to orthogonalize a batch.

    Args:
        recipe: How.
        m: Short side.
        n: Long side.
        batch: How many matrices at once.

    Returns:
        The work.
    """
    if not batch:
        return Work()
    ours = recipe.kernels.products == "triton"
    total = recipe.flops(m, n)
    dense = min(total, recipe.whole_flops(m, n)) if ours else total
    calls = _product_calls(recipe) + (_SMALL_CALLS * len(recipe.schedule) if recipe.kernels.products == "torch" else 0)
    calls += _FUSED_ENTRY_CALLS if recipe.fused else _ENTRY_CALLS
    passes = Work(bytes=float(entry_bytes(recipe) * batch * m * n), calls=float(calls))
    return products(m, dense=batch * dense * recipe.slowness, symmetric=batch * (total - dense)) + passes


def _product_calls(recipe: Recipe) -> int:
    if recipe.program is not None:
        return 1
    if recipe.form != "gram":
        return 3 * len(recipe.schedule)
    segments = split_at(recipe.schedule, recipe.restarts)
    small = sum(4 * len(segment) - 3 for segment in segments)
    return small + (_FOLDED_CALLS if recipe.way.folded else 2 * len(segments))


def fit(samples: Sequence[Sample], start: Calibration, *, trust: float = 0.03) -> Calibration:
    """Find the constants that explain measurements best.

    Relative errors are made small, and constants are kept near those they start from: with few samples, only what the
    samples tell about is changed.

    Args:
        samples: What was measured.
        start: Where to start: a data sheet, or an earlier fit.
        trust: Weight of the start: a constant off by e costs as much as a sample off by e times its root.

    Returns:
        The fitted constants.
    """
    logs = torch.zeros(len(SHORT_SIDES) + 2, dtype=torch.float64)
    prior = trust * torch.eye(len(logs), dtype=torch.float64)
    for _ in range(50):
        now = start.scaled(logs.exp().tolist())
        parts = torch.tensor([now._parts(sample.work) for sample in samples], dtype=torch.float64)
        predicted = parts.sum(dim=1)
        measured = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
        off = (predicted / measured).log()
        slopes = parts / predicted.unsqueeze(1)  # d log(predicted) / d log(factor)
        logs = logs - torch.linalg.solve(slopes.T @ slopes + prior, slopes.T @ off + trust * logs)
    return start.scaled(logs.exp().tolist())

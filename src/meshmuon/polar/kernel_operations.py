"""The six matrix operations by our kernels: by symmetric products in 16 bits, by whole ones in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.symmetric_matmul import symmetric_matmul
from meshmuon.kernels.whole_matmul import whole_matmul
from meshmuon.polar.coefficients import Triple
from meshmuon.polar.operations import Halves, TorchOperations


class KernelOperations:
    """Symmetric results cost half: see `meshmuon.kernels.symmetric_matmul`.

    Our kernels give a matrix the same bits in every batch. cuBLAS chooses by the size of the batch, and does not.

    Args:
        invariant: Whether cuBLAS is asked for one matrix at a time.
    """

    def __init__(self, *, invariant: bool = False) -> None:
        self._invariant = invariant

    def gram(self, x: Tensor) -> Tensor:
        """Return x·xᵀ."""
        return symmetric_matmul(x)

    def quadratic(self, gram: Tensor, triple: Triple) -> Tensor:
        """Return a·I + b·gram + c·gram²."""
        a, b, c = triple
        return symmetric_matmul(gram, alpha=c, beta=b, c=gram, gamma=a)

    def symmetric_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left·right for two that commute."""
        return symmetric_matmul(left, right)

    def apply(self, factor: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return factor·x, in `out` if given."""
        result = torch.empty_like(x) if out is None else out
        for left, right, to in self._at_once(factor, x, result):
            torch.bmm(left, right, out=to)
        return result

    def gram_in_halves(self, x: Tensor) -> Halves:
        """Return x·xᵀ to twice the digits of its dtype."""
        rest = x.new_empty(*x.shape[:-1], x.shape[-2])
        return symmetric_matmul(x, rest=rest), rest

    def congruence(self, factor: Tensor, halves: Halves) -> Tensor:
        """Return factor·r·factorᵀ for an r in halves."""
        product = torch.empty_like(factor)
        for left, high, rest, to in self._at_once(factor, *halves, product):
            torch.bmm(left, rest, out=to).baddbmm_(left, high, beta=1.0 / REST_SCALE)
        return symmetric_matmul(product, factor)

    def _at_once(self, *stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Give stacks as cuBLAS is to have them: whole, or a matrix at a time."""
        parts = (stack.split(1) if self._invariant else (stack,) for stack in stacks)
        return zip(*parts, strict=True)


class WholeOperations(TorchOperations):
    """In fp32, the same bits in every batch: see `meshmuon.kernels.whole_matmul`. Halves are of 16 bits: torch's."""

    def gram(self, x: Tensor) -> Tensor:
        """Return x·xᵀ."""
        return whole_matmul(x, x.mT)

    def quadratic(self, gram: Tensor, triple: Triple) -> Tensor:
        """Return a·I + b·gram + c·gram²."""
        a, b, c = triple
        return whole_matmul(gram, gram, alpha=c, beta=b, c=gram, gamma=a)

    def symmetric_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left·right for two that commute."""
        return whole_matmul(left, right)

    def apply(self, factor: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return factor·x, in `out` if given."""
        return whole_matmul(factor, x, out=out)

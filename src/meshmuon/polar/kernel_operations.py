"""The four matrix operations by our symmetric products, and everything else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from meshmuon.kernels.symmetric_matmul import symmetric_matmul
from meshmuon.polar.coefficients import Triple


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
        if not self._invariant or len(x) == 1:
            return torch.bmm(factor, x, out=out)
        result = torch.empty_like(x) if out is None else out
        for one, of, to in zip(factor.split(1), x.split(1), result.split(1), strict=True):
            torch.bmm(one, of, out=to)
        return result

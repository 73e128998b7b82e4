"""The six matrix operations the iteration is written over. Kernels for other hardware stand behind the same six."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.polar.coefficients import Triple

Given: TypeAlias = Tensor | list[Tensor]
Halves: TypeAlias = tuple[Tensor, Tensor]  # rounded to 16 bits, and what that took, times REST_SCALE


def taken(x: Given) -> Tensor:
    """Take a tensor, out of its list if it is in one.

    Whoever passes a tensor in a list gives it away: then nobody else holds it, and its memory is free for others as
    soon as it is used up. With one that is passed by itself, the caller's own name for it keeps it until the end.

    Args:
        x: A tensor, or a list of one.

    Returns:
        The tensor.
    """
    return x.pop() if isinstance(x, list) else x


class Operations(Protocol):
    """Products of stacks of matrices: x is (batch, m, n), every other operand a symmetric (batch, m, m)."""

    def gram(self, x: Tensor) -> Tensor:
        """Return x·xᵀ."""

    def quadratic(self, gram: Tensor, triple: Triple) -> Tensor:
        """Return a·I + b·gram + c·gram²."""

    def symmetric_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left·right for two that commute, so that the product is symmetric too."""

    def apply(self, factor: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return factor·x, in `out` if given."""

    def gram_in_halves(self, x: Tensor) -> Halves:
        """Return x·xᵀ to twice the digits of its dtype."""

    def congruence(self, factor: Tensor, halves: Halves) -> Tensor:
        """Return factor·r·factorᵀ for an r in halves."""


class TorchOperations:
    """The six operations by torch alone, as it comes."""

    def gram(self, x: Tensor) -> Tensor:
        """Return x·xᵀ."""
        return torch.bmm(x, x.mT)

    def quadratic(self, gram: Tensor, triple: Triple) -> Tensor:
        """Return a·I + b·gram + c·gram²."""
        a, b, c = triple
        result = quadratic_rows(gram, gram, gram, b, c)
        # Folding a·I in here makes the last product a plain one; measured as accurate as adding a·x to it.
        result.diagonal(dim1=-2, dim2=-1).add_(a)
        return result

    def symmetric_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left·right for two that commute."""
        return torch.bmm(left, right)

    def apply(self, factor: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return factor·x, in `out` if given."""
        return torch.bmm(factor, x, out=out)

    def gram_in_halves(self, x: Tensor) -> Halves:
        """Return x·xᵀ to twice the digits of its dtype."""
        wide = x.to(torch.float32)
        return in_halves(torch.bmm(wide, wide.mT), x.dtype)

    def congruence(self, factor: Tensor, halves: Halves) -> Tensor:
        """Return factor·r·factorᵀ for an r in halves."""
        high, rest = (half.to(torch.float32) for half in halves)
        wide = factor.to(torch.float32)
        return torch.bmm(torch.bmm(wide, high + rest / REST_SCALE), wide.mT).to(factor.dtype)


def quadratic_rows(these: Tensor, left: Tensor, right: Tensor, b: float, c: float) -> Tensor:
    """Return b·these + c·left·right, rounded once.

    Args:
        these: (batch, m, n).
        left: (batch, m, k).
        right: (batch, k, n).
        b: A factor.
        c: A factor.

    Returns:
        A new tensor.
    """
    if c == 0.0:
        return these * b  # torch's bf16 baddbmm is wrong on a CPU for alpha = 0
    return torch.baddbmm(these, left, right, beta=b, alpha=c)


def in_halves(wide: Tensor, dtype: torch.dtype) -> Halves:
    """Round to a dtype, and keep what that took.

    Args:
        wide: Any fp32 tensor.
        dtype: Of 16 bits.

    Returns:
        The two halves.
    """
    high = wide.to(dtype)
    return high, ((wide - high.to(wide.dtype)) * REST_SCALE).to(dtype)

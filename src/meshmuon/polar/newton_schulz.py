"""The iteration in its standard form: every step on the whole matrix."""

from __future__ import annotations

from torch import Tensor

from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.operations import Given, Operations, taken


def newton_schulz(x: Given, *, schedule: Schedule, operations: Operations, out: Tensor | None = None) -> Tensor:
    """Apply the composed polynomial to the singular values of each matrix.

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1; given away in a list, or kept.
        schedule: One triple per step.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.

    Returns:
        The (batch, m, n) result.
    """
    x = taken(x)
    for step, triple in enumerate(schedule, start=1):
        last = step == len(schedule)
        x = operations.apply(operations.quadratic(operations.gram(x), triple), x, out if last else None)
    return x

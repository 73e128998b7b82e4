"""The iteration in its standard form: every step on the whole matrix."""

from __future__ import annotations

from torch import Tensor

from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.operations import Operations


def newton_schulz(x: Tensor, *, schedule: Schedule, operations: Operations, out: Tensor | None = None) -> Tensor:
    """Apply the composed polynomial to the singular values of each matrix.

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1.
        schedule: One triple per step.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.

    Returns:
        The (batch, m, n) result.
    """
    for step, triple in enumerate(schedule, start=1):
        last = step == len(schedule)
        x = operations.apply(operations.quadratic(operations.gram(x), triple), x, out if last else None)
    return x

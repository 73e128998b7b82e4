"""The iteration on the m×m Gram matrix: cheaper for long matrices, and unstable unless it restarts.

Every step multiplies x from the left by a polynomial in x·xᵀ. So one can iterate on the small r = x·xᵀ alone, collect
the product q of those polynomials, and apply it to x once. Idea: https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.

[Note: restarts] Rounding leaves r with eigenvalues of size u (the unit roundoff) where x has none. In exact arithmetic
such an eigenvalue would grow by a² per step together with the x it belongs to; here it grows alone, and once it nears
1 the polynomial sends it to infinity. A restart applies q to x and forms r anew, which forgets the noise. A
segment of s steps updates r s-1 times, so it is safe while u·Π a² over all but its last step is small. The bound 1/4
gives (2,) for five Polar Express steps in fp16 and (2, 4) in bf16, which is what was measured to be needed.

[Note: mirrored products] Kernels that compute one triangle of z·q and mirror it take for granted that z and q commute.
They do not quite, and then q·x is no longer z·(q·x): a direction that q should shrink gets what rounding mixed into it
from those that q stretches by Π a. Where r was updated twice or more, this needs a tighter bound. Without it five steps
of You's coefficients, whose first maps 1 to 0.117, sent a matrix of rank one to 46 in fp16; with it they restart at 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.operations import Given, Operations, taken

_MAX_AMPLIFIED_ROUNDING = 0.25
_MAX_WHERE_MIRRORED = 0.1


def gram_newton_schulz(
    x: Given, *, schedule: Schedule, restarts: Sequence[int], operations: Operations, out: Tensor | None = None
) -> Tensor:
    """Apply the composed polynomial to the singular values of each matrix, through its Gram matrix.

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1; given away in a list, or kept.
        schedule: One triple per step.
        restarts: The steps (counted from 0) before which the Gram matrix is formed anew.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.

    Returns:
        The (batch, m, n) result.
    """
    *segments, last = split_at(schedule, restarts)
    x = taken(x)
    for segment in segments:
        x = operations.apply(factor([operations.gram(x)], segment, operations), x)
    return operations.apply(factor([operations.gram(x)], last, operations), x, out)


def factor(r: Given, segment: Schedule, operations: Operations) -> Tensor:
    """The product q of a segment's polynomials, so that the segment maps x to q·x. Holds four m×m matrices at most."""
    r, q = taken(r), None
    for step, triple in enumerate(segment, start=1):
        z = operations.quadratic(r, triple)
        q = z if q is None else operations.symmetric_product(z, q)
        if step < len(segment):
            r = operations.symmetric_product(z, r)  # in two lines: the one before is let go of in between
            r = operations.symmetric_product(r, z)
    assert q is not None, "a segment has at least one step"
    return q


def split_at(schedule: Schedule, restarts: Sequence[int]) -> list[Schedule]:
    """Cut a schedule into the segments between restarts.

    Args:
        schedule: One triple per step.
        restarts: Increasing step numbers from 1 to len(schedule) - 1.

    Returns:
        The segments, in order.
    """
    ends = [*restarts, len(schedule)]
    starts = [0, *restarts]
    return [schedule[start:end] for start, end in zip(starts, ends, strict=True)]


def choose_restarts(schedule: Schedule, dtype: torch.dtype, *, mirrored: bool = False) -> tuple[int, ...]:
    """Choose the fewest restarts that keep the Gram form stable in a dtype. See [Note: restarts].

    Args:
        schedule: One triple per step.
        dtype: The dtype the products are stored in.
        mirrored: Whether symmetric products are computed by one triangle. See [Note: mirrored products].

    Returns:
        Step numbers before which to restart.
    """
    # 16-bit products are summed in fp32 and rounded once; fp32 and fp64 ones leave several units of their own.
    roundoff = torch.finfo(dtype).eps / 2 * (1 if dtype.itemsize == 2 else 16)
    restarts: list[int] = []
    amplified, updates = roundoff, 0
    for step in range(1, len(schedule)):
        amplified *= max(1.0, schedule[step - 1][0]) ** 2
        updates += 1
        if amplified > (_MAX_WHERE_MIRRORED if mirrored and updates > 1 else _MAX_AMPLIFIED_ROUNDING):
            restarts.append(step)
            amplified, updates = roundoff, 0
    return tuple(restarts)

"""The iteration on the m×m Gram matrix: cheaper for long matrices, and unstable unless it restarts.

Every step multiplies x from the left by a polynomial in x·xᵀ. So one can iterate on the small r = x·xᵀ alone, collect
the product q of those polynomials, and apply it to x once. Idea: https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.

[Note: restarts] Rounding leaves r with eigenvalues of size u (the unit roundoff) where x has none. In exact arithmetic
such an eigenvalue would grow by a² per step together with the x it belongs to; here it grows alone, and once it nears
1 the polynomial sends it to infinity. A restart applies q to x and forms r anew, which forgets the noise. A
segment of s steps updates r s-1 times, so it is safe while u·Π a² over all but its last step is small. The bound 1/4
gives (2,) for five Polar Express steps in fp16 and (2, 4) in bf16, which is what was measured to be needed.

[Note: large matrices in fp32] In fp32 five steps are stable without a restart, but what rounding leaves in r where x is
nothing adds up over the directions: on a matrix of rank one the two forms differ by 3.6e-3 at 1024 rows, 2e-2 at 4096
and 4e-2 at 8192 (one H200). With the restarts of fp16 it is 4e-4, 1e-3 and at most 3e-3. So above 1024 rows fp32 takes
those.

[Note: folded restarts] A restart forms (q·x)·(q·x)ᵀ, which is q·r·q: it need not touch x. Then x is multiplied twice
instead of four times, for eight more m·m·m: cheaper from n = 2.3 to 2.7·m on, and near enough from 768 rows on (see
ways.py). Three things keep it accurate. r comes in two halves, since q lifts what rounding it once would do to small
singular values. q·r is a whole product and not one triangle mirrored, since q lifts its error once more. So is the last
product of polynomials, for the reason in the next note. Measured (benchmarks/NOTES.md), it is nearer to the exact
factor than a restart on x where many singular values count. At ranks of 1 to 8 it is further from the polynomial, since
q, large where x is nothing, is rounded as a whole; but no further than the standard form in bf16.

[Note: mirrored products] Kernels that compute one triangle of z·q and mirror it take for granted that z and q commute.
They do not quite, and then q·x is no longer z·(q·x): a direction that q should shrink gets what rounding mixed into it
from those that q stretches by Π a. Where r was updated twice or more, this needs a tighter bound. Without it five steps
of You's coefficients, whose first maps 1 to 0.117, sent a matrix of rank one to 46 in fp16; with it they restart at 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.operations import Given, Operations, taken
from meshmuon.polar.pairs import PairOperations, find_pair, two_steps

_MAX_AMPLIFIED_ROUNDING = 0.25
_MAX_WHERE_MIRRORED = 0.1
_LARGE_IN_FP32 = 1024


def gram_newton_schulz(
    x: Given,
    *,
    schedule: Schedule,
    restarts: Sequence[int],
    operations: Operations,
    out: Tensor | None = None,
    pairs: PairOperations | None = None,
    whole: bool = False,
) -> Tensor:
    """Apply the composed polynomial to the singular values of each matrix, through its Gram matrix.

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1; given away in a list, or kept.
        schedule: One triple per step.
        restarts: The steps (counted from 0) before which the Gram matrix is formed anew.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.
        pairs: How to do two steps at once, where that is known; None: step by step.
        whole: Whether the last product of three or more polynomials is not to be one triangle mirrored.

    Returns:
        The (batch, m, n) result.
    """
    *segments, last = split_at(schedule, restarts)
    x = taken(x)
    for segment in segments:
        x = operations.apply(factor([operations.gram(x)], segment, operations, pairs=pairs), x)
    whole = whole and len(last) > 2
    return operations.apply(factor([operations.gram(x)], last, operations, whole=whole, pairs=pairs), x, out)


def folded_gram_newton_schulz(
    x: Given,
    *,
    schedule: Schedule,
    restarts: Sequence[int],
    operations: Operations,
    out: Tensor | None = None,
    pairs: PairOperations | None = None,
) -> Tensor:
    """Do the same with one restart, which never touches x. See [Note: folded restarts].

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1; given away in a list, or kept.
        schedule: One triple per step.
        restarts: The one step before which the Gram matrix is formed anew.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.
        pairs: How to do two steps at once, where that is known; None: step by step.

    Returns:
        The (batch, m, n) result.
    """
    first, second = split_at(schedule, restarts)
    x = taken(x)
    halves = operations.gram_in_halves(x)
    before = factor(halves[0], first, operations, pairs=pairs)
    r = [operations.congruence(before, halves)]
    del halves
    after = factor(r, second, operations, whole=True, pairs=pairs)
    both = operations.apply(after, before)
    del before, after
    return operations.apply(both, x, out)


def factor(
    r: Given, segment: Schedule, operations: Operations, *, whole: bool = False, pairs: PairOperations | None = None
) -> Tensor:
    """Find the product q of a segment's polynomials, so that the segment maps x to q·x.

    Args:
        r: The (batch, m, m) Gram matrices; given away in a list, or kept.
        segment: One triple per step.
        operations: How to multiply.
        whole: Whether the last product is not to be one triangle mirrored.
        pairs: How to do the last two steps at once, where that is known; None: step by step.

    Returns:
        The (batch, m, m) factors. Up to four such stacks are held at a time, r included.
    """
    pair = None if pairs is None else find_pair(segment, whole=whole)
    alone = segment if pair is None else segment[:-2]
    last_product = operations.apply if whole else operations.symmetric_product
    r, q = taken(r), None
    for step, triple in enumerate(alone, start=1):
        z = operations.quadratic(r, triple)
        last = step == len(segment)
        if last:
            del r  # one less is held beside the last product
        if q is None:
            q = z
        else:
            q = last_product(z, q) if last else operations.symmetric_product(z, q)
        if not last:
            r = operations.symmetric_product(z, r)  # in two lines: the one before is let go of in between
            r = operations.symmetric_product(r, z)
    if pair is not None and pairs is not None:
        r = [r]
        z = two_steps(r, pair, pairs)
        q = z if q is None else last_product(z, q)
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


def held_small(schedule: Schedule, restarts: Sequence[int], *, folded: bool) -> int:
    """Count the m×m matrices that are held at a time.

    Args:
        schedule: One triple per step.
        restarts: Step numbers before which to restart.
        folded: Whether the one restart is folded.

    Returns:
        The number for one matrix.
    """
    segments = [len(segment) for segment in split_at(schedule, restarts)]
    in_factor = [min(1 + steps, 4) for steps in segments]
    if not folded:
        return max(in_factor)
    halves, before = 2, 1
    in_congruence = halves + before + 2  # q·r, and the result
    return max(halves + in_factor[0], in_congruence, before + in_factor[1])


def choose_restarts(
    schedule: Schedule, dtype: torch.dtype, *, mirrored: bool = False, side: int = 0
) -> tuple[int, ...]:
    """Choose the fewest restarts that keep the Gram form stable in a dtype. See [Note: restarts].

    Args:
        schedule: One triple per step.
        dtype: The dtype the products are stored in.
        mirrored: Whether symmetric products are computed by one triangle. See [Note: mirrored products].
        side: The short side of the matrix. See [Note: large matrices in fp32].

    Returns:
        Step numbers before which to restart.
    """
    if dtype == torch.float32 and side > _LARGE_IN_FP32:
        dtype = torch.float16
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


def can_fold(schedule: Schedule, restarts: Sequence[int], dtype: torch.dtype) -> bool:
    """Say whether restarts may be done on the Gram matrix alone. See [Note: folded restarts].

    Two halves know r to u², and q lifts that error by the square of what it lifts x by: it has to stay below u.

    Args:
        schedule: One triple per step.
        restarts: Step numbers before which to restart.
        dtype: The dtype the products are stored in.

    Returns:
        Whether; only for a single restart in fp16, after two steps at most. After three of Keller's, whose product is
        mirrored twice, low ranks came out two to five times as far from the polynomial as with a restart on x.
    """
    if dtype != torch.float16 or len(restarts) != 1 or restarts[0] > 2:
        return False
    lifted = math.prod(max(1.0, a) ** 2 for a, _, _ in schedule[: restarts[0]])
    return lifted * torch.finfo(dtype).eps / 2 <= 1.0

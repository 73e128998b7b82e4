"""The ways to evaluate the polynomial of a schedule, and which of them is the cheapest for a shape.

[Note: whole products] Where the last product of polynomials is one triangle mirrored, a matrix of low rank comes out
further from its polar factor than in fp32 ([Note: mirrored products] in gram.py): by 0.012 at 704 rows, 0.009 at 1408,
0.007 at 2048, against 0.002 if it is a whole product. Up to 0.01 is promised. So small matrices take the whole product,
or one more restart where that is cheaper, as it is for squares and for pairs of steps: then there is no such product at
all. On square Gaussians, with their singular values down to zero, that is nearer to the standard form as well: 0.002
from it instead of 0.006, from 64 rows to 1024.

[Note: small matrices do not fold] What a folded restart adds to the distance from the polar factor grows as matrices
get smaller. At rank m/8, after five steps of You's coefficients, it is 0.017 further than fp32 at 256 rows, 0.012 at
512, 0.0085 at 768 and 0.007 at 1024; with a restart on the matrix itself 0.009, 0.005, 0.004 and 0.003.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshmuon.config import Orthogonalizer
from meshmuon.polar import cost
from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.gram import (
    can_fold,
    choose_restarts,
    folded_gram_newton_schulz,
    gram_newton_schulz,
    split_at,
)
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.operations import Given, Operations
from meshmuon.polar.pairs import PairOperations, find_pair

_MIRRORED_FROM = 1280  # the short side from which the last product of polynomials may be mirrored
# The short side from which two steps at once pay ([Note: pairs] in pairs.py): with 768 rows, adding to a product and
# writing two results takes longer than the tensor cores take for the next one (768, 1408 and 2048: NOTES.md).
_PAIRS_FROM = 1024
_MOST_STEPS = 10  # for which a program with one more restart fits into a launch
_FOLDED_FROM = 768  # the short side from which a restart may be folded. See [Note: small matrices do not fold].


class Way(NamedTuple):
    """One way to evaluate the polynomial.

    Attributes:
        form: Its form.
        restarts: Where the Gram form starts anew.
        folded: Whether it does so on the Gram matrix alone, and multiplies matrices only at the end.
        whole: Whether the last product of its polynomials is a whole one. See [Note: whole products].
        paired: Whether two steps are done at once where that is known. See [Note: pairs] in pairs.py.
    """

    form: Literal["standard", "gram", "svd"]
    restarts: tuple[int, ...] = ()
    folded: bool = False
    whole: bool = False
    paired: bool = False


def choose_way(
    m: int,
    n: int,
    *,
    schedule: Schedule,
    wishes: Orthogonalizer,
    compute: torch.dtype,
    symmetric: bool,
    programs: bool,
) -> Way:
    """Choose the cheapest way for matrices of one shape.

    Args:
        m: Short side.
        n: Long side.
        schedule: One triple per step.
        wishes: The user's choices, with their "auto"s.
        compute: What the products are computed in.
        symmetric: Whether products with a symmetric result compute one triangle only.
        programs: Whether all products can be one program.

    Returns:
        The way.
    """
    ways = _ways(m, schedule=schedule, wishes=wishes, compute=compute, symmetric=symmetric, programs=programs)
    return min(ways, key=partial(count_flops, m, n, schedule=schedule, symmetric=symmetric))


def _ways(
    m: int, *, schedule: Schedule, wishes: Orthogonalizer, compute: torch.dtype, symmetric: bool, programs: bool
) -> list[Way]:
    """What there is to choose from; of two that cost the same, the first is taken."""
    if wishes.form == "standard" or wishes.form == "svd":
        return [Way(wishes.form)]
    ways = [Way("standard")] if wishes.form == "auto" else []
    restarts = wishes.restarts
    if restarts == "auto":
        restarts = choose_restarts(schedule, compute, mirrored=symmetric, side=m)
    segments = split_at(schedule, restarts)
    paired = programs and m >= _PAIRS_FROM and any(map(find_pair, segments))
    several = len(segments[-1]) > 2  # polynomials in the last product
    whole = symmetric and several and m < _MIRRORED_FROM
    ends_in_pair = paired and several and find_pair(segments[-1]) is not None
    if wishes.restarts == "auto" and (whole or ends_in_pair) and len(schedule) <= _MOST_STEPS:
        ways.append(Way("gram", (*restarts, len(schedule) - 2), paired=paired))
    ways.append(Way("gram", restarts, whole=whole, paired=paired))
    if symmetric and m >= _FOLDED_FROM and can_fold(schedule, restarts, compute):
        ways.append(Way("gram", restarts, folded=True, paired=paired))
    return ways


def count_flops(m: int, n: int, way: Way, *, schedule: Schedule, symmetric: bool) -> float:
    """Count the operations for one matrix.

    Args:
        m: Short side.
        n: Long side.
        way: How.
        schedule: One triple per step.
        symmetric: Whether products with a symmetric result compute one triangle only.

    Returns:
        FLOPs.
    """
    if way.form == "svd":
        return cost.svd_flops(m, n)
    if way.form == "standard":
        return cost.standard_flops(m, n, steps=len(schedule), symmetric=symmetric)
    _, restarts, folded, whole, paired = way
    how = {"folded": folded, "whole": whole, "paired": paired}
    return cost.gram_flops(m, n, schedule=schedule, restarts=restarts, symmetric=symmetric, **how)


def evaluate(
    x: Given,
    way: Way,
    *,
    schedule: Schedule,
    operations: Operations,
    out: Tensor | None = None,
    pairs: PairOperations | None = None,
) -> Tensor:
    """Apply the polynomial of a schedule to the singular values of each matrix.

    Args:
        x: (batch, m, n) with m <= n and singular values at most 1; given away in a list, or kept.
        way: How; not by an SVD.
        schedule: One triple per step.
        operations: How to multiply.
        out: Where the result goes; None: to a new tensor.
        pairs: How to do two steps at once, for a way that does; None: step by step.

    Returns:
        The (batch, m, n) result.
    """
    if way.form == "standard":
        return newton_schulz(x, schedule=schedule, operations=operations, out=out)
    iterate = folded_gram_newton_schulz if way.folded else partial(gram_newton_schulz, whole=way.whole)
    pairs = pairs if way.paired else None
    return iterate(x, schedule=schedule, restarts=way.restarts, operations=operations, out=out, pairs=pairs)

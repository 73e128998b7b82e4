"""Two steps of the iteration in four products instead of five.

[Note: pairs] Two steps multiply x by q(r) = z1(r)·z2(r·z1(r)²), a polynomial of degree twelve in r = x·xᵀ. Step by step
that takes five products: r², z1·r, (z1·r)·z1, the square of that, z1·z2. But four products reach degree sixteen, and
with two more terms added to some of them there are enough numbers to choose for all thirteen coefficients of q:

    s = r² + r + 1          every term with a factor of its own
    u = s² + r + s + 1
    v = s² + r + s + 1      of the same product, with other factors
    w = u² + s + v + 1
    q = v·w + u + 1

The factors solve a system of polynomial equations; `benchmarks/find_pairs.py` finds them, once, for the schedule that
is the default. They are exact: q has the values of the two steps to the last digits of a double. The system has several
solutions and one free number (a constant that s may be shifted by). Taken is the one that spreads rounding errors
least, by the slopes of q in s, u, v and w: up to 392 and 59 times the roundoff for the two pairs below, where step by
step it is 393 and 63. All of s, u, v and w are at most 1 in size where r is what it can be.

That a polynomial of degree twelve needs four products is known from matrix exponentials: Sastre (2018,
https://doi.org/10.1016/j.laa.2017.11.010), Bader, Blanes and Casas (2019, https://doi.org/10.3390/math7121174).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from meshmuon.polar.coefficients import Schedule, Triple
from meshmuon.polar.operations import Given, taken

_SAME = 1e-9  # triples are computed anew on every machine


class Terms(NamedTuple):
    """The factors of one result.

    Attributes:
        product: Of the product.
        added: Of what is added.
        identity: Of the identity.
    """

    product: float
    added: tuple[float, ...]
    identity: float


class Pair(NamedTuple):
    """The factors of two steps, in the order in which [Note: pairs] has the terms."""

    s: Terms
    u: Terms
    v: Terms
    w: Terms
    q: Terms


class PairOperations(Protocol):
    """What two steps at once are written over."""

    def combined(
        self, left: Tensor, right: Tensor, added: Sequence[Tensor], wanted: Sequence[Terms]
    ) -> Sequence[Tensor]:
        """Return, for each that is wanted, left·right + added[0] + ... + I with its factors; all of them commute."""


# The first two steps of five or more by Polar Express, for r up to 1; and its fourth and fifth, for r up to 3.6.
_KNOWN: dict[tuple[Triple, Triple], Pair] = {
    (
        (7.892582874424401, -20.38301394587955, 13.555306149406913),
        (3.911484868135425, -2.5464635929060835, 0.42689883196730666),
    ): Pair(
        s=Terms(5.094336960993794, (-6.383597449862224,), 0.9997850904132148),
        u=Terms(0.8537281509999693, (0.6046339004865919, 0.7747421825735835), -0.6279369247533145),
        v=Terms(0.46438535830437727, (1.4956558361434285, 1.0298871441574853), -0.49385158955851444),
        w=Terms(0.7699816979300776, (0.19926120628452992, -0.06206181292476258), 0.09286173185365992),
        q=Terms(42.88915490521303, (-11.291980411450764,), -0.7254560099463647),
    ),
    (
        (3.160399673686287, -2.1496495188984994, 0.3996366907664391),
        (2.191097161861732, -1.441662010214664, 0.32814648762315507),
    ): Pair(
        s=Terms(0.3978008148124209, (-1.7831452707268893,), 1.0),
        u=Terms(0.6165753285003093, (0.560468340311342, 1.2731540653443847), -1.1462765705934344),
        v=Terms(0.41461867786422657, (-0.08258084039063414, 0.333298922460395), 0.2520823996753784),
        w=Terms(0.8736185809527368, (0.18026218843076633, 0.210337436654003), 0.1265320779023319),
        q=Terms(6.12995815062054, (0.2895367520505645,), 0.5795276889952353),
    ),
}


def find_pair(segment: Schedule, *, whole: bool = False) -> Pair | None:
    """Look up how the last two steps of a segment are done at once.

    Args:
        segment: One triple per step.
        whole: Whether the last product may not be one triangle mirrored: then it may not be the pair's own.

    Returns:
        The factors, or None if they are not known.
    """
    if len(segment) < (3 if whole else 2):
        return None
    for steps, pair in _KNOWN.items():
        if all(math.isclose(x, y, rel_tol=_SAME) for ours, its in zip(steps, segment[-2:]) for x, y in zip(ours, its)):
            return pair
    return None


def two_steps(r: Given, pair: Pair, operations: PairOperations) -> Tensor:
    """Find the product of two steps' polynomials in four products. See [Note: pairs].

    Args:
        r: The (batch, m, m) Gram matrices; given away in a list, or kept.
        pair: The factors.
        operations: How to multiply.

    Returns:
        The (batch, m, m) factors that the two steps multiply x with.
    """
    r = taken(r)
    (s,) = operations.combined(r, r, [r], [pair.s])
    u, v = operations.combined(s, s, [r, s], [pair.u, pair.v])
    del r
    (w,) = operations.combined(u, u, [s, v], [pair.w])
    del s
    (q,) = operations.combined(v, w, [u], [pair.q])
    return q

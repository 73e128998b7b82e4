"""The tiles of a program of products, two at a time, in the order in which thread blocks take them (clusters.cu).

[Note: order] Products that follow each other wait for each other, matrix by matrix. So all matrices of a set go through
one product before any goes through the next: by the time a matrix comes round again, its tiles are long written. Sets
are as small as that allows, since what a set works on is to stay in the GPU's cache.

[Note: halves] A product alone often ends with a round in which few blocks have a tile. Its tiles are cut in two then,
64 rows for each block of a cluster, and the round takes half as long. Bits stay: a sum is added up in the same order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 128
MOST_ROWS = 2**15 * TILE // 2  # or columns: places are counted in boxes of 64, with 15 bits
_BAND = 16  # tile rows walked together, column by column: their operands stay in L2
_BOXES = 2  # of 64 rows or columns along a side of a tile: places are counted in them
_SHARED, _IDLE, _SHORT, _PRODUCT_SHIFT = 1, 2, 16, 8  # flags, as in clusters.cu
_WAVES_BETWEEN = 2.5  # until what one wave of tiles computes is written, about two more have begun (measured)


class Second(NamedTuple):
    """What else is made of a product: alpha·A·Bᵀ + beta·C + delta·E + gamma·I, with other factors.

    Attributes:
        d: Number of the stack it is written to. It may be C or E, whichever the first result is not.
        alpha: Factor of the product.
        beta: Factor of C.
        delta: Factor of E.
        gamma: What is added to the diagonal.
    """

    d: int
    alpha: float
    beta: float = 0.0
    delta: float = 0.0
    gamma: float = 0.0


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a program: D = alpha·A·Bᵀ + beta·C + delta·E + gamma·I if mirrored, else D = alpha·A·B + beta·C.

    Attributes:
        a: Number of the stack A.
        b: Number of the stack B.
        c: Number of the stack C, or None.
        d: Number of the stack D. It may be C or E, never A or B.
        mirrored: Whether D is known to be symmetric: one triangle is computed.
        alpha: Factor of the product.
        beta: Factor of C.
        gamma: What is added to the diagonal.
        e: Number of the stack E, or None. Only beside C.
        delta: Factor of E.
        second: Another result of the same product, or None.
        in_halves: Whether that is what rounding takes from the first result, times its alpha; then nothing is added.
        half_a: Whether only the lower triangle of A is there, which is symmetric.
        half_b: The same of B.
        half_d: Whether only the lower triangle of results is to be written. What is above it may be anything.
    """

    a: int
    b: int
    c: int | None
    d: int
    mirrored: bool
    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.0
    e: int | None = None
    delta: float = 0.0
    second: Second | None = None
    in_halves: bool = False
    half_a: bool = False
    half_b: bool = False
    half_d: bool = False

    @property
    def operands(self) -> tuple[int, int]:
        """The stacks that are multiplied."""
        return self.a, self.b

    @property
    def added(self) -> tuple[int, ...]:
        """The stacks that are added."""
        return tuple(stack for stack in (self.c, self.e) if stack is not None)

    @property
    def results(self) -> tuple[int, ...]:
        """The stacks that are written."""
        return (self.d,) if self.second is None else (self.d, self.second.d)


class Item(NamedTuple):
    """What one thread block of a pair computes.

    Attributes:
        matrix: Which one of the stack.
        row: Where its first row is, in boxes of 64.
        col: Where its first column is, in boxes of 64.
        flags: Whether the pair shares the operand of its column; whether there is nothing to compute; whether it is one
            box high instead of two; which product.
    """

    matrix: int
    row: int
    col: int
    flags: int


class Result(NamedTuple):
    """The shape of what a product computes.

    Attributes:
        rows: Of a matrix.
        cols: Of a matrix.
        mirrored: Whether only the lower triangle is computed.
    """

    rows: int
    cols: int
    mirrored: bool

    def columns(self) -> list[range]:
        """Give the tile rows that are computed of each column of tiles."""
        rows, cols = -(-self.rows // TILE), -(-self.cols // TILE)
        return [range(col if self.mirrored else 0, rows) for col in range(cols)]

    @property
    def tiles(self) -> int:
        """How many tiles there are of one matrix."""
        return sum(map(len, self.columns()))


def pair_up(matrices: Iterable[int], result: Result) -> list[tuple[Item, Item]]:
    """Cut what is computed of some matrices into tiles, two at a time.

    Tiles of one column go together as far as possible; what is left of odd columns goes together unshared.

    Args:
        matrices: Which ones of the stack.
        result: Of each.

    Returns:
        For each pair, what its two blocks compute; every tile once.
    """
    shared, single = [], []
    for col, column in enumerate(result.columns()):
        rows = list(column)
        if len(rows) % 2:
            single.append((rows.pop(), col))
        shared += [(row // _BAND, col, row) for row in rows[::2]]
    shared.sort()
    pairs: list[tuple[Item, Item]] = []
    waiting: Item | None = None
    for matrix in matrices:
        for _, col, row in shared:
            upper, lower = (Item(matrix, _BOXES * r, _BOXES * col, _SHARED) for r in (row, row + 1))
            pairs.append((upper, lower))
        for row, col in single:
            item = Item(matrix, _BOXES * row, _BOXES * col, 0)
            if waiting is None:
                waiting = item
            else:
                pairs.append((waiting, item))
                waiting = None
    if waiting is not None:
        pairs.append((waiting, Item(0, 0, 0, _IDLE)))
    return pairs


def list_pairs(batch: int, results: Sequence[Result], clusters: int) -> Tensor:
    """List all pairs of tiles of a program, in the order in which they are to be taken.

    Args:
        batch: Number of matrices.
        results: Of the products, in the order in which a matrix goes through them.
        clusters: How many pairs are computed at a time.

    Returns:
        (pairs, 2, 4), in 32 bits: for either block the matrix, row and column (16 bits each, in boxes of 64), flags,
        and nothing: the kernel sends 16 bytes.
    """
    patterns = [_pattern(result).of(product) for product, result in enumerate(results)]
    sets = even_sets(batch, set_size(batch, results, clusters))
    pairs = torch.cat([_repeated(pattern, matrices) for matrices in sets for pattern in patterns])
    alone = len(results) == 1 and results[0].mirrored  # what waits counts whole tiles; halves have no turned operands
    return last_in_halves(pairs, clusters) if alone else pairs


def last_in_halves(pairs: Tensor, clusters: int) -> Tensor:
    """Cut the tiles of the last round in halves, if there are no more of them than clusters. See [Note: halves].

    A tile whose lower half is outside of the matrix is cut as well: by itself it would take as long as two halves.

    Args:
        pairs: As `list_pairs` gives them, of one symmetric product.
        clusters: How many pairs are computed at a time. They take them in turn.

    Returns:
        The same tiles: pairs of full rounds as they were, and then a pair for each tile that is left.
    """
    full = len(pairs) // clusters * clusters
    left = pairs[full:].flatten(0, 1)
    left = left[left[:, 2] & _IDLE == 0]
    if not 0 < len(left) <= clusters:
        return pairs
    halves = left[:, None].repeat(1, 2, 1)
    halves[:, 1, 1] += 1  # a box further down
    halves[:, :, 2] |= _SHARED | _SHORT
    return torch.cat([pairs[:full], halves])


class _Pattern(NamedTuple):
    """The pairs of two matrices, in which no block idles, and those of one."""

    two: Tensor
    one: Tensor

    def of(self, product: int) -> _Pattern:
        """The same of another product of the program: of many products, few differ in shape."""
        number = torch.tensor([0, 0, product << _PRODUCT_SHIFT, 0], dtype=torch.int32)
        return _Pattern(self.two | number, self.one | number)


@functools.lru_cache(maxsize=256)
def _pattern(result: Result) -> _Pattern:
    return _Pattern(*(_table(pair_up(range(n), result)) for n in (2, 1)))


def _table(pairs: list[tuple[Item, Item]]) -> Tensor:
    rows = [[(item.matrix, item.row | item.col << 16, item.flags, 0) for item in pair] for pair in pairs]
    return torch.tensor(rows, dtype=torch.int32)


def _repeated(pattern: _Pattern, matrices: range) -> Tensor:
    """What `pair_up` gives for these matrices, without a loop over them."""
    firsts = torch.arange(matrices.start, matrices.stop - 1, 2, dtype=torch.int32)
    twos = pattern.two.repeat(len(firsts), 1, 1)
    twos[:, :, 0] += firsts.repeat_interleave(len(pattern.two))[:, None]
    if len(matrices) % 2 == 0:
        return twos
    one = pattern.one.clone()
    one[:, :, 0] += matrices[-1]
    return torch.cat([twos, one])


def set_size(batch: int, results: Sequence[Result], clusters: int) -> int:
    """Say how many matrices go through the products together, at the least. See [Note: order].

    Args:
        batch: Number of matrices.
        results: Of the products.
        clusters: How many compute.

    Returns:
        At least one, at most all.
    """
    if len(results) == 1:
        return batch
    fewest = min(result.tiles for result in results)
    return min(batch, 1 + math.ceil(_WAVES_BETWEEN * 2 * clusters / fewest))


def even_sets(batch: int, least: int) -> list[range]:
    """Divide matrices into sets of almost the same size.

    Args:
        batch: Number of matrices.
        least: Of a set.

    Returns:
        As many sets as there can be; the sizes of two differ by one at most.
    """
    count = batch // least
    ends = [batch * i // count for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def tiles_before(results: Sequence[Result]) -> list[int]:
    """Count, for each product, the tiles of a matrix that have to be written before.

    Args:
        results: Of the products.

    Returns:
        A number for each.
    """
    return list(accumulate((result.tiles for result in results), initial=0))[:-1]

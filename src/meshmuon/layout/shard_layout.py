"""ShardLayout: which part of a tensor each rank of a mesh holds, as intervals, by arithmetic alone.

A placement cuts one tensor dim along one mesh axis. Several may cut the same dim, one after the other, each cutting
what the ones before left. What a rank holds of a dim is then a list of intervals, ascending, in the order it stores
them: one interval for `Shard`, up to `split_factor` many for `_StridedShard` (FSDP over TP on the same dim).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Intervals: TypeAlias = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """What one placement does to a dim: cut it along `axis` into `parts`.

    A strided one cuts each of `factor` equal pieces; with `sizes`, each of the pieces of these sizes.
    """

    axis: int
    parts: int
    factor: int = 1
    sizes: tuple[int, ...] = ()

    def pieces(self, total: int) -> list[Interval]:
        """Give the stretches of a dim that are cut one by one."""
        if not self.sizes:
            return [_chunk(total, self.factor, piece) for piece in range(self.factor)]
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return list(itertools.pairwise(ends))


def length(intervals: Iterable[Interval]) -> int:
    """Count the indices in a list of intervals.

    Args:
        intervals: The intervals.

    Returns:
        The sum of their lengths.
    """
    return sum(stop - start for start, stop in intervals)


def clip(intervals: Iterable[Interval], low: int, high: int) -> Intervals:
    """Intersect intervals with [low, high), counted from low.

    Args:
        intervals: Ascending intervals.
        low: First index to keep.
        high: First index beyond.

    Returns:
        The non-empty intersections, shifted so that `low` becomes 0.
    """
    cut = ((max(start, low), min(stop, high)) for start, stop in intervals)
    return tuple((start - low, stop - low) for start, stop in cut if start < stop)


def position(intervals: Iterable[Interval], index: int) -> int:
    """Find where indices from `index` on begin in a rank's own storage.

    Args:
        intervals: What the rank holds, ascending.
        index: A global index.

    Returns:
        The number of indices below it that the rank holds.
    """
    return sum(max(0, min(stop, index) - start) for start, stop in intervals)


def _chunk(size: int, parts: int, part: int) -> Interval:
    """torch.chunk's rule: equal parts of the size rounded up, the last ones smaller or empty."""
    step = -(-size // parts)
    return (min(part * step, size), min((part + 1) * step, size))


def _narrow(intervals: Intervals, start: int, stop: int) -> list[Interval]:
    """The intervals that positions [start, stop) of a concatenation of intervals stand for."""
    result = []
    offset = 0
    for low, high in intervals:
        first, last = max(start - offset, 0), min(stop - offset, high - low)
        if first < last:
            result.append((low + first, low + last))
        offset += high - low
    return result


@functools.lru_cache(maxsize=1 << 16)
def held(size: int, cuts: tuple[Cut, ...], coordinates: tuple[int, ...]) -> Intervals:
    """Give the indices of a dim that a rank holds.

    Args:
        size: The dim's global size.
        cuts: How it is cut, in the order of mesh axes.
        coordinates: The rank's coordinate for each cut.

    Returns:
        Ascending intervals in storage order; neighbours are merged.
    """
    intervals: Intervals = ((0, size),) if size else ()
    for cut, coordinate in zip(cuts, coordinates, strict=True):
        total = length(intervals)
        taken: list[Interval] = []
        for low, high in cut.pieces(total):
            start, stop = _chunk(high - low, cut.parts, coordinate)
            taken += _narrow(intervals, low + start, low + stop)
        intervals = _merged(taken)
    return intervals


def _merged(intervals: Sequence[Interval]) -> Intervals:
    result: list[Interval] = []
    for start, stop in intervals:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def flattened(dims: Sequence[Intervals], sizes: Sequence[int]) -> Intervals:
    """Give the intervals of several dims seen as one.

    Args:
        dims: What is held of each dim.
        sizes: The dims' global sizes.

    Returns:
        Intervals of the flattened dim.
    """
    result: Intervals = ((0, 1),)
    for intervals, size in zip(dims, sizes, strict=True):
        if intervals == ((0, size),):
            result = tuple((start * size, stop * size) for start, stop in result)
        else:
            rows = itertools.chain.from_iterable(range(start, stop) for start, stop in result)
            result = _merged([(row * size + low, row * size + high) for row in rows for low, high in intervals])
    return result


@functools.lru_cache(maxsize=1024)
def _neighbours(
    mesh_shape: tuple[int, ...], ranks: tuple[int, ...], place: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Ranks that differ from a place along some axes only. Cached: a model has few layouts and many parameters."""
    spans = [range(size) if axis in axes else (place[axis],) for axis, size in enumerate(mesh_shape)]
    strides = [math.prod(mesh_shape[axis + 1 :]) for axis in range(len(mesh_shape))]
    found = (sum(map(int.__mul__, point, strides)) for point in itertools.product(*spans))
    return tuple(sorted(ranks[index] for index in found))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a tensor lies on a mesh.

    Attributes:
        shape: Its global shape.
        mesh_shape: Sizes of the mesh's axes.
        ranks: Global ranks of the mesh, row-major.
        cuts: For each tensor dim, how it is cut.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]

    def axes_of(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Give the mesh axes that cut any of these dims.

        Args:
            dims: Tensor dims.

        Returns:
            Axes, ascending.
        """
        return tuple(sorted({cut.axis for dim in dims for cut in self.cuts[dim]}))

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """The axes along which every rank holds the same; those of size 1 do not count."""
        used = self.axes_of(range(len(self.shape)))
        return tuple(axis for axis, size in enumerate(self.mesh_shape) if axis not in used and size > 1)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Give a rank's place in the mesh.

        Args:
            rank: A global rank.

        Returns:
            One coordinate per axis.
        """
        # On a mesh of the whole job ranks stand at their own places: no search among thousands.
        own_place = 0 <= rank < len(self.ranks) and self.ranks[rank] == rank
        index = rank if own_place else self.ranks.index(rank)
        result = []
        for size in reversed(self.mesh_shape):
            index, coordinate = divmod(index, size)
            result.append(coordinate)
        return tuple(reversed(result))

    def rank_at(self, place: tuple[int, ...]) -> int:
        """Give the rank at a place in the mesh.

        Args:
            place: One coordinate per axis.

        Returns:
            Its global rank.
        """
        index = 0
        for size, coordinate in zip(self.mesh_shape, place, strict=True):
            index = index * size + coordinate
        return self.ranks[index]

    def neighbours(self, rank: int, axes: Iterable[int]) -> tuple[int, ...]:
        """Give the ranks that differ from one along some axes only.

        Args:
            rank: A global rank.
            axes: The axes they may differ along.

        Returns:
            Global ranks, ascending, with the given one among them.
        """
        return _neighbours(self.mesh_shape, self.ranks, self.coordinates(rank), tuple(axes))

    def region(self, rank: int) -> tuple[Intervals, ...]:
        """Give what a rank holds.

        Args:
            rank: A global rank.

        Returns:
            For each dim, ascending intervals in storage order.
        """
        place = self.coordinates(rank)
        return tuple(
            held(size, cuts, tuple(place[cut.axis] for cut in cuts))
            for size, cuts in zip(self.shape, self.cuts, strict=True)
        )

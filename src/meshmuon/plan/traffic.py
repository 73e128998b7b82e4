"""What every member of a team sends and gets, for all members at once: the sums of `bytes_sent`, without its loops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshmuon.layout.records import Matrix
from meshmuon.plan.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Traffic:
    """The two exchanges of a bucket, in bytes, by member of the team.

    Attributes:
        gathered_from: Pieces that leave each member for owners.
        gathered_to: Pieces that reach each owner.
        scattered_from: Pieces of directions that leave each owner.
        scattered_to: Pieces of directions that reach each member.
        pieces: How many pieces the owner that has most takes in and gives out.
        peers: From how many others that owner takes them, and to how many it gives them.
    """

    gathered_from: tuple[int, ...]
    gathered_to: tuple[int, ...]
    scattered_from: tuple[int, ...]
    scattered_to: tuple[int, ...]
    pieces: int
    peers: tuple[int, int]

    @property
    def sent(self) -> list[int]:
        """What each member sends in a step: `bytes_sent`."""
        return list(map(int.__add__, self.gathered_from, self.scattered_from))


class Pieces:
    """How much each member of a team holds of a matrix; alike matrices are asked once. For plans that are kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[int]] = {}

    def key(self, matrix: Matrix, team: tuple[int, ...]) -> tuple[object, ...]:
        """Give what decides how a matrix is cut. Ranks are not hashed: a plan has each team as one object."""
        parameter, share = matrix.parameter, matrix.share
        assert parameter.layout is not None and share is not None
        layout = parameter.layout
        copies = (len(share.copies), id(share.copies[0]))
        where = (layout.shape, layout.mesh_shape, layout.cuts, id(team), copies)
        return (*where, parameter.routing.view, share.rows, share.cols)

    def held(self, matrices: Sequence[Matrix], team: tuple[int, ...]) -> list[int]:
        """Count what each member holds of several matrices together."""
        total = [0] * len(team)
        for alike in self.alike(matrices, team):
            sizes = self.sizes(alike[0], team)
            total = [sum_ + len(alike) * size for sum_, size in zip(total, sizes, strict=True)]
        return total

    def alike(self, matrices: Sequence[Matrix], team: tuple[int, ...]) -> list[list[Matrix]]:
        """Put matrices together that are cut alike."""
        found: dict[tuple[object, ...], list[Matrix]] = {}
        for matrix in matrices:
            found.setdefault(self.key(matrix, team), []).append(matrix)
        return list(found.values())

    def sizes(self, matrix: Matrix, team: tuple[int, ...]) -> list[int]:
        """Count what each member holds."""
        key = self.key(matrix, team)
        if key not in self._known:
            self._known[key] = [matrix.piece(rank).numel for rank in team]
        return self._known[key]


def traffic_of(bucket: Bucket, pieces: Pieces) -> Traffic:
    """Add up what the members of a team send and get for a bucket.

    Args:
        bucket: An owned bucket.
        pieces: Of its plan.

    Returns:
        The sums.
    """
    size = len(bucket.team)
    out, back = bucket.recipe.input_dtype.itemsize, bucket.recipe.dtype.itemsize
    totals = [[0] * size for _ in range(4)]
    alike: dict[tuple[object, ...], tuple[Matrix, Counter[int]]] = {}
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        alike.setdefault(pieces.key(matrix, bucket.team), (matrix, Counter()))[1][owner] += 1
    handled: Counter[int] = Counter()
    peers = (0, 0)
    for matrix, owned in alike.values():
        assert matrix.share is not None
        held = pieces.sizes(matrix, bucket.team)
        copies, whole = matrix.share.copies, math.prod(matrix.shape)
        copy_of = _copy_of(bucket.team, copies)
        in_copy = Counter[int]()
        for owner, count in owned.items():
            in_copy[copy_of[owner]] += count
        total = sum(owned.values())
        for member, piece in enumerate(held):
            mine = owned[member]
            totals[0][member] += (in_copy[copy_of[member]] - mine) * piece * out
            totals[1][member] += mine * (whole - piece) * out
            totals[2][member] += mine * (whole * len(copies) - piece) * back
            totals[3][member] += (total - mine) * piece * back
        holders = sum(map(bool, held))
        peers = (max(peers[0], holders // len(copies)), max(peers[1], holders))
        for owner, count in owned.items():
            handled[owner] += count * (holders // len(copies) + holders)
    most = max(handled.values(), default=0)
    return Traffic(tuple(totals[0]), tuple(totals[1]), tuple(totals[2]), tuple(totals[3]), most, peers)


def _copy_of(team: tuple[int, ...], copies: tuple[tuple[int, ...], ...]) -> list[int]:
    """For each member, the number of its replica."""
    if len(copies) == 1:
        return [0] * len(team)
    numbers = {rank: number for number, copy in enumerate(copies) for rank in copy}
    return [numbers[rank] for rank in team]

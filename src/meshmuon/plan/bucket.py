"""Bucket and Plan: what is computed together and by whom, as data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from meshmuon.config import Execution
from meshmuon.layout.records import Matrix, ParameterRecord
from meshmuon.plan.flat import FlatBucket
from meshmuon.plan.gram_route import gram_bytes, grams_sent
from meshmuon.plan.route import Route
from meshmuon.polar.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices of one group, shape, dtype, device and team, which are orthogonalized in one batch by each owner.

    Attributes:
        number: Its place in the plan.
        group: Index of the parameter group.
        matrices: What it holds; of an owned bucket, the same matrices in the same order on every member of the team.
        wide_shape: (short side, long side) of each.
        device: Where it is computed.
        recipe: How.
        route: Whether anything travels.
        team: Global ranks that hold the matrices together, ascending; empty for a local bucket.
        owners: For each matrix, the rank in the team that computes it.
    """

    number: int
    group: int
    matrices: tuple[Matrix, ...]
    wide_shape: tuple[int, int]
    device: torch.device
    recipe: Recipe
    route: Route = Route.LOCAL
    team: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()

    def computed_by(self, member: int | None) -> int:
        """Count the matrices a member of the team orthogonalizes; of a local bucket, all of them."""
        if self.route is Route.LOCAL:
            return sum(matrix.count for matrix in self.matrices)
        return sum(owner == member for owner in self.owners)

    def owned_by(self, rank: int) -> list[Matrix]:
        """Give what a global rank of the team computes."""
        return [m for m, owner in zip(self.matrices, self.owners, strict=True) if self.team[owner] == rank]

    @property
    def may_land(self) -> bool:
        """Whether parameters can take their steps where directions are computed: nothing travels, in one launch."""
        return self.route is Route.LOCAL and self.recipe.program is not None

    @property
    def bytes(self) -> int:
        """Memory it takes during a step on the rank where it takes most: the same number on every rank."""
        most = max(Counter(self.owners).values(), default=self.computed_by(None))
        if self.route is Route.SHARDED:
            return gram_bytes(self.wide_shape, len(self.matrices), owned=most, ranks=len(self.team))
        return most * workspace_bytes(self.matrices[0], self.recipe)

    @property
    def bytes_in_flight(self) -> int:
        """Memory it takes while it waits. A local bucket never waits: ranks may have different numbers of these."""
        return 0 if self.route is Route.LOCAL else self.bytes

    @property
    def flops(self) -> float:
        """Operations to orthogonalize one of its matrices."""
        return self.recipe.flops(*self.wide_shape)

    @property
    def cost(self) -> float:
        """The same by the time they take: as operations in 16 bits."""
        return self.recipe.cost(*self.wide_shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of an optimizer on one rank.

    Attributes:
        parameters: Every parameter.
        waves: What is computed together, in the order it is begun. A wave is finished before the next begins.
        elementwise: The parameters that take AdamW.
        execution: The bounds and choices of the run.
        flat: Those same parameters as ranks share them, where the optimizer averages gradients.
        rank: This process's global rank.
        ranks: Number of processes in the job.
    """

    parameters: tuple[ParameterRecord, ...]
    waves: tuple[tuple[Bucket, ...], ...]
    elementwise: tuple[ParameterRecord, ...]
    execution: Execution
    flat: tuple[FlatBucket, ...] = ()
    rank: int = 0
    ranks: int = 1

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, in order."""
        return tuple(bucket for wave in self.waves for bucket in wave)

    @property
    def fused(self) -> bool:
        """Whether element-wise work runs in kernels of ours."""
        return any(bucket.recipe.fused for wave in self.waves for bucket in wave)

    def __str__(self) -> str:
        from meshmuon.plan.describe import describe_plan

        return describe_plan(self)

    def describe(self) -> str:
        """Give the table a user can paste into an issue."""
        return str(self)

    def computed_here(self, bucket: Bucket) -> int:
        """Count the matrices of a bucket that this rank orthogonalizes."""
        return bucket.computed_by(bucket.team.index(self.rank) if bucket.team else None)


def bytes_sent(bucket: Bucket, rank: int) -> int:
    """Count what a rank sends to others for a bucket in one step: pieces to owners, and pieces of directions back.

    Args:
        bucket: An owned bucket.
        rank: A global rank of its team.

    Returns:
        Bytes; what a rank keeps for itself does not count.
    """
    if bucket.route is Route.SHARDED:
        member = bucket.team.index(rank)
        return grams_sent(bucket.wide_shape, bucket.owners, member, ranks=len(bucket.team), recipe=bucket.recipe)
    total = 0
    held: dict[tuple[int, int], tuple[int, frozenset[int]]] = {}  # experts of one parameter are cut alike
    everybody = frozenset(bucket.team)
    for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
        assert matrix.share is not None
        key = (id(matrix.parameter), id(matrix.share))
        if key not in held:
            one_copy = len(matrix.share.copies) == 1
            copy = everybody if one_copy else frozenset(matrix.share.copy_of(rank))
            held[key] = (matrix.piece(rank).numel, copy)
        piece, copy = held[key]
        if bucket.team[owner] == rank:
            back = math.prod(matrix.shape) * len(matrix.share.copies) - piece
            total += back * bucket.recipe.dtype.itemsize
        elif bucket.team[owner] in copy:
            total += piece * bucket.recipe.input_dtype.itemsize
    return total


def workspace_bytes(matrix: Matrix, recipe: Recipe) -> int:
    """Bound the memory one matrix takes during a step where it is computed.

    Args:
        matrix: The matrix.
        recipe: How it is computed.

    Returns:
        Bytes. A shared one is also once in a send and once in a receive buffer, for each of its replicas.
    """
    copies = 0 if matrix.share is None else len(matrix.share.copies)
    on_the_way = 2 * copies * math.prod(matrix.shape) * max(4, recipe.dtype.itemsize)
    return recipe.workspace_bytes(*matrix.wide_shape) + on_the_way

"""When the Gram matrices of sharded matrices travel instead of the matrices, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshmuon.config import Execution
from meshmuon.errors import message
from meshmuon.layout.matrices import is_cut_along_the_long_side
from meshmuon.layout.records import Matrix
from meshmuon.plan.cost import machine_of
from meshmuon.plan.route import Route
from meshmuon.polar.recipe import Recipe


def choose_route(matrix: Matrix, recipe: Recipe, execution: Execution) -> Route:
    """Choose how a shared matrix is computed.

    By itself, the sharded route is taken only where it moves fewer bytes (a Gram matrix does not shrink with the ranks,
    a rank's part of the matrix does), the cost model says it wins, and bits need not be the same on every layout: it
    adds in another order than one device would.

    Args:
        matrix: A shared matrix.
        recipe: How it would be computed by an owner.
        execution: The choices of the run.

    Returns:
        OWNED or SHARDED.

    Raises:
        ValueError: If the sharded route was asked for, and cannot be taken.
    """
    assert matrix.share is not None
    ranks = len(matrix.share.team)
    if matrix.parameter.route == "owner" or ranks == 1:
        return Route.OWNED
    if matrix.parameter.route == "gram":
        obstacle = _obstacle(matrix, recipe)
        if obstacle is not None:
            found, do = f'route="gram" for a matrix of {matrix.shape} {obstacle.what}', obstacle.remedy
            raise ValueError(message(f"parameter {matrix.name!r}", found=found, do=f"{do}, or leave the route out"))
        return Route.SHARDED
    m, n = matrix.wide_shape
    exact = execution.layout_invariant or matrix.parameter.device.type == "cpu"
    if exact or ranks * m >= n:
        return Route.OWNED
    gram = recipe.in_gram_space(execution.orthogonalizer.restarts)
    takes = gram_pays(matrix, recipe, gram) and _obstacle(matrix, recipe) is None  # which looks at every rank: last
    return Route.SHARDED if takes else Route.OWNED


class _Obstacle(NamedTuple):
    what: str
    remedy: str


def _obstacle(matrix: Matrix, recipe: Recipe) -> _Obstacle | None:
    """Why a matrix cannot take the sharded route, if so."""
    if recipe.form == "svd":
        return _Obstacle('with form="svd"', 'Use form="auto"')
    if matrix.parameter.dtype == torch.float64:
        return _Obstacle("in float64, while Gram matrices travel in float32", "Use float32 parameters")
    if not is_cut_along_the_long_side(matrix):
        return _Obstacle("that is cut along its short side, or has replicas", "Shard the long side")
    return None


def gram_pays(matrix: Matrix, recipe: Recipe, gram: Recipe) -> bool:
    """Tell whether the sharded route takes less time, by operations and bytes of a rank.

    Args:
        matrix: A shared matrix.
        recipe: How it would be computed by an owner.
        gram: How it would be computed in Gram space.

    Returns:
        True if it does.
    """
    assert matrix.share is not None
    ranks = len(matrix.share.team)
    m, n = matrix.wide_shape
    machine = machine_of(matrix.parameter.device)
    owner = recipe.cost(m, n) / ranks / machine.flops
    moved = 2 * m * n * recipe.input_dtype.itemsize * (ranks - 1) / ranks**2 / machine.bandwidth
    segments = len(gram.restarts) + 1
    small = gram.flops(m, 0) + 4.0 * m**3 * len(gram.restarts)  # the iteration, and restarts on the Gram matrix
    sharded = gram.slowness * ((2.0 + 2.0 * segments) * m * m * n + small) / ranks / machine.flops
    sent = sum(grams_sent((m, n), [0], member, ranks=ranks, recipe=gram) for member in range(ranks)) / ranks
    return sharded + sent / machine.bandwidth < owner + moved


def grams_sent(shape: tuple[int, int], owners: Sequence[int], member: int, *, ranks: int, recipe: Recipe) -> int:
    """Count what a member of a team sends to others in one step: Gram matrices to owners, factors to everyone.

    Args:
        shape: (short side, long side).
        owners: For each matrix, the member that computes it.
        member: Who sends.
        ranks: Size of the team.
        recipe: Its restarts and dtype.

    Returns:
        Bytes.
    """
    m = shape[0]
    triangle = m * (m + 1) // 2
    own = sum(owner == member for owner in owners)
    back = (len(recipe.restarts) + 1) * triangle * recipe.dtype.itemsize + 8
    return (len(owners) - own) * (triangle + 1) * 4 + own * (ranks - 1) * back


def gram_bytes(shape: tuple[int, int], matrices: int, *, owned: int, ranks: int) -> int:
    """Bound the memory a bucket of the sharded route takes on the rank where it takes most.

    Args:
        shape: (short side, long side).
        matrices: How many it holds.
        owned: How many the busiest rank owns.
        ranks: Size of the team.

    Returns:
        Bytes: shards, Gram matrices to send and to receive, and those that are iterated on.
    """
    m, n = shape
    return 4 * (3 * matrices * m * -(-n // ranks) + 2 * matrices * m * m + owned * (2 * ranks + 8) * m * m)

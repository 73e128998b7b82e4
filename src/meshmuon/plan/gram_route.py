"""When the Gram matrices of sharded matrices travel instead of the matrices, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

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
        ValueError: If the sharded route was asked for, and the matrix is cut along its short side.
    """
    assert matrix.share is not None
    ranks = len(matrix.share.team)
    if matrix.parameter.route == "owner" or ranks == 1:
        return Route.OWNED
    if matrix.parameter.route == "gram":
        if recipe.form == "svd" or not is_cut_along_the_long_side(matrix):
            found = f'route="gram" for a matrix of {matrix.shape} that is cut along its short side, or has replicas'
            do = "Shard the long side, or leave the route out"
            raise ValueError(message(f"parameter {matrix.name!r}", found=found, do=do))
        return Route.SHARDED
    m, n = matrix.wide_shape
    exact = execution.layout_invariant or matrix.parameter.device.type == "cpu"
    if exact or recipe.form == "svd" or ranks * m >= n or not gram_pays(matrix, recipe):
        return Route.OWNED
    return Route.SHARDED if is_cut_along_the_long_side(matrix) else Route.OWNED


def gram_pays(matrix: Matrix, recipe: Recipe) -> bool:
    """Tell whether the sharded route takes less time, by operations and bytes of a rank.

    Args:
        matrix: A shared matrix.
        recipe: How it would be computed by an owner.

    Returns:
        True if it does.
    """
    assert matrix.share is not None
    ranks = len(matrix.share.team)
    m, n = matrix.wide_shape
    machine = machine_of(matrix.parameter.device)
    owner = recipe.flops(m, n) / ranks / machine.flops
    moved = 2 * m * n * recipe.input_dtype.itemsize * (ranks - 1) / ranks**2 / machine.bandwidth
    gram = recipe.in_gram_space()
    segments = len(gram.restarts) + 1
    small = gram.flops(m, 0) + 4.0 * m**3 * segments  # the iteration, and restarts on the Gram matrix
    sharded = ((2.0 + 2.0 * segments) * m * m * n + small) / ranks / machine.flops
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

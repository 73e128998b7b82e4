"""What a rank sends in a step: the numbers that `print(opt)`, `metrics()` and the tests compare."""

from __future__ import annotations

import math

from meshmuon.layout.records import wire_dtype
from meshmuon.plan.bucket import Plan, bytes_sent
from meshmuon.plan.route import Route


def sent_in_a_step(plan: Plan) -> tuple[int, int]:
    """Count what this rank sends to others in a step.

    Args:
        plan: The plan.

    Returns:
        Bytes, and in how many all-to-alls. The agreement before a step, a few bytes for each parameter, does not count.
    """
    shared = [bucket for bucket in plan.buckets if bucket.route is not Route.LOCAL]
    teams = [*(bucket.team for bucket in shared), *(bucket.team for bucket in plan.flat)]
    total = sum(bytes_sent(bucket, plan.rank) for bucket in shared)
    if plan.execution.syncs:
        total += sum(contributions_sent(plan, team) for team in set(teams))
    return total, 2 * sum(len(team) > 1 for team in teams)


def contributions_sent(plan: Plan, team: tuple[int, ...]) -> int:
    """Count what a rank sends where the optimizer averages gradients: these to owners, and AdamW's results to everyone.

    Args:
        plan: The plan.
        team: The ranks that share the work.

    Returns:
        Bytes; directions do not count.
    """
    member = team.index(plan.rank)
    total = 0
    for bucket in plan.buckets:
        if bucket.team != team:
            continue
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            total += (owner != member) * math.prod(matrix.shape) * wire_dtype(matrix.parameter.dtype).itemsize
    for flat in plan.flat:
        if flat.team != team:
            continue
        own = flat.spread[member]
        total += (sum(flat.spread) - own) * wire_dtype(flat.dtype).itemsize
        total += own * (len(team) - 1) * flat.dtype.itemsize
    return total

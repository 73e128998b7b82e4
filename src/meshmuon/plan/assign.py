"""Owners: who computes which matrix. Longest processing time first, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_owners(costs: Sequence[float], members: int) -> list[int]:
    """Spread work over the members of a team.

    The costliest matrix goes first, always to the member with the least work so far; ties go by position, so that every
    rank arrives at the same answer.

    Args:
        costs: The cost of each matrix.
        members: Size of the team.

    Returns:
        For each matrix, the owner's rank in the team.
    """
    owners = [0] * len(costs)
    loads = [(0.0, member) for member in range(members)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, member = heapq.heappop(loads)
        owners[index] = member
        heapq.heappush(loads, (load + costs[index], member))
    return owners


def balance(costs: Sequence[float], owners: Sequence[int], members: int) -> float:
    """Measure how even an assignment is.

    Args:
        costs: The cost of each matrix.
        owners: Their owners.
        members: Size of the team.

    Returns:
        The largest load divided by the mean; 1 is perfect.
    """
    loads = [0.0] * members
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    total = sum(loads)
    return max(loads) * members / total if total else 1.0

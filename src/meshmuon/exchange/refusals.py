"""Before a collective that not all may reach: what one rank must refuse, all refuse."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshmuon.exchange.groups import world_size

_SIDE: list[tuple[Any, Any]] = []  # (the job it belongs to, the group)


def side_group() -> Any:
    """Give a group of all ranks for work beside training, on the host: made once, by every rank.

    Collectives from a second thread on a group that training uses would meet those of another rank's training.

    Returns:
        A gloo group; None without a job.
    """
    if world_size() == 1:
        return None
    if not _SIDE or _SIDE[-1][0] is not dist.group.WORLD:
        _SIDE[:] = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    return _SIDE[-1][1]


def first_problem(problem: str | None) -> str | None:
    """Tell all ranks what stands in the way of any. Every rank must ask.

    Args:
        problem: What this rank has found; None if nothing.

    Returns:
        The first rank's problem, with its number if it is another's; None if nobody has any.
    """
    group = side_group()
    if group is None:
        return problem
    every: list[str | None] = [None] * world_size()
    dist.all_gather_object(every, problem, group=group)
    found = next(((rank, text) for rank, text in enumerate(every) if text is not None), None)
    if problem is not None or found is None:
        return problem
    return f"rank {found[0]} says: {found[1]}"

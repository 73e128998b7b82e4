"""Before a collective that not all may reach: what one rank must refuse, all refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from meshmuon.errors import CheckpointError, message
from meshmuon.exchange.groups import side_group


def agree(check: Callable[[], object], *, same: Callable[[], str] = str, members: Any = None) -> None:
    """Run a check of this rank's own, and compare what must be the same on all. Every rank must ask.

    Where either fails on any rank, all raise: nobody waits in a collective for the others.

    Args:
        check: Raises what stands in the way.
        same: Gives the words that all ranks must have.
        members: A group of the ranks that take part; None: all of the job.

    Raises:
        CheckpointError: Says what another rank has found, or who has other words. This rank's own error is raised as
            it is.
    """
    error: Exception | None = None
    words = ""
    try:
        check()
        words = same()
    except Exception as raised:  # a disk may fail in any way
        error = raised
    told = _told_by_all((None if error is None else str(error), words), members)
    if error is not None:
        raise error
    for rank, (problem, _) in told:
        if problem is not None:
            raise CheckpointError(f"rank {rank} says: {problem}")
    first, (_, theirs) = told[0]
    odd = next(((rank, other) for rank, (_, other) in told if other != theirs), None)
    if odd is not None:
        found = f"not the same on all ranks; rank {first} has {theirs}, rank {odd[0]} has {odd[1]}"
        do = "Choose it on one rank and tell the others; pipeline stages name the ranks of their own, process_group="
        raise CheckpointError(message("folder", found=found, do=do))


def _told_by_all(words: tuple[str | None, str], members: Any) -> Sequence[tuple[int, tuple[str | None, str]]]:
    """What every rank says, with its global number; this rank's own words alone, without a job."""
    group = side_group(members)
    if group is None:
        return [(0, words)]
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, words, group=group)
    return list(zip(dist.get_process_group_ranks(group), every, strict=True))

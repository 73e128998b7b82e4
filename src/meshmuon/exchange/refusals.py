"""Before a collective that not all may reach: what one rank must refuse, all refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from meshmuon.exchange.groups import side_group


def told_by_all(words: Any, members: Any = None) -> Sequence[tuple[int, Any]]:
    """Tell all ranks something, and hear what they say. Every rank must ask.

    Args:
        words: Whatever pickles.
        members: A group of the ranks that take part; None: all of the job.

    Returns:
        (global rank, what it said), in the order of ranks; this rank's own words alone, if nobody else takes part.
    """
    group = side_group(members)
    if group is None:
        return [(0, words)]
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, words, group=group)
    return list(zip(dist.get_process_group_ranks(group), every, strict=True))

"""After a collective has failed: who is still there? Asked through the job's key-value store, which needs no group."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PATIENCE = 2.0  # seconds; survivors of a closed connection notice within milliseconds of each other
_PAUSE = 0.05


def silent_ranks(ranks: Sequence[int], *, incident: int) -> list[int]:
    """Find the ranks that do not answer any more. Every rank that is alive asks.

    Args:
        ranks: The peers, by global rank, this one among them.
        incident: Which failure this is, counted the same on every rank.

    Returns:
        Those that have not answered in time; nobody, if the store itself does not answer.
    """
    try:
        store = _get_default_store()
        store.set(f"meshmuon/{incident}/{dist.get_rank()}", "here")
        missing = list(ranks)
        deadline = time.monotonic() + _PATIENCE
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"meshmuon/{incident}/{rank}"])]
            time.sleep(_PAUSE if missing else 0.0)
    except (RuntimeError, ValueError):  # the process that kept the store is gone, or there is no job at all
        return []
    return missing

"""After a step has failed: who is still there, and who failed? Asked through the job's store, which needs no group."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PATIENCE = 2.0  # seconds; survivors of a closed connection notice within milliseconds of each other
_PAUSE = 0.05
_HERE = "here"
_GONE = (RuntimeError, ValueError)  # what the store raises: its process is gone, or there is no job at all


def is_about_peers(error: BaseException) -> bool:
    """Tell whether an error is that of a collective, which others are to blame for.

    Args:
        error: What a step was left with.

    Returns:
        True for NCCL's errors; for gloo's, plain RuntimeErrors, if it comes from where collectives are called.
    """
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(("torch.distributed.", "meshmuon.exchange."))


def answer(words: str = _HERE, *, incident: int) -> None:
    """Say that this rank is there, or why it is the one that failed.

    Args:
        words: Its own error, if it has one.
        incident: Which failure this is, counted the same on every rank.
    """
    with contextlib.suppress(*_GONE):
        _store().set(_key(incident, dist.get_rank()), words)


def call_roll(ranks: Sequence[int], *, incident: int) -> tuple[dict[int, str], list[int]]:
    """Find the ranks that failed, and those that do not answer any more. Every rank that is alive has answered.

    Args:
        ranks: The peers, by global rank.
        incident: Which failure this is, counted the same on every rank.

    Returns:
        Rank → its own error; and who has not answered in time. Nobody, if the store itself does not answer.
    """
    missing, failed = list(ranks), {}
    deadline = time.monotonic() + _PATIENCE
    try:
        store = _store()
        while missing and time.monotonic() < deadline:
            for rank in [rank for rank in missing if store.check([_key(incident, rank)])]:
                missing.remove(rank)
                words = store.get(_key(incident, rank)).decode()
                if words != _HERE:
                    failed[rank] = words
            time.sleep(_PAUSE if missing else 0.0)
    except _GONE:
        return {}, []
    return failed, missing


def withdraw_answers(incidents: int) -> None:
    """Take back this rank's answers: what is said of one optimizer must not be heard by the next.

    Args:
        incidents: How many there were.
    """
    for incident in range(1, incidents + 1):
        with contextlib.suppress(*_GONE):
            _store().delete_key(_key(incident, dist.get_rank()))


def _store() -> Any:
    return _get_default_store()


def _key(incident: int, rank: int) -> str:
    return f"meshmuon/{incident}/{rank}"

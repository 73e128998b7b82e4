"""After a step has failed: who is still there, and who failed? Asked through the job's store, which needs no group."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PATIENCE = 2.0  # seconds; survivors of a closed connection notice within milliseconds of each other
_PAUSE = 0.05
_HERE = "here"
_INCIDENTS: Counter[str] = Counter()
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
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [name for name in modules if not name.startswith("torch.")]  # DTensor's collectives end in torch._ops
    return modules[-1].startswith("torch.distributed.") or callers[-1].startswith("meshmuon.exchange.")


class RollCall:
    """One question to the ranks of some teams.

    Ranks of a team count its incidents alike, whichever optimizer they were in: answers to an earlier one, perhaps of
    an optimizer that was thrown away, are not heard.

    Args:
        teams: What each team shares, in letters → its global ranks, this one among them.
    """

    def __init__(self, teams: Mapping[str, Sequence[int]]) -> None:
        _INCIDENTS.update(teams.keys())
        self._keys: dict[int, str] = {}
        self._own: list[str] = []
        for team, ranks in teams.items():
            for rank in ranks:
                key = f"meshmuon/{team}/{_INCIDENTS[team]}/{rank}"
                self._keys[rank] = key
                if rank == dist.get_rank():
                    self._own.append(key)

    def answer(self, words: str = _HERE) -> None:
        """Say that this rank is there, or why it is the one that failed.

        Args:
            words: Its own error, if it has one.
        """
        with contextlib.suppress(*_GONE):
            for key in self._own:
                _store().set(key, words)

    def hear(self) -> tuple[dict[int, str], list[int]]:
        """Find the ranks that failed, and those that do not answer any more. Every rank that is alive has answered.

        Returns:
            Rank → its own error; and who has not answered in time. Nobody, if the store itself does not answer.
        """
        missing, failed = sorted(self._keys), {}
        deadline = time.monotonic() + _PATIENCE
        try:
            store = _store()
            while missing and time.monotonic() < deadline:
                for rank in [rank for rank in missing if store.check([self._keys[rank]])]:
                    missing.remove(rank)
                    words = store.get(self._keys[rank]).decode()
                    if words != _HERE:
                        failed[rank] = words
                time.sleep(_PAUSE if missing else 0.0)
        except _GONE:
            return {}, []
        return failed, missing


def _store() -> Any:
    return _get_default_store()

"""Process groups: found or made once, in the same order everywhere; and what this process knows about its peers."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshmuon._compat import groups_of_members, job_timeout, let_threads_finish_at_exit

Ranks = tuple[int, ...]
_WRITING_TAKES = timedelta(minutes=30)  # at most, while others wait for the slowest disk


def world_size() -> int:
    """Give the number of processes of this job; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_rank() -> int:
    """Give this process's rank in the job; 0 if torch.distributed is not in use."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _job() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


# Groups that were made by this process: (the job they belong to, the group), by what they are for and their ranks. A
# group costs sockets or a communicator, and all its members take part in making it, so all have it here or none.
_MADE: dict[tuple[str, Ranks], tuple[Any, Any]] = {}


def _made_once(purpose: str, ranks: Ranks, **options: Any) -> Any:
    job, group = _MADE.get((purpose, ranks), (None, None))
    if job is not _job():
        name = hashlib.sha1(f"meshmuon {purpose} {ranks}".encode(), usedforsecurity=False).hexdigest()
        with groups_of_members(name):
            group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
        _MADE[purpose, ranks] = (_job(), group)
    return group


def side_group(members: Any = None) -> Any:
    """Give a group for work beside training, on the host: made once, by all of its ranks.

    Collectives from a second thread on a group that training uses would meet those of another rank's training.

    Args:
        members: A group of the ranks that take part; None: all of the job.

    Returns:
        A gloo group; None without a job.
    """
    if world_size() == 1:
        return None
    ranks = tuple(range(world_size())) if members is None else tuple(sorted(dist.get_process_group_ranks(members)))
    timeout = job_timeout()
    return _made_once("side", ranks, backend="gloo", timeout=max(timeout or _WRITING_TAKES, _WRITING_TAKES))


class Groups:
    """The process groups of an optimizer, by their (ascending) global ranks."""

    def __init__(self) -> None:
        if world_size() > 1:
            let_threads_finish_at_exit()
        self._groups: dict[Ranks, Any] = {}
        self._job = _job()

    @property
    def gone(self) -> bool:
        """Whether the job they belong to has been ended and another begun."""
        return _job() not in (None, self._job)

    def know(self, groups: dict[Ranks, Any]) -> None:
        """Remember groups that exist already, such as those of a mesh, if their ranks ascend.

        Args:
            groups: Ranks → group.
        """
        for ranks, group in groups.items():
            if dist.get_process_group_ranks(group) == list(ranks):  # collectives go by the group's own order
                self._groups.setdefault(ranks, group)

    def ensure(self, wanted: set[Ranks]) -> None:
        """Make the groups that are still missing.

        In the order of their ranks: a rank that is in two of them makes them in the same order as every other, so that
        no two wait for each other. Only members take part.

        Args:
            wanted: Ranks of each group this process is a member of.
        """
        for ranks in sorted(wanted - self._groups.keys()):
            whole_job = len(ranks) == world_size()
            self._groups[ranks] = (
                dist.group.WORLD if whole_job else _made_once("exchange", ranks, timeout=job_timeout())
            )

    def __getitem__(self, ranks: Ranks) -> Any:
        return self._groups[ranks]

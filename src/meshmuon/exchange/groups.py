"""Process groups: found or made once, in the same order everywhere; and what this process knows about its peers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshmuon._compat import let_threads_finish_at_exit


def world_size() -> int:
    """Give the number of processes of this job; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_rank() -> int:
    """Give this process's rank in the job; 0 if torch.distributed is not in use."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# Groups that were made for any optimizer of this process: (the job they belong to, the group), by their ranks. A group
# costs sockets or a communicator, and all its members take part in making it, so all have it here or none.
_MADE: dict[tuple[int, ...], tuple[Any, Any]] = {}


class Groups:
    """The process groups of an optimizer, by their (ascending) global ranks."""

    def __init__(self) -> None:
        if world_size() > 1:
            let_threads_finish_at_exit()
        self._groups: dict[tuple[int, ...], Any] = {}

    def know(self, groups: dict[tuple[int, ...], Any]) -> None:
        """Remember groups that exist already, such as those of a mesh, if their ranks ascend.

        Args:
            groups: Ranks → group.
        """
        for ranks, group in groups.items():
            if dist.get_process_group_ranks(group) == list(ranks):  # collectives go by the group's own order
                self._groups.setdefault(ranks, group)

    def ensure(self, wanted: set[tuple[int, ...]]) -> None:
        """Make the groups that are still missing.

        In the order of their ranks: a rank that is in two of them makes them in the same order as every other, so that
        no two wait for each other. Only members take part.

        Args:
            wanted: Ranks of each group this process is a member of.
        """
        for ranks in sorted(wanted):
            if ranks in self._groups:
                continue
            if len(ranks) == world_size():
                self._groups[ranks] = dist.group.WORLD
            else:
                job, group = _MADE.get(ranks, (None, None))
                if job is not dist.group.WORLD:
                    group = dist.new_group(list(ranks), use_local_synchronization=True)
                    _MADE[ranks] = (dist.group.WORLD, group)
                self._groups[ranks] = group

    def __getitem__(self, ranks: tuple[int, ...]) -> Any:
        return self._groups[ranks]

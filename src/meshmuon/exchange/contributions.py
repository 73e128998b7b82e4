"""Average what every rank has of a gradient, where the average is needed; and give results to everyone.

[Note: in rank order] The contributions of all ranks arrive side by side and are added one after the other, in the order
of the ranks, in fp32, and divided once. So the average has the same bits wherever it is computed, on any number of
owners. A reduce-scatter moves less and adds in an order of its own: the faster choice, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshmuon._compat import reduce_scatter
from meshmuon.exchange.exchange import Pending
from meshmuon.exchange.groups import Groups


class Contributions:
    """Carries gradients to the ranks that use them, and results from there to everyone.

    Args:
        groups: Process groups by their ranks.
        in_rank_order: Whether averages must have the same bits on any number of ranks; see [Note: in rank order].
    """

    def __init__(self, groups: Groups, *, in_rank_order: bool) -> None:
        self._groups = groups
        self._in_rank_order = in_rank_order

    def average(self, team: tuple[int, ...], sent: Tensor, spread: Sequence[int], *, rank: int) -> Pending:
        """Average gradients, each part where its owner is.

        Args:
            team: Global ranks, ascending.
            sent: This rank's whole contribution, by owner.
            spread: How many numbers of it each member of the team owns.
            rank: This process's global rank.

        Returns:
            The average of what this rank owns, in fp32 (fp64 for fp64), once waited for.
        """
        own = spread[team.index(rank)]
        wide = torch.float64 if sent.dtype == torch.float64 else torch.float32
        if not dist.is_initialized():
            return Pending(lambda: sent.to(wide, copy=True))
        if not self._in_rank_order:
            return _reduce_scattered(sent, spread, own=own, wide=wide, group=self._groups[team])
        collected = self.collect(team, sent, spread, rank=rank)

        def added() -> Tensor:
            first, *others = collected.finish().view(len(team), own)
            total = first.to(wide, copy=True)
            for each in others:
                total.add_(each)
            return total.div_(len(team))

        return Pending(added, collected.work, sent)

    def collect(self, team: tuple[int, ...], sent: Tensor, spread: Sequence[int], *, rank: int) -> Pending:
        """Bring what every rank has to the owners of its parts.

        Args:
            team: Global ranks, ascending.
            sent: What this rank has, by owner.
            spread: How many numbers of it each member of the team owns.
            rank: This process's global rank.

        Returns:
            What all ranks have of this rank's part, one after the other, flat, once waited for.
        """
        own = spread[team.index(rank)]
        if not dist.is_initialized():
            return Pending(lambda: sent)
        received = sent.new_empty(own * len(team))
        splits = [own] * len(team)
        work = dist.all_to_all_single(received, sent, splits, list(spread), group=self._groups[team], async_op=True)
        return Pending(lambda: received, work, sent)

    def give(self, team: tuple[int, ...], own: Tensor, spread: Sequence[int]) -> Pending:
        """Give everyone what this rank has computed, and get theirs.

        Args:
            team: Global ranks, ascending.
            own: What this rank has, flat.
            spread: How many numbers each member of the team has.

        Returns:
            Everything, by owner, once waited for.
        """
        if not dist.is_initialized():
            return Pending(lambda: own)
        sent = own.repeat(len(team))
        received = own.new_empty(sum(spread))
        splits = [own.numel()] * len(team)
        work = dist.all_to_all_single(received, sent, list(spread), splits, group=self._groups[team], async_op=True)
        return Pending(lambda: received, work, sent)

    def total(self, team: tuple[int, ...], numbers: Tensor) -> Tensor:
        """Add up numbers over ranks.

        Args:
            team: Global ranks, ascending.
            numbers: What this rank has; written.

        Returns:
            The sums, on every rank.
        """
        if dist.is_initialized():
            dist.all_reduce(numbers, op=dist.ReduceOp.SUM, group=self._groups[team])
        return numbers

    def together(self, team: tuple[int, ...], scattered: Tensor) -> Tensor:
        """Put together numbers of which each rank has some, and zeros for the rest. Every bit is kept, even of a -0.

        Args:
            team: Global ranks, ascending.
            scattered: What this rank has; written.

        Returns:
            The whole, the same on every rank.
        """
        if dist.is_initialized():
            bits = scattered.view(_SAME_SIZE[scattered.dtype.itemsize])
            dist.all_reduce(bits, op=dist.ReduceOp.SUM, group=self._groups[team])
        return scattered


# Integers, whose sums with zero are exact; collectives know no 16-bit ones, so two bf16 numbers go as one.
_SAME_SIZE = {2: torch.int32, 4: torch.int32, 8: torch.int64}


def _reduce_scattered(sent: Tensor, spread: Sequence[int], *, own: int, wide: torch.dtype, group: Any) -> Pending:
    most = max(spread)
    padded = sent.new_zeros(len(spread), most)
    for row, part in zip(padded, sent.split(list(spread)), strict=True):
        row[: part.numel()].copy_(part)
    received = sent.new_empty(most)
    work = reduce_scatter()(received, padded.view(-1), group=group, async_op=True)
    return Pending(lambda: received[:own].to(wide).div_(len(spread)), work, padded)

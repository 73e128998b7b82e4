"""Who updates which stretch of the element-wise parameters, where ranks share that work too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshmuon.layout.records import ParameterRecord

# Stretches begin at multiples of this, so that sums over a stretch do not depend on the number of ranks.
GRAIN = 2**14


@dataclass(frozen=True, slots=True)
class Stretch:
    """Numbers [start, stop) of a flattened parameter, and the rank in the team that updates them."""

    parameter: ParameterRecord
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Stretches of one group, dtype and device that travel together, by owner.

    Attributes:
        group: Index of the parameter group.
        dtype: Of the parameters and gradients.
        device: Where they lie.
        team: Global ranks that share the work.
        stretches: In the order of their owners.
    """

    group: int
    dtype: torch.dtype
    device: torch.device
    team: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def spread(self) -> tuple[int, ...]:
        """How many numbers each member updates."""
        counts = [0] * len(self.team)
        for stretch in self.stretches:
            counts[stretch.owner] += stretch.numel
        return tuple(counts)

    @property
    def bytes(self) -> int:
        """Memory it takes during a step: sent and received, twice, and what is computed from it."""
        return _BYTES * sum(self.spread)

    def owned_by(self, rank: int) -> list[Stretch]:
        """Give what a global rank of the team updates."""
        return [stretch for stretch in self.stretches if self.team[stretch.owner] == rank]


_BYTES = 4 * 4  # a buffer to send and one to receive, and room for the average and for padding, in fp32


def flat_buckets(parameters: Sequence[ParameterRecord], *, most_bytes: int) -> tuple[FlatBucket, ...]:
    """Spread element-wise parameters over the ranks that hold them, evenly in numbers.

    Args:
        parameters: Those that take AdamW, each replicated on the ranks of its layout.
        most_bytes: How much memory a bucket may take; one grain for each rank is always allowed.

    Returns:
        The buckets, the same on every rank.
    """
    alike: dict[tuple[object, ...], list[tuple[ParameterRecord, int, int]]] = {}
    for parameter in parameters:
        assert parameter.layout is not None
        key = (parameter.group, parameter.dtype, parameter.device, parameter.layout.ranks)
        for start in range(0, parameter.numel, GRAIN):
            alike.setdefault(key, []).append((parameter, start, min(start + GRAIN, parameter.numel)))
    buckets = []
    for grains in alike.values():
        room = max(most_bytes // (_BYTES * GRAIN), len(_team(grains[0][0])))
        buckets += [_bucket(grains[i : i + room]) for i in range(0, len(grains), room)]
    return tuple(buckets)


def _team(parameter: ParameterRecord) -> tuple[int, ...]:
    assert parameter.layout is not None
    return tuple(sorted(parameter.layout.ranks))


def _bucket(grains: Sequence[tuple[ParameterRecord, int, int]]) -> FlatBucket:
    first = grains[0][0]
    team = _team(first)
    total = sum(stop - start for _, start, stop in grains)
    stretches: list[Stretch] = []
    before = 0
    for parameter, start, stop in grains:
        owner = min(len(team) - 1, before * len(team) // total)
        last = stretches[-1] if stretches else None
        if last is not None and last.parameter is parameter and last.owner == owner:
            stretches[-1] = Stretch(parameter, last.start, stop, owner)
        else:
            stretches.append(Stretch(parameter, start, stop, owner))
        before += stop - start
    return FlatBucket(first.group, first.dtype, first.device, team, tuple(stretches))

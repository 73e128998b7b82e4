"""Interleave the journeys of buckets, so that one computes while another is on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Journey:
    """A bucket's way through a step: a generator that yields where it would wait, and the memory it takes meanwhile."""

    steps: Iterator[None]
    bytes: int


def run(journeys: Iterable[Journey], *, max_in_flight: int, workspace_bytes: int) -> None:
    """Run journeys to their ends, keeping few enough of them begun.

    While one waits, younger ones get their turn, oldest first. The order depends on the arguments alone: every rank of
    a team begins and ends the same collectives in the same order.

    Args:
        journeys: One per bucket, in the order they should start.
        max_in_flight: How many may be begun and not finished.
        workspace_bytes: How much they may take together; a larger single one runs alone.
    """
    begun: deque[Journey] = deque()
    for journey in journeys:
        while begun and (len(begun) >= max_in_flight or _taken(begun) + journey.bytes > workspace_bytes):
            _advance(begun, begun.popleft())
        _advance(begun, journey)
    while begun:
        _advance(begun, begun.popleft())


def _taken(begun: Iterable[Journey]) -> int:
    return sum(journey.bytes for journey in begun)


def _advance(begun: deque[Journey], journey: Journey) -> None:
    """Let a journey run to its next wait, and queue it again unless it ended."""
    try:
        next(journey.steps)
    except StopIteration:
        return
    begun.append(journey)

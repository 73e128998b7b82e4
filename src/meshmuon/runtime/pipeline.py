"""Interleave the journeys of buckets, so that one computes while another is on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


def run(tasks: Iterable[Iterator[None]], *, max_in_flight: int) -> None:
    """Run generators to their ends, keeping at most `max_in_flight` of them begun.

    A task yields where it would wait. While it does, younger ones get their turn, oldest first.

    Args:
        tasks: One generator per bucket, in the order they should start.
        max_in_flight: How many may be begun and not finished.
    """
    begun: deque[Iterator[None]] = deque()
    for task in tasks:
        while len(begun) >= max_in_flight:
            _advance_oldest(begun)
        _advance(begun, task)
    while begun:
        _advance_oldest(begun)


def _advance_oldest(begun: deque[Iterator[None]]) -> None:
    _advance(begun, begun.popleft())


def _advance(begun: deque[Iterator[None]], task: Iterator[None]) -> None:
    """Let a task run to its next wait, and queue it again unless it ended."""
    try:
        next(task)
    except StopIteration:
        return
    begun.append(task)

"""Several matrices at a time on a CPU, each by one thread.

[Note: one product, one thread] A library that shares one product among threads may cut its sum between them. On two
threads X·Xᵀ of a 128×1024 matrix has other bits than on one, and where that begins depends on shape, batch and thread
count (Intel MKL 2024.2). So a product, or a fixed part of a large one, belongs to one thread here, and several are
computed at a time. Who takes which, and how many threads there are, cannot change a bit.

Element-wise work goes the same way, small work on the caller's thread alone: threads that torch has used for it spin
for milliseconds afterwards, on the cores that ours need (GNU OpenMP, unless OMP_WAIT_POLICY is "passive"). AdamW, which
comes last, is left to torch's threads. While the caller works alone, torch's number of threads is one for less than a
millisecond; another thread that calls torch for the very first time just then keeps that number.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_MANY = 2**19  # numbers from which element-wise work is worth waking threads for
_GLANCE = 0.1  # seconds
_member = threading.local()  # of a crew, which computes by itself already


def share(
    work: Callable[[Item], Result], items: Iterable[Item], *, device: torch.device, large: bool = True
) -> list[Result]:
    """Do some work for each item; on a CPU on as many threads as torch would use here, each computing by itself.

    Returns when all is done, also after an error or Ctrl-C: then nobody writes any more.

    Args:
        work: Called once for each item; it may not depend on what it does for others.
        items: What to do it for, the longest work first.
        device: Where the tensors are.
        large: Whether it is worth waking threads for: half a millisecond in all, say. Else the caller does it alone.

    Returns:
        What each call returned, in the order of the items.
    """
    threads = 1 if device.type != "cpu" or hasattr(_member, "of") else torch.get_num_threads()
    todo = list(items)
    if threads == 1 or not todo:
        return [work(item) for item in todo]
    if large:
        return _Job(work, todo).done_by(_crew(threads), members=min(threads, len(todo)))
    try:
        torch.set_num_threads(1)
        return [work(item) for item in todo]
    finally:
        torch.set_num_threads(threads)


def share_elementwise(
    work: Callable[[Item], Result], items: Iterable[Item], *, device: torch.device, numbers: int
) -> list[Result]:
    """Do element-wise work the same way, on several threads only where there is much of it.

    Args:
        work: As for `share`.
        items: As for `share`.
        device: Where the tensors are.
        numbers: How many are worked on in all.

    Returns:
        What each call returned.
    """
    return share(work, items, device=device, large=numbers > _MANY)


class _Job(Generic[Item, Result]):
    """Items that threads take from a heap, and what came of each."""

    def __init__(self, work: Callable[[Item], Result], items: list[Item]) -> None:
        self._work = work
        self._todo = deque(enumerate(items))
        self._results: dict[int, Result] = {}
        self._errors: list[BaseException] = []
        self._at_work = 0
        self._changed = threading.Condition()
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def done_by(self, crew: SimpleQueue[_Job], *, members: int) -> list[Result]:
        """Have it done by some members of a crew, and wait until nobody is at work."""
        try:
            for _ in range(members):
                crew.put(self)
            self._wait()
        finally:
            self._todo.clear()  # interrupted: they end with what they have begun
            self._wait()
        if self._errors:
            raise self._errors[0]
        return [self._results[i] for i in sorted(self._results)]

    def _wait(self) -> None:
        with self._changed:
            # Python misses a Ctrl-C that comes just before it waits: so it looks again after a while.
            while not self._changed.wait_for(lambda: not self._todo and not self._at_work, timeout=_GLANCE):
                pass

    def take_turns(self) -> None:
        """Take items as long as there are any: what a member of the crew does."""
        inference, recorded = self._modes  # they do not come along into another thread by themselves
        with self._changed:
            self._at_work += 1
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(recorded):
                while (turn := self._next()) is not None:
                    i, item = turn
                    self._results[i] = self._work(item)
        except BaseException as error:  # raised again where the work was asked for
            self._errors.append(error)
            self._todo.clear()
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _next(self) -> tuple[int, Item] | None:
        try:
            return self._todo.popleft()
        except IndexError:
            return None


@functools.cache
def _crew(threads: int) -> SimpleQueue[_Job]:
    """Start threads that compute by themselves, once; give what they take their jobs from."""
    jobs: SimpleQueue[_Job] = SimpleQueue()
    ready: SimpleQueue[None] = SimpleQueue()
    try:
        for number in range(threads):
            # Daemons: they hold nothing at the end of a program, and are there for threads that outlive its main one.
            member = threading.Thread(target=_serve, args=(jobs, ready), name=f"meshmuon-{number}", daemon=True)
            member.start()
            ready.get()
    finally:
        torch.set_num_threads(threads)  # a thread's own number also became that of threads to come
    return jobs


def _serve(jobs: SimpleQueue[_Job], ready: SimpleQueue[None]) -> None:
    _member.of = jobs
    torch.get_num_threads()  # takes over the number of the process at the first call, and not later on top of ours
    torch.set_num_threads(1)
    ready.put(None)
    while True:
        jobs.get().take_turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.cache_clear)  # threads do not come along into a forked process

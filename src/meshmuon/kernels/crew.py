"""Several matrices at a time on a CPU, each by one thread.

[Note: one product, one thread] A library that shares one product among threads may cut its sum between them. On two
threads X·Xᵀ of a 128×1024 matrix has other bits than on one, and where that begins depends on shape, batch and thread
count (Intel MKL 2024.2). So a product, or a fixed part of a large one, belongs to one thread here, and several are
computed at a time. Who takes which, and how many threads there are, cannot change a bit.

All work of a step on a CPU goes the same way: threads that torch has used for an element-wise call go on looking for
more of it for milliseconds, on the cores that ours need (GNU OpenMP, unless OMP_WAIT_POLICY is "passive").
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    todo = deque(enumerate(items))
    if threads == 1 or not todo:  # one also in a thread that computes by itself already
        return [work(item) for _, item in todo]
    if large:
        return _by_crew(work, todo, threads)
    torch.set_num_threads(1)
    try:
        return [work(item) for _, item in todo]
    finally:
        torch.set_num_threads(threads)


def _by_crew(work: Callable[[Item], Result], todo: deque[tuple[int, Item]], threads: int) -> list[Result]:
    results: dict[int, Result] = {}
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def take_turns() -> None:
        with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):  # they do not come along by themselves
            while todo:
                try:
                    i, item = todo.popleft()
                except IndexError:  # another was faster
                    return
                try:
                    results[i] = work(item)
                except BaseException:
                    todo.clear()  # the others end with what they have begun
                    raise

    turns = [_crew(threads).submit(take_turns) for _ in range(min(threads, len(todo)))]
    try:
        for turn in turns:
            turn.result()
    finally:
        todo.clear()
        wait(turns)
    return [results[i] for i in sorted(results)]


@functools.cache
def _crew(threads: int) -> ThreadPoolExecutor:
    """Start threads that compute by themselves, once; they wait for work from then on."""
    crew = ThreadPoolExecutor(threads, thread_name_prefix="meshmuon", initializer=_compute_alone)
    all_there = threading.Barrier(threads)
    for started in [crew.submit(all_there.wait) for _ in range(threads)]:
        started.result()
    torch.set_num_threads(threads)  # a thread's own number also became that of threads to come
    return crew


def _compute_alone() -> None:
    torch.get_num_threads()  # takes over the number of the process at the first call, and not later on top of ours
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.cache_clear)  # threads do not come along into a forked process

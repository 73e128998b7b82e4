"""RankPool: gloo ranks on this machine that are started once and run many functions. Importing torch takes seconds."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A function failed on some rank; the message holds every rank's traceback."""


class RankPool:
    """A job of `size` processes that waits for functions to run.

    Args:
        size: Number of ranks.
        timeout: Seconds after which a collective of the job gives up.
        backend: "gloo" on CPUs; "nccl" gives each rank the GPU of its number.
    """

    def __init__(self, size: int, *, timeout: float = 60.0, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        self.size = size
        self._timeout = timeout
        context = multiprocessing.get_context("spawn")
        store = tempfile.NamedTemporaryFile(prefix="meshmuon-ranks-", delete=False)  # noqa: SIM115 (outlives us)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, store.name, timeout, theirs, list(sys.path), backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on every rank.

        Args:
            function: Importable by name; called as function(*arguments), with the process group ready.
            *arguments: Whatever pickles.

        Returns:
            What it returned on each rank.

        Raises:
            RankError: If it failed anywhere.
        """
        results = self.outcomes(function, *arguments)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in results]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """Run a function on every rank, and tell for each whether it went well.

        Args:
            function: Importable by name.
            *arguments: Whatever pickles.

        Returns:
            For each rank, (True, what it returned) or (False, the traceback).
        """
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # a rank that is gone does not answer either
                pipe.send((function.__module__, function.__qualname__, arguments))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(2 * self._timeout + 60):
                answer: tuple[bool, Any] = pipe.recv()
                return answer
        except (EOFError, ConnectionError):
            return (False, "the process is gone")
        return (False, "no answer in time")

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(
    rank: int, size: int, store: str, timeout: float, pipe: Connection, path: Sequence[str], backend: str
) -> None:
    """A rank's life: join the job, then run what is asked until the pool is gone."""
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)

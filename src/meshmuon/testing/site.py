"""Where the checks of `health` are made: on which device, by which ranks."""

from __future__ import annotations

from typing import Literal

import torch

from meshmuon.testing.ranks import RankPool

RANKS = 2
_TIMEOUT = 120.0  # seconds after which a collective gives up


class Site:
    """Where checks are made; ranks are started when the first check asks for them."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    @property
    def device(self) -> str:
        """Where ranks compute: GPUs if each can have one."""
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= RANKS else "cpu"

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """How ranks talk to each other."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def pool(self) -> RankPool:
        """The ranks."""
        if self._pool is None:
            self._pool = RankPool(RANKS, timeout=_TIMEOUT, backend=self.backend)
        return self._pool

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

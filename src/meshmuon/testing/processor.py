"""What this CPU is fast at: whether it has instructions for bf16 or imitates them."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from meshmuon.kernels.cpu_products import multiply

_SIDE, _TIMES = 512, 5


def bf16_in_fp32() -> float:
    """Measure how many products in fp32 take as long as one in bf16 on this CPU.

    Returns:
        The ratio of their times.
    """
    wide = torch.randn(_SIDE, _SIDE)
    return _seconds(wide.bfloat16()) / _seconds(wide)


def _seconds(x: Tensor) -> float:
    """The shortest time of its square: others are those of a busy machine, or of a first call."""
    times = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        multiply(x[None], x[None])  # as a step does
        times.append(time.perf_counter() - start)
    return min(times)

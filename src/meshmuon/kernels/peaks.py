"""The largest magnitude in each of many tensors, by one launch that reads them once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from meshmuon.kernels.availability import check_runnable, has_triton, is_interpreted
from meshmuon.kernels.elementwise import triton_dtype
from meshmuon.kernels.launching import launch

_BLOCK = 4096  # numbers that a program looks at together
_BLOCKS = 8  # so many times
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_find(tensor: Tensor) -> bool:
    """Say whether the kernel can read a tensor: on a GPU, one piece of memory without holes, in any order of dims.

    Args:
        tensor: Not empty.

    Returns:
        Whether.
    """
    reachable = tensor.is_cuda or (has_triton() and is_interpreted())
    return reachable and tensor.dtype in _DTYPES and torch.ops.aten.is_non_overlapping_and_dense(tensor)


class PeakFinder:
    """Finds peaks, and keeps the table of addresses from step to step."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, torch.dtype], _Table] = {}

    def find(self, tensors: Sequence[Tensor]) -> Tensor:
        """Give the largest magnitude in each tensor; NaN if there is one.

        Args:
            tensors: On one device and of one dtype, such as `can_find` takes.

        Returns:
            fp32, one number each.

        Raises:
            ModuleNotFoundError: If Triton is not installed.
            ValueError: If they are not on a GPU.
        """
        first = tensors[0]
        check_runnable("peaks", first)
        kind = (first.device, first.dtype)
        sizes = [tensor.numel() for tensor in tensors]
        table = self._tables.get(kind)
        if table is None or table.sizes != sizes:
            table = self._tables[kind] = _Table(sizes, first.device)
        return table.find([tensor.data_ptr() for tensor in tensors], first.dtype)


class _Table:
    """How many tensors of these sizes are shared out to programs, and where the tensors are."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        programs = [-(-size // (_BLOCK * _BLOCKS)) for size in sizes]
        *firsts, self._programs = accumulate(programs, initial=0)
        repeats = torch.tensor(programs, device="cpu")
        owners = torch.arange(len(sizes), dtype=torch.int32, device="cpu").repeat_interleave(repeats)
        self._owners = _moved(owners, device)
        self._spans = _moved(torch.tensor([firsts, sizes], dtype=torch.int64, device="cpu"), device)
        self._addresses: tuple[list[int], Tensor] | None = None

    def find(self, addresses: list[int], dtype: torch.dtype) -> Tensor:
        from meshmuon.kernels import elementwise_tiles as tiles

        device = self._owners.device
        if self._addresses is None or self._addresses[0] != addresses:
            self._addresses = addresses, _moved(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)
        bits = torch.zeros(len(addresses), dtype=torch.int32, device=device)
        aligned = all(address % 16 == 0 for address in addresses)
        arguments: tuple[Any, ...] = (self._owners, self._spans, self._addresses[1], bits, len(addresses))
        constants = (triton_dtype(dtype), aligned, _BLOCK, _BLOCKS)
        launch(tiles.peak_kernel, self._programs, arguments, constants, num_warps=8)
        return bits.view(torch.float32)


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Bring numbers to a device without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers

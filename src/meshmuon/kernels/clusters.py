"""Large symmetric products on Hopper, by pairs of thread blocks that share operands (clusters.cu).

The bits are those of the Triton kernel, which stands in wherever this one cannot run. It is faster by 4 to 10 %: no
tensor core waits for results to be written, and less is read (benchmarks/NOTES.md).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from importlib import resources
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from meshmuon.errors import message, warn_user
from meshmuon.kernels.availability import is_interpreted, launching_on
from meshmuon.kernels.cuda import Function, TensorMap, compile_source

TILE = 128
STEP = 64  # numbers of the inner dimension at a time
_BAND = 16  # tile rows walked together, column by column: their operands stay in L2
_THREADS = 384
_SHARED_BYTES = 6 * 2 * TILE * STEP * 2 + 4 * STEP * STEP * 2 + 2 * 6 * 8  # ring, staging, barriers
_SHARED, _IDLE = 1, 2  # flags, as in clusters.cu
_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16"}


class Item(NamedTuple):
    """What one thread block of a pair computes.

    Attributes:
        matrix: Which one of the stack.
        row: Of the tile's first element.
        col: Of the tile's first element.
        flags: Whether the pair shares the operand of its column; whether there is nothing to compute.
    """

    matrix: int
    row: int
    col: int
    flags: int


def pair_up(batch: int, m: int) -> list[tuple[Item, Item]]:
    """Cut the lower triangles of a stack into tiles, two at a time.

    Tiles of one column go together as far as possible; what is left of odd columns goes together unshared.

    Args:
        batch: Number of matrices.
        m: Their side.

    Returns:
        For each pair, what its two blocks compute; every tile once.
    """
    sides = -(-m // TILE)
    pairs: list[tuple[Item, Item]] = []
    waiting: Item | None = None
    for matrix in range(batch):
        shared, single = [], []
        for col in range(sides):
            rows = list(range(col, sides))
            if len(rows) % 2:
                single.append((rows.pop(), col))
            shared += [(row // _BAND, col, row) for row in rows[::2]]
        for _, col, row in sorted(shared):
            first, second = (Item(matrix, TILE * r, TILE * col, _SHARED) for r in (row, row + 1))
            pairs.append((first, second))
        for row, col in single:
            item = Item(matrix, TILE * row, TILE * col, 0)
            if waiting is None:
                waiting = item
            else:
                pairs.append((waiting, item))
                waiting = None
    if waiting is not None:
        pairs.append((waiting, Item(0, 0, 0, _IDLE)))
    return pairs


def share_out(batch: int, m: int, clusters: int) -> tuple[list[Item], list[int]]:
    """Give each of so many clusters its pairs.

    Args:
        batch: Number of matrices.
        m: Their side.
        clusters: How many.

    Returns:
        What the blocks compute, two by two, cluster by cluster; and where each cluster's pairs begin, and the end.
    """
    pairs = pair_up(batch, m)
    parts = [pairs[cluster::clusters] for cluster in range(clusters)]  # those side by side run at the same time
    starts = list(accumulate(map(len, parts), initial=0))
    return list(chain.from_iterable(chain.from_iterable(parts))), starts


_Tables = tuple[Tensor, Tensor]
_Key = tuple[torch.device, torch.dtype, int, int]
_tables: dict[_Key, _Tables] = {}  # kept: there are few shapes, and graphs know addresses
_lock = threading.Lock()


def _tables_of(key: _Key, clusters: int) -> _Tables:
    device, _, batch, m = key
    with _lock:
        if key not in _tables:
            numbers = share_out(batch, m, clusters)
            items, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in numbers)
            _tables[key] = items, starts
        return _tables[key]


class _Kernel(NamedTuple):
    function: Function
    clusters: int  # that run side by side


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype) -> _Kernel | str:
    """The compiled kernel, or why it cannot be had. Compiled on first use, in about a second."""
    try:
        source = resources.files("meshmuon.kernels").joinpath("clusters.cu").read_text(encoding="utf-8")
        cubin = compile_source(source, architecture="sm_90a", options=[f'-DELEMENT="{_NAMES[dtype]}"'])
        with launching_on(device):
            function = Function(cubin, "symmetric_product", shared_bytes=_SHARED_BYTES)
            clusters = function.clusters_at_once(2, _THREADS)
        if clusters < 1:
            raise RuntimeError("not one cluster fits on this device")
        return _Kernel(function, clusters)
    except (OSError, RuntimeError, AttributeError) as error:  # the last: a driver without one of these calls
        found = f"{type(error).__name__}: {error}"
        do = "Triton's kernel is used instead: same bits, up to 10 % slower. Install torch with its CUDA packages"
        warn_user(message("symmetric products by clusters", found=found, do=do))
        return found


def can_run(device: torch.device, dtype: torch.dtype, *, batch: int, m: int) -> bool:
    """Say whether products of this kind can run in clusters now.

    Args:
        device: Where.
        dtype: Of the operands.
        batch: Number of matrices.
        m: Side of the result.

    Returns:
        Whether. Not while a CUDA graph is captured that would be the first to ask: then nothing may be uploaded.
    """
    if _impossible(device, dtype):
        return False
    if (device, dtype, batch, m) not in _tables and torch.cuda.is_current_stream_capturing():
        return False
    return not isinstance(_kernel(device, dtype), str)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Say whether large products run in clusters, or why not.

    Args:
        device: Where.
        dtype: Of the operands.

    Returns:
        A few words.
    """
    reason = _impossible(device, dtype)
    kernel = reason or _kernel(device, dtype)
    if isinstance(kernel, str):
        return f"large symmetric products stay with Triton: {kernel}"
    return f"large symmetric products run in {kernel.clusters} clusters at a time"


def _impossible(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda" or is_interpreted() or not _is_hopper(device):
        return "not on a Hopper GPU"
    return "" if dtype in _NAMES else f"products in {dtype}"


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


class ClusterLaunch:
    """A launch bound to its memory by address: it keeps no tensor alive.

    Args:
        a: (batch, m, k).
        b: Of a's shape, or None: a.
        c: (batch, m, m), or None.
        d: (batch, m, m), the result.
    """

    def __init__(self, a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor) -> None:
        batch, m, k = a.shape
        kernel = _kernel(a.device, a.dtype)
        assert not isinstance(kernel, str), "can_run says whether it can"
        self._device = a.device
        tables = _tables_of((a.device, a.dtype, batch, m), kernel.clusters)
        self._maps = (
            TensorMap(a, rows=TILE),
            TensorMap(a if b is None else b, rows=TILE // 2),
            TensorMap(d if c is None else c, rows=TILE),
            TensorMap(d, rows=TILE // 2),
        )
        self._scale = [ctypes.c_float() for _ in range(3)]
        numbers = [ctypes.c_int(number) for number in (m, -(-k // STEP), c is not None)]
        pointers = [ctypes.c_void_p(table.data_ptr()) for table in tables]
        self._values = (*pointers, *numbers, *self._scale)  # these are kept: the arguments are their addresses
        addresses = [tensor_map.address for tensor_map in self._maps] + [ctypes.addressof(v) for v in self._values]
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self._launch = kernel.function.bind(2 * kernel.clusters, _THREADS, arguments)

    def __call__(self, alpha: float, beta: float, gamma: float) -> None:
        """Launch it on the current stream.

        Args:
            alpha: Factor of the product.
            beta: Factor of c.
            gamma: What is added to the diagonal.
        """
        for value, number in zip(self._scale, (alpha, beta, gamma), strict=True):
            value.value = number
        with launching_on(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._launch(stream)

"""Symmetric products of so few tiles that each has a multiprocessor of its own, on Hopper (few_tiles.cu).

The same bits as by Triton's kernel, which stands in wherever this one cannot run; sooner done (benchmarks/NOTES.md).
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from meshmuon.kernels.availability import launching_on
from meshmuon.kernels.cuda import MAP_ALIGNMENT, MAP_BYTES, Function, Launch, describe_stack
from meshmuon.kernels.hopper import load_kernel, why_impossible

BOX = 64  # side of what a tile consists of
_BOX_BYTES = BOX * BOX * 2
_BOXES = 28  # in shared memory
MOST_BLOCKS = 144  # as in few_tiles.cu


class Cut(NamedTuple):
    """How large tiles are, in boxes."""

    rows: int
    cols: int

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return f"few_{self.rows}x{self.cols}"

    @property
    def shared_bytes(self) -> int:
        """As many slots of operands as there is room for, with two barriers each."""
        boxes = self.rows + self.cols
        return _BOXES // boxes * (boxes * _BOX_BYTES + 2 * 8)


# The smaller, the more multiprocessors work on one product, and the less has to arrive before one can be done.
CUTS = (Cut(1, 1), Cut(2, 1), Cut(3, 1), Cut(2, 2))


class Block(NamedTuple):
    """What a thread block does: where its tile begins, in boxes; or, paired, the boxes (row, row) and (col, col)."""

    row: int
    col: int
    paired: bool = False


def list_blocks(m: int, cut: Cut, *, most: int, same: bool) -> list[Block] | None:
    """List what each thread block does for one matrix.

    Args:
        m: Side of the result.
        cut: Size of the tiles.
        most: How many thread blocks there may be.
        same: Whether the product is of a matrix with itself: then boxes on the diagonal can be paired.

    Returns:
        The tiles of the lower triangle, with as many pairs as it takes; None if they are too many or do not fit.
    """
    boxes = -(-m // BOX)
    if cut.rows > 2 and boxes % cut.rows:
        return None  # slower than larger tiles, measured
    rows = range(0, boxes, cut.rows)
    tiles = [Block(row, col) for row in rows for col in range(0, min(row + cut.rows, boxes), cut.cols)]
    pairs = max(0, len(tiles) - most)
    pairable = boxes // 2 if same and cut.rows == cut.cols == 1 else 0
    if pairs > pairable:
        return None
    paired = [Block(2 * i, 2 * i + 1, paired=True) for i in range(pairs)]
    return paired + [tile for tile in tiles if tile.row != tile.col or tile.row >= 2 * pairs]


def choose_cut(batch: int, m: int, *, same: bool, multiprocessors: int) -> tuple[Cut, list[Block]] | None:
    """Choose the smallest tiles of which all have a multiprocessor of their own.

    Args:
        batch: Number of matrices.
        m: Side of the results.
        same: Whether products are of matrices with themselves.
        multiprocessors: Of the device.

    Returns:
        Their size, and what each thread block does for one matrix; None if there are too many of any size.
    """
    most = min(multiprocessors // batch, MOST_BLOCKS)
    for cut in CUTS:
        blocks = list_blocks(m, cut, most=most, same=same) if most else None
        if blocks is not None:
            return cut, blocks
    return None


@functools.lru_cache(maxsize=1024)
def _chosen(device: torch.device, batch: int, m: int, same: bool) -> tuple[Cut, list[Block]] | None:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return choose_cut(batch, m, same=same, multiprocessors=count)


_loaded: set[tuple[torch.device, torch.dtype]] = set()


def can_run(device: torch.device, dtype: torch.dtype, *, batch: int, m: int, same: bool) -> bool:
    """Say whether a product is of few tiles, and can run so now.

    Args:
        device: Where.
        dtype: Of the operands.
        batch: Number of matrices.
        m: Side of the results.
        same: Whether products are of matrices with themselves.

    Returns:
        Whether. Not while a CUDA graph is captured that would be the first to ask.
    """
    if why_impossible(device, dtype) or _chosen(device, batch, m, same) is None:
        return False
    known = (device, dtype) in _loaded
    return (known or not torch.cuda.is_current_stream_capturing()) and not isinstance(_kernels(device, dtype), str)


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype) -> dict[Cut, Function] | str:
    loaded = load_kernel("few_tiles.cu", dtype, load=functools.partial(_load, device))
    _loaded.add((device, dtype))
    return loaded


def _load(device: torch.device, cubin: bytes) -> dict[Cut, Function]:
    with launching_on(device):
        return {cut: Function(cubin, cut.kernel, shared_bytes=cut.shared_bytes) for cut in CUTS}


class _Few(ctypes.Structure):
    """The arguments, as few_tiles.cu knows them."""

    _fields_ = (
        ("maps", ctypes.c_ubyte * (4 * MAP_BYTES)),
        ("terms", ctypes.c_float * 4),
        *((name, ctypes.c_int) for name in ("rows", "steps", "blocks", "same", "added")),
        ("block", ctypes.c_ubyte * (3 * MOST_BLOCKS)),
        ("unused", ctypes.c_ubyte * (-(16 + 20 + 3 * MOST_BLOCKS) % MAP_ALIGNMENT)),
    )


class FewLaunch:
    """A launch bound to its memory by address: it keeps no tensor alive.

    Args:
        a: (batch, m, k).
        b: Of a's shape, or None: a.
        c: (batch, m, m), or None.
        d: (batch, m, m); written.
    """

    def __init__(self, a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor) -> None:
        batch, m, k = a.shape
        kernels, chosen = _kernels(a.device, a.dtype), _chosen(a.device, batch, m, b is None)
        assert not isinstance(kernels, str) and chosen is not None, "can_run says whether it can"
        cut, blocks = chosen
        self._device = a.device
        memory = ctypes.create_string_buffer(ctypes.sizeof(_Few) + MAP_ALIGNMENT)
        self._few = _Few.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
        stacks = (a, a if b is None else b, d if c is None else c, d)  # d for c: not touched
        for i, stack in enumerate(stacks):
            describe_stack(stack, ctypes.addressof(self._few) + i * MAP_BYTES)
        self._few.rows, self._few.steps, self._few.blocks = m, -(-k // BOX), len(blocks)
        self._few.same, self._few.added = b is None, c is not None
        listed = bytes(number for block in blocks for number in block)
        self._few.block[: len(listed)] = listed
        # A group for each row of boxes, or for each of two on the diagonal; and a warp that loads.
        groups = max(cut.rows, *(1 + block.paired for block in blocks))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._few))
        self._launch: Launch = kernels[cut].bind(batch * len(blocks), 128 * groups + 32, arguments)

    def scaled(self, alpha: float, beta: float, gamma: float) -> None:
        """Launch it on the current stream.

        Args:
            alpha: Factor of the product.
            beta: Factor of c.
            gamma: What is added to the diagonal.
        """
        self._few.terms[:] = (alpha, beta, 0.0, gamma)
        with launching_on(self._device):
            self._launch(torch.cuda.current_stream(self._device).cuda_stream)

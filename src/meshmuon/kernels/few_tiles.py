"""Symmetric products of so few tiles that each has a multiprocessor of its own, on Hopper (few_tiles.cu).

The same bits as by Triton's kernel, which stands in wherever this one cannot run; sooner done (benchmarks/NOTES.md).
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshmuon.kernels.availability import launching_on
from meshmuon.kernels.cuda import MAP_ALIGNMENT, MAP_BYTES, Function, Launch, describe_stack
from meshmuon.kernels.hopper import load_kernel, why_impossible

BOX = 64  # side of what a tile consists of
_BOX_BYTES = BOX * BOX * 2
_BOXES = 28  # in a multiprocessor's shared memory
MOST_BLOCKS = 144  # as in few_tiles.cu


class Cut(NamedTuple):
    """How large tiles are, in boxes, and what else is said of them.

    Attributes:
        rows: Boxes from top to bottom.
        cols: Boxes from left to right.
        how: "halves": of one box, half of its columns where it is not on the diagonal. "beside": thread blocks of the
            next launch find room beside those of this one, and get ready there. That is for launches that have one on
            every multiprocessor: with some to spare the next ones find those, and two of one launch could find
            themselves on the same.
    """

    rows: int
    cols: int
    how: Literal["", "halves", "beside"] = ""

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return f"few_{self.rows}x{self.cols}{self.how and '_' + self.how}"

    @property
    def shared_bytes(self) -> int:
        """As many slots of operands as there is room for, with two barriers each."""
        boxes, blocks = self.rows + self.cols, 2 if self.how == "beside" else 1
        return _BOXES // blocks // boxes * (boxes * _BOX_BYTES + 2 * 8)


# The smaller, the more multiprocessors work on one product, and the less has to arrive before one can be done.
CUTS = (Cut(1, 1, "halves"), Cut(1, 1, "beside"), Cut(1, 1), Cut(2, 1), Cut(3, 1), Cut(2, 2))


class Part(enum.IntEnum):
    """How much of its tile a thread block computes. A pair are the boxes (row, row) and (col, col)."""

    WHOLE = 0
    PAIR = 1
    LEFT = 2
    RIGHT = 3


class Block(NamedTuple):
    """What a thread block does: where its tile begins, in boxes, and how much of it is there."""

    row: int
    col: int
    part: Part = Part.WHOLE


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
    if cut.how == "halves" and not same:
        return None  # whole boxes on the diagonal would take in two operands, and all others wait for them
    rows = range(0, boxes, cut.rows)
    tiles = [Block(row, col) for row in rows for col in range(0, min(row + cut.rows, boxes), cut.cols)]
    if cut.how == "halves":
        tiles = [Block(*tile[:2], part) for tile in tiles for part in _parts(tile)]
    pairs = max(0, len(tiles) - most)
    pairable = boxes // 2 if same and cut.rows * cut.cols == 1 and cut.how != "halves" else 0
    if pairs > pairable:
        return None
    paired = [Block(2 * i, 2 * i + 1, Part.PAIR) for i in range(pairs)]
    return paired + [tile for tile in tiles if tile.row != tile.col or tile.row >= 2 * pairs]


def _parts(box: Block) -> tuple[Part, ...]:
    """A box on the diagonal stays whole: it takes in but one operand."""
    return (Part.WHOLE,) if box.row == box.col else (Part.LEFT, Part.RIGHT)


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
        if blocks is not None and (cut.how != "beside" or batch * len(blocks) == multiprocessors):
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
        ("maps", ctypes.c_ubyte * (6 * MAP_BYTES)),
        ("terms", ctypes.c_float * 4),
        *((name, ctypes.c_int) for name in ("rows", "steps", "blocks", "same", "added")),
        ("block", ctypes.c_ubyte * (3 * MOST_BLOCKS)),
        ("unused", ctypes.c_ubyte * (-(16 + 20 + 3 * MOST_BLOCKS) % MAP_ALIGNMENT)),
    )


def _with_boxes(stacks: tuple[Tensor, ...], cut: Cut) -> list[tuple[Tensor, tuple[int, int]]]:
    """What the copy engine takes boxes of, in the order of few_tiles.cu, and how many rows and columns these have."""
    a, b, c, d = stacks
    whole, flat, upright = (BOX, BOX), (BOX // 2, BOX), (BOX, BOX // 2)
    if cut.how == "halves":
        return [(a, whole), (b, flat), (c, whole), (d, whole), (d, upright), (d, flat)]
    return [(stack, whole) for stack in stacks]


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
        for i, (stack, box) in enumerate(_with_boxes(stacks, cut)):
            describe_stack(stack, ctypes.addressof(self._few) + i * MAP_BYTES, box=box)
        self._few.rows, self._few.steps, self._few.blocks = m, -(-k // BOX), len(blocks)
        self._few.same, self._few.added = b is None, c is not None
        listed = bytes(number for block in blocks for number in block)
        self._few.block[: len(listed)] = listed
        # A group for each row of boxes, or for each of two on the diagonal; and a warp that loads.
        groups = max(cut.rows, *(1 + (block.part is Part.PAIR) for block in blocks))
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

"""Which tensors a fused element-wise launch works on: addresses and strides, as one small table on the device.

[Note: tables] A launch over many tensors needs their addresses on the device. They are written once per bucket and read
by every program; `TensorTable.is_current` compares addresses on the host, and `update` rewrites the same device
memory, so that a captured CUDA graph that reads the table stays valid when gradients move.

[Note: turned] Programs work on square tiles of a matrix as it is *stored* (columns contiguous). The workspace holds
every matrix wide, so a tall one stands there transposed: only what goes to or comes from the workspace is turned.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmuon.errors import message

TILE = 64  # side of the tiles: norms are summed tile by tile, so changing it changes the last bits of a norm
FIELDS = 18  # 64-bit numbers per matrix; `elementwise_tiles.py` reads them in the order of `_rows`
VECTOR = 8  # elements: what rows have to be a multiple of for 16-byte accesses
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, kw_only=True)  # not frozen: it is kept from step to step, with another gradient each time
class Slot:
    """A stack of equal matrices, and where it stands in the flat workspaces of its bucket.

    Attributes:
        param: (count, rows, cols) or (rows, cols), any strides; written by `apply_update`.
        buffer: Its momentum, of the same shape; written by `update_momentum`.
        grad: Its gradient, or None: then zeros go to the workspace, and nothing else changes.
        input_offset: Where the first element goes in the inputs, or None: this rank does not provide them.
        direction_offset: Where the first element stands in the directions.
        padded: (rows, cols) of one matrix in the workspaces, where it stands row by row; beyond the matrix: zeros.
        turned: Whether the workspaces hold the transpose.
        scale: Factor on the update.
    """

    param: Tensor
    buffer: Tensor
    grad: Tensor | None
    input_offset: int | None
    direction_offset: int
    padded: tuple[int, int]
    turned: bool
    scale: float = 1.0


class TensorTable:
    """The table of one launch: slots whose tensors share dtypes and alignment. Make it with `build_tables`.

    Args:
        slots: What it lists.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.param_dtype, self.buffer_dtype, self.grad_dtype, self.aligned = _kind(slots[0])
        self._addresses = _addresses(slots)
        rows = _rows(slots)
        self.matrices = len(rows)
        self.tiles = max(_tiles(slot.padded) for slot in slots)
        self.in_order = _are_in_order(slots)
        self.entries = _upload(rows, device=slots[0].param.device)

    @property
    def can_be_landed_on(self) -> bool:
        """Whether its parameters can take steps where directions are computed. See [Note: landing] in landing.py."""
        return self.aligned and self.in_order and self.param_dtype == torch.float32

    def is_current(self, slots: Sequence[Slot]) -> bool:
        """Tell whether the tensors still lie where the table says. Costs about 0.2 µs of host time per tensor.

        Args:
            slots: The slots it was made of, with the tensors of this step.

        Returns:
            False if `update` is needed.
        """
        return self._addresses == _addresses(slots)

    def update(self, slots: Sequence[Slot]) -> None:
        """Write new addresses into the same device memory, in the order of the current stream, without waiting.

        Args:
            slots: As many as before, of the same shapes, dtypes and alignment.

        Raises:
            ValueError: If they do not fit the launch this table was made for.
        """
        rows = _rows(slots)
        same = all(
            _kind(slot) == (self.param_dtype, self.buffer_dtype, self.grad_dtype, self.aligned) for slot in slots
        )
        if not same or len(rows) != self.matrices or max(_tiles(slot.padded) for slot in slots) != self.tiles:
            raise ValueError(message("table", found="other dtypes, sizes or alignment", do="Build the tables anew"))
        self.in_order = _are_in_order(slots)
        self.entries.copy_(_host(rows, self.entries.device), non_blocking=True)
        self._addresses = _addresses(slots)  # last: if there is no memory for the copy, the table is still the old one


def build_tables(slots: Sequence[Slot]) -> list[tuple[TensorTable, list[int]]]:
    """Sort slots into as few launches as possible: one, if all share dtypes and are aligned.

    Args:
        slots: The matrices of a bucket.

    Returns:
        Each table with the positions of its slots.

    Raises:
        TypeError: If a dtype is none of fp32, bf16 and fp16.
        ValueError: If shapes do not fit each other.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for position, slot in enumerate(slots):
        _check(slot)
        if slot.param.numel():
            alike.setdefault(_kind(slot), []).append(position)
    return [(TensorTable([slots[i] for i in positions]), positions) for positions in alike.values()]


def count_partials(batch: int, padded: tuple[int, int]) -> int:
    """Count the partial sums that `update_momentum` or `measure` writes for a stack.

    Args:
        batch: Number of matrices.
        padded: (rows, cols) of each in the workspace.

    Returns:
        One per tile.
    """
    return batch * _tiles(padded)


def _tiles(padded: tuple[int, int]) -> int:
    return -(-padded[0] // TILE) * -(-padded[1] // TILE)


def _check(slot: Slot) -> None:
    shape = slot.param.shape
    for name, tensor in (("param", slot.param), ("buffer", slot.buffer), ("grad", slot.grad)):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.ndim not in (2, 3):
            found = f"shape {tuple(tensor.shape)} beside a parameter of {tuple(shape)}"
            raise ValueError(message(name, found=found, do="Pass equal (count, rows, cols) or (rows, cols)"))
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                message(name, found=f"{tensor.dtype}", do="Use fp32, bf16 or fp16, or the plain torch path")
            )
    rows, cols = (shape[-1], shape[-2]) if slot.turned else shape[-2:]
    if slot.padded[0] < rows or slot.padded[1] < cols:
        found = f"{slot.padded} for a matrix of {(rows, cols)}"
        raise ValueError(message("padded", found=found, do="Leave room for the whole matrix"))


def _are_in_order(slots: Sequence[Slot]) -> bool:
    """Whether the directions of all matrices stand one behind the other, in the order of the table."""
    end = 0
    for slot in slots:
        if slot.direction_offset != end:
            return False
        end += slot.padded[0] * slot.padded[1] * (slot.param.shape[0] if slot.param.ndim == 3 else 1)
    return True


def _stored_transposed(slot: Slot) -> bool:
    """Whether rows, not columns, are contiguous in all tensors: then the transpose is what is stored."""
    tensors = [t for t in (slot.param, slot.buffer, slot.grad) if t is not None]
    return all(t.stride(-2) == 1 for t in tensors) and any(t.stride(-1) != 1 for t in tensors)


def _kind(slot: Slot) -> tuple[torch.dtype, torch.dtype, torch.dtype, bool]:
    """What one launch has to share: dtypes, and whether 16-byte accesses are allowed."""
    grad_dtype = slot.param.dtype if slot.grad is None else slot.grad.dtype
    return (slot.param.dtype, slot.buffer.dtype, grad_dtype, _is_aligned(slot))


def _is_aligned(slot: Slot) -> bool:
    row_dim, col_dim = (-1, -2) if _stored_transposed(slot) else (-2, -1)
    numbers = [slot.param.shape[col_dim], slot.padded[1], slot.direction_offset, slot.input_offset or 0]
    for tensor in (slot.param, slot.buffer, slot.grad):
        if tensor is None:
            continue
        if tensor.stride(col_dim) != 1 or tensor.data_ptr() % 16:
            return False
        numbers.append(tensor.stride(row_dim))
        numbers.append(tensor.stride(0) if tensor.ndim == 3 else 0)
    return all(number % VECTOR == 0 for number in numbers)


def _addresses(slots: Sequence[Slot]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for slot in slots:  # every call counts: a model has many matrices
        grad = None if slot.grad is None else whereabouts(slot.grad)
        found.append((whereabouts(slot.param), whereabouts(slot.buffer), grad))
    return found


def whereabouts(tensor: Tensor) -> tuple[object, ...]:
    """Give where a tensor of a known shape lies, and how: what a launch that was prepared for it depends on.

    Args:
        tensor: The tensor.

    Returns:
        Its address and dtype, and its strides unless it is stored in the usual way.
    """
    return (tensor.data_ptr(), tensor.dtype, None if tensor.is_contiguous() else tensor.stride())


def _rows(slots: Sequence[Slot]) -> list[list[int]]:
    """The numbers of every matrix, in the order the kernels read them."""
    rows, partial = [], 0
    for slot in slots:
        flipped = _stored_transposed(slot)
        row_dim, col_dim = (-1, -2) if flipped else (-2, -1)
        size = slot.padded[0] * slot.padded[1]
        scale = struct.unpack("<i", struct.pack("<f", slot.scale))[0]
        tensors = (slot.grad, slot.buffer, slot.param)
        strides = [(0, 0) if t is None else (t.stride(row_dim), t.stride(col_dim)) for t in tensors]
        for index in range(slot.param.shape[0] if slot.param.ndim == 3 else 1):
            pointers = [0 if t is None else _address(t, index) for t in tensors]
            rows.append(
                [
                    *pointers,
                    *(stride for pair in strides for stride in pair),
                    slot.param.shape[row_dim],
                    slot.param.shape[col_dim],
                    -1 if slot.input_offset is None else slot.input_offset + index * size,
                    slot.direction_offset + index * size,
                    *slot.padded,
                    int(slot.turned != flipped),
                    scale,
                    partial,
                ]
            )
            partial += _tiles(slot.padded)
    return rows


def _address(tensor: Tensor, index: int) -> int:
    return tensor.data_ptr() + (index * tensor.stride(0) * tensor.element_size() if index else 0)


def _host(rows: list[list[int]], device: torch.device) -> Tensor:
    """Pinned, so that the copy does not wait; torch keeps the memory until the copy is done."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    assert table.shape[1] == FIELDS
    return table.pin_memory() if device.type == "cuda" else table


def _upload(rows: list[list[int]], *, device: torch.device) -> Tensor:
    return _host(rows, device).to(device, non_blocking=True)

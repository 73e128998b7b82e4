"""The tensors of one matrix during a step, and the dtype its arithmetic is done in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshmuon.layout.records import Matrix, Place


@dataclass(slots=True)  # not frozen: one is made for every tensor at every step, in a third of the time
class MatrixTensors:
    """What this rank holds of one matrix, as plain views in the block's dims, and its place in the bucket's buffer.

    Attributes:
        matrix: Which one.
        param: Its parameter; written.
        grad: Its gradient until it has been read; None also if the step has none for it.
        buffer: Its momentum; written.
        place: Where it stands in the bucket's flat buffers.
        active: Whether it takes part in this step.
    """

    matrix: Matrix
    param: Tensor
    grad: Tensor | None
    buffer: Tensor
    place: Place
    active: bool

    def input_in(self, flat: Tensor) -> Tensor | None:
        """See this matrix's part of the bucket's inputs in the block's own dims.

        Args:
            flat: The inputs.

        Returns:
            A view that lines up with `param`; None if another replica provides this input.
        """
        return None if self.place.input is None else self._view(flat, self.place.input)

    def direction_in(self, flat: Tensor) -> Tensor:
        """See this matrix's part of the bucket's directions in the block's own dims.

        Args:
            flat: The directions.

        Returns:
            A view that lines up with `param`.
        """
        return self._view(flat, self.place.direction)

    def _view(self, flat: Tensor, offset: int) -> Tensor:
        """Whole matrices stand there wide, ready to be orthogonalized; pieces of shared ones as they are stored."""
        matrix = self.matrix
        turned = matrix.share is None and matrix.tall
        rows, cols = matrix.wide_shape if matrix.share is None else matrix.block.shape
        part = flat[offset : offset + matrix.count * rows * cols].view(matrix.count, rows, cols)
        return matrix.block.unfold(part.mT if turned else part)


def with_buffers(matrices: Sequence[MatrixTensors], buffers: Sequence[Tensor]) -> list[MatrixTensors]:
    """Give matrices other momentum tensors, e.g. copies on the device.

    Args:
        matrices: The tensors.
        buffers: One for each.

    Returns:
        New records.
    """
    pairs = zip(matrices, buffers, strict=True)
    return [item if item.buffer is buffer else replace(item, buffer=buffer) for item, buffer in pairs]


def crosswise(one: Tensor, other: Tensor) -> bool:
    """Say whether one of two lies by rows and the other by columns: a CPU is slow to go through both side by side.

    Args:
        one: A tensor.
        other: Another of its shape.

    Returns:
        Whether, for stacks of matrices without gaps on a CPU.
    """
    if one.device.type != "cpu" or one.stride() == other.stride() or not one.numel():
        return False
    return (one.is_contiguous() and other.mT.is_contiguous()) or (one.mT.is_contiguous() and other.is_contiguous())


def fill_(target: Tensor, values: Tensor) -> None:
    """Write values, rounded to the dtype of the target.

    What lies crosswise is turned matrix by matrix and from rows to rows: only that does torch in blocks, up to eleven
    times as fast.

    Args:
        target: Written.
        values: As many, in the same shape.
    """
    if not crosswise(target, values):
        target.copy_(values)
        return
    if not target.is_contiguous():
        target, values = target.mT, values.mT
    rows, cols = target.shape[-2:]
    for to, value in zip(target.view(-1, rows, cols), values.mT.reshape(-1, cols, rows), strict=True):
        to.copy_(value.to(to.dtype).mT)


def math_dtype(tensor: Tensor) -> torch.dtype:
    """Give the dtype updates are computed in before they are rounded once: fp32, or fp64 for fp64.

    Args:
        tensor: The parameter.

    Returns:
        The dtype.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def at_least_fp32(lr: float | Tensor) -> float | Tensor:
    """Give a learning rate in a dtype that can hold 1 - lr·wd: in 16 bits that is 1, or off by a half.

    Args:
        lr: A number or a tensor.

    Returns:
        The same, or a tensor in fp32.
    """
    return lr.to(torch.float32) if isinstance(lr, Tensor) and lr.dtype.itemsize < 4 else lr


_PART = 2**24


def in_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor into parts for sums in a wider dtype: torch makes a copy in that dtype of whatever it sums up.

    Args:
        tensor: Of any shape.

    Returns:
        1-D parts of bounded size, at least one; views where that is possible.
    """
    return tensor.reshape(-1).split(_PART)

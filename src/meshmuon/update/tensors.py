"""The tensors of one matrix during a step, and the dtype its arithmetic is done in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshmuon.layout.records import Matrix


@dataclass(frozen=True, slots=True)
class MatrixTensors:
    """What this rank holds of one matrix, as plain views in the block's dims, and its place in the bucket's buffer.

    Attributes:
        matrix: Which one.
        param: Its parameter; written.
        grad: Its gradient until it has been read; None also if the step has none for it.
        buffer: Its momentum; written.
        offset: Where it stands in the flat buffer.
        active: Whether it takes part in this step.
    """

    matrix: Matrix
    param: Tensor
    grad: Tensor | None
    buffer: Tensor
    offset: int
    active: bool

    def slot(self, flat: Tensor) -> Tensor:
        """See this matrix's part of a bucket's flat buffer in the block's own dims.

        Whole matrices stand there wide, ready to be orthogonalized; pieces of shared ones as they are stored.

        Args:
            flat: The buffer of the bucket.

        Returns:
            A view that lines up with `param`, `grad` and `buffer`.
        """
        matrix = self.matrix
        turned = matrix.share is None and matrix.tall
        rows, cols = matrix.wide_shape if matrix.share is None else matrix.block.shape
        part = flat[self.offset : self.offset + matrix.count * rows * cols].view(matrix.count, rows, cols)
        return matrix.block.unfold(part.mT if turned else part)


def math_dtype(tensor: Tensor) -> torch.dtype:
    """Give the dtype updates are computed in before they are rounded once: fp32, or fp64 for fp64.

    Args:
        tensor: The parameter.

    Returns:
        The dtype.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32

"""The tensors of one matrix during a step, and the dtype its arithmetic is done in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshmuon.layout.records import Matrix


@dataclass(frozen=True, slots=True)
class MatrixTensors:
    """One block's parameter, gradient (until it has been read) and momentum, as views in its dims; and its place."""

    matrix: Matrix
    param: Tensor
    grad: Tensor | None
    buffer: Tensor
    offset: int

    def slot(self, stack: Tensor) -> Tensor:
        """See this block's part of a bucket's stack of wide matrices in the block's own dims.

        Args:
            stack: (batch, m, n) of the bucket.

        Returns:
            A view that lines up with `param`, `grad` and `buffer`.
        """
        part = stack[self.offset : self.offset + self.matrix.count]
        return self.matrix.block.unfold(part.mT if self.matrix.tall else part)


def math_dtype(tensor: Tensor) -> torch.dtype:
    """Give the dtype updates are computed in before they are rounded once: fp32, or fp64 for fp64.

    Args:
        tensor: The parameter.

    Returns:
        The dtype.
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32

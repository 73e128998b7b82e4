"""One part of a parameter that is a stack of equal matrices: a strided view, never a copy."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # it makes blocks
    from meshmuon.layout.matrix_view import MatrixView


@dataclass(frozen=True, slots=True)
class Block:
    """A stack of equal matrices inside one parameter.

    The parameter, seen as (lead..., rows..., cols...), is narrowed to an interval of rows and one of columns; heads
    become one more leading dim. Leading, row and column dims stay separate dims: merging them may need a copy.
    """

    view: MatrixView
    rows: tuple[int, int]
    cols: tuple[int, int]
    lead_shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    col_shape: tuple[int, ...]
    lead_index: tuple[int, ...] = ()
    lead_ranges: tuple[tuple[int, int], ...] = ()
    whole: bool = False  # nothing is left out or turned: `select` gives the tensor itself, at no cost

    def cut(self, at_most: int) -> list[Block]:
        """Cut a stack into smaller ones along its leading dims.

        Args:
            at_most: How many matrices each may hold.

        Returns:
            The smaller stacks, in order.
        """
        if self.count <= at_most or not self.lead_shape:
            return [self]
        per_dim = []
        for dim, size in enumerate(self.lead_shape):
            step = min(size, max(1, at_most // math.prod(self.lead_shape[dim + 1 :])))
            per_dim.append([(start, min(start + step, size)) for start in range(0, size, step)])
        return [
            replace(self, lead_shape=tuple(stop - start for start, stop in ranges), lead_ranges=ranges, whole=False)
            for ranges in itertools.product(*per_dim)
        ]

    @property
    def count(self) -> int:
        """How many matrices."""
        return math.prod(self.lead_shape)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each matrix."""
        return (math.prod(self.row_shape), math.prod(self.col_shape))

    def select(self, tensor: Tensor) -> Tensor:
        """See the block in a tensor of the parameter's shape.

        Args:
            tensor: The parameter, its gradient or its momentum.

        Returns:
            A view of shape lead + rows + cols.
        """
        if self.whole:
            return tensor
        view = self.view
        if self.lead_index:
            tensor = tensor[self.lead_index]
        lead = tensor.ndim - 2 if view.experts else 0
        if view.transposed:
            tensor = tensor.transpose(lead, lead + 1)
        if self.rows != (0, tensor.shape[lead]):
            tensor = tensor.narrow(lead, self.rows[0], self.rows[1] - self.rows[0])
        if not view.flatten and self.cols != (0, tensor.shape[lead + 1]):
            tensor = tensor.narrow(lead + 1, self.cols[0], self.cols[1] - self.cols[0])
        if view.heads is not None and view.heads_on == "rows":
            tensor = tensor.unflatten(lead, (view.heads, -1))
        elif view.heads is not None:
            tensor = tensor.unflatten(lead + 1, (view.heads, -1)).movedim(lead + 1, lead)
        for dim, (start, stop) in enumerate(self.lead_ranges):
            tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def unfold(self, stack: Tensor) -> Tensor:
        """Give a stack of matrices the dims of `select`, as a view.

        Args:
            stack: (count, rows, cols), any strides.

        Returns:
            A view of shape lead + rows + cols.
        """
        stack = stack.unflatten(2, self.col_shape).unflatten(1, self.row_shape)
        return stack.unflatten(0, self.lead_shape) if self.lead_shape else stack.squeeze(0)

"""The operations of the iteration on a CPU: the same bits on any number of threads.

[Note: panels] A product of many rows is computed by panels of rows, which several threads can share. The cut depends on
the shape alone, so the bits do too. A product that is symmetric is cut into panels of columns, which begin at the
diagonal; the rest is their mirror image: five eighths of the work at 512 rows. Numbers of 16 bits take larger panels:
their products are fast only on processors that multiply large tiles of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshmuon.kernels.cpu_products import multiply
from meshmuon.kernels.crew import share
from meshmuon.polar.coefficients import Triple
from meshmuon.polar.operations import TorchOperations, quadratic_rows

_PANEL, _PANEL_OF_16_BITS = 128, 256
PANELS_FROM, PANELS_OF_16_BITS_FROM = 384, 512  # rows below which a panel costs as much as it saves


class CpuOperations(TorchOperations):
    """Products by one thread each. See [Note: one product, one thread] in kernels/crew.py.

    Those of few rows are not cut: who has several threads shares whole matrices among them.
    """

    def gram(self, x: Tensor) -> Tensor:
        """Return x·xᵀ."""
        return _symmetric(x, lambda panel: multiply(x[:, panel.start :], x[:, panel].mT))

    def quadratic(self, gram: Tensor, triple: Triple) -> Tensor:
        """Return a·I + b·gram + c·gram²."""
        a, b, c = triple

        def from_diagonal(panel: slice) -> Tensor:
            rows = gram[:, panel.start :]
            if gram.dtype.itemsize > 2:
                inner = gram[:, :, panel] * c
                inner[:, panel].diagonal(dim1=-2, dim2=-1).add_(b)
                part = multiply(rows, inner)
            else:  # b·I + c·r would swallow c·r
                part = quadratic_rows(rows[:, :, panel], rows, gram[:, :, panel], b, c)
            part.diagonal(dim1=-2, dim2=-1).add_(a)
            return part

        return _symmetric(gram, from_diagonal)

    def symmetric_product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left·right for two that commute; whole, since they do not quite."""
        return self.apply(left, right)

    def apply(self, factor: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return factor·x, in `out` if given."""
        panels = _panels(factor.shape[1], x.dtype)
        if len(panels) == 1:
            return multiply(factor, x, out)
        out = torch.empty_like(x) if out is None else out

        def write(rows: slice) -> None:
            for left, right, result in zip(factor.split(1), x.split(1), out.split(1), strict=True):
                multiply(left[:, rows], right, result[:, rows])

        share(write, panels, device=x.device)
        return out


def _symmetric(x: Tensor, from_diagonal: Callable[[slice], Tensor]) -> Tensor:
    """Put together a symmetric matrix for each of x, from parts of its columns that begin at the diagonal."""
    batch, m, _ = x.shape
    panels = _panels(m, x.dtype)
    if len(panels) == 1:
        return from_diagonal(panels[0])
    whole = x.new_empty(batch, m, m)

    def write(panel: slice) -> None:
        part = from_diagonal(panel)
        whole[:, panel.start :, panel] = part
        whole[:, panel, panel.stop :] = part[:, panel.stop - panel.start :].mT

    share(write, panels, device=whole.device)
    return whole


def count_panels(rows: int, dtype: torch.dtype) -> int:
    """Count the parts that threads can share of a product with so many rows.

    Args:
        rows: Of the result.
        dtype: Of its numbers.

    Returns:
        How many; 1 if it is not cut.
    """
    return len(_panels(rows, dtype))


def _panels(m: int, dtype: torch.dtype) -> list[slice]:
    """Cut rows or columns into panels; the first ones of a symmetric product are the longest."""
    least, panel = (PANELS_OF_16_BITS_FROM, _PANEL_OF_16_BITS) if dtype.itemsize == 2 else (PANELS_FROM, _PANEL)
    return [slice(start, min(m, start + panel)) for start in range(0, m, panel)] if m >= least else [slice(0, m)]

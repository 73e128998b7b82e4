"""Products of matrices on a CPU, by the library of torch's two that is the faster one there.

[Note: two libraries] torch multiplies fp32 matrices with MKL, which does not use AVX-512 on AMD's processors. oneDNN,
which torch brings too, does: 265 GFLOP/s on a core of an EPYC with Zen 5 instead of 118, in the same fp32. Which one is
taken depends on the processor and on sizes alone, never on a measurement: ranks of one job have to agree to the last
bit. oneDNN is asked through the operation that torch's own compiler uses for linear layers, matrix by matrix. Of its
operands the second has to be dense, in rows or in columns: for parts of columns it would take a path that is a hundred
times slower.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from meshmuon._compat import has_wide_registers_of_amd, linear_by_onednn

_LEAST = 2**21  # multiplications from which a call of its own pays for each matrix: 128x128x128


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two stacks of matrices, on the calling thread's own number of threads.

    Args:
        left: (batch, m, k).
        right: (batch, k, n).
        out: Where the result goes, (batch, m, n); None: to a new tensor.

    Returns:
        The products.
    """
    if not _by_onednn(left, right):
        return torch.bmm(left, right, out=out)
    linear = linear_by_onednn()
    assert linear is not None
    if out is None and len(left) == 1:
        return linear(left[0], right[0].mT).unsqueeze(0)
    out = left.new_empty(*left.shape[:2], right.shape[2]) if out is None else out
    for one, other, result in zip(left, right, out, strict=True):
        result.copy_(linear(one, other.mT))
    return out


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    if left.dtype != torch.float32 or not prefers_onednn():
        return False
    m, k, n = *left.shape[1:], right.shape[2]
    dense = right.stride()[1:] in ((n, 1), (1, k))
    return dense and m * k * n >= _LEAST


@functools.cache
def prefers_onednn() -> bool:
    """Tell whether products in fp32 are left to oneDNN on this machine. See [Note: two libraries]."""
    return has_wide_registers_of_amd() and linear_by_onednn() is not None

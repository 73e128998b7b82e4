"""Products in fp32, by tiles that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshmuon.errors import message
from meshmuon.kernels.availability import check_runnable, is_interpreted, launching_on
from meshmuon.kernels.launching import run

WHOLE = "whole_matmul"  # the problem it is checked with (problems.py)
# The fastest, or within a tenth of it, from 64x256 to 240x960 on an H200, and as fast as cuBLAS's (NOTES.md).
_BLOCK, _BLOCK_K = 64, 32
_OPTIONS = {"num_warps": 4, "num_stages": 2}
_compiled: dict[tuple[torch.device, bool], Any] = {}  # where, and whether something is added


def whole_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    gamma: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute alpha·A·B + beta·C + gamma·I for stacks in fp32, whose sides are multiples of 16. One launch.

    Sums are in fp32 (no TF32, whatever torch is set to). A matrix gets the same bits alone or in any batch, which
    cuBLAS does not promise. Operands are read row by row: others are copied.

    Args:
        a: (batch, m, k), on a GPU.
        b: (batch, k, n).
        alpha: Factor of the product.
        beta: Factor of c.
        c: (batch, m, n), or None.
        gamma: What is added to the diagonal.
        out: Where to write, contiguous, never a or b; None makes a new tensor.

    Returns:
        `out`, or a new contiguous (batch, m, n).

    Raises:
        ValueError: If sides are no multiples of 16, or numbers not in fp32: the kernel would read what is not there.
    """
    (batch, m, k), n = a.shape, b.shape[-1]
    if (m | k | n) % 16 or not a.dtype == b.dtype == torch.float32:
        found = f"{a.dtype} {tuple(a.shape)} times {b.dtype} {tuple(b.shape)}"
        raise ValueError(message(WHOLE, found=found, do="Pass fp32, padded to multiples of 16"))
    a, b, c = a.contiguous(), b.contiguous(), None if c is None else c.contiguous()
    result = a.new_empty(batch, m, n) if out is None else out
    tiles = -(-m // _BLOCK) * -(-n // _BLOCK)
    numbers = (m // 16, n // 16, k // 16, tiles, float(alpha), float(beta), float(gamma), _BLOCK, _BLOCK_K)
    stacks = (a, b, c, result)
    addresses = tuple([None if stack is None else stack.data_ptr() for stack in stacks])
    compiled = _compiled.get((a.device, c is not None))
    if compiled is None or any(address is not None and address % 16 for address in addresses):
        _by_triton(stacks, batch * tiles, numbers)
        return result
    with launching_on(a.device):
        run(compiled, batch * tiles, (*addresses, *numbers), a.device)
    return result


def _by_triton(stacks: tuple[Tensor, Tensor, Tensor | None, Tensor], programs: int, numbers: tuple[Any, ...]) -> None:
    """Launch by way of Triton, which compiles. What it made for aligned rows is kept once it has been compared."""
    from meshmuon.kernels.self_check import check_before_use  # whose problems are multiplied here

    device = stacks[0].device
    given = [stack for stack in stacks if stack is not None]
    check_runnable(WHOLE, *given)
    checked = check_before_use(WHOLE, device, torch.float32)
    from meshmuon.kernels.whole_tiles import whole_kernel

    if not programs:
        return
    with launching_on(device):
        compiled = whole_kernel[(programs,)](*stacks, *numbers, **_OPTIONS)
    aligned = all(stack.data_ptr() % 16 == 0 for stack in given)
    if aligned and checked and not is_interpreted() and torch.version.hip is None:
        _compiled[device, stacks[2] is not None] = compiled

"""Fused element-wise work over many tensors, one launch each: on the way into the orthogonalization and out of it.

[Note: passes] Bytes per fp32 parameter with fp32 momentum, when the iteration is in 16 bits:

| launch | reads | writes |
|---|---|---|
| `update_momentum` | gradient 4, momentum 4 | momentum 4, input 2 |
| `find_norms` | one number per 64×64 tile | two numbers per matrix |
| `normalise` | input 2 | the same memory 2 |
| `apply_update` | parameter 4, direction 2 | parameter 4 |

28 bytes; 26 where parameters take their steps as directions are computed, which has no launch here and needs no
reading of directions ([Note: landing] in landing.py). The wire rule says that inputs are rounded to bf16 once, before
anything else, so that a matrix gets the same bits wherever it is computed; dividing fp32 inputs by their norm in the
first launch would need the norm before it (a second reading of gradient and momentum, 8 bytes, instead of
`normalise`'s 4) and would break that rule. Squares are summed from the rounded inputs, tile by tile, in the first
launch; a stack that came over a wire is summed by `measure` to the same bits.

Numbers that change between steps are read from device memory, so that a captured CUDA graph sees their live values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshmuon.config import WeightDecayMode
from meshmuon.errors import message
from meshmuon.kernels.availability import check_runnable
from meshmuon.kernels.launching import launch
from meshmuon.kernels.tables import TILE, TensorTable, count_partials

_CHUNK = 1024  # partial sums that one program adds at a time
_FLAT = 4096  # elements per program where a stack is contiguous
_EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}  # see [Note: no contraction]
_STRIDED = (16, 256)  # rows and columns per program where it is not


def momentum_numbers(momentum: float, *, l2: float = 0.0) -> tuple[float, float, float]:
    """Give what `update_momentum` reads from the device, for a tensor that is filled when they change.

    Args:
        momentum: Weight of the past.
        l2: Weight decay added to the gradient.

    Returns:
        1 - momentum (from the double, as torch.lerp gets it), momentum, and l2.
    """
    return (1.0 - momentum, momentum, l2)


def update_momentum(
    table: TensorTable,
    inputs: Tensor,
    *,
    numbers: Tensor,
    nesterov: bool,
    l2: bool = False,
    unscale: Tensor | None = None,
    proceed: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Advance the momentum of every matrix of a table, and write what will be orthogonalized. One launch.

    buf = lerp(buf, g, 1 - momentum), bit for bit as torch.lerp on a GPU; input = lerp(g, buf, momentum) if nesterov
    else buf. In fp32, each stored result rounded once.

    Args:
        table: The tensors; momentum is written.
        inputs: The flat workspace that the table's input offsets point into, fp32, bf16 or fp16; written, padding
            included.
        numbers: fp32, on the device: `momentum_numbers`.
        nesterov: Whether to average once more with the gradient.
        l2: Whether to add `numbers[2]` times the parameter to the gradient.
        unscale: What gradients are multiplied with when read: one number on the device, or None.
        proceed: One bool on the device: where it is False momentum does not change. None means go.
        partials: fp64, `count_partials` numbers: written with the sums of squares of the inputs, or None.
    """
    check_runnable("update_momentum", inputs, numbers, table.entries)
    from meshmuon.kernels import elementwise_tiles as tiles

    dtypes = tuple([triton_dtype(dtype) for dtype in (table.grad_dtype, table.buffer_dtype, table.param_dtype)])
    launch(
        tiles.momentum_kernel,
        table.matrices * table.tiles,
        (table.entries, inputs, partials, numbers, unscale, _as_bytes(proceed), table.tiles),
        (*dtypes, nesterov, l2, table.aligned, TILE),
        **_EXACT,
    )


def measure(x: Tensor) -> Tensor:
    """Sum the squares of a stack, tile by tile: what `update_momentum` leaves in `partials`. One launch.

    Args:
        x: (batch, m, n), any strides, fp32, bf16 or fp16.

    Returns:
        fp64 partial sums for `find_norms`.
    """
    check_runnable("measure", x)
    from meshmuon.kernels import elementwise_tiles as tiles

    batch, m, n = x.shape
    partials = torch.empty(count_partials(batch, (m, n)), dtype=torch.float64, device=x.device)
    across = -(-n // TILE)
    count = partials.numel()
    if count:
        launch(
            tiles.measure_kernel, count, (x, partials, x.stride(), m, n, count // batch, across), (TILE,), num_warps=4
        )
    return partials


def find_norms(partials: Tensor, *, batch: int) -> Tensor:
    """Add the partial sums of every matrix. One launch.

    Args:
        partials: fp64, the same number for every matrix.
        batch: Number of matrices.

    Returns:
        (batch, 2) in fp32: 2^-e and 2^e / norm, so that nothing overflows on the way. A zero matrix has norm 1.
    """
    check_runnable("find_norms", partials)
    from meshmuon.kernels import elementwise_tiles as tiles

    norms = torch.empty(batch, 2, dtype=torch.float32, device=partials.device)
    if batch:
        launch(tiles.norm_kernel, batch, (partials, norms, partials.numel() // batch), (_CHUNK,), num_warps=4)
    return norms


def normalise(x: Tensor, norms: Tensor, *, out: Tensor) -> Tensor:
    """Divide every matrix of a stack by its norm, and round to the dtype of the products. One launch.

    Args:
        x: (batch, m, n), any strides.
        norms: What `find_norms` gave.
        out: (batch, M, N), contiguous, M >= m and N >= n; written, zeros in the padding. It may be the memory of x
            itself, seen in a dtype of the same size, if x is contiguous and has out's shape.

    Returns:
        `out`.

    Raises:
        ValueError: If `out` does not fit.
    """
    (batch, m, n), (stacked, padded_m, padded_n) = x.shape, out.shape
    if stacked != batch or padded_m < m or padded_n < n or not out.is_contiguous():
        raise ValueError(message("out", found=f"{tuple(out.shape)}", do=f"Pass a contiguous ({batch}, >={m}, >={n})"))
    check_runnable("normalise", x, norms, out)
    from meshmuon.kernels import elementwise_tiles as tiles

    strides, tile = x.stride(), _STRIDED
    if x.is_contiguous() and x.shape == out.shape:
        strides, tile = (m * n, m * n, 1), (1, _FLAT)
        m, n = padded_m, padded_n = 1, m * n
    across = -(-padded_n // tile[1])
    count = -(-padded_m // tile[0]) * across
    sizes = (strides, m, n, padded_m, padded_n, count, across)
    launch(tiles.normalise_kernel, batch * count, (x, out, norms, *sizes), tile, **_EXACT)
    return out


def apply_update(
    table: TensorTable,
    directions: Tensor,
    *,
    lr: Tensor,
    weight_decay: Tensor,
    mode: WeightDecayMode,
    proceed: Tensor | None = None,
) -> None:
    """Step every parameter of a table along its direction: p·(1 - lr·wd) - lr·scale·direction. One launch.

    In fp32, each operation rounded by itself as in the plain torch path, the result rounded once to the parameter.

    Args:
        table: The tensors; parameters with a gradient are written.
        directions: The flat workspace that the table's direction offsets point into.
        lr: One number on the device.
        weight_decay: One number on the device.
        mode: "decoupled", "cautious" (decay only where direction and parameter agree in sign) or "l2" (no decay here).
        proceed: One bool on the device: where it is False nothing changes. None means go.
    """
    check_runnable("apply_update", directions, lr, weight_decay, table.entries)
    from meshmuon.kernels import elementwise_tiles as tiles

    launch(
        tiles.apply_kernel,
        table.matrices * table.tiles,
        (table.entries, directions, lr, weight_decay, _as_bytes(proceed), table.tiles),
        (triton_dtype(table.param_dtype), mode, table.aligned, TILE),
        **_EXACT,
    )


def _as_bytes(flag: Tensor | None) -> Tensor | None:
    """A flag as bytes: Triton's own bool is one bit wide in some versions."""
    return flag.view(torch.uint8) if flag is not None and flag.dtype == torch.bool else flag


def triton_dtype(dtype: torch.dtype) -> Any:
    """Give Triton's name of a dtype; imports Triton.

    Args:
        dtype: fp32, bf16 or fp16.

    Returns:
        A `triton.language` dtype.
    """
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

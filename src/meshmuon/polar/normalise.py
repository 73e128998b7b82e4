"""The one form that iterations begin with: wide, padded, contiguous, of norm one. See [Note: canonical entry]."""

from __future__ import annotations

import torch
from torch import Tensor

from meshmuon.kernels import elementwise
from meshmuon.kernels.self_check import check_alone, check_kernels
from meshmuon.polar import cost
from meshmuon.polar.recipe import Recipe

LARGEST_EXPONENT = 126  # 2**126 and 2**-126 are both normal fp32 numbers
_ORDINARY_NORMS = (2.0**-30, 2.0**30)  # whose squares stay far from fp32's ends


def normalised(x: Tensor, *, eps: float) -> Tensor:
    """Divide each matrix by its Frobenius norm, without overflow or underflow on the way.

    The matrix is first scaled by a power of two (exactly) so that its largest element lies in [1/2, 1): squares of
    1e20 or 1e-25 would not survive in fp32. A CPU, which can look, leaves that out where it would change nothing.

    Args:
        x: (batch, m, n), fp32 or fp64, contiguous; never written.
        eps: Replaces a norm of zero.

    Returns:
        A new tensor.
    """
    if x.device.type == "cpu":
        norm = _norms(x)
        ordinary = (_ORDINARY_NORMS[0] <= norm) & (norm <= _ORDINARY_NORMS[1])
        if ordinary.all():
            return x / norm
        # Each by itself: a power of two is exact but for subnormal numbers, and the company is not to be seen.
        factor = torch.where(ordinary, 1.0, power_of_two(x)[0])
    else:
        factor = power_of_two(x)[0]
    x = x * factor
    norm = _norms(x)
    return x.div_(torch.where(norm > 0, norm, eps))


def power_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the power of two that brings the largest element of each matrix into [1/2, 1).

    Args:
        x: (batch, m, n), fp32 or fp64, not empty.

    Returns:
        2^-e and e, both (batch, 1, 1).
    """
    peak = torch.maximum(x.amax(dim=(-2, -1), keepdim=True), -x.amin(dim=(-2, -1), keepdim=True))
    largest = 1022 if x.dtype == torch.float64 else LARGEST_EXPONENT
    exponent = torch.frexp(peak).exponent.clamp_(-largest, largest)
    return torch.ldexp(torch.ones_like(peak), -exponent), exponent


def _norms(x: Tensor) -> Tensor:
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def normalised_by_torch(x: Tensor, recipe: Recipe) -> Tensor:
    """Bring a stack into that form by torch.

    Args:
        x: (batch, m, n), any strides; never written.
        recipe: What it is computed in, and what guards 0/0.

    Returns:
        A new stack, sides padded, in the dtype of the products.
    """
    return normalised(_canonical(x, recipe), eps=recipe.eps).to(recipe.dtype)


def _canonical(x: Tensor, recipe: Recipe) -> Tensor:
    """Bring into the one form everything is computed from; x itself, if it has it. See [Note: canonical entry]."""
    batch, m, n = x.shape
    wide = torch.float64 if torch.float64 in (x.dtype, recipe.dtype) else torch.float32
    if (m, n) == (cost.padded(m), cost.padded(n)):
        return x.to(wide).contiguous()
    buffer = torch.zeros(batch, cost.padded(m), cost.padded(n), dtype=wide, device=x.device)
    buffer[:, :m, :n].copy_(x)
    return buffer


def normalised_by_kernels(x: Tensor, recipe: Recipe, partials: Tensor | None, *, consume: bool) -> Tensor:
    """Bring a stack into that form by fused kernels.

    Args:
        x: (batch, m, n), any strides.
        recipe: What it is computed in.
        partials: Sums of squares of x by tiles, where the kernels have made them already.
        consume: Whether its memory may be used up.

    Returns:
        A stack, sides padded, in the dtype of the products.
    """
    batch, m, n = x.shape
    check_kernels(x.device, recipe.dtype)
    if partials is None:
        check_alone("measure", x.device, recipe.dtype)
        partials = elementwise.measure(x)
    norms = elementwise.find_norms(partials, batch=batch)
    in_place = consume and x.is_contiguous() and x.dtype.itemsize == recipe.dtype.itemsize
    if in_place and (m, n) == (cost.padded(m), cost.padded(n)):
        return elementwise.normalise(x, norms, out=x.view(recipe.dtype))
    out = torch.empty(batch, cost.padded(m), cost.padded(n), dtype=recipe.dtype, device=x.device)
    return elementwise.normalise(x, norms, out=out)

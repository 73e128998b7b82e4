"""The Gram form for a matrix that is cut along its long side: only m×m matrices travel.

[Note: one round] With x = [x_1 ... x_P], x·xᵀ is the sum of the x_p·x_pᵀ, and the iteration is x ← q·x with a q that
depends on x·xᵀ alone. So each rank forms its own x_p·x_pᵀ, one of them adds them up in fp32 and finds q, and each
applies q to its own shard. Where rounding needs a restart, it is done on the sum: q·(x·xᵀ)·q is the Gram matrix that a
restart would form anew, and nothing else travels. The sum must be in fp32: in 16 bits its small eigenvalues drown, and
they are what the iteration lifts. trace(x·xᵀ) is the squared norm, so that it needs no reduction of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshmuon.kernels.crew import share
from meshmuon.polar.gram import factor, split_at
from meshmuon.polar.normalise import LARGEST_EXPONENT, power_of_two
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.recipe import Recipe

_OPERATIONS = TorchOperations()


def local_gram(x: Tensor) -> tuple[Tensor, Tensor]:
    """Form one rank's part of the Gram matrices, scaled so that no square overflows.

    Args:
        x: (batch, m, n) of this rank, any floating dtype; n may be 0.

    Returns:
        x·xᵀ times 4^-e in fp32, (batch, m, m); and the whole numbers e as fp32, (batch,).
    """
    wide = x.to(torch.float32)
    if wide.shape[-1] == 0:
        return wide.new_zeros(*wide.shape[:2], wide.shape[1]), wide.new_full(wide.shape[:1], float(-LARGEST_EXPONENT))
    scale, exponent = power_of_two(wide)
    scaled = wide * scale
    precise = scaled.to(torch.float64) if scaled.device.type == "cpu" else scaled  # summed before it is rounded
    gram = _one_thread_each(lambda one: torch.bmm(one, one.mT), precise)
    return gram.to(torch.float32), exponent.to(torch.float32).flatten()


def added_grams(grams: Sequence[Tensor], exponents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Add up what all ranks have, in their order, at the largest of their scales.

    Args:
        grams: For each rank, (batch, m, m).
        exponents: For each rank, (batch,).

    Returns:
        The sum times 4^-e in fp64, and e.
    """
    largest = torch.stack(list(exponents)).amax(dim=0)
    total = torch.zeros_like(grams[0], dtype=torch.float64)  # the sum over many ranks must not lose what each has sent
    for gram, exponent in zip(grams, exponents, strict=True):
        total.add_(gram * torch.exp2((exponent - largest) * 2)[:, None, None])
    return total, largest


def find_factors(gram: Tensor, recipe: Recipe) -> tuple[list[Tensor], Tensor]:
    """Find the factors whose product takes each matrix to its polar factor.

    Args:
        gram: (batch, m, m) in fp64.
        recipe: The schedule, its restarts, and the dtype factors are rounded to.

    Returns:
        One factor for each segment, to be applied in this order to the matrix divided by its norm; and 1 / norm in
        fp32, of the scale the Gram matrix has.
    """
    square = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    inverse = torch.where(square > 0, square.rsqrt(), torch.ones_like(square))
    # Factors of more than 16 bits are iterated on in fp64: m×m is small, and squares of small singular values need it.
    r = (gram * inverse.square()[:, None, None]).to(torch.float32 if recipe.dtype.itemsize == 2 else torch.float64)
    if r.device.type != "cpu":
        return _factors(r, recipe), inverse.to(torch.float32)
    found = share(lambda one: _factors(one, recipe), r.split(1), device=r.device)
    return [torch.cat(each) for each in zip(*found, strict=True)], inverse.to(torch.float32)


def _factors(r: Tensor, recipe: Recipe) -> list[Tensor]:
    """One factor for each segment."""
    factors: list[Tensor] = []
    for segment in split_at(recipe.schedule, recipe.restarts):
        if factors:
            last = factors[-1].to(r.dtype)  # as the ranks will apply it
            r = torch.bmm(torch.bmm(last, r), last)
        q = factor(r, segment, _OPERATIONS)
        # One triangle travels. Rounding leaves q unsymmetric by a hundredth where it lifts most: the mean of q and its
        # transpose is as good as q, one triangle of it mirrored is not (2e-2 against 7e-4 on a power law).
        factors.append(((q + q.mT) / 2).to(recipe.dtype))
    return factors


def apply_factors(x: Tensor, factors: Sequence[Tensor], *, inverse: Tensor, exponent: Tensor) -> Tensor:
    """Take one rank's shard to its part of the polar factor.

    Args:
        x: (batch, m, n) of this rank.
        factors: What `find_factors` gave.
        inverse: 1 / norm at the scale of the sum.
        exponent: That scale.

    Returns:
        The shard of the result, in the dtype of the factors.
    """
    scale = torch.exp2(-exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))
    # A CPU applies 16-bit factors in fp32, which is faster there; a GPU in the dtype of its fast products.
    between = torch.float32 if x.device.type == "cpu" else factors[0].dtype
    y = (x.to(torch.float32) * scale[:, None, None] * inverse[:, None, None]).to(between)
    for q in factors:
        y = _one_thread_each(torch.bmm, q.to(between), y)
    return y.to(factors[0].dtype)


def _one_thread_each(product: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Multiply stacks; on a CPU matrix by matrix. See [Note: one product, one thread] in kernels/crew.py."""
    device = stacks[0].device
    if device.type != "cpu":
        return product(*stacks)
    matrices = zip(*(stack.split(1) for stack in stacks), strict=True)
    return torch.cat(share(lambda each: product(*each), matrices, device=device))

"""Each kernel against plain torch, on first use on a device. A wrong one is refused loudly, never silently replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from meshmuon.errors import message
from meshmuon.kernels import clusters, elementwise
from meshmuon.kernels.agenda import Product, Result
from meshmuon.kernels.peaks import PeakFinder
from meshmuon.kernels.symmetric_matmul import REST_SCALE, symmetric_matmul
from meshmuon.kernels.tables import Slot, build_tables

_ROUNDINGS = 16  # how many units in the last place of the largest number a result may be off
_ROUNDS = 4  # of two products in one launch


@functools.cache
def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Run every kernel once on a small problem and compare it with torch.

    Args:
        device: Where.
        dtype: What products are computed in.

    Raises:
        RuntimeError: Names the kernel that is wrong.
    """
    for name in CHECKS:
        check_kernel(name, device, dtype)


@functools.cache
def check_peaks(device: torch.device) -> None:
    """Check the one kernel that runs before the others: a wrong answer would stop or spoil every step.

    Args:
        device: Where.

    Raises:
        RuntimeError: If it is wrong there.
    """
    check_kernel("peaks", device, torch.float32)


def check_kernel(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """Run one kernel on a small problem and compare it with torch.

    Args:
        name: Of the kernel, in `CHECKS`.
        device: Where.
        dtype: What products are computed in.

    Returns:
        How far it is off, as a share of what rounding explains.

    Raises:
        RuntimeError: If that is too far.
    """
    got, expected = CHECKS[name](device, dtype)
    bound = _ROUNDINGS * torch.finfo(got.dtype).eps * float(expected.abs().max())
    worst = float((got.double() - expected.double()).abs().max())
    if not worst <= bound:  # NaN fails too
        found = f"off by {worst:.2e} on {device}, where rounding explains {bound:.2e}"
        do = 'Do not train with it: use Orthogonalizer(kernels="torch"), and report this'
        raise RuntimeError(message(f"kernel {name}", found=found, do=do))
    return worst / bound


def _numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Reproducible numbers of size 1 without a generator: this may run in the middle of a training run."""
    count = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32)
    return torch.sin(count * 12.9898).mul_(1.7).view(shape).to(dtype)


def _stack(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sides that fill no tile. On a GPU as many as it takes to be given the tiles of large products, which train."""
    return _numbers(device, dtype, 2 if device.type == "cpu" else 48, 144, 208)


def _gram(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype) / 8
    return symmetric_matmul(x), torch.bmm(x.double(), x.double().mT)


def _halves(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype != torch.float16:
        return _gram(device, dtype)  # nothing else is iterated on in halves
    x = _stack(device, dtype) / 8
    rest = x.new_empty(*x.shape[:-1], x.shape[-2])
    high = symmetric_matmul(x, rest=rest)
    return (high.double() + rest.double() / REST_SCALE).to(torch.float32), torch.bmm(x.double(), x.double().mT)


def _quadratic(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype) / 64
    r = torch.bmm(x, x.mT)
    wide = r.double()
    expected = torch.baddbmm(wide, wide, wide.mT, beta=-2.5, alpha=1.5)
    expected.diagonal(dim1=-2, dim2=-1).add_(3.0)
    return symmetric_matmul(r, alpha=1.5, beta=-2.5, c=r, gamma=3.0), expected


def _one_after_the_other(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x·xᵀ and its product with x, both again and again in one launch, where there is a kernel for both.

    So often that every cluster takes more pairs than it knows ahead. Only the last round gives what is expected. One
    triangle of x·xᵀ is there, as in the programs that train.
    """
    x = _stack(device, dtype) / 8
    batch, m, n = x.shape
    results = (Result(m, m, mirrored=True), Result(m, n, mirrored=False)) * _ROUNDS
    if not clusters.can_run(device, dtype, batch=batch, results=results):
        return _gram(device, dtype)
    r, product = x.new_full((batch, m, m), float("nan")), torch.empty_like(x)
    gram = Product(a=0, b=0, c=None, d=1, mirrored=True, half_d=True)
    whole = Product(a=1, b=0, c=None, d=2, mirrored=False, half_a=True)
    products = [replace(gram, alpha=2.0), whole] * (_ROUNDS - 1) + [gram, whole]
    written = clusters.counters(x)
    clusters.ClusterLaunch(products, [x, r, product], written)()
    expected = torch.bmm(x.double(), x.double().mT).to(dtype)
    return product, torch.bmm(expected.double(), x.double())


def _slot(device: torch.device) -> tuple[Slot, Tensor]:
    param, buffer, grad = _numbers(device, torch.float32, 3, 80, 48).unbind()
    slot = Slot(
        param=param,
        buffer=buffer,
        grad=grad,
        input_offset=0,
        direction_offset=0,
        padded=(48, 80),
        turned=True,
        scale=0.5,
    )
    return slot, torch.empty(48 * 80, dtype=torch.bfloat16, device=device)


def _momentum(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slot, inputs = _slot(device)
    assert slot.grad is not None
    buffer = torch.lerp(slot.buffer, slot.grad, 0.1)
    expected = torch.lerp(slot.grad, buffer, 0.9).mT.to(torch.bfloat16)
    numbers = torch.tensor(elementwise.momentum_numbers(0.9), dtype=torch.float32, device=device)
    elementwise.update_momentum(build_tables([slot])[0][0], inputs, numbers=numbers, nesterov=True)
    return inputs.view(48, 80), expected


def _normalise(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _numbers(device, torch.bfloat16, 2, 48, 80) * 1e-20
    out = torch.empty(2, 48, 80, dtype=dtype, device=device)
    elementwise.normalise(x, elementwise.find_norms(elementwise.measure(x), batch=2), out=out)
    return out, x.double() / x.double().flatten(1).norm(dim=1)[:, None, None]


def _apply(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slot, _ = _slot(device)
    direction = _numbers(device, dtype, 48 * 80)
    expected = slot.param * (1 - 0.1 * 0.2) - 0.1 * 0.5 * direction.view(48, 80).mT.float()
    lr, decay = torch.tensor([0.1, 0.2], dtype=torch.float32, device=device).unbind()
    elementwise.apply_update(build_tables([slot])[0][0], direction, lr=lr, weight_decay=decay, mode="decoupled")
    return slot.param, expected


def _peaks(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tensors = [_numbers(device, torch.float32, size) for size in (5, 40_000, 3)]
    return PeakFinder().find(tensors), torch.stack([tensor.abs().max() for tensor in tensors])


CHECKS: dict[str, Callable[[torch.device, torch.dtype], tuple[Tensor, Tensor]]] = {
    "peaks": _peaks,
    "symmetric_matmul (gram)": _gram,
    "symmetric_matmul (in halves)": _halves,
    "symmetric_matmul (quadratic)": _quadratic,
    "one product after the other": _one_after_the_other,
    "update_momentum": _momentum,
    "normalise": _normalise,
    "apply_update": _apply,
}

"""A small problem for every element-wise kernel, with torch's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from meshmuon.kernels import elementwise
from meshmuon.kernels.peaks import PeakFinder
from meshmuon.kernels.tables import TILE, Slot, build_tables, count_partials

Problem: TypeAlias = Callable[[torch.device, torch.dtype], tuple[Tensor, Tensor]]  # what was got, what is expected


def numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Make reproducible numbers of size 1 without a generator: this may run in the middle of a training run.

    Args:
        device: Where.
        dtype: Theirs.
        *shape: Theirs.

    Returns:
        A new tensor.
    """
    count = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32)
    return torch.sin(count * 12.9898).mul_(1.7).view(shape).to(dtype)


def go(device: torch.device) -> Tensor:
    """Make the flag that lets a kernel write.

    Args:
        device: Where.

    Returns:
        True, on the device.
    """
    return torch.ones((), dtype=torch.bool, device=device)


def _peaks(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tensors = [numbers(device, torch.float32, size) for size in (5, 40_000, 3)]
    return PeakFinder().find(tensors), torch.stack([tensor.abs().max() for tensor in tensors])


def _slot(device: torch.device) -> Slot:
    param, buffer, grad = numbers(device, torch.float32, 3, 144, 80).unbind()
    return Slot(
        param=param,
        buffer=buffer,
        grad=grad,
        input_offset=0,
        direction_offset=0,
        padded=(80, 144),
        turned=True,
        scale=0.5,
    )


def _arrives_in(dtype: torch.dtype) -> torch.dtype:
    """What matrices arrive in for products in fp32 or in 16 bits (`Recipe.input_dtype`)."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def _momentum(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slot = _slot(device)
    assert slot.grad is not None
    buffer = torch.lerp(slot.buffer, slot.grad, 0.1)
    expected = torch.lerp(slot.grad, buffer, 0.9).mT.to(_arrives_in(dtype))
    return _update(slot, dtype)[0], expected


def _norms(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs, partials = _update(_slot(device), dtype)
    return partials.float(), _squares_by_tiles(inputs[None])  # on a grid of 2^-40


def _update(slot: Slot, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    device = slot.param.device
    inputs = torch.empty(80 * 144, dtype=_arrives_in(dtype), device=device)
    partials = torch.empty(count_partials(1, slot.padded), dtype=torch.float64, device=device)
    elementwise.update_momentum(
        build_tables([slot])[0][0],
        inputs,
        numbers=torch.tensor(elementwise.momentum_numbers(0.9), dtype=torch.float32, device=device),
        nesterov=True,
        proceed=go(device),
        partials=partials,
    )
    return inputs.view(80, 144), partials


def _measure(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = numbers(device, _arrives_in(dtype), 2, 80, 144)
    return elementwise.measure(x).float(), _squares_by_tiles(x)  # on a grid of 2^-40


def _squares_by_tiles(x: Tensor) -> Tensor:
    batch, m, n = x.shape
    room = functional.pad(x.double().square(), (0, -n % TILE, 0, -m % TILE))
    return room.view(batch, -(-m // TILE), TILE, -(-n // TILE), TILE).sum(dim=(2, 4)).flatten()


def _normalise(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = numbers(device, _arrives_in(dtype), 2, 80, 144) * 1e-20
    out = torch.empty(2, 80, 144, dtype=dtype, device=device)
    elementwise.normalise(x, elementwise.find_norms(_squares_by_tiles(x), batch=2), out=out)
    return out, x.double() / x.double().flatten(1).norm(dim=1)[:, None, None]


def _apply(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slot = _slot(device)
    direction = numbers(device, dtype, 80 * 144)
    expected = slot.param * (1 - 0.1 * 0.2) - 0.1 * 0.5 * direction.view(80, 144).mT.float()
    lr, decay = (torch.full((1,), number, dtype=torch.float32, device=device) for number in (0.1, 0.2))
    table = build_tables([slot])[0][0]
    elementwise.apply_update(table, direction, lr=lr, weight_decay=decay, mode="decoupled", proceed=go(device))
    return slot.param, expected


ELEMENTWISE: dict[str, Problem] = {
    "peaks": _peaks,
    "measure": _measure,
    "update_momentum": _momentum,
    "update_momentum (norms)": _norms,
    "normalise": _normalise,
    "apply_update": _apply,
}

"""The parts the regression tests share. Each test stands for a failure of another optimizer that really happened.

The numbers in the tests' docstrings are those of the project's catalogue of 72 failures. Those that need several
processes or a GPU are tested elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import Muon

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameter(*shape: int, seed: int = 100, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(randn(*shape, seed=seed, dtype=dtype))


class Holder(nn.Module):
    """A model that is nothing but what it is given."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, value in children.items():
            setattr(self, name, value)


def step(opt: Muon, params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone()
    opt.step()


def train(make: Callable[[list[nn.Parameter]], Any], grads: Sequence[Tensor]) -> tuple[nn.Parameter, Any]:
    """Train one matrix on given gradients from a given start; return it and its optimizer."""
    p = parameter(*grads[0].shape, dtype=grads[0].dtype)
    opt = make([p])
    for g in grads:
        step(opt, [p], [g])
    return p, opt


def direction_of(grad: Tensor, **arguments: Any) -> Tensor:
    """What Muon moves a matrix by, for lr 1 and without any scale: its orthogonalized first gradient."""
    settings = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "none", **arguments}
    p = nn.Parameter(torch.zeros_like(grad))
    step(Muon([p], **settings), [p], [grad])
    return -p.detach()


def routes(opt: Muon) -> dict[str, str]:
    return {record.name: record.routing.algorithm for record in opt.plan.parameters}


def reasons(opt: Muon) -> dict[str, str]:
    return {record.name: record.routing.reason for record in opt.plan.parameters}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())


def must_fail(check: Callable[..., None], *arguments: Any) -> None:
    """The sabotage: shown to something wrong, the check must notice."""
    with pytest.raises(AssertionError):
        check(*arguments)


class Products(TorchDispatchMode):
    """Counts the matrix products while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
        return func(*args, **(kwargs or {}))


def products_of(action: Callable[[], Any]) -> int:
    with Products() as products:
        action()
    return products.count

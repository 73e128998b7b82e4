"""A small model, gradients that are a function of step and name, and the comparison of two runs."""

import copy
import io
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshmuon import Muon

MATRICES = ("up.weight", "mid.0.weight", "mid.1.weight", "mid.2.weight", "down.weight")
BEFORE, AFTER = range(4), range(4, 9)


class Net(nn.Module):
    """Hidden matrices, three of one shape; embedding and head of one shape; vectors, several of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(66, 24)
        self.up = nn.Linear(24, 40)
        self.mid = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(40)
        self.down = nn.Linear(40, 24)
        self.head = nn.Linear(24, 66, bias=False)


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def split(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices for Muon, and the rest, in the model's order."""
    named = list(net.named_parameters())
    return [p for n, p in named if n in MATRICES], [p for n, p in named if n not in MATRICES]


def names(net: nn.Module) -> tuple[list[str], list[str]]:
    listed = [name for name, _ in net.named_parameters()]
    return [n for n in listed if n in MATRICES], [n for n in listed if n not in MATRICES]


def gradient(step: int, name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
    return torch.randn(*shape, generator=generator)


def train(net: nn.Module, opts: Iterable[Optimizer], steps: Iterable[int]) -> None:
    opts = list(opts)
    for step in steps:
        for name, param in net.named_parameters():
            param.grad = gradient(step, name, param.shape).to(param.dtype)
        for opt in opts:
            opt.step()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().double().clone() for name, param in net.named_parameters()}


def assert_moves_alike(
    ours: nn.Module, theirs: nn.Module, start: dict[str, Tensor], *, bound: float, only: Iterable[str] | None = None
) -> None:
    """Compare every parameter; distances are relative to the way it went, not to its size."""
    for name in start if only is None else only:
        way = dict(theirs.named_parameters())[name].detach().double() - start[name]
        ours_way = dict(ours.named_parameters())[name].detach().double() - start[name]
        distance = ((ours_way - way).norm() / way.norm()).item()
        assert distance <= bound, f"{name} is {distance:.2g} of its way off"


def twin_of(net: Net, **settings: Any) -> tuple[Net, Muon]:
    twin = copy.deepcopy(net)
    return twin, Muon(twin, **settings)


def state_of(opt: Muon, net: nn.Module, name: str) -> dict[str, Tensor]:
    return opt.state[dict(net.named_parameters())[name]]


def all_state(net: nn.Module, opt: Muon) -> dict[str, Tensor]:
    return {
        f"{name} {key}": value.detach().clone()
        for name, param in net.named_parameters()
        for key, value in opt.state[param].items()
    }

"""What two ranks run to show that an installation is exact: real wrappers, and a checkpoint that changes hands.

Functions here run on every rank of a `RankPool`. `disturb` and `tamper` are ways to break them, so that a test can see
them fail.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshmuon.muon import Muon
from meshmuon.testing.replay import Replay, whole

Kind = Literal["fsdp", "tp"]
STEPS = 5
_VOCABULARY, _WIDTH, _INNER, _TOKENS = 29, 20, 34, 16
_SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "layout_invariant": True}


class SmallModel(nn.Module):
    """One block between an embedding and a head: both algorithms, sides that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH, bias=False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.lm_head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embedding(tokens)
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


def build(kind: Kind | None, device: str) -> SmallModel:
    """Make the model, the same on every rank, and wrap it.

    Args:
        kind: "fsdp", "tp", or None for one process.
        device: Where.

    Returns:
        The model.
    """
    torch.manual_seed(0)
    model = SmallModel().to(device)
    if kind is None:
        return model
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if kind == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    fully_shard(model, mesh=mesh)
    return model


@dataclass(frozen=True, slots=True)
class Exactness:
    """What came out.

    Attributes:
        differences: Names of parameters and state that differ from the same steps on one process.
        compared: How many were compared.
        travelling: How many matrices the ranks share.
        unmoved: Names of parameters that are where they were.
    """

    differences: tuple[str, ...]
    compared: int
    travelling: int
    unmoved: tuple[str, ...]


def exactness(kind: Kind, device: str, disturb: Callable[[nn.Module], None] | None = None) -> Exactness:
    """Train with real backward passes, and replay each step on one process from the gathered gradients.

    Args:
        kind: How the model is shared.
        device: Where.
        disturb: Called before each step, after its gradients were gathered.

    Returns:
        What differs.
    """
    model = build(kind, device)
    before = {name: whole(param) for name, param in model.named_parameters()}
    optimizer = Muon(model, **_SETTINGS)
    replay = Replay(optimizer, _SETTINGS)
    for step in range(STEPS):
        stream = dist.get_rank() if kind == "fsdp" else 0  # ranks of data parallelism see data of their own
        generator = torch.Generator().manual_seed(1000 * step + stream)
        tokens = torch.randint(_VOCABULARY, (_TOKENS + 1,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
        replay.step()
        if disturb is not None:
            disturb(model)
        optimizer.step()
    after = {name: whole(param) for name, param in model.named_parameters()}
    return Exactness(
        differences=tuple(replay.differences()),
        compared=sum(1 + len(optimizer.state[param]) for param in model.parameters()),
        travelling=sum(len(bucket.matrices) for bucket in optimizer.plan.buckets if bucket.team),
        unmoved=tuple(name for name, value in after.items() if torch.equal(value, before[name])),
    )


def train(model: nn.Module, optimizer: Muon, steps: range) -> None:
    """Take steps whose gradients are a pure function of (step, name): the same on every layout.

    Args:
        model: The model.
        optimizer: Its optimizer.
        steps: Numbers of the steps.
    """
    for step in steps:
        for name, param in model.named_parameters():
            seed = int.from_bytes(hashlib.sha256(f"{step} {name}".encode()).digest()[:6], "big")
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.device)
            if isinstance(param, DTensor):
                param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
            else:
                param.grad = grad
        optimizer.step()


def begin(folder: Path, device: str, tamper: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Tensor]:
    """Train, save, and go on: the run without an interruption.

    Args:
        folder: Where to save after the first steps.
        device: Where to train.
        tamper: Is shown the optimizer's state before it is saved.

    Returns:
        Parameters and state after all steps, whole.
    """
    model = build("fsdp", device)
    optimizer = Muon(model, **_SETTINGS)
    train(model, optimizer, range(STEPS))
    save(model, optimizer, folder, tamper)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    return snapshot(model, optimizer)


def resume(folder: Path, device: str) -> dict[str, Tensor]:
    """Load on ranks that share the model, and go on.

    Args:
        folder: Where it was saved.
        device: Where to train.

    Returns:
        Parameters and state after all steps, whole.
    """
    model = build("fsdp", device)
    optimizer = Muon(model, **_SETTINGS)
    load(model, optimizer, folder)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    return snapshot(model, optimizer)


def hand_over(source: Path, target: Path, device: str) -> dict[str, Tensor]:
    """On one process, without a job: load what ranks saved, save it again, and go on.

    Args:
        source: Where it was saved.
        target: Where to save it.
        device: Where to train.

    Returns:
        Parameters and state after all steps.
    """
    model = build(None, device)
    optimizer = Muon(model, **_SETTINGS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that is what is wanted here
        load(model, optimizer, source)
        save(model, optimizer, target)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    return snapshot(model, optimizer)


def save(
    model: nn.Module, optimizer: Muon, folder: Path, tamper: Callable[[dict[str, Any]], None] | None = None
) -> None:
    """Save with torch.distributed.checkpoint.

    Args:
        model: The model.
        optimizer: Its optimizer.
        folder: Where to.
        tamper: Is shown the optimizer's state before.
    """
    state = _state(model, optimizer)
    if tamper is not None:
        tamper(state["optimizer"])
    checkpoint.save(state, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Muon, folder: Path) -> None:
    """Load what `save` wrote, on any number of ranks.

    Args:
        model: The model.
        optimizer: Its optimizer.
        folder: Where from.
    """
    state = _state(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=True))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model: nn.Module, optimizer: Muon) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def snapshot(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """Copy parameters and state, whole. Call it on every rank.

    Args:
        model: The model.
        optimizer: Its optimizer.

    Returns:
        Name → tensor on the CPU.
    """
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param).cpu()
        found |= {f"{name}.{key}": whole(value).cpu() for key, value in optimizer.state[param].items()}
    return found

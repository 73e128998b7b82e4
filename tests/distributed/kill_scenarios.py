"""A training loop that saves every few steps, and a rank that dies in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from meshmuon import Muon, latest_checkpoint, load_checkpoint, save_checkpoint
from tests.distributed import checkpoint_scenarios as scenarios
from tests.distributed.real_models import VOCABULARY, Model

STEPS, EVERY = 9, 2


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_while_saving(monkey):
    """Half of this rank's data is written when it happens."""
    write = dcp.FileSystemWriter.write_data

    def half(self, plan, planner):
        if monkey["armed"]:
            plan.items = plan.items[: len(plan.items) // 2]
            write(self, plan, planner).wait()
            _die()
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = half


def injected(kind, root, death=None):
    """Gradients are injected, so any layout may continue."""
    model, opt, params = scenarios.build(kind)
    first = _loop(root, model, opt, lambda step: scenarios.train(kind, opt, params, step, 1), death)
    return first, scenarios.digest(model, opt, params)


def real(root, death=None):
    """Real gradients of real data: the same layout continues."""
    torch.manual_seed(0)
    model = Model(width=12, heads=2, inner=30, experts=3)
    fully_shard(model)
    opt = Muon(model, lr=0.02)
    params = {name: (param, tuple(param.shape)) for name, param in model.named_parameters()}

    def step(number):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()

    first = _loop(root, model, opt, step, death)
    return first, scenarios.digest(model, opt, params)


def _loop(root, model, opt, take, death):
    """`death`: (rank, step, when), when being "before", "after" a step, or "saving". Gives the step it began with."""
    monkey = {"armed": False}
    if death is not None and death[0] == dist.get_rank() and death[2] == "saving":
        _dies_while_saving(monkey)
    found = latest_checkpoint(root)
    first = 0 if found is None else load_checkpoint(found, model, opt)["step"]
    for step in range(first, STEPS):
        dies = death is not None and death[:2] == (dist.get_rank(), step)
        if dies and death[2] == "before":
            _die()
        take(step)
        if dies and death[2] == "after":
            _die()
        monkey["armed"] = dies
        if (step + 1) % EVERY == 0:
            save_checkpoint(Path(root) / f"step-{step + 1}", model, opt, extra={"step": step + 1})
    return first

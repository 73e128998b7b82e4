"""What ranks run to measure: the same numbers on every rank, whatever each holds."""

from __future__ import annotations

from unittest import mock

import torch

from meshmuon import Muon
from meshmuon.exchange.contributions import Contributions
from tests.distributed import sync_scenarios
from tests.distributed.meshes import mesh_of
from tests.distributed.scenarios import chosen, groups_for, shard, tensor_for

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


def on_a_mesh(layout, settings, sabotage=None, skipped=False):
    mesh_shape, table = chosen(layout)
    mesh = mesh_of(mesh_shape)
    params = {
        name: (torch.nn.Parameter(shard(tensor_for("p", name, shape, torch.float32), mesh, placements)), view)
        for name, (shape, view, placements) in table.items()
    }
    opt = Muon(groups_for(params), **SETTINGS, **settings)
    assert opt.metrics()["dead"] == len(params), "before anything was exchanged"
    for step in range(2):
        for name, (shape, _, placements) in table.items():
            gradient = poisoned(f"g{step}", name, shape, skipped and step == 1)
            params[name][0].grad = shard(gradient, mesh, placements)
        opt.step()
    if sabotage == "not added up":
        with mock.patch.object(Contributions, "total", lambda self, team, numbers: numbers):
            return opt.metrics()
    return opt.metrics()


def poisoned(step, name, shape, really):
    """A gradient; with an inf in its first number, which one rank alone may hold."""
    gradient = tensor_for(step, name, shape, torch.float32)
    if really:
        gradient.view(-1)[0] = torch.inf
    return gradient


def alone(layout, skipped=False):
    _, table = chosen(layout)
    params = {n: (tensor_for("p", n, s, torch.float32).requires_grad_(), v) for n, (s, v, _) in table.items()}
    opt = Muon(groups_for(params), **SETTINGS)
    for step in range(2):
        for name, (tensor, _) in params.items():
            tensor.grad = poisoned(f"g{step}", name, tensor.shape, skipped and step == 1)
        opt.step()
    return opt.metrics()


def synced(ranks=None):
    """With a number of ranks: the oracle on one process, from momentum alone, as under grad_sync."""
    import torch.distributed as dist

    params = sync_scenarios.parameters(torch.float32)
    extra = {"grad_sync": "optimizer"} if ranks is None else {}
    opt = Muon(groups_for(params), **SETTINGS, nesterov=False, **extra)
    for step in range(2):
        for name, (tensor, _) in params.items():
            if ranks is None:
                tensor.grad = sync_scenarios.contribution(step, name, tensor.shape, dist.get_rank(), torch.float32)
            else:
                tensor.grad = sync_scenarios.average(step, name, tensor.shape, ranks, torch.float32)
        opt.step()
    opt.zero_grad()
    return opt.metrics()


def exchanges(matrices):
    """Under grad_sync: all-to-alls of a step, as counted, as `metrics()` says and as the plan's words have it."""
    import re

    import torch.distributed as dist

    shapes = {"w": (12, 8), "norm": (8,)} if matrices else {"norm": (8,), "bias": (5,)}
    params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    opt = Muon(params.items(), grad_sync="optimizer", allow_no_muon=not matrices, **SETTINGS)
    counted = 0
    all_to_all = dist.all_to_all_single

    def counting(*arguments, **others):
        nonlocal counted
        counted += 1
        return all_to_all(*arguments, **others)

    for _ in range(2):
        for param in params.values():
            param.grad = torch.ones_like(param)
        counted = 0
        with mock.patch.object(dist, "all_to_all_single", counting):
            opt.step()
    text = str(opt)
    said = sum(map(int, re.findall(r"in (\d+) all-to-alls", text)))
    return counted, opt.metrics()["exchanges"], said, "nothing travels" in text

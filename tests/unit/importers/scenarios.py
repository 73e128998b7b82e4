"""What ranks do in `test_layouts`: import whole state into sharded parameters, and under grad_sync."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from tests.unit.importers.test_sources import CASES, COMMON
from tests.unit.importers.tools import AFTER, BEFORE, gradient, make_net, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import CheckpointError, Muon, export_torch_state, load_foreign_state

CASE = CASES["moonlight"]
PLACES = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def source() -> tuple[nn.Module, Any]:
    net = make_net()
    theirs = CASE.build(net)
    train(net, theirs, BEFORE)
    return net, theirs[0].state_dict()


def on_one_device() -> dict[str, Tensor]:
    """The same import and 5 steps on plain tensors."""
    net, state = source()
    opt = Muon(net, **COMMON, **CASE.ours)
    load_foreign_state(opt, state)
    train(net, [opt], AFTER)
    return {n: p.detach() for n, p in net.named_parameters()}


def sharded(where: str, *, load: bool = True) -> dict[str, Tensor]:
    """FSDP- and TP-like layouts; the number of ranks need not divide anything."""
    net, state = source()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {}
    for name, param in net.named_parameters():
        place = PLACES[where] if param.ndim == 2 else Shard(0)
        params[name] = nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [place]))
    opt = Muon(params.items(), **COMMON, **CASE.ours)
    if load:
        report = load_foreign_state(opt, copy.deepcopy(state))
        assert len(report.taken) == len(params)
    for param in params.values():
        assert all(isinstance(value, DTensor) for key, value in opt.state[param].items() if key != "step")
    for step in AFTER:
        for name, param in params.items():
            param.grad = distribute_tensor(gradient(step, name, param.shape), mesh, param.placements)
        opt.step()
    states = export_torch_state(opt)
    assert all(isinstance(entry["momentum_buffer"], DTensor) for entry in states["muon"]["state"].values())
    return {name: param.full_tensor().detach() for name, param in params.items()}


def not_loaded() -> dict[str, Tensor]:
    return sharded("rows", load=False)


def loaded(grad_sync: str) -> dict[int, dict[str, Tensor]]:
    """The state after the import, gathered from its owners if there are any."""
    net, state = source()
    opt = Muon(net, **COMMON, **CASE.ours, grad_sync=grad_sync)
    load_foreign_state(opt, state)
    return opt.state_dict()["state"]


def otherwise_laid_out() -> str:
    """State that is a DTensor of another layout is refused, with the parameter's name."""
    matrix = torch.arange(96.0).view(12, 8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)]))
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "params": [0]}
    opt = Muon([("blocks.0.weight", param)])
    for place in (Shard(0), Shard(1)):
        state = {"state": {0: {"momentum_buffer": distribute_tensor(matrix, mesh, [place])}}, "param_groups": [group]}
        try:
            load_foreign_state(opt, state)
        except CheckpointError as error:
            return str(error)
        assert torch.equal(opt.state[param]["momentum_buffer"].full_tensor(), matrix)
    return "nothing was refused"

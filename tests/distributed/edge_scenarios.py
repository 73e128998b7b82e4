"""What ranks run at the edges: odd groups, odd dtypes, empty shards, gradients as tensor parallelism leaves them."""

from __future__ import annotations

import pickle
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshmuon import Muon, Sharded, load_foreign_state
from meshmuon.runtime import synced
from tests.distributed import sync_scenarios


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(12)
        self.lm_head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def trained(model, steps=3):
    opt = Muon(model, lr=0.01)
    for step in range(steps):
        tokens = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return opt


def tensor_parallel():
    """torch's own recipe with SequenceParallel: partial sums for norms, whole gradients for the embedding."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)
    trained(model)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def one_device():
    model = Model()
    trained(model)
    return {name: p.detach() for name, p in model.named_parameters()}


def steps_on_every_rank():
    """A bias of one number: all ranks but one hold nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = Muon(model, lr=0.01)
    for step in range(3):
        model(torch.full((2, 9), float(step))).sum().backward()
        if step == 1 and dist.get_rank() == 0:
            model[1].bias.grad._local_tensor.fill_(float("nan"))
        opt.step()
        opt.zero_grad()
    return [float(state["step"]) for state in opt.state.values() if "step" in state]


def in_descending_order(settings):
    group = dist.new_group(list(range(dist.get_world_size()))[::-1], sort_ranks=False)
    return sync_scenarios.synced({**settings, "process_group": group})[0]


def small_and_large_gradients(dtype, value, scale, how):
    """One matrix and one vector with a gradient of one size, under `grad_sync`."""
    params = [nn.Parameter(torch.eye(6, dtype=dtype)), nn.Parameter(torch.ones(6, dtype=dtype))]
    groups = [{"params": [params[0]], "algorithm": "muon"}, {"params": [params[1]], "algorithm": "adamw"}]
    opt = Muon(groups, lr=0.01, grad_sync=how, state_dtype="float32")
    for p in params:
        p.grad = torch.full_like(p, value * scale)
    if scale != 1:
        opt.grad_scale, opt.found_inf = torch.tensor(float(scale)), torch.tensor(0.0)
    opt.step()
    state = opt.state_dict()["state"]
    moved = [
        bool((p != start).any()) for p, start in zip(params, (torch.eye(6, dtype=dtype), torch.ones(6)), strict=True)
    ]
    finite = all(bool(torch.isfinite(p).all()) for p in params)
    return float(state[0]["momentum_buffer"].max()), moved, finite, opt.metrics()["skipped_non_finite"]


def summands(value):
    """A norm whose gradient is a partial sum: the summands are finite, whatever the sum is; and metrics after it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    norm = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()]))
    matrix = nn.Parameter(distribute_tensor(torch.eye(8), mesh, [Shard(0)]))
    opt = Muon([("block.norm", norm), ("block.w", matrix)], lr=0.1)
    found = []
    for each in (value, 1.0):
        norm.grad = DTensor.from_local(torch.full((6,), each), mesh, [Partial()], run_check=False)
        matrix.grad = DTensor.from_local(torch.ones(8, 8), mesh, [Replicate()], run_check=False)
        opt.step()
        metrics = opt.metrics()
        finite = bool(torch.isfinite(norm.to_local()).all() and torch.isfinite(matrix.to_local()).all())
        found.append((finite, metrics["skipped_non_finite"]))
    return found


def pickled_on_one_rank():
    opt = Muon([nn.Parameter(torch.eye(4))], grad_sync="optimizer")
    if dist.get_rank():
        return None
    start = time.monotonic()
    try:
        pickle.dumps(opt)
    except TypeError as error:
        return str(error), time.monotonic() - start
    return None


def foreign_state_of_a_plain_shard():
    """A whole checkpoint of torch.optim.Muon, where each rank has some rows of the matrix."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = nn.Parameter(torch.arange(12.0 * ranks).view(4 * ranks, 3))
    theirs = torch.optim.Muon([whole])
    whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
    theirs.step()
    mine = nn.Parameter(torch.zeros(4, 3))
    opt = Muon([{"params": [("w", mine)], "algorithm": "muon", "sharded": Sharded(0, dist.group.WORLD)}])
    load_foreign_state(opt, theirs.state_dict())
    expected = theirs.state_dict()["state"][0]["momentum_buffer"]
    return opt.state[mine]["momentum_buffer"], expected[4 * rank : 4 * rank + 4]


def interrupted(kind):
    """An exception in AdamW's half of a step: what is raised, and then by state_dict() and the next step."""
    torch.manual_seed(0)
    params = [torch.randn(8, 16).requires_grad_(), torch.randn(5).requires_grad_()]
    groups = [{"params": params[:1], "algorithm": "muon"}, {"params": params[1:], "algorithm": "adamw"}]
    opt = Muon(groups, grad_sync="optimizer")
    raised = []

    def fail(*_, **__):
        raise kind("in the middle")

    with mock.patch.object(synced, "update_adamw_", fail):
        for attempt in (opt.step, opt.state_dict, opt.step):
            for param in params:
                param.grad = torch.ones_like(param)
            try:
                attempt()
                raised.append(None)
            except BaseException as error:
                raised.append(type(error).__name__)
    return raised


def one_removed():
    """Momentum of the parameters that are left when the first one is taken out of its group."""
    params = [torch.full((8, 16), float(i)).requires_grad_() for i in range(3)]
    opt = Muon([{"params": params, "algorithm": "muon"}], grad_sync="optimizer", lr=0.0, momentum=0.5)
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, float(i))
    opt.step()
    del opt.param_groups[0]["params"][0]
    for param in params:
        param.grad = torch.zeros_like(param)
    opt.step()
    return [float(each["momentum_buffer"].mean()) for _, each in sorted(opt.state_dict()["state"].items())]

"""What ranks run with plain tensors: replicas that share their matrices, and tensor-parallel shards."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon, Sharded, orthogonalize
from meshmuon.testing import Replay
from meshmuon.update import apply, fused
from tests.distributed.fault_scenarios import attempt, on_mesh
from tests.distributed.scenarios import EXPERTS, PARAMETERS, STEPS, groups_for, result_of, shard, tensor_for, whole

REPLICATED = PARAMETERS | EXPERTS


def cut_table(ranks):
    """name → (shape, view, dim, parts): everything divides, nothing else does."""
    return {
        "row": ((3 * ranks, 10), {}, 0, None),
        "column": ((7, 5 * ranks), {}, 1, None),
        "tall": ((9 * ranks, 4), {}, 0, None),
        "gate_up": ((10 * ranks, 6), {"split_rows": (5 * ranks, 5 * ranks)}, 0, (5 * ranks, 5 * ranks)),
        "qkv": ((7 * ranks, 11), {"split_rows": (4 * ranks, 2 * ranks, ranks)}, 0, (4 * ranks, 2 * ranks, ranks)),
        "fused": ((6, 8 * ranks), {}, 1, (5 * ranks, 3 * ranks)),
        "experts": ((4, 6, 3 * ranks), {"experts": True}, 2, None),
        "whole": ((5, 9), {}, -1, None),
        "norm": ((37,), "adamw", -1, None),
        "bias": ((3 * ranks,), "adamw", 0, None),
    }


def cut(full, dim, parts, rank, ranks):
    """What one rank holds, by torch's own functions."""
    if dim == -1:
        return full.clone()
    pieces = full.split(parts, dim) if parts else (full,)
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in pieces], dim).clone()


def uncut(pieces, dim, parts, ranks):
    if dim == -1:
        return pieces[0]
    sizes = [part // ranks for part in parts] if parts else [pieces[0].shape[dim]]
    split = [piece.split(sizes, dim) for piece in pieces]
    return torch.cat([torch.cat([each[i] for each in split], dim) for i in range(len(sizes))], dim)


def replicas(settings, sabotage=None, group=None):
    """The same plain tensors and averaged gradients on every rank."""
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, torch.float32)), v) for n, (s, v) in REPLICATED.items()}
    opt = Muon(groups_for(params), process_group=group or dist.group.WORLD, **settings)
    for step in range(STEPS):
        for name, (tensor, _) in params.items():
            tensor.grad = tensor_for(f"gradient {step}", name, tensor.shape, torch.float32)
            if sabotage == "local gradient" and name == "medium":
                tensor.grad += 0.01 * (1 + dist.get_rank())
        opt.step()
    return result_of(params, opt), str(opt)


def unlike_replicas(**settings):
    """Tensors that were said to be the same, and are not: another rank's expert."""
    same, own = torch.ones(6, 8), torch.full((6, 8), 1.0 + dist.get_rank())
    params = {"same": (nn.Parameter(same), {}), "own": (nn.Parameter(own), {})}
    opt = Muon(groups_for(params), **settings)
    for tensor, _ in params.values():
        tensor.grad = torch.randn(6, 8)
    before = own.clone()
    first, again = attempt(opt.step), attempt(opt.step)  # to go on regardless does not help
    assert first["error"] == again["error"]
    return f"{again['error']}: {again['message']}", torch.equal(before, params["own"][0].detach())


def unlike_in_process_group():
    return unlike_replicas(process_group=dist.group.WORLD)


def unlike_in_grad_sync():
    return unlike_replicas(grad_sync="optimizer")


def replicas_alone(settings):
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, torch.float32)), v) for n, (s, v) in REPLICATED.items()}
    return _train_whole(params, settings)


def _train_whole(params, settings):
    opt = Muon(groups_for(params), **settings)
    for step in range(STEPS):
        for name, (tensor, _) in params.items():
            tensor.grad = tensor_for(f"gradient {step}", name, tensor.shape, torch.float32)
        opt.step()
    return result_of(params, opt)


def shards(settings, sabotage=None):
    """Tensor-parallel shards; the whole result, put together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    table = cut_table(ranks)
    group = dist.group.WORLD
    if sabotage == "wrong order":
        rank = (rank + 1) % ranks if ranks > 1 else rank
    params, declared = {}, {}
    for name, (shape, view, dim, parts) in table.items():
        full = tensor_for("parameter", name, shape, torch.float32)
        params[name] = (nn.Parameter(cut(full, dim, parts, rank, ranks)), view)
        if sabotage == "parts forgotten" and name == "fused":
            parts = None
        declared[name] = Sharded(dim, group, parts)
    opt = Muon(groups_for(params), sharded=declared, **settings)
    if sabotage == "scale":
        _see_ranks_twice()
    for step in range(STEPS):
        for name, (shape, _, dim, parts) in table.items():
            full = tensor_for(f"gradient {step}", name, shape, torch.float32)
            params[name][0].grad = cut(full, dim, parts, rank, ranks)
        opt.step()
    mine = result_of(params, opt)
    every = [None] * ranks
    dist.all_gather_object(every, mine)
    if sabotage == "wrong order":
        every = every[-1:] + every[:-1]
    together = {}
    for key in mine:
        _, _, dim, parts = table[key.split(".")[0]]
        together[key] = uncut([each[key] for each in every], dim, parts, ranks)
    return together, str(opt)


def _see_ranks_twice():
    """The mistake of a peer: the lr rule sees a shape that was multiplied with the number of ranks once too often."""

    def wrong(matrices, directions, rule):
        def seen(matrix):
            rows, cols = matrix.shape
            return dataclasses.replace(matrix, logical_shape=(rows * dist.get_world_size(), cols))

        apply.apply_update_([dataclasses.replace(m, matrix=seen(m.matrix)) for m in matrices], directions, rule)

    fused.apply_update_ = wrong


def see_right():
    fused.apply_update_ = apply.apply_update_


def shards_alone(ranks, settings):
    table = cut_table(ranks)
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, torch.float32)), v) for n, (s, v, _, _) in table.items()}
    return _train_whole(params, settings)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.up = nn.Linear(12, 23)
        self.down = nn.Linear(23, 12, bias=False)
        self.head = nn.Linear(12, 17)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(self.up(x).relu()))


def real_ddp():
    """Backward passes through DistributedDataParallel, other data on each rank; what differs from the replay."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    opt = Muon(model, lr=0.02)
    replay = Replay(opt, {"lr": 0.02})
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(17, (3, 9))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        replay.step()
        opt.step()
        opt.zero_grad()
    return replay.differences(), str(opt)


def count_owned(settings):
    """How many matrices this rank orthogonalizes in a step, and how many there are."""
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, torch.float32)), v) for n, (s, v) in REPLICATED.items()}
    opt = Muon(groups_for(params), process_group=dist.group.WORLD, **settings)
    here = sum(opt.plan.computed_here(bucket) for bucket in opt.plan.buckets)
    return here, sum(len(bucket.matrices) for bucket in opt.plan.buckets)


def bad(kind):
    """A declaration that cannot be right; what was raised."""
    weight = nn.Parameter(torch.ones(4, 6 + (kind == "sizes" and dist.get_rank() == 1)))
    others = dist.new_group([1, 2])
    declared = {
        "no group": Sharded(0, None),
        "foreign group": Sharded(0, others),
        "dim": Sharded(2, dist.group.WORLD),
        "parts": Sharded(0, dist.group.WORLD, parts=(5, 8)),
        "sizes": Sharded(0, dist.group.WORLD),
        "name": Sharded(0, dist.group.WORLD),
        "marked": None,
    }[kind]
    if kind == "marked":
        weight.tensor_model_parallel, weight.partition_dim = True, 0
    name = "elsewhere" if kind == "name" else "weight"
    try:
        opt = Muon([("weight", weight)], lr=0.1, sharded=None if declared is None else {name: declared})
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        opt.step()
    except (ValueError, TypeError, RuntimeError) as error:
        unchanged = kind != "sizes" or torch.equal(before, weight.detach())
        return f"{type(error).__name__}: {error}", unchanged
    return "nothing", False


def blockwise(settings):
    """Each rank's block by itself, against the reference on the block alone."""
    full = tensor_for("parameter", "w", (12, 10), torch.float32)
    weight = nn.Parameter(on_mesh()(full))
    opt = Muon([{"params": [("w", weight)], "algorithm": "muon", "mode": "blockwise"}], lr=0.1, **settings)
    mine = nn.Parameter(weight.detach()._local_tensor.clone())
    alone = Muon([("w", mine)], lr=0.1, adjust_lr_fn="none", extra_scale_factor=0.2 * 12**0.5)
    for step in range(3):
        weight.grad = on_mesh()(tensor_for(f"gradient {step}", "w", (12, 10), torch.float32))
        mine.grad = weight.grad._local_tensor.clone()
        opt.step()
        alone.step()
    return (weight.detach()._local_tensor - mine.detach()).abs().max().item(), str(opt)


def orthogonalized(kind):
    """The polar factor of matrices that ranks hold together, put together again; and the whole ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full = tensor_for("gradient", "w", (3, 4 * ranks, 5 * ranks), torch.float32)
    if kind == "dtensor":
        mesh = init_device_mesh("cpu", (ranks,))
        x = shard(full, mesh, [Shard(1)])
        before = x._local_tensor.clone()
        got = orthogonalize(x)
        assert got.placements == x.placements and torch.equal(x._local_tensor, before)
        return whole(got), full
    dim = {"rows": 1, "columns": 2}[kind]
    mine = cut(full, dim, None, rank, ranks)
    got = orthogonalize(mine, sharded=Sharded(dim, dist.group.WORLD))
    every = [None] * ranks
    dist.all_gather_object(every, got)
    return uncut(every, dim, None, ranks), full


def orthogonalized_otherwise():
    """Ranks that do not ask for the same."""
    try:
        steps = 4 if dist.get_rank() == 1 else 5
        orthogonalize(torch.randn(4, 6), sharded=Sharded(0, dist.group.WORLD), steps=steps)
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"

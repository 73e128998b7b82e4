"""What ranks run on the sharded-Gram route: matrices cut along their long side, beside the owner route."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from meshmuon import Muon, Orthogonalizer
from meshmuon.plan.bucket import bytes_sent
from tests.distributed.scenarios import shard, tensor_for, whole

# name → (shape, dim that is cut): wide ones along their columns, tall ones along their rows; uneven and empty shards.
SHAPES = {
    "wide": ((16, 96), 1),
    "tall": ((90, 24), 0),
    "long": ((8, 200), 1),
    "also": ((16, 96), 1),
    "short": ((3, 5), 1),
}


def spectrum(kind, name, step, shape):
    """Gradients that are well conditioned, or not at all."""
    noise = tensor_for(f"gradient {step}", name, shape, torch.float32)
    if kind == "gaussian":
        return noise
    if kind == "tiny":
        return noise * 1e-25
    u, _, vh = torch.linalg.svd(noise, full_matrices=False)
    rank = torch.arange(min(shape), dtype=torch.float32)
    values = 10.0 ** (-4 * rank / len(rank)) if kind == "power law" else (rank < 2).float() + 0.01
    return (u * values) @ vh


def train(route, kind, dtype, steps=3, **more):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups, params = [], {}
    for name, (shape, dim) in SHAPES.items():
        params[name] = nn.Parameter(shard(tensor_for("parameter", name, shape, torch.float32), mesh, [Shard(dim)]))
        groups.append({"params": [(name, params[name])], "algorithm": "muon", "route": route})
    form = "standard" if route == "owner" else "auto"  # the more exact one to compare with
    settings = {
        "lr": 0.1,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "orthogonalizer": Orthogonalizer(dtype=dtype, form=form),
    }
    opt = Muon(groups, **{**settings, **more})
    sent = []
    all_to_all = dist.all_to_all_single

    def counting(received, buffer, receive_splits, send_splits, **others):
        sent.append((buffer.numel() - send_splits[dist.get_rank()]) * buffer.element_size())
        return all_to_all(received, buffer, receive_splits, send_splits, **others)

    for step in range(steps):
        for name, (shape, dim) in SHAPES.items():
            params[name].grad = shard(spectrum(kind, name, step, shape), mesh, [Shard(dim)])
        sent.clear()
        with mock.patch.object(dist, "all_to_all_single", counting):
            opt.step()
    planned = sum(bytes_sent(bucket, dist.get_rank()) for bucket in opt.plan.buckets)
    return {name: whole(param.detach()) for name, param in params.items()}, str(opt), sum(sent), planned


def refused():
    """What is said to matrices that cannot take this route."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = torch.ones(16, 96)
    cases = {
        "short side": (wide, 0, "auto"),
        "float64": (wide.double(), 1, "auto"),
        "svd": (wide, 1, "svd"),
    }
    said = {}
    for case, (full, dim, form) in cases.items():
        group = {"params": [("w", nn.Parameter(shard(full, mesh, [Shard(dim)])))], "algorithm": "muon", "route": "gram"}
        try:
            Muon([group], orthogonalizer=Orthogonalizer(form=form))
        except ValueError as error:
            said[case] = str(error)
    return said


def wished_restarts():
    """The restarts of a bucket on this route, asked for and not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for restarts in ("auto", (1, 3)):
        param = nn.Parameter(shard(torch.ones(16, 96), mesh, [Shard(1)]))
        group = {"params": [("w", param)], "algorithm": "muon", "route": "gram"}
        opt = Muon([group], orthogonalizer=Orthogonalizer(restarts=restarts))
        param.grad = shard(tensor_for("gradient", "w", (16, 96), torch.float32), mesh, [Shard(1)])
        opt.step()
        found.append((opt.plan.buckets[0].recipe.restarts, whole(param.detach())))
    return found


def offloaded_or_not():
    """The Gram route with momentum in host memory, and without: parameters that differ."""
    results = [train("gram", "gaussian", "float32", momentum=0.9, offload=on)[0] for on in (False, True)]
    return [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]

"""What ranks run: the same parameters and gradients on any layout. Gradients are a pure function of (step, name)."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon
from tests.distributed.meshes import mesh_of

STEPS = 5
R = Replicate()
S = Shard


def SS(dim, factor):
    return _StridedShard(dim, split_factor=factor)


# name → (shape, view); "adamw" instead of a view sends it there.
PARAMETERS = {
    "vector": ((1, 40), {}),
    "tiny": ((3, 5), {}),
    "odd": ((7, 33), {}),
    "tall": ((18, 8), {}),
    "medium": ((64, 96), {}),
    "square": ((48, 48), {}),
    "qkv": ((30, 20), {"split_rows": (18, 7, 5)}),
    "columns": ((20, 30), {"split_cols": (7, 23)}),
    "heads": ((24, 20), {"heads": 4}),
    "o_proj": ((20, 24), {"heads": 3, "heads_on": "cols"}),
    "conv": ((12, 6, 3, 3), {"flatten": True}),
    "up_conv": ((6, 10, 3), {"flatten": True, "transposed": True}),
    "gpt2": ((20, 9), {"transposed": True}),
    "norm": ((37,), "adamw"),
    "embedding": ((50, 12), "adamw"),
}
EXPERTS = {
    "experts": ((8, 14, 10), {"experts": True}),
    "experts_gate_up": ((8, 14, 9), {"experts": True, "split_rows": (9, 5)}),
}

# name → (mesh shape, placements for ordinary parameters, placements for experts)
LAYOUTS = {
    "fsdp2": ((2,), [S(0)], [S(0)]),
    "fsdp3": ((3,), [S(0)], [S(0)]),
    "fsdp4": ((4,), [S(0)], [S(0)]),
    "fsdp8_empty": ((8,), [S(0)], [S(1)]),
    "shard1_3": ((3,), [S(1)], [S(2)]),
    "hsdp": ((2, 2), [R, S(0)], [R, S(1)]),
    "tp_row": ((4,), [S(0)], [S(1)]),
    "tp_column": ((4,), [S(1)], [S(2)]),
    "fsdp_tp_same_dim": ((2, 2), [SS(0, 2), S(0)], [SS(1, 2), S(1)]),
    "fsdp_tp_other_dim": ((2, 2), [S(0), S(1)], [S(1), S(2)]),
    "fsdp_tp_3x2": ((3, 2), [SS(0, 2), S(0)], [S(0), S(1)]),
    "hsdp_tp": ((2, 2, 2), [R, SS(0, 2), S(0)], [R, S(0), S(1)]),
    "ep": ((4,), [R], [S(0)]),
    "ep_efsdp": ((2, 2), [S(0), R], [S(0), S(1)]),
    "efsdp_strided": ((2, 2), [R, S(0)], [SS(0, 2), S(0)]),
    "replicated": ((3,), [R], [R]),
    "two_axes_same_dim": ((2, 3), [S(0), S(0)], [S(1), S(1)]),
    "four_axes": ((1, 2, 2, 2), [R, S(0), S(1), S(0)], [S(0), S(0), S(1), S(2)]),
}


def shard(full, mesh, placements):
    """A DTensor by torch's own cutting, placement by placement: `distribute_tensor` refuses uneven strided shards."""
    piece = full
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(piece, mesh.size(axis), with_padding=False, contiguous=False)
            piece = pieces[mesh.get_local_rank(axis)]
    return DTensor.from_local(piece.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def whole(tensor):
    """The full tensor, put together from what each rank holds by torch's own cutting of the indices."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    indices = torch.arange(tensor.numel()).view(tensor.shape)
    mine = (shard(indices, tensor.device_mesh, tensor.placements)._local_tensor, tensor._local_tensor)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    result = torch.full((tensor.numel(),), float("nan"), dtype=tensor.dtype)
    for places, values in every:
        result[places.flatten()] = values.flatten()
    return result.view(tensor.shape)


def tensor_for(kind, name, shape, dtype):
    seed = int.from_bytes(hashlib.sha256(f"{kind} {name}".encode()).digest()[:6], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(layout):
    """Parameters with their placements: dims a small parameter lacks are replicated."""
    mesh_shape, ordinary, experts = LAYOUTS[layout]
    result = {}
    for table, placements in ((PARAMETERS, ordinary), (EXPERTS, experts)):
        for name, (shape, view) in table.items():
            fitting = [p if isinstance(p, Replicate) or p.dim < len(shape) else R for p in placements]
            result[name] = (shape, view, fitting)
    return mesh_shape, result


def groups_for(params):
    groups = []
    for name, (tensor, view) in params.items():
        group = {"params": [(name, tensor)], "algorithm": "adamw" if view == "adamw" else "muon"}
        if view != "adamw":
            group["view"] = view
        groups.append(group)
    return groups


def result_of(params, opt):
    keys = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    result = {name: whole(tensor.detach()) for name, (tensor, _) in params.items()}
    for name, (tensor, _) in params.items():
        for key in keys:
            if key in opt.state[tensor]:
                result[f"{name}.{key}"] = whole(opt.state[tensor][key])
    return result


def run_distributed(layout, dtype, settings, sabotage=None):
    """Five steps on a mesh; the whole parameters and momentum, on rank 0."""
    mesh_shape, table = chosen(layout)
    mesh = mesh_of(mesh_shape)
    params = {}
    for name, (shape, view, placements) in table.items():
        full = tensor_for("parameter", name, shape, dtype)
        params[name] = (torch.nn.Parameter(shard(full, mesh, placements)), view)
    opt = Muon(groups_for(params), **settings)
    for step in range(STEPS):
        for name, (shape, _, placements) in table.items():
            grad = shard(tensor_for(f"gradient {step}", name, shape, dtype), mesh, placements)
            if sabotage == "unscaled shard" and name == "medium" and dist.get_rank() == 1:
                grad._local_tensor.mul_(1.001)
            params[name][0].grad = grad
        if sabotage in ("wrong owner", "swapped ranks"):
            _sabotage_exchange(opt, sabotage)
        if sabotage == "stale buffer" and step == 3 and dist.get_rank() == 0:
            opt.state[params["medium"][0]]["momentum_buffer"]._local_tensor.zero_()
        opt.step()
    result = result_of(params, opt)
    return (result, str(opt)) if dist.get_rank() == 0 else None


def _sabotage_exchange(opt, sabotage):
    """Make the exchange deliver something else: an owner's result for another matrix, or two ranks' pieces swapped."""
    scatter = type(opt._ready().exchange).scatter

    def wrong(bucket, directions):
        if sabotage == "wrong owner":
            return scatter(opt._ready().exchange, bucket, directions.flip(-1))
        pending = scatter(opt._ready().exchange, bucket, directions)
        return pending.__class__(lambda: pending.finish().flip(0), pending.work, pending.sent)

    opt._ready().exchange.scatter = wrong


def run_plain(layout, dtype, settings):
    """The same on one process with plain tensors: the oracle."""
    _, table = chosen(layout)
    params = {n: (tensor_for("parameter", n, s, dtype).requires_grad_(), v) for n, (s, v, _) in table.items()}
    opt = Muon(groups_for(params), **settings)
    for step in range(STEPS):
        for name, (tensor, _) in params.items():
            tensor.grad = tensor_for(f"gradient {step}", name, tensor.shape, dtype)
        opt.step()
    return result_of(params, opt)


def world_size(layout):
    return math.prod(LAYOUTS[layout][0])

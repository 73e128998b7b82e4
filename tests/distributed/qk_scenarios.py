"""What ranks run with QK-clip: the same layers, gradients and logits on any layout. All are pure functions of names."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon, QKClip, QKLogits, Sharded
from meshmuon.exchange.peers import Peers
from meshmuon.layout.heads import HeadParameter
from meshmuon.runtime import qk_clip
from meshmuon.testing import Replay
from meshmuon.update.qk_clip import clip_factors
from tests.distributed.fault_scenarios import attempt, on_mesh
from tests.distributed.meshes import mesh_of
from tests.distributed.plain_scenarios import cut, uncut
from tests.distributed.scenarios import LAYOUTS, groups_for, shard, tensor_for, whole

STEPS = 3
HEADS, DIM, WIDTH = 6, 5, 8
SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


def _clip(q="q", k="k", **settings):
    said = {"threshold": 100.0, "head_dim": DIM, **settings}
    return QKClip(q=f"layers.{{layer}}.{q}.weight", k=f"layers.{{layer}}.{k}.weight", **said)


# name → (what is said, the parameters of a layer). Heads do not line up with shards.
KINDS = {
    "mha": (_clip(), {"q.weight": (30, WIDTH), "k.weight": (30, WIDTH), "q.bias": (30,)}),
    "gqa": (_clip(kind="gqa"), {"q.weight": (30, WIDTH), "k.weight": (15, WIDTH), "k.bias": (15,)}),
    "mla": (
        _clip(k="up", kind="mla", head_dim=3, q_heads=HEADS),
        {"q.weight": (30, WIDTH), "up.weight": (42, WIDTH), "down.weight": (7, WIDTH)},
    ),
    "fused": (
        _clip("qkv", "qkv", kind="gqa", fused_rows=(30, 15, 15)),
        {"qkv.weight": (60, WIDTH), "qkv.bias": (60,)},
    ),
    "grouped": (_clip("qkv", "qkv", kind="gqa", fused_rows=(10, 5, 5)), {"qkv.weight": (60, WIDTH)}),
}


def table(kind):
    """name → (shape, view)."""
    shapes = {f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in KINDS[kind][1].items()}
    shapes["mlp.weight"] = (9, WIDTH)
    return {name: (shape, {} if len(shape) == 2 else "adamw") for name, shape in shapes.items()}


def logits(step, layer, rank):
    """What one rank has seen: some heads are over, on some ranks; and not everything is a number."""
    seen = tensor_for(f"logits {step} of rank {rank}", str(layer), (HEADS,), torch.float32).abs() * 150
    seen[(step + layer + rank) % HEADS] = float("nan")
    seen[(step + layer + rank + 2) % HEADS] = float("inf") if rank else -300.0
    return seen


def largest(step, layer, ranks):
    """The oracle: the largest that any rank has seen, of what is finite."""
    every = torch.stack([logits(step, layer, rank) for rank in ranks])
    return torch.where(every.isfinite(), every, -torch.inf).amax(0)


def all_layers(make):
    return {layer: make(layer) for layer in range(2)}


def given(way, step, rank, mesh=None, axis=None):
    """The logits of one step, in one of the ways a user may have them."""
    ranks = range(dist.get_world_size())
    if way == "own":  # every data-parallel rank has seen its own batch
        return all_layers(lambda layer: logits(step, layer, rank))
    if way == "some":  # not every rank has looked
        return all_layers(lambda layer: logits(step, layer, rank)) if rank % 2 == 0 else None
    if way == "dtensor":  # this rank's heads, as a DTensor
        placements = [Shard(0) if each == axis else Replicate() for each in range(mesh.ndim)]
        return all_layers(lambda layer: shard(largest(step, layer, ranks), mesh, placements))
    parts = mesh.size(axis)  # "local": this rank's heads, as a plain tensor
    place = mesh.get_local_rank(axis)
    return all_layers(lambda layer: largest(step, layer, ranks).chunk(parts)[place])


def those_who_look(way, size):
    return range(0, size, 2) if way == "some" else range(size)


def sabotaged(sabotage):
    if sabotage == "no reduction":
        return mock.patch.object(Peers, "largest", lambda self, ranks, numbers: numbers)
    if sabotage == "local rows":
        return mock.patch.object(HeadParameter, "held", _as_if_local)
    if sabotage == "k left alone":
        return mock.patch.object(qk_clip, "clip_factors", _without_k)
    return contextlib.nullcontext()


def _as_if_local(self, rank):
    return ((0, self.record.local_shape[self.row_dim]),)


def _without_k(given, key_of, **others):
    factors = clip_factors(given, key_of, **others)
    factors[2 * len(given) :] = 1.0
    return factors


def train(params, settings, give_gradient, give_logits, sabotage=None, steps=STEPS):
    """Some steps; the optimizer."""
    with sabotaged(sabotage):
        opt = Muon(groups_for(params), **{**SETTINGS, **settings})
        for step in range(steps):
            for name, (tensor, _) in params.items():
                tensor.grad = give_gradient(step, name, tensor)
            opt.step(qk_logits=give_logits(step))
    return opt


def alone(kind, ranks, dtype=torch.float32, average=None):
    """The same on one process: the oracle."""
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, dtype)), v) for n, (s, v) in table(kind).items()}

    def gradient(step, name, tensor):
        if average is not None:
            return average(step, name, tensor.shape)
        return tensor_for(f"gradient {step}", name, tensor.shape, dtype)

    opt = train(params, {"qk_clip": KINDS[kind][0]}, gradient, lambda s: all_layers(lambda n: largest(s, n, ranks)))
    return {name: tensor.detach() for name, (tensor, _) in params.items()}, opt.metrics()["qk_clipped_heads"]


def on_layout(layout, kind, way, dtype=torch.float32, sabotage=None, axis=None):
    """DTensors on a mesh; the whole parameters, and how many heads were clipped at the last step."""
    mesh_shape, placements, _ = LAYOUTS[layout]
    mesh = mesh_of(mesh_shape)

    def placed(full):
        fitting = [p if isinstance(p, Replicate) or p.dim < full.ndim else Replicate() for p in placements]
        return shard(full, mesh, fitting)

    params = {n: (nn.Parameter(placed(tensor_for("parameter", n, s, dtype))), v) for n, (s, v) in table(kind).items()}
    opt = train(
        params,
        {"qk_clip": KINDS[kind][0]},
        lambda step, name, tensor: placed(tensor_for(f"gradient {step}", name, tensor.shape, dtype)),
        lambda step: given(way, step, dist.get_rank(), mesh, axis),
        sabotage,
    )
    result = {name: whole(tensor.detach()) for name, (tensor, _) in params.items()}
    return result, opt.metrics()["qk_clipped_heads"], str(opt)


def as_replicas(kind, way, settings, sabotage=None):
    """Plain tensors, the same on every rank: with averaged gradients, or with gradients that are averaged here."""
    rank = dist.get_rank()
    params = {n: (nn.Parameter(tensor_for("parameter", n, s, torch.float32)), v) for n, (s, v) in table(kind).items()}

    def gradient(step, name, tensor):
        of_rank = f" of rank {rank}" if "grad_sync" in settings else ""
        return tensor_for(f"gradient {step}{of_rank}", name, tensor.shape, torch.float32)

    group = {} if "grad_sync" in settings else {"process_group": dist.group.WORLD}
    settings = {"qk_clip": KINDS[kind][0], **group, **settings}
    opt = train(params, settings, gradient, lambda step: given(way, step, rank), sabotage)
    return {name: tensor.detach() for name, (tensor, _) in params.items()}, opt.metrics()["qk_clipped_heads"]


def average(ranks):
    def of(step, name, shape):
        every = [tensor_for(f"gradient {step} of rank {rank}", name, shape, torch.float32) for rank in range(ranks)]
        total = every[0].clone()
        for each in every[1:]:
            total += each
        return total / ranks

    return of


def as_shards(kind, way, sabotage=None):
    """Plain tensor-parallel shards, fused ones part by part; the whole parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fused = KINDS[kind][0].fused_rows
    params, declared = {}, {}
    for name, (shape, view) in table(kind).items():
        dim, parts = (0, fused) if name.startswith("layers") and "down" not in name else (-1, None)
        full = tensor_for("parameter", name, shape, torch.float32)
        params[name] = (nn.Parameter(cut(full, dim, parts, rank, ranks)), view)
        declared[name] = Sharded(dim, dist.group.WORLD, parts)

    def gradient(step, name, tensor):
        shape, shards = table(kind)[name][0], declared[name]
        return cut(tensor_for(f"gradient {step}", name, shape, torch.float32), shards.dim, shards.parts, rank, ranks)

    def heads(step):
        if way == "own":
            return given(way, step, rank)
        return all_layers(lambda layer: largest(step, layer, range(ranks)).chunk(ranks)[rank])

    opt = train(params, {"qk_clip": KINDS[kind][0], "sharded": declared}, gradient, heads, sabotage)
    every = [None] * ranks
    dist.all_gather_object(every, {name: tensor.detach() for name, (tensor, _) in params.items()})
    result = {n: uncut([e[n] for e in every], s.dim, s.parts, ranks) for n, s in declared.items()}
    return result, opt.metrics()["qk_clipped_heads"]


def on_rows():
    """Parameters cut along their rows, with gradients."""
    place = on_mesh()
    params = {}
    for name, (shape, view) in table("mha").items():
        params[name] = (nn.Parameter(place(tensor_for("parameter", name, shape, torch.float32))), view)
        params[name][0].grad = place(tensor_for("gradient", name, shape, torch.float32))
    return params


def refused(bad):
    """One rank has logits that do not fit; then a good step. What each rank raised, and what was changed."""
    params = on_rows()
    opt = Muon(groups_for(params), qk_clip=None if bad == "no qk_clip" else KINDS["mha"][0], **SETTINGS)
    good = None if bad == "no qk_clip" else all_layers(lambda layer: logits(0, layer, 0))
    wrong = {
        "missing": {0: logits(0, 0, 0)},
        "unknown": {**(good or {}), 7: logits(0, 0, 0)},
        "heads": all_layers(lambda layer: torch.ones(5)),
        "no qk_clip": all_layers(lambda layer: logits(0, layer, 0)),
    }[bad]
    first = attempt(lambda: opt.step(qk_logits=wrong if dist.get_rank() == 1 else good), params, opt)
    again = attempt(lambda: opt.step(qk_logits=good), params, opt)
    return first, again


def unlike():
    """Ranks that were told to clip differently."""
    params = on_rows()
    opt = Muon(groups_for(params), qk_clip=_clip(threshold=50.0 + dist.get_rank()), **SETTINGS)
    return attempt(opt.step, params, opt)


def skipped():
    """A gradient that is not finite on one rank: nobody scales anything."""
    params = on_rows()
    opt = Muon(groups_for(params), qk_clip=KINDS["mha"][0], **SETTINGS)
    if dist.get_rank() == 1:
        params["mlp.weight"][0].grad._local_tensor[0] = float("nan")
    record = attempt(lambda: opt.step(qk_logits=all_layers(lambda layer: torch.full((HEADS,), 900.0))), params, opt)
    return record, opt.metrics()


def stages():
    """Two pipeline stages of two ranks, each with a layer and logits of its own; it knows no other layer."""
    rank = dist.get_rank()
    stage = rank // 2
    mesh = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])][stage]
    names = {n: v for n, v in table("gqa").items() if n.startswith(f"layers.{stage}.")}
    params = {
        n: (nn.Parameter(shard(tensor_for("parameter", n, s, torch.float32), mesh, [Shard(0)])), v)
        for n, (s, v) in names.items()
    }
    opt = train(
        params,
        {"qk_clip": KINDS["gqa"][0]},
        lambda step, name, tensor: shard(
            tensor_for(f"gradient {step}", name, tensor.shape, torch.float32), mesh, [Shard(0)]
        ),
        lambda step: {stage: logits(step, stage, rank)},
    )
    wrong = attempt(lambda: opt.step(qk_logits={1 - stage: logits(0, 0, rank)}), params, opt)
    assert not wrong["changed"]
    pieces = {name: tensor.detach()._local_tensor for name, (tensor, _) in params.items()}
    every = [None] * 4
    dist.all_gather_object(every, pieces)
    mine = every[2 * stage : 2 * stage + 2]
    return {name: torch.cat([each[name] for each in mine]) for name in pieces}, wrong["message"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.k = nn.Linear(WIDTH, HEADS * DIM)

    def forward(self, x):
        q, k = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (self.q, self.k))
        return x + nn.functional.scaled_dot_product_attention(q, k, q).sum()


def wrapped(wrapper):
    """A model as users wrap it."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Linear(WIDTH, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp":
        return fully_shard(model, mesh=mesh)
    parallelize_module(model[0], mesh, {"q": ColwiseParallel(), "k": ColwiseParallel()})
    return model


def real_model(wrapper):
    """Real backward passes, other data on each rank, logits from the collector: what differs from a replay."""
    model = wrapped(wrapper)
    clip = QKClip(threshold=0.2, head_dim=DIM, q="{layer}.q.weight", k="{layer}.k.weight")
    settings = {"lr": 0.01, "qk_clip": clip}
    opt = Muon(model, **settings)
    replay = Replay(opt, settings)
    torch.manual_seed(0 if wrapper == "tp" else dist.get_rank())
    clipped = 0
    for _ in range(STEPS):
        with QKLogits(model) as seen:
            model(torch.randn(2, 5, WIDTH)).square().mean().backward()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, seen["0"])
        replay.step(qk_logits={0: torch.cat(every) if wrapper == "tp" else torch.stack(every).amax(0)})
        opt.step(qk_logits=seen)
        opt.zero_grad()
        clipped += opt.metrics()["qk_clipped_heads"]
    return replay.differences(), clipped


def counted():
    """The collectives of a step with and without QK-clip: their names and sizes."""
    found = {}
    for clips in (False, True):
        params = on_rows()
        opt = Muon(groups_for(params), qk_clip=KINDS["mha"][0] if clips else None, **SETTINGS)
        opt.step()
        sizes = []
        reduce = dist.all_reduce

        def counting(tensor, *args, _sizes=sizes, _reduce=reduce, **others):
            _sizes.append((str(tensor.dtype), tensor.numel()))
            return _reduce(tensor, *args, **others)

        with mock.patch.object(dist, "all_reduce", counting):
            opt.step(qk_logits=all_layers(lambda layer: logits(0, layer, dist.get_rank())) if clips else None)
        found[clips] = sizes
    return found

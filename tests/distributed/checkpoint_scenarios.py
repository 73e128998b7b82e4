"""What ranks run to save on one layout and continue on another. Gradients are a pure function of (step, name)."""

from __future__ import annotations

import contextlib
import hashlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshmuon import CheckpointError, Muon, View, load_checkpoint, save_checkpoint
from tests.distributed.meshes import mesh_of
from tests.distributed.scenarios import shard, tensor_for, whole

BEFORE, AFTER = 3, 5  # steps before the checkpoint and after it
WIDTH = 12

# kind → the mesh, by number of ranks
KINDS = {
    "plain": {1: None},
    "fsdp": {n: (n,) for n in (1, 2, 3, 4)},
    "hsdp": {2: (2, 1), 4: (2, 2)},
    "tp": {n: (n,) for n in (1, 2, 3, 4)},
    "fsdp_tp": {2: (2, 1), 4: (2, 2)},
    "ddp": dict.fromkeys((1, 2, 3, 4)),
    "grad_sync": dict.fromkeys((1, 2, 3, 4)),
}
CELLS = [(kind, ranks) for kind, meshes in KINDS.items() for ranks in meshes]


class Block(nn.Module):
    """Fused q, k, v; an output projection with a bias; a stack of experts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts_up = nn.Parameter(torch.zeros(4, 10, WIDTH))


class Model(nn.Module):
    """Only its parameters count: gradients are injected."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 29, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, _):
        raise AssertionError("never run")


def build(kind, dtype=torch.float32, **settings):
    """A model on a layout, its optimizer, and its bare parameters by name."""
    model = Model().to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(tensor_for("parameter", name, param.shape, dtype))
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    mesh_shape = KINDS[kind].get(dist.get_world_size() if dist.is_initialized() else 1)
    if kind in ("tp", "fsdp_tp"):
        names = ("tp",) if kind == "tp" else ("dp", "tp")
        mesh = mesh_of(mesh_shape, names)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"qkv": ColwiseParallel(), "o": RowwiseParallel()})
        if kind == "fsdp_tp":
            fully_shard(model, mesh=mesh["dp"])
    elif kind in ("fsdp", "hsdp"):
        names = ("replicas", "shards")[-len(mesh_shape) :]
        fully_shard(model, mesh=mesh_of(mesh_shape, names))
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    extra = {"grad_sync": "optimizer"} if kind == "grad_sync" else {}
    overrides = {"*.qkv.weight": View(split_rows=(WIDTH,) * 3)}
    opt = Muon(model, lr=0.02, weight_decay=0.2, overrides=overrides, **extra, **settings)
    bare = model.module if kind == "ddp" else model
    return model, opt, {name: (param, shapes[name]) for name, param in bare.named_parameters()}


def gradient(step, name, shape, dtype):
    """Few bits, so that sums over ranks and their averages are exact."""
    full = tensor_for(f"gradient {step}", name, shape, torch.float32)
    return (full * 16).round().clamp(-64, 64).div(16).to(dtype)


def train(kind, opt, params, first, steps):
    """Steps whose averaged gradients are the same on every layout; under grad_sync, ranks contribute different ones."""
    for step in range(first, first + steps):
        for name, (param, shape) in params.items():
            full = gradient(step, name, shape, param.dtype)
            if isinstance(param, DTensor):
                param.grad = shard(full, param.device_mesh, param.placements)
            elif kind == "grad_sync" and dist.get_world_size() > 1:
                sign = {0: 1, 1: -1}.get(dist.get_rank(), 0)
                param.grad = full + sign * gradient(step, f"other {name}", shape, param.dtype)
            else:
                param.grad = full
        opt.step()


def digest(model, opt, params):
    """A hash of every parameter and all state, put together from the ranks."""
    saved = opt.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    found = {name: whole(param.detach()) for name, (param, _) in params.items()}
    for index, name in enumerate(names):
        found |= {f"{name}.{key}": whole(value) for key, value in saved["state"][index].items()}
    total = hashlib.sha256()
    for name in sorted(found):
        value = found[name].contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.view(torch.uint8).numpy().tobytes() if value.ndim else value.numpy().tobytes())
    return total.hexdigest()


def states(model, opt, **options):
    chosen = StateDictOptions(**options) if options else None
    found, optim = get_state_dict(model, opt, options=chosen)
    return {"model": found, "optim": optim}


def save(kind, folder, dtype=torch.float32, settings=None, asynchronous=False):
    """Train, save, and tell what an uninterrupted run would come to."""
    model, opt, params = build(kind, dtype, **(settings or {}))
    train(kind, opt, params, 0, BEFORE)
    pending = None
    if asynchronous:  # the write is still under way while training goes on
        pending = save_checkpoint(folder, model, opt, extra={"step": BEFORE}, wait=False)
    else:
        dcp.save(states(model, opt), checkpoint_id=folder)
    train(kind, opt, params, BEFORE, AFTER)
    if pending is not None:
        pending.result()
    return digest(model, opt, params)


def resume_whole(kind, folder):
    """Load with `load_checkpoint`, and continue."""
    model, opt, params = build(kind)
    first = load_checkpoint(folder, model, opt)["step"]
    train(kind, opt, params, first, AFTER)
    return digest(model, opt, params)


def refuse(kind, folder):
    """What each rank says about a checkpoint that only one of them cannot read, and that nothing was changed."""
    model, opt, params = build(kind)
    before = digest(model, opt, params)
    try:
        load_checkpoint(folder if dist.get_rank() != 1 else f"{folder}-elsewhere", model, opt)
    except CheckpointError as error:
        return str(error), digest(model, opt, params) == before
    return "loaded", False


def load_plain_into_shards(folder):
    """A whole state dict into sharded parameters; and one that lies otherwise, which is refused."""
    _, plain, params = build("plain")
    train("plain", plain, params, 0, BEFORE)
    model, opt, sharded = build("fsdp")
    with torch.no_grad():
        for name, (param, _) in sharded.items():
            param._local_tensor.copy_(
                shard(params[name][0].detach(), param.device_mesh, param.placements)._local_tensor
            )
    opt.load_state_dict(plain.state_dict())
    train("fsdp", opt, sharded, BEFORE, AFTER)
    lr = plain.param_groups[0]["lr"]
    other = opt.state_dict()
    other["param_groups"][0]["lr"] = 0.5
    try:
        plain.load_state_dict(other)
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    return digest(model, opt, sharded), refused, plain.param_groups[0]["lr"] == lr and len(plain.state) > 0


def resume(kind, folder, dtype=torch.float32, settings=None, sabotage=None, options=None):
    """Load on this layout, and continue."""
    model, opt, params = build(kind, dtype, **(settings or {}))
    loaded = states(model, opt)
    if sabotage != "no load":
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    else:
        dcp.load({"model": loaded["model"]}, checkpoint_id=folder)
    with torch.no_grad(), contextlib.suppress(KeyError):
        if sabotage == "zero momentum":
            opt.state[params["blocks.0.qkv.weight"][0]]["momentum_buffer"].zero_()
        if sabotage == "weights times 1.001":
            params["blocks.1.o.weight"][0].mul_(1.001)
    train(kind, opt, params, BEFORE, AFTER)
    return digest(model, opt, params)


def resume_all(kind, folders, dtype=torch.float32, settings=None):
    """Continue from each of several checkpoints."""
    return [resume(kind, folder, dtype, settings) for folder in folders]


def whole_file(kind, folder, saving):
    """One file of whole tensors, written by rank 0 and given out by it: `full_state_dict`, flattened or not."""
    options = {"full_state_dict": True, "cpu_offload": True}
    path = f"{folder}.pt"
    model, opt, params = build(kind)
    if saving:
        train(kind, opt, params, 0, BEFORE)
        found = states(model, opt, **options)
        if dist.get_rank() == 0:
            torch.save(found, path)
        train(kind, opt, params, BEFORE, AFTER)
    else:
        empty = {"model": {}, "optim": {}}
        loaded = torch.load(path, weights_only=True) if dist.get_rank() == 0 else empty
        chosen = StateDictOptions(**options, broadcast_from_rank0=True)
        set_model_state_dict(model, loaded["model"], options=chosen)
        set_optimizer_state_dict(model, opt, loaded["optim"], options=chosen)
        train(kind, opt, params, BEFORE, AFTER)
    return digest(model, opt, params)

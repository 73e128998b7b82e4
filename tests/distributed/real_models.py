"""What ranks run with real wrappers: fully_shard, parallelize_module, their composition; real forward and backward.

Every rank sees data of its own where the wrapper expects it. The gradients of each step are gathered and sent home,
where the same steps are taken on one process with plain tensors.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu

from meshmuon import Muon
from tests.distributed.meshes import mesh_of

STEPS = 5
VOCABULARY, BATCH, TIME = 29, 2, 5
STATE_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")


class Attention(nn.Module):
    """Heads are counted from the width of q, so that a tensor-parallel rank works with the heads it holds."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i == 2) for i in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT * self.head_dim**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A soft mixture: every expert sees every token, weighted by a router."""

    def __init__(self, count, width, inner):
        super().__init__()
        self.experts_up = nn.Parameter(torch.randn(count, inner, width) * 0.1)
        self.experts_down = nn.Parameter(torch.randn(count, width, inner) * 0.1)
        self.router = nn.Linear(width, count, bias=False)

    def forward(self, x):
        inner = gelu(torch.einsum("eiw,btw->beti", self.experts_up, x))
        outer = torch.einsum("ewi,beti->betw", self.experts_down, inner)
        return torch.einsum("betw,bte->btw", outer, self.router(x).softmax(-1))


class Block(nn.Module):
    def __init__(self, width, heads, inner, experts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.mixture = Experts(experts, width, 7) if experts else None

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        x = x + self.down(gelu(self.up(self.norm2(x))))
        return x if self.mixture is None else x + self.mixture(x)


class Model(nn.Module):
    def __init__(self, width=24, heads=6, inner=42, experts=0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width, heads, inner, experts) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.convolution(x.mT).mT
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


# name → (world size, model, dtype)
CASES = {
    "fsdp2": (2, {"width": 15, "heads": 3, "inner": 23, "experts": 3}, torch.float32),
    "fsdp3": (3, {"width": 10, "heads": 2, "inner": 25, "experts": 4}, torch.float32),
    "fsdp3_bf16": (3, {"width": 10, "heads": 2, "inner": 25, "experts": 4}, torch.bfloat16),
    "fsdp4_empty": (4, {"width": 3, "heads": 1, "inner": 9, "experts": 2}, torch.float32),
    "fsdp2_shard1": (2, {"width": 12, "heads": 2, "inner": 30, "experts": 3}, torch.float32),
    "fsdp2_mixed": (2, {"width": 15, "heads": 3, "inner": 23}, torch.float32),
    "hsdp4": (4, {"width": 15, "heads": 3, "inner": 23, "experts": 3}, torch.float32),
    "tp2": (2, {"width": 12, "heads": 2, "inner": 30, "experts": 3}, torch.float32),
    "tp3": (3, {"width": 12, "heads": 3, "inner": 33}, torch.float32),
    "fsdp_tp4": (4, {"width": 12, "heads": 2, "inner": 28}, torch.float32),
    "hsdp_tp8": (8, {"width": 16, "heads": 4, "inner": 40}, torch.float32),
}


def build(case):
    _, sizes, dtype = CASES[case]
    torch.manual_seed(0)
    return Model(**sizes).to(dtype)


def shard_fully(model, mesh, **more):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def parallelize(model, mesh):
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def longer_side(param):
    """FSDP2 along the second dim: only where that divides evenly, as torch asks for."""
    return Shard(1) if param.ndim == 2 and param.shape[1] > param.shape[0] and param.shape[1] % 2 == 0 else None


def distribute(case, model):
    """Wrap the model; give the mesh axis along which data differ."""
    size = dist.get_world_size()
    if case.startswith("hsdp_tp"):
        mesh = mesh_of((2, 2, size // 4), ("replicate", "shard", "tp"))
        parallelize(model, mesh["tp"])
        shard_fully(model, mesh["replicate", "shard"])
        return dist.get_rank() // (size // 4)
    if case.startswith("fsdp_tp"):
        mesh = mesh_of((2, size // 2), ("dp", "tp"))
        parallelize(model, mesh["tp"])
        shard_fully(model, mesh["dp"])
        return mesh.get_local_rank("dp")
    if case.startswith("tp"):
        parallelize(model, mesh_of((size,)))
        return 0
    if case.startswith("hsdp"):
        shard_fully(model, mesh_of((2, size // 2), ("replicate", "shard")))
        return dist.get_rank()
    more = {"shard_placement_fn": longer_side} if case.endswith("shard1") else {}
    if case.endswith("mixed"):
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_fully(model, mesh_of((size,)), **more)
    return dist.get_rank()


def tokens(step, stream):
    generator = torch.Generator().manual_seed(1000 * step + stream)
    return torch.randint(VOCABULARY, (BATCH, TIME + 1), generator=generator)


def loss_of(model, step, stream):
    data = tokens(step, stream)
    logits = model(data[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def result_of(model, opt):
    result = {name: whole(param) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for key in STATE_KEYS:
            if key in opt.state[param]:
                result[f"{name}.{key}"] = whole(opt.state[param][key])
    return result


def train(case, settings):
    """Five steps with backward passes; the gradients of each, and what became of the model, on rank 0."""
    model = build(case)
    stream = distribute(case, model)
    opt = Muon(model, **settings)
    gradients, losses = [], []
    for step in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, step, stream)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: whole(param.grad) for name, param in model.named_parameters()})
        opt.step()
    placements = {
        name: tuple(map(str, param.placements)) if isinstance(param, DTensor) else ()
        for name, param in model.named_parameters()
    }
    result = result_of(model, opt)
    first = dist.get_rank() == 0
    return losses, placements, (gradients if first else None), (result if first else None)


def replay(case, settings, gradients):
    """The same steps on one process with plain tensors."""
    model = build(case)
    opt = Muon(model, **settings)
    for grads in gradients:
        for name, param in model.named_parameters():
            param.grad = grads[name]
        opt.step()
    return result_of(model, opt)

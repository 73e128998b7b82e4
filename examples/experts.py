"""A mixture of experts with expert parallelism: each rank holds its own experts, whole, and orthogonalizes them alone.

torchrun --nproc-per-node 2 examples/experts.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshmuon import Muon

VOCABULARY, WIDTH, EXPERTS, BATCH, STEPS = 64, 32, 8, 64, 40


def gather(x: torch.Tensor) -> torch.Tensor:
    """What all ranks have, one after the other."""
    every = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(every, x.contiguous())
    return every


def total_of_mine(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, of which this rank keeps its part."""
    total = x.clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()]


class Dispatch(torch.autograd.Function):
    """Tokens of all ranks come here; their gradients go home."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return total_of_mine(grad)


class Combine(torch.autograd.Function):
    """The way back: contributions of all experts are added where the token came from."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return total_of_mine(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return gather(grad)


class Experts(nn.Module):
    """Stacks (experts, out, in), cut along their first dim: `Shard(0)` on the mesh of expert parallelism."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        whole = {"up": torch.randn(EXPERTS, 2 * WIDTH, WIDTH), "down": torch.randn(EXPERTS, WIDTH, 2 * WIDTH)}
        for name, stack in whole.items():
            placed = distribute_tensor(stack / stack.shape[-1] ** 0.5, mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(placed))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert sees every token here; a real router would send each token to a few of them."""
        tokens, shares = Dispatch.apply(x), Dispatch.apply(weights)
        shares = shares.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]  # those of my experts
        up, down = (self.get_parameter(name) for name in ("up", "down"))
        assert isinstance(up, DTensor) and isinstance(down, DTensor)
        inner = torch.relu(torch.einsum("eiw,tw->eti", up.to_local(), tokens))
        return Combine.apply(torch.einsum("ewi,eti,te->tw", down.to_local(), inner, shares))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(mesh)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.lm_head(x + self.experts(x, self.router(x).softmax(-1)))


def average_gradients(model: nn.Module) -> None:
    """Replicas are averaged. Experts already saw the tokens of all ranks: their sum becomes a mean."""
    for param in model.parameters():
        assert param.grad is not None
        if not isinstance(param.grad, DTensor):
            dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())


def main() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # replicas must start alike
    model = Model(init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))).to(device)

    # "experts" in a name makes a stack: one matrix for each expert. They lie whole where they are, so nothing travels.
    # The router is a replica: the group says whose, and its ranks share such matrices.
    opt = Muon(model, lr=1e-2, weight_decay=0.1, process_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        print(opt.plan)

    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (BATCH,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % VOCABULARY)
        loss.backward()
        average_gradients(model)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    main()
    dist.destroy_process_group()

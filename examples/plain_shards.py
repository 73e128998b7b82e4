"""Tensor-parallel shards that are plain tensors, as in Megatron: tell the optimizer what they are shards of.

torchrun --nproc-per-node 2 examples/plain_shards.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshmuon import Muon, Sharded

VOCABULARY, WIDTH, INNER, STEPS = 64, 32, 128, 40


class Enter(torch.autograd.Function):
    """Into the parallel part: the input is everybody's, so its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    """Out of it: each rank has a part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Model(nn.Module):
    """`up` is cut by outputs, `down` by inputs; the rest is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        up, down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)  # the whole, once
        self.up = nn.Linear(WIDTH, INNER // ranks, bias=False)
        self.down = nn.Linear(INNER // ranks, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(ranks, dim=0)[rank])
            self.down.weight.copy_(down.weight.chunk(ranks, dim=1)[rank])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.lm_head(x + Leave.apply(self.down(torch.relu(self.up(Enter.apply(x))))))


def main() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)

    # Nothing in a plain tensor says that it is a shard. Without this, each rank would orthogonalize its own piece:
    # another algorithm. The group is never guessed. (Megatron marks its shards: `megatron_shards(model, group)`.)
    tp = dist.group.WORLD
    opt = Muon(model, lr=1e-2, sharded={"up.weight": Sharded(0, tp), "down.weight": Sharded(1, tp)})
    if dist.get_rank() == 0:
        print(opt.plan)

    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (256,), device=device)  # seeded alike: tensor parallelism shares the data
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % VOCABULARY)
        loss.backward()
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

"""FSDP2 over tensor parallelism: the optimizer reads the layout from the parameters.

torchrun --nproc-per-node 4 examples/fsdp_tp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshmuon import Muon

VOCABULARY, WIDTH, LAYERS, STEPS = 64, 32, 2, 15


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def main() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model().to(device)

    # First tensor parallelism inside each block, then FSDP around it: as you would with AdamW.
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    # Nothing to say about the mesh. Each matrix travels to one owner and back; the result has the bits of one device.
    opt = Muon(model, lr=1e-2, weight_decay=0.1)
    if dist.get_rank() == 0:
        print(opt.plan)

    losses = []
    for step in range(STEPS):
        # Ranks of one TP group must see the same data, ranks along dp different ones.
        generator = torch.Generator().manual_seed(1000 * step + mesh.get_local_rank("dp"))
        tokens = torch.randint(VOCABULARY, (128,), generator=generator).to(device)
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

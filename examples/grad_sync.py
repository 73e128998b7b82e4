"""Data parallelism without a wrapper: the optimizer averages the gradients on their way to the owners.

State is kept once in the whole job, and the result does not depend on the order in which the network adds.

torchrun --nproc-per-node 2 examples/grad_sync.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshmuon import Muon

VOCABULARY, WIDTH, STEPS = 64, 32, 40


def main() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # nothing is broadcast: ranks must start alike
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.ReLU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    ).to(device)

    # Not with DDP or FSDP: they would average a second time. Clipping belongs here, too: averages exist only inside.
    opt = Muon(model, lr=1e-2, weight_decay=0.1, grad_sync="optimizer", max_grad_norm=1.0)
    if dist.get_rank() == 0:
        print(opt.plan)

    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # other data on every rank
        tokens = torch.randint(VOCABULARY, (128,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % VOCABULARY)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())

    saved = opt.state_dict()  # collective: every rank calls it, and gets the whole state
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(saved['state'])} states to save")
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    main()
    dist.destroy_process_group()

"""Muon for the hidden matrices, and a torch.optim.AdamW of your own for everything else.

`Muon(model)` does both in one optimizer, with one scheduler. This is for those who must keep their AdamW.

python examples/separate_adamw.py
"""

from __future__ import annotations

import torch
from torch import nn

import meshmuon
from meshmuon import Muon

VOCABULARY, WIDTH, STEPS = 64, 32, 40


def main() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.ReLU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )

    # What Muon(model) would do, as group dicts to take apart: named parameters with "algorithm".
    groups = meshmuon.param_groups(model)
    matrices = [group for group in groups if group["algorithm"] == "muon"]
    others = [param for group in groups if group["algorithm"] == "adamw" for _, param in group["params"]]
    muon = Muon(matrices, lr=1e-2, weight_decay=0.1)
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = (muon, adamw)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=STEPS) for each in optimizers]
    print(muon.plan)

    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (256,))
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % VOCABULARY)
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

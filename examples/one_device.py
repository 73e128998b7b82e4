"""Muon on one device: one optimizer, one lr, one scheduler, one state dict.

python examples/one_device.py
"""

from __future__ import annotations

import io

import torch
from torch import nn

from meshmuon import Muon

WIDTH, VOCABULARY, STEPS = 32, 64, 40


class Model(nn.Module):
    """Guesses the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


def main() -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)

    # The lr you would give AdamW. Embedding, head, norm and biases take AdamW, `up` and `down` take Muon.
    opt = Muon(model, lr=1e-2, weight_decay=0.1)
    print(opt.plan)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS)

    losses = []
    saved = io.BytesIO()  # a file, in real life
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (256,), device=device)
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % VOCABULARY)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step == STEPS // 2:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, saved)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    # Resume: build everything as before, then load.
    again = Model().to(device)
    opt = Muon(again, lr=1e-2, weight_decay=0.1)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again.load_state_dict(loaded["model"])
    opt.load_state_dict(loaded["opt"])
    print(f"resumed after step {STEPS // 2 + 1}, lr {opt.param_groups[0]['lr']:.2e}")
    return losses


if __name__ == "__main__":
    main()

"""What the optimizer costs of a real training step: GPT in bf16 with torch.compile, Muon beside fused AdamW, one GPU.

python -m benchmarks.bench_training [--sizes 124m 0.5b] [--tokens 32768] [--accumulate 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshmuon import Muon
from meshmuon.bench.measure import milliseconds
from meshmuon.cli.gpt import GPT, GPTConfig

SIZES = {
    "124m": GPTConfig(vocabulary=50304, context=1024, width=768, layers=12, heads=12),
    "0.5b": GPTConfig(vocabulary=50304, context=1024, width=1280, layers=24, heads=20),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW (fused)": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True),
    "meshmuon.Muon": lambda model: Muon(model, lr=3e-4),
}


def measure(
    config: GPTConfig, make: Callable[[nn.Module], torch.optim.Optimizer], *, tokens: int, accumulate: int
) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(config).cuda()
    optimizer = make(model)
    compiled: Any = torch.compile(model)
    batch = max(1, tokens // config.context)
    data = torch.randint(config.vocabulary, (batch, config.context + 1), device="cuda")

    def backward() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = compiled(data[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())
        loss.backward()

    def step() -> None:
        for _ in range(accumulate):
            backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    total = statistics.median(milliseconds(step, "cuda", calls=3) for _ in range(5))
    backward()
    alone = statistics.median(milliseconds(optimizer.step, "cuda", calls=3) for _ in range(5))
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "training step ms": total,
        "optimizer ms": alone,
        "parameters": parameters,
        "tokens": accumulate * batch * config.context,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of one backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes of one step")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for size in arguments.sizes:
        results[size] = {}
        for name, make in OPTIMIZERS.items():
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()
            row = results[size][name] = measure(
                SIZES[size], make, tokens=arguments.tokens, accumulate=arguments.accumulate
            )
            print(
                f"{size:6s} {row['parameters'] / 1e6:6.0f} M, {row['tokens']:.0f} tokens  {name:16s} "
                f"training step {row['training step ms']:8.1f} ms, optimizer {row['optimizer ms']:6.2f} ms "
                f"({row['optimizer ms'] / row['training step ms']:.1%})",
                flush=True,
            )
        adamw, muon = (results[size][name]["training step ms"] for name in OPTIMIZERS)
        print(f"{size:6s} Muon's training step over AdamW's: {muon / adamw - 1:+.1%}", flush=True)
    if arguments.json:
        record = {"date": str(datetime.date.today()), "hardware": torch.cuda.get_device_name(), "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

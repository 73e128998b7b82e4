"""What the optimizer costs of a real training step: GPT in bf16 with torch.compile, Muon beside fused AdamW, one GPU.

python -m benchmarks.bench_training [--sizes 124m 0.5b] [--tokens 32768] [--accumulate 1 4 16] [--json FILE]

Both are there at once and take turns, so that a card that gets warmer or clocks lower does so for both. First with a
learning rate of 0: optimizers do all they do, and both models keep the same weights. Then they learn, and what backward
passes multiply is no longer the same: a card clocks by the power that numbers draw, which alone makes 1 to 2 % of the
time (benchmarks/NOTES.md, nineteenth round).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshmuon import Muon
from meshmuon.bench.measure import circumstances, milliseconds
from meshmuon.cli.gpt import GPT, GPTConfig

SIZES = {
    "124m": GPTConfig(vocabulary=50304, context=1024, width=768, layers=12, heads=12),
    "0.5b": GPTConfig(vocabulary=50304, context=1024, width=1280, layers=24, heads=20),
}
_LR = 3e-4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW (fused)": lambda model: torch.optim.AdamW(model.parameters(), lr=_LR, fused=True),
    "meshmuon.Muon": lambda model: Muon(model, lr=_LR),
}

STEPS = ("training step ms", "training step with equal weights ms")
_ROUNDS = 5


class Training:
    """One model and its optimizer."""

    def __init__(self, config: GPTConfig, make: Callable[[nn.Module], torch.optim.Optimizer], *, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(config).cuda()
        self.optimizer = make(self.model)
        self._compiled: Any = torch.compile(self.model)
        self._data = torch.randint(config.vocabulary, (max(1, tokens // config.context), config.context + 1)).cuda()

    def backward(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = self._compiled(self._data[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self._data[:, 1:].flatten())
        loss.backward()

    def step(self, accumulate: int) -> None:
        for _ in range(accumulate):
            self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(pair: dict[str, Training], accumulate: int) -> dict[str, dict[str, float]]:
    """Median times of a training step, with equal weights and while learning, and of the optimizer alone, of each."""
    first, *others = (training.model for training in pair.values())
    for other in others:
        other.load_state_dict(first.state_dict())
    equal = _training_steps(pair, accumulate, lr=0.0)
    learning = _training_steps(pair, accumulate, lr=_LR)
    result = {}
    for name, training in pair.items():
        training.backward()
        alone = statistics.median(milliseconds(training.optimizer.step, "cuda", calls=3) for _ in range(_ROUNDS))
        result[name] = dict(zip(STEPS, (learning[name], equal[name]), strict=True)) | {"optimizer ms": alone}
    return result


def _training_steps(pair: dict[str, Training], accumulate: int, *, lr: float) -> dict[str, float]:
    calls = max(1, 8 // accumulate)
    rounds: dict[str, list[float]] = {name: [] for name in pair}
    for training in pair.values():
        for group in training.optimizer.param_groups:
            group["lr"] = lr
    for i in range(_ROUNDS + 1):
        for name, training in pair.items():
            took = milliseconds(lambda training=training: training.step(accumulate), "cuda", calls=calls)
            if i:  # the first is a warm-up
                rounds[name].append(took)
    return {name: statistics.median(times) for name, times in rounds.items()}


def _say(size: str, parameters: int, tokens: int, rows: dict[str, dict[str, float]]) -> None:
    for name, row in rows.items():
        print(f"{size:6s} {parameters / 1e6:6.0f} M, {tokens} tokens  {name:16s} ", end="")
        print(", ".join(f"{what.removesuffix(' ms')} {took:.2f} ms" for what, took in row.items()), flush=True)
    adamw, muon = rows.values()
    over = ", ".join(f"{what.removesuffix(' ms')} {muon[what] / adamw[what] - 1:+.2%}" for what in STEPS)
    print(f"{size:6s} Muon's over AdamW's: {over}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of one backward pass")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1], help="backward passes of one step")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for size in arguments.sizes:
        gc.collect()
        torch.cuda.empty_cache()
        pair = {name: Training(SIZES[size], make, tokens=arguments.tokens) for name, make in OPTIMIZERS.items()}
        parameters = sum(p.numel() for p in next(iter(pair.values())).model.parameters())
        for accumulate in arguments.accumulate:
            tokens = accumulate * arguments.tokens
            rows = measure(pair, accumulate)
            results[f"{size}, {tokens} tokens"] = {"parameters": parameters, "tokens": tokens, **rows}
            _say(size, parameters, tokens, rows)
        del pair
    if arguments.json:
        record = {**circumstances("cuda"), "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The run behind `meshmuon train`: `train()` yields records, and the caller decides what to show.

torch is imported inside functions, so that a command can import the records without waiting for it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from meshmuon.cli.corpus import Corpus, CorpusFacts, random_windows, spread_windows

if TYPE_CHECKING:
    from meshmuon.cli.gpt import GPTConfig

SAMPLE_PROMPT = b"def "


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on, besides the corpus.

    Attributes:
        model: Shape of the GPT.
        steps: Optimizer steps.
        batch: Windows in one step.
        lr: Peak learning rate, reached after the warmup.
        weight_decay: Decoupled weight decay.
        warmup_share: Share of the steps with a linearly growing rate.
        final_lr_share: The cosine ends at this share of `lr`.
        seed: Decides initial weights, batches and the sample.
        device: Where to train, as torch names it.
        validate_every: Steps between two measurements on held-out bytes.
        validation_windows: Held-out windows in one measurement, at most.
    """

    model: "GPTConfig"
    steps: int
    batch: int
    lr: float
    weight_decay: float = 0.1
    warmup_share: float = 0.1
    final_lr_share: float = 0.1
    seed: int = 0
    device: str = "cpu"
    validate_every: int = 50
    validation_windows: int = 128

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every", "validation_windows"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: found {value}. Give a positive number.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: found {self.lr}. Give a positive number.")

    def lr_factor(self, step: int) -> float:
        """Learning rate at a step as a share of `lr`: linear warmup, then a cosine.

        Args:
            step: Steps already done.

        Returns:
            A factor in (0, 1].
        """
        warmup = max(1, round(self.warmup_share * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return self.final_lr_share + (1 - self.final_lr_share) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the run is, known before its first step. `routing` is the optimizer's own table."""

    kind: ClassVar[str] = "started"
    torch_version: str
    parameters: int
    routing: str
    corpus: CorpusFacts
    config: TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One optimizer step; `loss` is the batch's, measured before the update."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    tokens_per_second: float
    elapsed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Loss on held-out bytes after `step` steps."""

    kind: ClassVar[str] = "validation"
    step: int
    loss: float
    elapsed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The verdict: validation loss in nats per byte, before the first step and after the last."""

    kind: ClassVar[str] = "finished"
    steps: int
    first_loss: float
    last_loss: float
    elapsed: float
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ended early; `reason` says why."""

    kind: ClassVar[str] = "stopped"
    step: int
    reason: str


Record = Started | Stepped | Validated | Finished | Stopped


def preset(size: Literal["tiny", "small"]) -> TrainConfig:
    """The defaults of a size.

    Args:
        size: `tiny` takes about a minute on two CPU cores; `small` is meant for a GPU.

    Returns:
        A config to adapt with `dataclasses.replace`.
    """
    from meshmuon.cli.gpt import GPTConfig

    if size == "tiny":
        model = GPTConfig(width=128, layers=4, heads=4, context=128)
        return TrainConfig(model=model, steps=400, batch=16, lr=1e-2)
    if size == "small":
        model = GPTConfig(width=384, layers=6, heads=6, context=256)
        return TrainConfig(model=model, steps=1000, batch=32, lr=2e-3)
    raise ValueError(f"size: found {size!r}. Give 'tiny' or 'small'.")


def pick_device(word: Literal["auto", "cpu", "cuda"]) -> str:
    """Turn a word into a device that exists here.

    Args:
        word: `auto` takes CUDA if there is any.

    Returns:
        A name for `Tensor.to`.

    Raises:
        ValueError: `cuda` on a machine without it.
    """
    import torch

    available = torch.cuda.is_available()
    if word == "auto":
        return "cuda" if available else "cpu"
    if word == "cuda" and not available:
        raise ValueError("device: found cuda, but torch sees no CUDA device. Give cpu or auto.")
    return word


def train(config: TrainConfig, corpus: Corpus) -> Iterator[Record]:
    """Train a GPT with Muon.

    Args:
        config: What to train and how.
        corpus: Bytes to learn from and bytes held out.

    Yields:
        `Started`, then one `Stepped` per step and `Validated` before the first step, every `validate_every`
        steps and after the last. At the end `Finished`, or `Stopped` as soon as a loss is not finite.
    """
    for record in _run(config, corpus):
        if isinstance(record, Stepped | Validated) and not math.isfinite(record.loss):
            yield Stopped(step=record.step, reason=f"the loss is {record.loss}: try --lr below {config.lr:g}")
            return
        yield record


def _run(config: TrainConfig, corpus: Corpus) -> Iterator[Record]:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    from meshmuon import Muon
    from meshmuon.cli.gpt import GPT, generate, mean_loss, next_byte_loss

    # Built on the CPU, so that every device gets the same weights; in a fork, because the global random state
    # belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(config.device)
    optimizer = Muon(model, lr=config.lr, weight_decay=config.weight_decay)
    table = str(optimizer)  # before the schedule, which replaces lr by its warmup value
    schedule = LambdaLR(optimizer, config.lr_factor)
    window = config.model.context + 1
    batches = random_windows(corpus.train, window=window, batch=config.batch, seed=config.seed)
    held_out = spread_windows(corpus.validation, window=window, count=config.validation_windows)
    held_out = held_out.to(config.device)
    size = sum(p.numel() for p in model.parameters())
    yield Started(torch_version=torch.__version__, parameters=size, routing=table, corpus=corpus.facts, config=config)
    begin = time.perf_counter()
    first = last = mean_loss(model, held_out, batch=config.batch)
    yield Validated(step=0, loss=first, elapsed=time.perf_counter() - begin)
    for step in range(1, config.steps + 1):
        step_begin, lr = time.perf_counter(), float(schedule.get_last_lr()[0])
        batch_loss = next_byte_loss(model, next(batches).to(config.device))
        batch_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        loss = batch_loss.item()
        now = time.perf_counter()
        rate = config.batch * config.model.context / (now - step_begin)
        yield Stepped(step=step, loss=loss, lr=lr, tokens_per_second=rate, elapsed=now - begin)
        if step % config.validate_every == 0 or step == config.steps:
            last = mean_loss(model, held_out, batch=config.batch)
            yield Validated(step=step, loss=last, elapsed=time.perf_counter() - begin)
    elapsed = time.perf_counter() - begin
    sample = generate(model, SAMPLE_PROMPT, length=240, temperature=0.7, seed=config.seed)
    text = sample.decode("utf-8", "replace")
    yield Finished(steps=step, first_loss=first, last_loss=last, elapsed=elapsed, sample=text)

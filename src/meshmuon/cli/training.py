"""The run behind `meshmuon train`: `train()` yields records, and the caller decides what to show."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.cli.corpus import Corpus, batch_drawer, spread_windows
from meshmuon.cli.gpt import GPT, fingerprint, generate, mean_loss, next_byte_loss
from meshmuon.cli.optimizers import Optimizers, build_optimizers
from meshmuon.cli.records import Finished, Record, Started, Stepped, Stopped, Validated
from meshmuon.cli.settings import TrainConfig

SAMPLE_PROMPT = b"def "
# On a GPU losses are read once for several steps: each reading waits until the device has caught up.
GPU_WINDOW = 10


def train(config: TrainConfig, corpus: Corpus) -> Iterator[Record]:
    """Train a GPT.

    Args:
        config: What to train and how.
        corpus: Bytes to learn from and bytes held out.

    Yields:
        `Started`, then one `Stepped` per step and `Validated` before the first step, every `validate_every`
        steps and after the last. At the end `Finished`, or `Stopped` as soon as a loss is not finite.
    """
    for record in _records(Run.build(config, corpus), corpus):
        if isinstance(record, Stepped | Validated) and not math.isfinite(record.loss):
            do = f"try a learning rate below {config.optimizer.lr:g}"
            yield Stopped(step=record.step, reason=f"the loss is {record.loss}: {do}")
            return
        yield record


def _records(run: "Run", corpus: Corpus) -> Iterator[Record]:
    config = run.config
    yield run.describe(corpus)
    step, elapsed = 0, 0.0
    first = last = run.validate()
    yield Validated(step=0, loss=first, elapsed=elapsed)
    run.warm_up()
    while step < config.steps:
        for stepped in run.advance(step, elapsed):
            yield stepped
            step, elapsed = stepped.step, stepped.elapsed
        if step % config.validate_every == 0 or step == config.steps:
            last = run.validate()
            yield Validated(step=step, loss=last, elapsed=elapsed)
    yield Finished(steps=step, first_loss=first, last_loss=last, elapsed=elapsed, sample=run.sample())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model in training.

    Attributes:
        config: What to train and how.
        model: The model.
        optimizers: What changes it.
        batches: The batch of a step, by its number: the same for every optimizer.
        held_out: Windows for validation.
        weights_sha256: Of the initial weights.
    """

    config: TrainConfig
    model: GPT
    optimizers: Optimizers
    batches: Callable[[int], Tensor]
    held_out: Tensor
    weights_sha256: str

    @classmethod
    def build(cls, config: TrainConfig, corpus: Corpus) -> "Run":
        """Make everything a run needs.

        Args:
            config: What to train and how.
            corpus: What to learn.

        Returns:
            A run before its first step.
        """
        # Built on the CPU, so that every device gets the same weights; in a fork, because the global random state
        # belongs to the caller.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = GPT(config.model)
        weights = fingerprint(model)
        model = model.to(config.device)
        if config.compile:
            torch.compiler.reset()  # what an earlier run compiled would count against the limit of variants
            for block in model.blocks:  # block by block: they are alike, so one is compiled and all use it
                block.compile()
        window = config.model.context + 1
        held_out = spread_windows(corpus.validation, window=window, count=config.validation_windows)
        return cls(
            config=config,
            model=model,
            optimizers=build_optimizers(config.optimizer, model),
            batches=batch_drawer(corpus.train, window=window, batch=config.batch, seed=config.seed),
            held_out=held_out.to(config.device),
            weights_sha256=weights,
        )

    def describe(self, corpus: Corpus) -> Started:
        """Say what the run is.

        Args:
            corpus: What it learns.

        Returns:
            The first record.
        """
        return Started(
            torch_version=torch.__version__,
            layout="one process",
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            weights_sha256=self.weights_sha256,
            routing=str(self.optimizers),
            corpus=corpus.facts,
            config=self.config,
        )

    def advance(self, step: int, elapsed: float) -> list[Stepped]:
        """Take the next steps: one on a CPU, up to `GPU_WINDOW` on a GPU, never past the next validation.

        Args:
            step: Steps already done.
            elapsed: Seconds they took.

        Returns:
            A record of each.
        """
        config, timer = self.config, Timer(self.config.device)
        window = 1 if config.device == "cpu" else GPU_WINDOW
        end = min(step + window, (step // config.validate_every + 1) * config.validate_every, config.steps)
        losses, rates = [], []
        with timer.measure("steps"):
            for index in range(step, end):
                batch = self.batches(index).to(config.device)
                with self._autocast():
                    loss = next_byte_loss(self.model, batch)
                loss.backward()
                rates.append(config.lr_at(index))
                with timer.measure("optimizer"):
                    self.optimizers.step(lr=rates[-1])
                losses.append(loss.detach())
        seconds = timer.seconds("steps")
        each = seconds / len(losses)
        return [
            Stepped(
                step=index,
                loss=loss,
                lr=lr,
                tokens_per_second=config.batch * config.model.context / each,
                optimizer_share=timer.seconds("optimizer") / seconds,
                elapsed=elapsed + each * (index - step),
            )
            for index, loss, lr in zip(range(step + 1, end + 1), torch.stack(losses).tolist(), rates, strict=True)
        ]

    def warm_up(self) -> None:
        """Compile the model before the clock starts: forward and backward, without a step."""
        if self.config.compile:
            with self._autocast():
                loss = next_byte_loss(self.model, self.batches(0).to(self.config.device))
            loss.backward()
            self.model.zero_grad()

    def validate(self) -> float:
        """Measure the loss on held-out bytes.

        Returns:
            Nats per byte.
        """
        with self._autocast():
            return mean_loss(self.model, self.held_out, batch=self.config.batch)

    def sample(self) -> str:
        """Let the model write.

        Returns:
            Text that begins with `SAMPLE_PROMPT`.
        """
        # A text grows, and compiled code is for one length.
        with torch.compiler.set_stance("force_eager"), self._autocast():
            text = generate(self.model, SAMPLE_PROMPT, length=240, temperature=0.7, seed=self.config.seed)
        return text.decode("utf-8", "replace")

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(self.config.device.split(":")[0], dtype=torch.bfloat16, enabled=enabled)


class Timer:
    """Times named parts of work; on a GPU by events, so that nothing waits in between.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._laps: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time what is done inside.

        Args:
            name: What it is called.
        """
        begin = self._mark()
        yield
        self._laps.setdefault(name, []).append((begin, self._mark()))

    def seconds(self, name: str) -> float:
        """Read the clock; on a GPU, waits for it.

        Args:
            name: As given to `measure`.

        Returns:
            The sum over all its measurements.
        """
        laps = self._laps[name]
        if not self._on_gpu:
            return float(sum(end - begin for begin, end in laps))
        laps[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in laps)) / 1000

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

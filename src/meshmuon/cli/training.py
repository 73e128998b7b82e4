"""The run behind `meshmuon train`: `train()` yields records, and the caller decides what to show."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshmuon.cli.checkpoints import Checkpoints, Progress
from meshmuon.cli.corpus import Corpus, batch_drawer, spread_windows
from meshmuon.cli.gpt import GPT, fingerprint, generate, mean_loss, next_byte_loss
from meshmuon.cli.optimizers import Optimizers, build_optimizers
from meshmuon.cli.parallel import ALONE, Parallel
from meshmuon.cli.records import INTERRUPTED, Finished, Record, Started, Stepped, Stopped, Validated
from meshmuon.cli.settings import TrainConfig

SAMPLE_PROMPT = b"def "
# On a GPU losses are read once for several steps: each reading waits until the device has caught up.
GPU_WINDOW = 10


def train(
    config: TrainConfig,
    corpus: Corpus,
    *,
    parallel: Parallel = ALONE,
    checkpoints: Checkpoints | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Record]:
    """Train a GPT.

    Args:
        config: What to train and how.
        corpus: Bytes to learn from and bytes held out.
        parallel: The processes that train together; all of them must iterate.
        checkpoints: Where to begin, if it has one, and where to save. A record is yielded before the checkpoint that
            comes after it, so a log kept by the caller is never behind.
        interrupted: Asked between steps; once it says so on any process, all save and stop.

    Yields:
        `Started`, then one `Stepped` per step and `Validated` before the first step, every `validate_every`
        steps and after the last. At the end `Finished`; or `Stopped`, when interrupted or as soon as a loss is not
        finite.
    """
    for record in _records(Run.build(config, corpus, parallel), corpus, checkpoints, interrupted):
        if isinstance(record, Stepped | Validated) and not math.isfinite(record.loss):
            do = f"try a learning rate below {config.optimizer.lr:g}"
            yield Stopped(step=record.step, reason=f"the loss is {record.loss}: {do}")
            return
        yield record


def _records(
    run: "Run", corpus: Corpus, checkpoints: Checkpoints | None, interrupted: Callable[[], bool]
) -> Iterator[Record]:
    config, at = run.config, checkpoints.latest() if checkpoints else None
    yield run.describe(corpus, resumed_at=at.step if at else 0)
    if checkpoints and at:
        checkpoints.load(run.wrapped, run.optimizers)
    else:
        at = Progress(step=0, elapsed=0.0, first_loss=run.validate())
        yield Validated(step=0, loss=at.first_loss, elapsed=0.0)
    run.warm_up()
    last = math.nan
    while at.step < config.steps:
        steps = run.advance(at.step, at.elapsed)
        yield from steps
        at = replace(at, step=steps[-1].step, elapsed=steps[-1].elapsed)
        stop = run.agreed(interrupted())
        ended = at.step == config.steps
        if ended or at.step % config.validate_every == 0:
            last = run.validate()
            yield Validated(step=at.step, loss=last, elapsed=at.elapsed)
        if checkpoints and (ended or stop or at.step % config.checkpoint_every == 0):
            checkpoints.save(run.wrapped, run.optimizers, at)
        if stop and not ended:
            yield Stopped(step=at.step, reason=INTERRUPTED)
            return
    if math.isnan(last):  # resumed after its last step
        last = run.validate()
    yield Finished(steps=at.step, first_loss=at.first_loss, last_loss=last, elapsed=at.elapsed, sample=run.sample())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model in training.

    Attributes:
        config: What to train and how.
        parallel: The processes that train together.
        model: The model.
        wrapped: What is called in training: the model, or DDP around it.
        optimizers: What changes it.
        batches: The batch of a step, by its number: the same for every optimizer.
        held_out: Windows for validation.
        weights_sha256: Of the initial weights.
    """

    config: TrainConfig
    parallel: Parallel
    model: GPT
    wrapped: nn.Module
    optimizers: Optimizers
    batches: Callable[[int], Tensor]
    held_out: Tensor
    weights_sha256: str

    @classmethod
    def build(cls, config: TrainConfig, corpus: Corpus, parallel: Parallel = ALONE) -> "Run":
        """Make everything a run needs.

        Args:
            config: What to train and how.
            corpus: What to learn.
            parallel: The processes that train together.

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
        wrapped = parallel.spread(model)
        window = config.model.context + 1
        held_out = spread_windows(corpus.validation, window=window, count=config.validation_windows)
        return cls(
            config=config,
            parallel=parallel,
            model=model,
            wrapped=wrapped,
            optimizers=build_optimizers(config.optimizer, wrapped),
            batches=batch_drawer(corpus.train, window=window, batch=config.batch, seed=config.seed),
            held_out=held_out.to(config.device),
            weights_sha256=weights,
        )

    def describe(self, corpus: Corpus, *, resumed_at: int = 0) -> Started:
        """Say what the run is.

        Args:
            corpus: What it learns.
            resumed_at: Steps already done.

        Returns:
            The first record.
        """
        return Started(
            torch_version=torch.__version__,
            layout=str(self.parallel),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            weights_sha256=self.weights_sha256,
            routing=str(self.optimizers),
            corpus=corpus.facts,
            config=self.config,
            resumed_at=resumed_at,
        )

    def advance(self, step: int, elapsed: float) -> list[Stepped]:
        """Take the next steps: one on a CPU, up to `GPU_WINDOW` on a GPU, never past a validation or checkpoint.

        Args:
            step: Steps already done.
            elapsed: Seconds they took.

        Returns:
            A record of each.
        """
        config, timer = self.config, Timer(self.config.device)
        window = 1 if config.device == "cpu" else GPU_WINDOW
        stops = [(step // every + 1) * every for every in (config.validate_every, config.checkpoint_every)]
        end = min(step + window, config.steps, *stops)
        losses, rates = [], []
        with timer.measure("steps"):
            for index in range(step, end):
                batch = self.parallel.share(self.batches(index)).to(config.device)
                with self._autocast():
                    loss = next_byte_loss(self.wrapped, batch)
                loss.backward()
                rates.append(config.lr_at(index))
                with timer.measure("optimizer"):
                    self.optimizers.step(lr=rates[-1])
                losses.append(loss.detach())
        means = self.parallel.mean(torch.stack(losses)).tolist()
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
            for index, loss, lr in zip(range(step + 1, end + 1), means, rates, strict=True)
        ]

    def warm_up(self) -> None:
        """Compile the model before the clock starts: forward and backward, without a step."""
        if self.config.compile:
            with self._autocast():
                loss = next_byte_loss(self.wrapped, self.parallel.share(self.batches(0)).to(self.config.device))
            loss.backward()
            self.model.zero_grad()

    def agreed(self, flag: bool) -> bool:
        """Whether any process says so: all must stop at the same step.

        Args:
            flag: Ours.

        Returns:
            The same on every process.
        """
        return bool(self.parallel.mean(torch.tensor([float(flag)], device=self.config.device)) > 0)

    def validate(self) -> float:
        """Measure the loss on held-out bytes: all of them on every process, so that the number is defined alike.

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
            length, seed = self.config.sample_bytes, self.config.seed
            text = generate(self.model, SAMPLE_PROMPT, length=length, temperature=0.7, seed=seed)
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

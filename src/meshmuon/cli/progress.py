"""What one sees while `meshmuon train` runs: bars on a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meshmuon.cli.comparison import label_of
from meshmuon.cli.records import Finished, Record, Started, Stepped, Stopped, Validated
from meshmuon.cli.settings import TrainConfig


class Display:
    """Shows the records of a comparison as they come.

    Args:
        console: Where to.
        configs: The runs, in order.
    """

    def __init__(self, console: Console, configs: Sequence[TrainConfig]) -> None:
        self._console = console
        self._left = {label_of(config): config.steps for config in configs}
        self._width = max(map(len, self._left))
        self._header_is_out = False
        self._clock = (0.0, 0)  # when we began to watch this run, and at which step
        self._stepped: Stepped | None = None
        self._loss = float("nan")
        columns = (TextColumn("{task.fields[run]}"), BarColumn(bar_width=12), TextColumn("{task.description}"))
        self.bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks = {
            label: self.bars.add_task("waiting", run=f"{label:{self._width}}", total=steps)
            for label, steps in self._left.items()
        }

    def show(self, config: TrainConfig, record: Record) -> None:
        """Show a record.

        Args:
            config: Of its run.
            record: Anything `train` yields.
        """
        label = label_of(config)
        if isinstance(record, Started):
            self._clock = (time.monotonic(), record.resumed_at)
            self._print_header(record)
        elif isinstance(record, Stepped):
            self._stepped, self._left[label] = record, config.steps - record.step
            self._update(label, self._status(config, record))
        elif isinstance(record, Validated):
            self._loss = record.loss
            if self._stepped and record.step and not self._console.is_terminal:
                self._console.print(f"{label:{self._width}} {self._status(config, self._stepped)}", soft_wrap=True)
        elif isinstance(record, Finished):
            self._update(label, f"loss {record.last_loss:.3f} after {record.steps} steps, {record.elapsed:.0f} s")
        elif isinstance(record, Stopped):
            self._left[label] = 0
            self._update(label, f"stopped at step {record.step}")
            self._console.print(f"{label}: stopped at step {record.step}: {record.reason}")

    def _update(self, label: str, status: str) -> None:
        done = self._stepped.step if self._stepped else 0
        self.bars.update(self._tasks[label], completed=done, description=status)

    def _status(self, config: TrainConfig, stepped: Stepped) -> str:
        began, first = self._clock
        # Runs still to come are taken to be as fast as this one; validations are in the mean.
        eta = (time.monotonic() - began) / max(1, stepped.step - first) * sum(self._left.values())
        speed = f"{stepped.tokens_per_second:,.0f} tokens/s, optimizer {stepped.optimizer_share:.0%}"
        return f"{stepped.step:>5}/{config.steps} loss {self._loss:.3f}, {speed}, eta {eta:.0f} s"

    def _print_header(self, record: Started) -> None:
        if self._header_is_out:
            return
        self._header_is_out = True
        corpus, config = record.corpus, record.config
        passes = config.steps * config.batch * config.model.context / corpus.train_bytes
        self._console.print(f"corpus   {corpus.label}: {corpus.train_bytes:,} bytes to learn,", soft_wrap=True)
        self._console.print(f"         {corpus.validation_bytes:,} held out, sha256 {corpus.sha256[:12]}")
        self._console.print(
            f"model    {record.parameters:,} parameters, initial weights sha256 {record.weights_sha256[:12]}\n"
            f"batch    {config.batch} windows of {config.model.context} bytes, {config.steps} steps, "
            f"{passes:.1f} times the corpus\n"
            f"device   {config.device}, {record.layout}, torch {record.torch_version}\n"
            "loss     on held-out bytes, in nats per byte\n"
        )

"""`meshmuon train`: options and output. The run itself is `training.train`."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshmuon.cli.corpus import Corpus, load_corpus
from meshmuon.cli.records import Finished, Record, Started, Stepped, Stopped, Validated, as_dict
from meshmuon.cli.settings import TrainConfig, pick_device, preset

PLAIN_LINE_EVERY = 25
EXIT_DIVERGED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class Size(str, Enum):
    """Words for `--size`. An Enum, which every supported typer turns into a checked choice."""

    tiny = "tiny"
    small = "small"


class Device(str, Enum):
    """Words for `--device`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# Not the docstring below: its Args section is for readers of the code.
HELP = """Train a small GPT on bytes with Muon, in about a minute.

Learns the source of Python's standard library, which is already on the machine, or any --corpus.
Writes log.jsonl and curve.png, and ends with a verdict and a sample.

Exit codes: 0 finished, 1 the loss stopped being finite, 2 bad input, 130 interrupted.
"""

_Steps = typer.Option(min=1, help="Optimizer steps.", show_default="tiny 600, small 1000")
_Lr = typer.Option(help="Peak learning rate.", show_default="tiny 8e-3, small 4e-3")
_Seed = typer.Option(min=0, help="Decides initial weights, batches and the sample.")
_Corpus = typer.Option(help="File or folder to learn, as bytes.", show_default="Python's standard library")
_Out = typer.Option(help="Folder for log.jsonl and curve.png.", show_default="runs/<date-time>")
_Size = typer.Option(help="tiny: 0.9 M parameters, a minute on two CPU cores; small: 10.8 M, for a GPU.")
_Device = typer.Option(help="auto takes CUDA if there is any.")
_Json = typer.Option("--json", help="Only the final record on stdout, as JSON; progress on stderr.")


def train_command(
    *,
    steps: Annotated[int | None, _Steps] = None,
    lr: Annotated[float | None, _Lr] = None,
    seed: Annotated[int, _Seed] = 0,
    corpus: Annotated[Path | None, _Corpus] = None,
    out: Annotated[Path | None, _Out] = None,
    size: Annotated[Size, _Size] = Size.tiny,
    device: Annotated[Device, _Device] = Device.auto,
    json_output: Annotated[bool, _Json] = False,
) -> None:
    """Train a small GPT on bytes with Muon, in about a minute.

    Args:
        steps: Optimizer steps, by default those of the size.
        lr: Peak learning rate, by default that of the size.
        seed: Decides initial weights, batches and the sample.
        corpus: File or folder to learn, by default Python's standard library.
        out: Folder for the log and the curve, by default one named after the time.
        size: Which preset to train.
        device: Where to train.
        json_output: Keep stdout for the final record.
    """
    console = Console(stderr=json_output, highlight=False, markup=False, soft_wrap=True)
    try:
        config, data = _prepare(steps=steps, lr=lr, seed=seed, corpus=corpus, size=size, device=device)
        log = RunLog(out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    except ValueError as error:
        _fail(str(error), EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        _fail("interrupted before the first step; nothing was written", EXIT_INTERRUPTED)
    from meshmuon.cli.training import train  # imports torch

    try:
        last = _present(train(config, data), log, console, steps=config.steps)
        curve = _curve_of(log, console)
    except KeyboardInterrupt:
        log.write(Stopped(step=log.last_step, reason="interrupted"))
        _fail(f"interrupted after step {log.last_step}; the log is {log.path}", EXIT_INTERRUPTED)
    finally:
        log.close()
    if json_output:
        print(json.dumps({**as_dict(last), "log": str(log.path), "curve": curve and str(curve)}))
    if isinstance(last, Stopped):
        _fail(f"stopped at step {last.step}: {last.reason}; the log is {log.path}", EXIT_DIVERGED)
    _conclude(last, log, curve, console)


def _prepare(
    *, steps: int | None, lr: float | None, seed: int, corpus: Path | None, size: Size, device: Device
) -> tuple[TrainConfig, Corpus]:
    """Everything that can be wrong with the options, found before anything is written."""
    config = preset(size.value)
    config = dataclasses.replace(
        config,
        steps=config.steps if steps is None else steps,
        optimizer=dataclasses.replace(config.optimizer, lr=config.optimizer.lr if lr is None else lr),
        seed=seed,
        device=pick_device(device.value),
    )
    return config, load_corpus(corpus, window=config.model.context + 1)


def _fail(message: str, code: int) -> NoReturn:
    print(f"meshmuon train: {message}", file=sys.stderr)
    raise typer.Exit(code)


class RunLog:
    """`log.jsonl`: one JSON object per record, on disk as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.jsonl"
        self.records: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", encoding="utf-8")  # "x": never over the log of another run
        except OSError as error:
            message = f"out: cannot create {self.path} ({error.strerror}). Give another --out."
            raise ValueError(message) from error

    @property
    def last_step(self) -> int:
        """Number of the last completed step."""
        return max((record.step for record in self.records if isinstance(record, Stepped)), default=0)

    def write(self, record: Record) -> None:
        """Append a record.

        Args:
            record: Anything `train` yields.
        """
        self.records.append(record)
        # NaN is not JSON: readers in other languages would refuse the line.
        self._file.write(json.dumps(as_dict(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _present(records: Iterator[Record], log: RunLog, console: Console, *, steps: int) -> Finished | Stopped:
    """Show and log records as they come; a live bar on a terminal, plain lines elsewhere."""
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}  eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=steps)
        for record in records:
            log.write(record)
            if isinstance(record, Started):
                _print_header(record, console)
            elif isinstance(record, Stepped):
                status = f"loss {record.loss:.3f}  {record.tokens_per_second:,.0f} tokens/s"
                progress.update(bar, completed=record.step, description=status)
                if not console.is_terminal and record.step % PLAIN_LINE_EVERY == 0:
                    eta = record.elapsed / record.step * (steps - record.step)
                    console.print(f"step {record.step:>5}/{steps}  {status}  eta {eta:.0f} s")
            elif isinstance(record, Validated):
                console.print(f"step {record.step:>5}/{steps}  validation loss {record.loss:.3f} nats/byte")
            else:
                return record
    raise AssertionError("train() ends with Finished or Stopped")


def _print_header(record: Started, console: Console) -> None:
    corpus = record.corpus
    console.print(f"torch       {record.torch_version} on {record.config.device}")
    console.print(
        f"corpus      {corpus.train_bytes:,} bytes to learn, {corpus.validation_bytes:,} held out, "
        f"sha256 {corpus.sha256[:12]}, {corpus.source}"
    )
    console.print(f"parameters  {record.parameters:,}\n\n{record.routing}\n")


def _curve_of(log: RunLog, console: Console) -> Path | None:
    """Draw the curve beside the log, or say why not."""
    if find_spec("matplotlib") is None:
        console.print("no curve.png: matplotlib is missing (pip install 'meshmuon[train]')")
        return None
    path = log.path.with_name("curve.png")
    draw_curve(log.records, path)
    return path


def draw_curve(records: list[Record], path: Path) -> None:
    """Draw training and validation loss.

    Args:
        records: What `train` yielded.
        path: Where to write the PNG.
    """
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, Stepped)]
    checks = [record for record in records if isinstance(record, Validated)]
    figure = Figure(figsize=(8, 5), layout="constrained")  # no pyplot: its global state may open windows
    axes = figure.subplots()
    axes.plot([r.step for r in steps], [r.loss for r in steps], color="0.7", lw=1, label="training batch")
    axes.plot([r.step for r in checks], [r.loss for r in checks], "o:", color="C0", label="validation")
    for check in checks[:1] + checks[-1:]:
        axes.annotate(f"{check.loss:.2f}", (check.step, check.loss), (9, -4), textcoords="offset points")
    axes.margins(x=0.1)  # room for the last number
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Muon on a small byte-level GPT")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _conclude(last: Finished, log: RunLog, curve: Path | None, console: Console) -> None:
    """The verdict, honest either way."""
    change = "fell" if last.last_loss < last.first_loss else "did NOT fall: it went"
    console.print(
        f"\nvalidation loss {change} from {last.first_loss:.3f} to {last.last_loss:.3f} nats/byte "
        f"in {last.steps} steps, {last.elapsed:.1f} s"
    )
    console.print(f"log    {log.path}")
    if curve:
        console.print(f"curve  {curve}")
    console.print(f"\nsample:\n{_printable(last.sample)}")


def _printable(text: str) -> str:
    # A young model emits any byte, and an escape sequence would garble the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

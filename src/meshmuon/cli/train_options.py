"""The options of `meshmuon train`, as a newcomer reads them. Defaults are told from the sizes themselves."""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmuon.cli.common import InputError
from meshmuon.cli.settings import LABELS, SIZES
from meshmuon.cli.settings import Size as SizeFacts


class Size(str, Enum):
    """Words for `--size`. An Enum, which every supported typer turns into a checked choice."""

    tiny = "tiny"
    small = "small"
    base = "base"


class Device(str, Enum):
    """Words for `--device`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Layout(str, Enum):
    """Words for `--parallel`."""

    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"
    tp = "tp"
    fsdp_tp = "fsdp+tp"


class Named(str, Enum):
    """Words for `--experiment`."""

    sweep = "sweep"
    final = "final"
    four_curves = "four-curves"
    lr_rules = "lr-rules"


HELP = """Train a small GPT on bytes twice, with Muon and with AdamW, and say which was better.

Both begin with the same weights and see the same batches under the same schedule; each has a learning rate of its \
own, by the sweeps in docs/results.md. The text is the source of Python's standard library, which is already on the \
machine, or any --corpus. On two CPU cores it takes about four minutes.

Writes log.jsonl, summary.json, curve.png and checkpoints into --out. Ctrl-C saves; --resume goes on.

On several processes:  torchrun --nproc-per-node 2 -m meshmuon train --parallel fsdp

Exit codes: 0 finished, 1 failed (a loss stopped being finite, out of memory, a lost process), 2 bad input, \
130 interrupted.
"""

_RUN, _WHERE, _GRID = "What to train", "Where, and what is written", "Many runs, as in docs/results.md"


def _by_size(describe: Callable[[SizeFacts], object]) -> str:
    return ", ".join(f"{name} {describe(size)}" for name, size in SIZES.items())


def _option(*names: str, panel: str, text: str, default: str | bool = True, **rest: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default, **rest)


_sizes = f"Parameters: {_by_size(lambda size: size.parameters)}."
_steps = _by_size(lambda size: size.steps)
_muon_lr = _by_size(lambda size: f"{size.lr['muon']:g}")
_adamw_lr = _by_size(lambda size: f"{size.lr['adamw']:g}")
_stdlib = "Python's standard library"

Optimizers = Annotated[str, _option(panel=_RUN, text=f"What to compare, by commas: {', '.join(LABELS)}.")]
SizeOption = Annotated[Size | None, _option(panel=_RUN, text=_sizes, default="tiny on a CPU, base on a GPU")]
Steps = Annotated[int | None, _option(panel=_RUN, text="Optimizer steps.", default=_steps, min=1)]
MuonLr = Annotated[float | None, _option("--lr", panel=_RUN, text="Peak learning rate of Muon.", default=_muon_lr)]
AdamWLr = Annotated[float | None, _option(panel=_RUN, text="Peak learning rate of AdamW.", default=_adamw_lr)]
Seed = Annotated[int, _option(panel=_RUN, text="Decides weights, batches and sample.", min=0)]
Seeds = Annotated[int, _option(panel=_RUN, text="Runs of each optimizer, on the seeds that follow.", min=1)]
CorpusOption = Annotated[Path | None, _option(panel=_RUN, text="File or folder to learn.", default=_stdlib)]

DeviceOption = Annotated[Device, _option(panel=_WHERE, text="auto takes CUDA if there is any.")]
ParallelOption = Annotated[Layout, _option(panel=_WHERE, text="How torchrun's processes share the model.")]
Out = Annotated[Path | None, _option(panel=_WHERE, text="Folder to write to.", default="runs/<date-time>")]
Resume = Annotated[
    Path | None,
    _option(panel=_WHERE, text="Go on with the run in this folder, on any number of processes.", default=False),
]
Json = Annotated[bool, _option("--json", panel=_WHERE, text="Only the summary on stdout; progress on stderr.")]
Verbose = Annotated[bool, _option("--verbose", "-v", panel=_WHERE, text="Show tracebacks of errors.")]

Sweep = Annotated[bool, _option("--sweep", panel=_GRID, text="Short for --experiment sweep.")]
ExperimentOption = Annotated[
    Named | None, _option(panel=_GRID, text="Run a named experiment into <name>.json.", default=False)
]
Rates = Annotated[
    Path | None, _option(panel=_GRID, text="A sweep.json whose best learning rates to use.", default=False)
]
Jobs = Annotated[int, _option(panel=_GRID, text="Runs at a time, one thread each.", min=1)]


_NAMES = {"json_output": "--json", "adamw_lr": "--adamw-lr"}
_ALWAYS = {"device", "verbose"}
_RESUME_TAKES = {"resume", "parallel", "json_output"} | _ALWAYS
_EXPERIMENT_TAKES = {"sweep", "experiment", "size", "steps", "corpus", "out", "rates", "jobs"} | _ALWAYS
_ONLY_EXPERIMENTS_TAKE = {"rates", "jobs"}


def check_together(context: typer.Context) -> None:
    """Refuse options that would not be read beside others that were given: nothing a user writes is ignored.

    Args:
        context: Typer's, which knows what was written.

    Raises:
        InputError: Names the options that do not go together.
    """
    # By name: typer may carry a click of its own, whose enum is another.
    given = {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if "resume" in given:
        _refuse(given - _RESUME_TAKES, beside="--resume", do="A run goes on with its own options: leave them out.")
    elif given & {"sweep", "experiment"}:
        _refuse(given - _EXPERIMENT_TAKES, beside="an experiment", do="Its runs are fixed beforehand: leave them out.")
    else:
        _refuse(given & _ONLY_EXPERIMENTS_TAKE, beside="a single comparison", do="Give --experiment too.")


def _refuse(names: set[str], *, beside: str, do: str) -> None:
    if names:
        words = ", ".join(sorted(_NAMES.get(name, f"--{name}") for name in names))
        raise InputError(f"{words}: not read beside {beside}. {do}")

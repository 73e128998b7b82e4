"""`meshmuon bench`: options, output and plot. The measuring is `meshmuon.bench`."""

import json
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmuon.cli.common import VERBOSE, WIDTH, InputError, choice, one_line_errors

# One line a paragraph: the help is wrapped to the terminal.
HELP = """Measure optimizer steps and polar factors beside torch's, against what this machine can do.

WHAT is step, polar or all. On a GPU the whole models; on a CPU smaller ones, about a minute.

step: a whole step of Muon beside torch.optim.Muon and fused AdamW. polar: the orthogonalization alone, beside torch.optim.Muon's. The rate of a large product and of a copy are measured in the same run; "x floor" is how far from these.

Exit codes: 0 measured, 1 failed, 2 bad input, 130 interrupted.
"""  # noqa: E501


_What = typer.Argument(help="step, polar or all", metavar="[WHAT]", show_default=False)
_Device = typer.Option(metavar="WHERE", help="auto, cpu or cuda; auto takes CUDA if there is any.")
_Only = typer.Option(metavar="TEXT", help="Only what has this in its name, e.g. llama-1b.", show_default=False)
_Repeats = typer.Option(min=1, metavar="N", help="Timed rounds of each.", show_default="9, on a CPU 3")
_Quick = typer.Option("--quick", help="Tiny matrices, a second or two: to see that it works.")
_Json = typer.Option("--json", help="The record as JSON on stdout; tables on stderr.")
_Out = typer.Option(metavar="FILE", help="Also write the record to this file.", show_default=False)
_Plot = typer.Option(metavar="FILE.png", help="Also draw a bar chart.", show_default=False)
_Tune = typer.Option(
    metavar="FILE",
    help="Instead: find the fastest tiles of our kernels on this GPU and write them to this file. "
    "MESHMUON_TILES=FILE makes Muon use them.",
    show_default=False,
)


def bench_command(
    what: Annotated[str, _What] = "all",
    *,
    device: Annotated[str, _Device] = "auto",
    only: Annotated[str | None, _Only] = None,
    repeats: Annotated[int | None, _Repeats] = None,
    quick: Annotated[bool, _Quick] = False,
    json_output: Annotated[bool, _Json] = False,
    out: Annotated[Path | None, _Out] = None,
    plot: Annotated[Path | None, _Plot] = None,
    tune: Annotated[Path | None, _Tune] = None,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Measure optimizer steps and polar factors beside torch's.

    Args:
        what: Which of the two.
        device: Where.
        only: Part of the names of what to measure.
        repeats: Timed rounds.
        quick: Tiny matrices.
        json_output: Keep stdout for the record.
        out: File for the record.
        plot: File for a chart.
        tune: File for tiles; nothing else is measured then.
        verbose: Show tracebacks.
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr if json_output else sys.stdout, flush=True)

    with one_line_errors("bench", verbose=verbose):
        _check_files(out, plot, tune)
        if tune is not None:
            record = _tune(say, tune)
        else:
            choice("WHAT", what, ("all", "step", "polar"))
            record = _measure(what, _pick(device), say, only=only, repeats=repeats, quick=quick)
        if json_output:
            print(json.dumps(record))
        if out is not None:
            out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            say(f"record  {out}")
        if plot is not None:
            from meshmuon.cli.bench_plot import draw

            draw(record, plot)
            say(f"plot    {plot}")


def _check_files(out: Path | None, plot: Path | None, tune: Path | None) -> None:
    """Everything that can be wrong with files, before minutes are spent."""
    for option, path in (("--out", out), ("--plot", plot), ("--tune", tune)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{option}: cannot write {path}. Give a file in a folder that exists.")
    if plot is not None and find_spec("matplotlib") is None:
        raise InputError("--plot: matplotlib is missing. pip install 'meshmuon[train]'")
    if plot is not None and tune is not None:
        raise InputError("--plot: there is nothing to draw about --tune. Leave one of them out.")


def _pick(word: str) -> str:
    import torch

    choice("--device", word, ("auto", "cpu", "cuda"))
    if word == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here. Use --device cpu.")
    return word if word != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _tune(say: Callable[[str], None], path: Path) -> dict[str, Any]:
    from meshmuon.bench.tune import run_tune
    from meshmuon.kernels.configs import VARIABLE

    record = run_tune(say=say)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    say(f"tiles   {path}: {len(record['rows'])} shapes faster than the table. Use them with {VARIABLE}={path}")
    return record


def _measure(
    what: str, device: str, say: Callable[[str], None], *, only: str | None, repeats: int | None, quick: bool
) -> dict[str, Any]:
    from meshmuon.bench.measure import circumstances
    from meshmuon.bench.polar import run_polar
    from meshmuon.bench.steps import run_steps

    size: Any = "quick" if quick else "small" if device == "cpu" else "full"
    rounds = repeats or {"quick": 1, "small": 3, "full": 9}[size]
    record = circumstances(device)
    say(textwrap.fill(", ".join(f"{key} {value}" for key, value in record.items()), WIDTH))
    if what in ("all", "step"):
        record["results"] = run_steps(device, say=say, only=only, repeats=rounds, size=size)
    if what in ("all", "polar"):
        record["polar"] = run_polar(device, say=say, only=only, repeats=rounds, size=size)
    measured = [name for part in ("results", "polar") for name in record.get(part, {}) if name != "ceilings"]
    if not measured:
        raise InputError(f"--only: nothing has {only!r} in its name. Leave it out to see the names.")
    return record

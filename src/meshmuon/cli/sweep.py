"""The experiments behind docs/results.md, with torch alone: no typer, no rich, plain lines.

python -m meshmuon.cli.sweep --experiment sweep --size tiny --jobs 16 --out docs/results/sweep-tiny.json
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import get_args

from meshmuon.cli.corpus import load_corpus
from meshmuon.cli.experiments import COMPARED, DESCRIPTIONS, Experiment, runs_of
from meshmuon.cli.outcomes import Outcome, Results, best_rates, load_results, table
from meshmuon.cli.settings import LABELS, SIZES, SizeName, pick_device

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run an experiment from the command line.

    Args:
        arguments: Words of the command line; by default the process's own.

    Returns:
        The exit code: 0, 2 for bad input, 130 when interrupted.
    """
    options = _parser().parse_args(arguments)
    try:
        run(**vars(options))
    except ValueError as error:
        print(f"meshmuon: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("meshmuon: interrupted; finished runs are kept, the same command goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def run(
    experiment: Experiment,
    *,
    size: SizeName | None = None,
    device: str = "auto",
    corpus: Path | None = None,
    out: Path | None = None,
    rates: Path | None = None,
    steps: int | None = None,
    seeds: int = 3,
    jobs: int = 1,
    threads: int = 1,
) -> Path:
    """Run an experiment: a line for each run as it ends, and a table.

    Args:
        experiment: Its name.
        size: The size of model; by default the device's.
        device: "auto", "cpu" or "cuda".
        corpus: File or folder to learn; by default Python's standard library.
        out: The JSON file of results; by default in docs/results. What it holds is not run again.
        rates: A sweep's JSON file, whose best learning rates to use; by default those of the size.
        steps: Optimizer steps; by default those of the size.
        seeds: How many seeds, at most three.
        jobs: Runs at a time.
        threads: Threads of each.

    Returns:
        The JSON file.
    """
    from meshmuon.cli.runner import facts_of, run_experiment

    device = pick_device(device)  # type: ignore[arg-type]
    size = size or ("tiny" if device == "cpu" else "base")
    out = out or Path("docs") / "results" / f"{experiment}-{size}.json"
    data = load_corpus(corpus, window=SIZES[size].model.context + 1)
    best = best_rates(rates) if rates else None
    configs = runs_of(experiment, size, device=device, rates=best, steps=steps, seeds=seeds)
    facts = facts_of(experiment, size, data, device=device, jobs=jobs)
    print(f"{experiment}: {DESCRIPTIONS[experiment]}")
    print(f"{len(configs)} runs of {configs[0].steps} steps, size {size} on {facts['machine']}, {jobs} at a time")
    print(f"corpus: {data.facts.label}, sha256 {data.facts.sha256[:12]}; results: {out}", flush=True)
    begin = time.monotonic()
    progress = run_experiment(configs, out, facts=facts, corpus=corpus, jobs=jobs, threads=threads)
    for ended, (outcome, remaining) in enumerate(progress, 1):
        eta = (time.monotonic() - begin) / ended * remaining
        print(f"{_line(outcome)}  {remaining} to go, eta {eta:.0f} s", flush=True)
    print(f"\n{results_table(load_results(out))}")
    return out


def results_table(results: Results) -> str:
    """The settings of an experiment, with mean ± standard deviation over seeds, and what to take from it.

    Args:
        results: The experiment's.

    Returns:
        A table in plain text, and a line for each optimizer that was swept.
    """
    rows = [
        [setting.optimizer, "" if setting.optimizer == "adamw" else setting.rule, f"{setting.lr:g}", str(setting)]
        for setting in results.settings()
    ]
    lines = [table(("optimizer", "lr rule", "lr", "validation loss (nats/byte)"), rows, style="plain")]
    if results.facts["experiment"] == "sweep":
        lines.append("")
        for name in COMPARED:
            best = results.best(name)
            inside = "inside the grid" if results.brackets(name) else "AT THE EDGE of the grid: widen it"
            lines.append(f"best of {LABELS[name]}: lr {best.lr:g}, {best}; {inside}")
    return "\n".join(lines)


def _line(outcome: Outcome) -> str:
    chosen = outcome.config.optimizer
    rule = "" if chosen.name == "adamw" else f" {chosen.adjust_lr_fn}"
    end = f"loss {outcome.loss:.4f}" if math.isfinite(outcome.loss) else f"stopped: {outcome.stopped}"
    return f"{chosen.name}{rule} lr {chosen.lr:g} seed {outcome.config.seed}: {end}, {outcome.seconds:.0f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshmuon.cli.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", choices=get_args(Experiment), default="sweep", help="which experiment")
    parser.add_argument("--size", choices=get_args(SizeName), help="size of the model; by default tiny on a CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA if it can")
    parser.add_argument("--corpus", type=Path, help="file or folder; by default Python's standard library")
    parser.add_argument("--out", type=Path, help="JSON file; runs it holds are not run again")
    parser.add_argument("--rates", type=Path, help="a sweep's JSON file: use its best learning rates")
    parser.add_argument("--steps", type=int, help="optimizer steps; by default those of the size")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3), default=3, help="how many of the seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each a process")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    return parser


if __name__ == "__main__":
    sys.exit(main())

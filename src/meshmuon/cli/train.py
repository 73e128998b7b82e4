"""`meshmuon train`: options, messages and the end. The runs are `comparison.compare`, what one sees is `progress`."""

import dataclasses
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from meshmuon.cli import train_options as options
from meshmuon.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, fail, one_line_errors
from meshmuon.cli.comparison import Comparison, RunLog, compare, label_of, load_comparison, outcomes_of
from meshmuon.cli.corpus import Corpus, load_corpus
from meshmuon.cli.figures import draw_curves
from meshmuon.cli.interrupts import Interrupts
from meshmuon.cli.outcomes import Outcome
from meshmuon.cli.progress import Display
from meshmuon.cli.records import INTERRUPTED, Finished, Record, Stopped
from meshmuon.cli.settings import LABELS, TrainConfig, pick_device, preset
from meshmuon.cli.train_options import HELP, Device, Layout, Named, Size
from meshmuon.cli.verdict import summary
from meshmuon.errors import message, one_of

if TYPE_CHECKING:  # it imports torch
    from meshmuon.cli.parallel import Parallel

__all__ = ["HELP", "train_command"]


def train_command(
    context: typer.Context,
    *,
    optimizers: options.Optimizers = "muon,adamw",
    size: options.SizeOption = None,
    steps: options.Steps = None,
    lr: options.MuonLr = None,
    adamw_lr: options.AdamWLr = None,
    seed: options.Seed = 0,
    seeds: options.Seeds = 1,
    corpus: options.CorpusOption = None,
    device: options.DeviceOption = Device.auto,
    parallel: options.ParallelOption = Layout.none,
    out: options.Out = None,
    resume: options.Resume = None,
    json_output: options.Json = False,
    verbose: options.Verbose = False,
    sweep: options.Sweep = False,
    experiment: options.ExperimentOption = None,
    rates: options.Rates = None,
    jobs: options.Jobs = 1,
) -> None:
    """Train a small GPT with Muon and AdamW, and compare.

    Args:
        context: Typer's.
        optimizers: Which to compare, by commas.
        size: Which preset to train.
        steps: Optimizer steps, by default those of the size.
        lr: Peak learning rate of Muon, by default that of the size.
        adamw_lr: Peak learning rate of AdamW, by default that of the size.
        seed: Decides weights, batches and sample.
        seeds: Runs of each optimizer.
        corpus: File or folder to learn, by default Python's standard library.
        device: Where to train.
        parallel: How torchrun's processes share the model.
        out: Folder to write to, by default one named after the time.
        resume: Folder of an earlier run to go on with.
        json_output: Keep stdout for the summary.
        verbose: Show tracebacks.
        sweep: Short for `experiment="sweep"`.
        experiment: Run a named experiment instead.
        rates: A sweep's results, for an experiment.
        jobs: Runs at a time, in an experiment.
    """
    with one_line_errors("train", verbose=verbose):
        options.check_together(context)
        folder = resume or out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        named = Named.sweep if sweep else experiment
        if named:
            _run_experiment(named, folder, size=size, device=device, corpus=corpus, steps=steps, rates=rates, jobs=jobs)
            return
        where = pick_device(device.value)
        if resume:
            comparison = load_comparison(resume).on(where)
        else:
            chosen = size or (Size.tiny if where == "cpu" else Size.base)
            configs = _configs(optimizers, chosen, where, steps=steps, lr=lr, adamw_lr=adamw_lr, seed=seed, seeds=seeds)
            comparison = Comparison(folder=folder, configs=configs, corpus=corpus)
        _run(comparison, layout=parallel, is_new=resume is None, json_output=json_output)


def _configs(
    optimizers: str,
    size: Size,
    device: str,
    *,
    steps: int | None,
    lr: float | None,
    adamw_lr: float | None,
    seed: int,
    seeds: int,
) -> tuple[TrainConfig, ...]:
    names = [name.strip() for name in optimizers.split(",")]
    unknown = [name for name in names if name not in LABELS]
    if unknown or len(set(names)) < len(names):
        known = one_of(LABELS)
        do = f"Give each of {known} at most once, with commas between."
        raise ValueError(message("optimizers", found=f"found {optimizers!r}", do=do))
    configs = []
    for each in range(seed, seed + seeds):
        for name in names:
            config = preset(size.value, name, device=device)  # type: ignore[arg-type]
            rate = adamw_lr if name == "adamw" else lr
            optimizer = dataclasses.replace(config.optimizer, lr=config.optimizer.lr if rate is None else rate)
            steps_here = config.steps if steps is None else steps
            configs.append(dataclasses.replace(config, optimizer=optimizer, seed=each, steps=steps_here))
    return tuple(configs)


def _run(comparison: Comparison, *, layout: Layout, is_new: bool, json_output: bool) -> None:
    """Train, watch, conclude."""
    window = comparison.configs[0].model.context + 1
    corpus = load_corpus(comparison.corpus, window=window)
    from meshmuon.cli.parallel import start_parallel

    parallel = start_parallel(layout.value, comparison.configs[0].device)
    try:
        comparison = dataclasses.replace(comparison, folder=Path(parallel.told_by_first(str(comparison.folder))))
        for config in comparison.configs:
            parallel.check(config)
        if is_new and parallel.first:
            comparison.save()
        console = Console(stderr=json_output, highlight=False, markup=False, quiet=not parallel.first)
        log = RunLog(comparison.folder / "log.jsonl")
        last = _watch(comparison, corpus, log, console, parallel)
        if isinstance(last, Stopped) and last.reason == INTERRUPTED:
            again = _resume_command(comparison, parallel)
            fail("train", f"interrupted at step {last.step} and saved. To go on: {again}", EXIT_INTERRUPTED)
        if parallel.first:
            _conclude(comparison, log, console, json_output=json_output)
    finally:
        parallel.leave()


def _watch(
    comparison: Comparison, corpus: Corpus, log: RunLog, console: Console, parallel: "Parallel"
) -> Record | None:
    """Show records as they come; the last one comes back, or None if there was nothing left to run."""
    last: Record | None = None
    display = Display(console, [c for c in comparison.configs if not log.is_over(label_of(c))] or comparison.configs)
    try:
        with Interrupts() as interrupts, display.bars:
            for config, last in compare(comparison, corpus, log, parallel=parallel, interrupted=interrupts.asked):
                display.show(config, last)
    finally:
        log.close()
    return last


def _conclude(comparison: Comparison, log: RunLog, console: Console, *, json_output: bool) -> None:
    """The verdict, the figure, the sample; exit code 1 if a run diverged."""
    outcomes = outcomes_of(comparison, log)
    facts = summary(outcomes)
    (comparison.folder / "summary.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    curve = _curve(outcomes, comparison.folder / "curve.png", console)
    ends = [record for record in log.of(label_of(comparison.configs[0])) if isinstance(record, Finished)]
    for end in ends:
        console.print(f"\nA sample of {label_of(comparison.configs[0])}:\n{_printable(end.sample)}\n")
    for sentence in facts["verdict"]:
        console.print(sentence)
    written = ["log.jsonl", "summary.json", *(["curve.png"] if curve else [])]
    console.print(f"\n{comparison.folder}: {', '.join(written)}", soft_wrap=True)
    if json_output:
        print(json.dumps({**facts, "folder": str(comparison.folder)}))
    stopped = [outcome for outcome in outcomes if outcome.stopped]
    if stopped:
        fail("train", f"{label_of(stopped[0].config)} stopped: {stopped[0].stopped}", EXIT_FAILED)


def _curve(outcomes: list[Outcome], path: Path, console: Console) -> bool:
    """Draw the curve, or say why not."""
    if find_spec("matplotlib") is None:
        console.print("no curve.png: matplotlib is missing (pip install 'meshmuon[train]')")
        return False
    if all(outcome.stopped for outcome in outcomes):
        return False
    config = outcomes[0].config
    title = f"Byte-level GPT, {config.steps} steps of {config.batch} x {config.model.context} bytes"
    draw_curves(outcomes, path, title=title, seconds=True)
    return True


def _run_experiment(
    experiment: Named,
    folder: Path,
    *,
    size: Size | None,
    device: Device,
    corpus: Path | None,
    steps: int | None,
    rates: Path | None,
    jobs: int,
) -> None:
    from meshmuon.cli.sweep import run

    run(
        experiment.value,
        size=size.value if size else None,
        device=device.value,
        corpus=corpus,
        out=folder / f"{experiment.value}.json",
        rates=rates,
        steps=steps,
        jobs=jobs,
    )


def _resume_command(comparison: Comparison, parallel: "Parallel") -> str:
    if parallel.mode == "none":
        return f"meshmuon train --resume {comparison.folder}"
    torchrun = f"torchrun --nproc-per-node {parallel.size} -m"
    return f"{torchrun} meshmuon train --resume {comparison.folder} --parallel {parallel.mode}"


def _printable(text: str) -> str:
    # A young model emits any byte, and an escape sequence would garble the terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

"""Runs many training runs, several at once if asked, and keeps each result as soon as it is there."""

import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshmuon.cli.corpus import Corpus, load_corpus
from meshmuon.cli.experiments import Experiment
from meshmuon.cli.outcomes import Outcome, Results, check_same_start, load_results, outcome_of
from meshmuon.cli.settings import SizeName, TrainConfig
from meshmuon.cli.training import train
from meshmuon.errors import message


def run_experiment(
    configs: Sequence[TrainConfig], out: Path, *, facts: dict[str, Any], corpus: Path | None, jobs: int, threads: int
) -> Iterator[tuple[Outcome, int]]:
    """Run what is not yet in a file of results, and add it there.

    Args:
        configs: The runs.
        out: The JSON file. Runs that it holds are not run again, so a killed experiment goes on where it was.
        facts: What the file says about itself, from `facts_of`.
        corpus: As for `load_corpus`.
        jobs: Runs at a time, each in a process of its own.
        threads: Threads of each.

    Yields:
        Each new outcome, and how many runs remain.
    """
    results = _continued(out, facts) if out.exists() else Results(facts=facts)
    done = [outcome.config for outcome in results.outcomes]
    missing = [config for config in configs if config not in done]
    for count, outcome in enumerate(_outcomes(missing, corpus, jobs=jobs, threads=threads), 1):
        results.outcomes.append(outcome)
        check_same_start(results.outcomes)
        results.save(out)
        yield outcome, len(missing) - count


def facts_of(experiment: Experiment, size: SizeName, corpus: Corpus, *, device: str, jobs: int) -> dict[str, Any]:
    """What a file of results says about itself: nothing that names a folder of this machine.

    Args:
        experiment: Which one.
        size: Which size of model.
        corpus: What is learned.
        device: Where.
        jobs: Runs at a time: with several, seconds tell little.

    Returns:
        Plain JSON types.
    """
    facts = asdict(corpus.facts)
    facts["source"] = corpus.facts.label
    where = torch.cuda.get_device_name() if device != "cpu" else f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return {
        "experiment": experiment,
        "size": size,
        "corpus": facts,
        "machine": where,
        "torch": torch.__version__,
        "jobs": jobs,
        "date": time.strftime("%Y-%m-%d"),
    }


def _continued(out: Path, facts: dict[str, Any]) -> Results:
    results = load_results(out)
    for key in ("experiment", "size", "corpus", "torch"):
        if results.facts[key] != facts[key]:
            found = f"holds results with {key} {results.facts[key]}, not {facts[key]}"
            raise ValueError(message(str(out), found=found, do="Give another --out."))
    return results


def _outcomes(configs: Sequence[TrainConfig], corpus: Path | None, *, jobs: int, threads: int) -> Iterator[Outcome]:
    """Run everything, here or in processes; outcomes come as they are ready."""
    if not configs:
        return
    start = (corpus, configs[0].model.context + 1, threads)
    if jobs == 1:
        _Worker.start(*start)
        yield from map(_Worker.execute, configs)
        return
    # "spawn": a forked process cannot use CUDA.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(configs)), mp_context=spawn, initializer=_Worker.start, initargs=start)
    try:
        for future in as_completed([pool.submit(_Worker.execute, config) for config in configs]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Worker:
    """What a worker process keeps between runs."""

    corpus: Corpus

    @classmethod
    def start(cls, corpus: Path | None, window: int, threads: int) -> None:
        torch.set_num_threads(threads)
        cls.corpus = load_corpus(corpus, window=window)

    @classmethod
    def execute(cls, config: TrainConfig) -> Outcome:
        return outcome_of(config, list(train(config, cls.corpus)))

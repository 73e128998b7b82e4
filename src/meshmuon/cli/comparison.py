"""A comparison of optimizers: its runs one after another, in a folder from which it can go on after a kill.

The folder holds `config.json` (what to run), `log.jsonl` (every record), `checkpoints/` (the latest of each run), and
at the end `summary.json` and `curve.png`.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from meshmuon.cli.corpus import Corpus, CorpusFacts
from meshmuon.cli.outcomes import Outcome, check_same_start, outcome_of
from meshmuon.cli.records import (
    INTERRUPTED,
    Finished,
    Record,
    Started,
    Stepped,
    Stopped,
    Validated,
    as_dict,
    record_from,
)
from meshmuon.cli.settings import TrainConfig, config_from
from meshmuon.errors import message

if TYPE_CHECKING:  # it imports torch
    from meshmuon.cli.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared, and where it is written.

    Attributes:
        folder: Where everything of it lies.
        configs: One per run.
        corpus: File or folder to learn; None: Python's standard library.
    """

    folder: Path
    configs: tuple[TrainConfig, ...]
    corpus: Path | None

    def save(self) -> None:
        """Write `config.json`.

        Raises:
            ValueError: The folder holds another comparison, or cannot be written.
        """
        stored = {"runs": [c.as_dict() for c in self.configs], "corpus": self.corpus and str(self.corpus.absolute())}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "config.json").open("x", encoding="utf-8") as file:  # "x": never over another run's
                json.dump(stored, file, indent=1)
        except OSError as error:
            path = self.folder / "config.json"
            found = f"cannot create {path} ({error.strerror})"
            raise ValueError(message("out", found=found, do="Give another --out, or --resume this one.")) from error

    def on(self, device: str) -> "Comparison":
        """The same on another device.

        Args:
            device: As torch names it.

        Returns:
            A comparison whose runs train there.
        """
        return replace(self, configs=tuple(replace(config, device=device) for config in self.configs))


def load_comparison(folder: Path) -> Comparison:
    """Read what a comparison was.

    Args:
        folder: The `--out` of an earlier one.

    Returns:
        The comparison.

    Raises:
        ValueError: There is none.
    """
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        corpus = stored["corpus"] and Path(stored["corpus"])
        return Comparison(folder=folder, configs=tuple(config_from(run) for run in stored["runs"]), corpus=corpus)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        do = "Give the folder of an earlier run, the one with config.json."
        raise ValueError(message("resume", found=f"no run to go on with in {folder} ({error})", do=do)) from error


def label_of(config: TrainConfig) -> str:
    """The name of a run inside its comparison.

    Args:
        config: What is run.

    Returns:
        Optimizer and seed.
    """
    return f"{config.optimizer.name}-seed{config.seed}"


class RunLog:
    """`log.jsonl`: one JSON object per record, on disk as soon as it is known.

    Args:
        path: The file; what it holds already is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, list[Record]] = {}
        self._file: TextIO | None = None
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            stored = _parsed(line)
            if stored is not None:
                self._records.setdefault(stored.pop("run"), []).append(record_from(stored))

    def of(self, run: str) -> Sequence[Record]:
        """The records of a run.

        Args:
            run: Its label.

        Returns:
            In the order they came.
        """
        return tuple(self._records.get(run, ()))

    def is_over(self, run: str) -> bool:
        """Whether a run needs nothing more: it finished, or its loss stopped being finite.

        Args:
            run: Its label.

        Returns:
            False also for a run that was interrupted.
        """
        ends = [record for record in self.of(run) if isinstance(record, Finished | Stopped)]
        return any(not (isinstance(end, Stopped) and end.reason == INTERRUPTED) for end in ends)

    def check_corpus(self, facts: CorpusFacts) -> None:
        """Refuse to go on with another text than the one that was begun.

        Args:
            facts: Of the corpus as it is now.

        Raises:
            ValueError: It has changed.
        """
        for records in self._records.values():
            for record in records:
                if isinstance(record, Started) and record.corpus.sha256 != facts.sha256:
                    found = f"{facts.source} has changed since the run began (sha256)"
                    raise ValueError(message("resume", found=found, do="Restore it, or begin anew with another --out."))

    def check_whole(self, run: str) -> None:
        """Refuse to sum up a run whose records are gone, though its checkpoint says that it is over.

        Args:
            run: Its label.

        Raises:
            ValueError: There are no measurements of it.
        """
        if not any(isinstance(record, Validated) for record in self.of(run)):  # every run begins with one
            do = "Restore it, or begin anew with another --out."
            raise ValueError(message(str(self.path), found=f"no measurements of {run}, which is over", do=do))

    def rewind(self, run: str, step: int | None) -> None:
        """Forget what a run did after its checkpoint: it will do that again.

        Args:
            run: Its label.
            step: Of the checkpoint; None: there is none.
        """

        def stays(record: Record) -> bool:
            if step is None or isinstance(record, Finished | Stopped):
                return False
            return not isinstance(record, Stepped | Validated) or record.step <= step

        self._records[run] = [record for record in self.of(run) if stays(record)]

    def open(self) -> None:
        """Begin writing: first what is known, as a whole, then each record as it comes."""
        unfinished = self.path.with_suffix(".part")
        lines = [_line(run, record) for run, records in self._records.items() for record in records]
        unfinished.write_text("".join(lines), encoding="utf-8")
        os.replace(unfinished, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, run: str, record: Record) -> None:
        """Append a record.

        Args:
            run: The label of its run.
            record: Anything `train` yields.
        """
        assert self._file is not None, "open() comes first"
        self._records.setdefault(run, []).append(record)
        self._file.write(_line(run, record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def compare(
    comparison: Comparison, corpus: Corpus, log: RunLog, *, parallel: "Parallel", interrupted: Callable[[], bool]
) -> Iterator[tuple[TrainConfig, Record]]:
    """Run what is not yet in the log, from the checkpoints that are there.

    Args:
        comparison: What to run.
        corpus: What to learn.
        log: Read and written on the first process only.
        parallel: The processes that train together; all must iterate.
        interrupted: Asked between steps; all stop when any process says so.

    Yields:
        Each record with the config of its run. An interrupted run is the last.
    """
    from meshmuon.cli.checkpoints import Checkpoints
    from meshmuon.cli.training import train

    over = [label_of(config) for config in comparison.configs if log.is_over(label_of(config))]
    over = json.loads(parallel.told_by_first(json.dumps(over)))
    waiting = [config for config in comparison.configs if label_of(config) not in over]
    places = {label_of(c): Checkpoints(comparison.folder / "checkpoints" / label_of(c), parallel) for c in waiting}
    log.check_corpus(corpus.facts)
    if parallel.first:
        for label, place in places.items():
            at = place.latest()
            log.rewind(label, at.step if at else None)
        log.open()
    for config in waiting:
        label = label_of(config)
        for record in train(config, corpus, parallel=parallel, checkpoints=places[label], interrupted=interrupted):
            if parallel.first:
                log.write(label, record)
            yield config, record
            if isinstance(record, Stopped) and record.reason == INTERRUPTED:
                return


def outcomes_of(comparison: Comparison, log: RunLog) -> list[Outcome]:
    """Sum up the runs that are over, after a check that all began alike.

    Args:
        comparison: What was run.
        log: What it gave.

    Returns:
        One per run.
    """
    over = [config for config in comparison.configs if log.is_over(label_of(config))]
    for config in over:
        log.check_whole(label_of(config))
    outcomes = [outcome_of(config, log.of(label_of(config))) for config in over]
    check_same_start(outcomes)
    return outcomes


def _line(run: str, record: Record) -> str:
    # NaN is not JSON: readers in other languages would refuse the line.
    return json.dumps({"run": run, **as_dict(record)}, allow_nan=False) + "\n"


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of the log; None for one that a kill cut short."""
    try:
        stored: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return stored

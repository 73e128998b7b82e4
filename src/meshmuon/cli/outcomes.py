"""What runs came to: one JSON file per experiment, and the means and spreads over seeds that tables show."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshmuon.cli.experiments import COMPARED, Rates
from meshmuon.cli.records import Record, Started, Stepped, Stopped, Validated
from meshmuon.cli.settings import TrainConfig, config_from
from meshmuon.errors import message

Point = tuple[int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
        config: What was run.
        weights_sha256: Of its initial weights.
        curve: (step, validation loss, seconds of training) at each validation.
        optimizer_share: Median share of a step that the optimizer took.
        tokens_per_second: Median over steps.
        stopped: Why it ended early, or None.
    """

    config: TrainConfig
    weights_sha256: str
    curve: tuple[Point, ...]
    optimizer_share: float
    tokens_per_second: float
    stopped: str | None = None

    @property
    def loss(self) -> float:
        """The last validation loss; infinite for a run that did not come to its end."""
        return math.inf if self.stopped else self.curve[-1][1]

    @property
    def step_seconds(self) -> float:
        """Seconds of the median step: what else the machine did in between does not count."""
        return self.config.batch * self.config.model.context / self.tokens_per_second

    @property
    def seconds(self) -> float:
        """Seconds of training at the median step, without validation."""
        return self.curve[-1][0] * self.step_seconds if self.tokens_per_second else 0.0

    @property
    def setting(self) -> tuple[str, str, float]:
        """What is the same for all seeds: optimizer, lr rule and learning rate."""
        chosen = self.config.optimizer
        return (chosen.name, chosen.adjust_lr_fn, chosen.lr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The runs of one optimizer, lr rule and learning rate.

    Attributes:
        optimizer: Its name.
        rule: Its lr rule.
        lr: Its peak learning rate.
        outcomes: One per seed.
    """

    optimizer: str
    rule: str
    lr: float
    outcomes: tuple[Outcome, ...]

    @property
    def mean(self) -> float:
        """Mean of the final losses; infinite if any seed failed."""
        return statistics.fmean(outcome.loss for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        losses = [outcome.loss for outcome in self.outcomes]
        return statistics.stdev(losses) if len(losses) > 1 and math.isfinite(sum(losses)) else 0.0

    def __str__(self) -> str:
        failed = sum(outcome.stopped is not None for outcome in self.outcomes)
        if failed:
            return f"diverged ({failed} of {len(self.outcomes)})"
        return f"{self.mean:.4f} ± {self.spread:.4f}" if len(self.outcomes) > 1 else f"{self.mean:.4f}"


@dataclass(kw_only=True)
class Results:
    """The runs of an experiment so far.

    Attributes:
        facts: Experiment, size, corpus and machine.
        outcomes: One per run.
    """

    facts: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)

    def settings(self) -> list[Setting]:
        """The runs by optimizer, rule and rate, in order of these.

        Returns:
            One record for each.
        """
        found: dict[tuple[str, str, float], list[Outcome]] = {}
        for outcome in sorted(self.outcomes, key=lambda outcome: (outcome.setting, outcome.config.seed)):
            found.setdefault(outcome.setting, []).append(outcome)
        return [
            Setting(optimizer=name, rule=rule, lr=lr, outcomes=tuple(outcomes))
            for (name, rule, lr), outcomes in found.items()
        ]

    def best(self, optimizer: str) -> Setting:
        """The setting of an optimizer with the lowest mean loss.

        Args:
            optimizer: Its name.

        Returns:
            The best.
        """
        return min((setting for setting in self.settings() if setting.optimizer == optimizer), key=lambda s: s.mean)

    def brackets(self, optimizer: str) -> bool:
        """Whether the best learning rate of an optimizer has worse ones on both sides.

        Args:
            optimizer: Its name.

        Returns:
            False if it lies at an edge of the grid.
        """
        rates = sorted(setting.lr for setting in self.settings() if setting.optimizer == optimizer)
        return rates[0] < self.best(optimizer).lr < rates[-1]

    def save(self, path: Path) -> None:
        """Write everything, so that a reader never sees half a file.

        Args:
            path: Where to.
        """
        runs = [{**asdict(outcome), "curve": [list(point) for point in outcome.curve]} for outcome in self.outcomes]
        text = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(f'{{"facts": {json.dumps(self.facts)},\n"runs": [\n{text}\n]}}\n', encoding="utf-8")
        os.replace(unfinished, path)


def outcome_of(config: TrainConfig, records: Sequence[Record]) -> Outcome:
    """Sum a run up.

    Args:
        config: What was run.
        records: All that `train` yielded.

    Returns:
        Its outcome.
    """
    steps = [record for record in records if isinstance(record, Stepped)]
    stopped = [record.reason for record in records if isinstance(record, Stopped)]
    return Outcome(
        config=config,
        weights_sha256=next(record.weights_sha256 for record in records if isinstance(record, Started)),
        curve=tuple((r.step, r.loss, r.elapsed) for r in records if isinstance(r, Validated)),
        optimizer_share=statistics.median(r.optimizer_share for r in steps) if steps else 0.0,
        tokens_per_second=statistics.median(r.tokens_per_second for r in steps) if steps else 0.0,
        stopped=stopped[0] if stopped else None,
    )


def load_results(path: Path) -> Results:
    """Read what `Results.save` wrote.

    Args:
        path: The JSON file.

    Returns:
        The results.

    Raises:
        ValueError: The file is missing or something else.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Results(facts=stored["facts"], outcomes=[_outcome_from(run) for run in stored["runs"]])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        do = "Give the JSON file that an experiment wrote."
        raise ValueError(message(str(path), found=f"no results ({error!r})", do=do)) from error


def best_rates(path: Path) -> Rates:
    """The best learning rate of each optimizer in a sweep.

    Args:
        path: What the sweep wrote.

    Returns:
        Rates of "muon" and "adamw".

    Raises:
        ValueError: The best lies at an edge of the grid: a better one may lie outside.
    """
    results = load_results(path)
    rates: Rates = {}
    for name in COMPARED:
        if not results.brackets(name):
            found = f"the best learning rate of {name}, {results.best(name).lr:g}, lies at the edge of the grid"
            raise ValueError(message(str(path), found=found, do="Widen GRIDS in cli/experiments.py."))
        rates[name] = results.best(name).lr
    return rates


def check_same_start(outcomes: Iterable[Outcome]) -> None:
    """Check that runs with the same seed began with the same weights.

    Args:
        outcomes: Runs to be compared.
    """
    weights: dict[tuple[int, str], str] = {}
    for outcome in outcomes:
        key = (outcome.config.seed, str(outcome.config.model))
        if weights.setdefault(key, outcome.weights_sha256) != outcome.weights_sha256:
            raise AssertionError(f"seed {key[0]}: optimizers began with different weights")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, style: Literal["plain", "markdown"]) -> str:
    """Lay a table out.

    Args:
        header: Names of the columns.
        rows: Cells.
        style: Aligned text, or Markdown.

    Returns:
        Lines without a newline at the end.
    """
    if style == "markdown":
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _outcome_from(stored: dict[str, Any]) -> Outcome:
    curve = tuple((step, loss, seconds) for step, loss, seconds in stored["curve"])
    return Outcome(**{**stored, "config": config_from(stored["config"]), "curve": curve})

"""Who won, in words and numbers: how many steps and seconds Muon needed for the loss that AdamW ended with."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshmuon.cli.outcomes import Outcome, Point
from meshmuon.cli.settings import LABELS

_NOISE = 0.01  # of a validation loss, relative: what one measurement may lie above another by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One challenger against the baseline, on the same seed.

    Attributes:
        seed: Of both.
        challenger_loss: Final validation loss.
        baseline_loss: Likewise.
        steps: Steps after which the challenger had the baseline's final loss; None: never.
        seconds: Seconds of training until then, each step taken as long as the median one.
        baseline_steps: All steps of the baseline.
        baseline_seconds: All its seconds.
    """

    seed: int
    challenger_loss: float
    baseline_loss: float
    steps: float | None
    seconds: float | None
    baseline_steps: int
    baseline_seconds: float


def reached(curve: Sequence[Point], loss: float) -> float | None:
    """When a curve first came down to a loss, between two measurements by a straight line.

    Args:
        curve: (step, loss, seconds), in order of steps.
        loss: The loss to reach.

    Returns:
        Steps, or None if it never did.
    """
    for before, after in zip([curve[0], *curve], curve, strict=False):
        if after[1] <= loss:
            drop = before[1] - after[1]
            share = (before[1] - loss) / drop if drop > 0 else 1.0
            return before[0] + share * (after[0] - before[0])
    return None


def races(outcomes: Sequence[Outcome], challenger: str, baseline: str) -> list[Race]:
    """Pair the runs of two optimizers by seed.

    Args:
        outcomes: Runs of both, perhaps of others.
        challenger: Name of one optimizer.
        baseline: Name of the other.

    Returns:
        One race for each seed that both finished.
    """
    by_name = {
        name: {o.config.seed: o for o in outcomes if o.config.optimizer.name == name and o.stopped is None}
        for name in (challenger, baseline)
    }
    found = []
    for seed, theirs in by_name[baseline].items():
        if seed in by_name[challenger]:
            ours = by_name[challenger][seed]
            steps = reached(ours.curve, theirs.loss)
            found.append(
                Race(
                    seed=seed,
                    challenger_loss=ours.loss,
                    baseline_loss=theirs.loss,
                    steps=steps,
                    seconds=None if steps is None else steps * ours.step_seconds,
                    baseline_steps=theirs.curve[-1][0],
                    baseline_seconds=theirs.seconds,
                )
            )
    return found


def verdict(outcomes: Sequence[Outcome]) -> list[str]:
    """Say who won, Muon or AdamW.

    Args:
        outcomes: The runs.

    Returns:
        Sentences, none if the runs hold no such pair.
    """
    ours, theirs = LABELS["muon"], LABELS["adamw"]
    lines = [
        f"{LABELS[o.config.optimizer.name]}, seed {o.config.seed}, did not finish: {o.stopped}."
        for o in outcomes
        if o.stopped
    ]
    pairs = races(outcomes, "muon", "adamw")
    if not pairs:
        return lines
    gaps = [pair.baseline_loss - pair.challenger_loss for pair in pairs]
    finals = (_mean([p.challenger_loss for p in pairs]), _mean([p.baseline_loss for p in pairs]))
    lines.append(f"Validation loss: {ours} {finals[0]}, {theirs} {finals[1]} nats/byte.")
    winners = [pair for pair in pairs if pair.steps is not None]
    if len(winners) == len(pairs):
        lines.append(_speed(pairs, ours, theirs))
    else:
        lost = f"in {len(pairs) - len(winners)} of {len(pairs)} seeds " if len(pairs) > 1 else ""
        where = "there" if winners else "here"
        lines.append(f"{ours} did NOT reach the final loss of {theirs} {lost}in as many steps: AdamW wins {where}.")
    lines.extend(filter(None, map(_risen, outcomes)))
    if len(pairs) == 1:
        lines.append("One seed: a small difference may be chance. --seeds 3 tells the spread.")
    elif abs(statistics.fmean(gaps)) < 2 * statistics.stdev(gaps) / math.sqrt(len(gaps)):
        lines.append("The difference is within two standard errors over seeds: call it a draw.")
    return lines


def _speed(pairs: Sequence[Race], ours: str, theirs: str) -> str:
    steps = statistics.fmean(pair.steps or 0.0 for pair in pairs)
    seconds = statistics.fmean(pair.seconds or 0.0 for pair in pairs)
    all_steps = statistics.fmean(pair.baseline_steps for pair in pairs)
    all_seconds = statistics.fmean(pair.baseline_seconds for pair in pairs)
    took, instead = f"{seconds:.1f}", f"{all_seconds:.1f}"
    in_time = f"{took} s instead of {instead} s"
    if took == instead:
        in_time = f"and as long, {took} s"
    elif seconds > all_seconds:
        in_time = f"but {in_time}: its steps cost more than they saved"
    return (
        f"{ours} needed {steps:.0f} steps for the loss that {theirs} had after {all_steps:.0f} "
        f"({round(steps) / all_steps:.0%}), {in_time}, by the median step of each."
    )


def _risen(outcome: Outcome) -> str | None:
    """Say it where a run would have done better with fewer steps: its last loss is no measure of the optimizer."""
    step, lowest, _ = min(outcome.curve, key=lambda point: point[1])
    if outcome.stopped or outcome.loss <= lowest * (1 + _NOISE):
        return None
    name = f"{LABELS[outcome.config.optimizer.name]}, seed {outcome.config.seed}"
    seen = f"{name}: the loss was lowest after {step} steps ({lowest:.3f}) and has risen since."
    return f"{seen} Take fewer steps, or more text."


def _mean(losses: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.3f}{spread}"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `summary.json` holds.

    Args:
        outcomes: All runs of a comparison.

    Returns:
        Plain JSON types: each run's end, the races by seed, and the verdict's sentences.
    """
    runs = [
        {
            "optimizer": o.config.optimizer.name,
            "lr": o.config.optimizer.lr,
            "seed": o.config.seed,
            "steps": o.curve[-1][0],
            "loss": None if o.stopped else o.loss,
            "seconds": o.seconds,
            "optimizer_share": o.optimizer_share,
            "tokens_per_second": o.tokens_per_second,
            "stopped": o.stopped,
        }
        for o in outcomes
    ]
    pairs = [asdict(pair) for pair in races(outcomes, "muon", "adamw")]
    return {"runs": runs, "races": pairs, "verdict": verdict(outcomes)}

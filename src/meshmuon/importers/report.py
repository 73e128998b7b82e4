"""What an import did: taken, left, and what the two runs do not have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshmuon.errors import some
from meshmuon.importers.match import Match
from meshmuon.importers.records import Target
from meshmuon.polar.coefficients import KELLER, resolve_schedule


@dataclass(frozen=True, slots=True)
class Taken:
    """State that was taken.

    Attributes:
        name: The parameter's name.
        algorithm: "muon" or "adamw".
        by: How its state was found: by "name" or by "order".
        factor: What its momentum was multiplied with.
    """

    name: str
    algorithm: str
    by: str
    factor: float


@dataclass(frozen=True, slots=True)
class Left:
    """State that was not taken.

    Attributes:
        key: What it is called there.
        count: Of how many parameters.
        reason: Why.
    """

    key: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A hyper-parameter that was otherwise in the other run. Ours is kept.

    Attributes:
        key: Our name for it.
        theirs: What the checkpoint says.
        ours: What this optimizer has.
        names: The parameters it concerns.
    """

    key: str
    theirs: Any
    ours: Any
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What `load_foreign_state` did; print it.

    Attributes:
        source: The word of the format that was read.
        title: What wrote it.
        taken: State that was taken, one record for each of our parameters.
        left: State that was not taken, and why.
        differences: Hyper-parameters that differ. This optimizer keeps its own.
        notes: What else a user should know.
    """

    source: str
    title: str
    taken: tuple[Taken, ...]
    left: tuple[Left, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        counts = {word: sum(each.algorithm == word for each in self.taken) for word in ("muon", "adamw")}
        ways = {way: sum(each.by == way for each in self.taken) for way in ("name", "order")}
        lines = [
            f"state of {self.title} (source={self.source!r}): {counts['muon']} parameters with Muon, "
            f"{counts['adamw']} with AdamW",
            "  found      " + ", ".join(f"{count} by {way}" for way, count in ways.items() if count),
            f"  momentum   {self._momentum()}",
        ]
        lines += [f"  not taken  {each.key} of {each.count} parameters: {each.reason}" for each in self.left]
        if self.differences:
            lines.append("  hyper-parameters that differ (this optimizer keeps its own):")
        lines += [
            f"    {each.key:<18} there {each.theirs}, here {each.ours}   {_who(each)}" for each in self.differences
        ]
        return "\n".join([*lines, *(f"  note       {note}" for note in self.notes)])

    def _momentum(self) -> str:
        factors = sorted({each.factor for each in self.taken if each.algorithm == "muon"})
        if factors in ([], [1.0]):
            return "as it was saved: a moving average"
        return f"a sum of gradients there, a moving average here: times {', '.join(f'{f:.6g}' for f in factors)}"


def _who(difference: Difference) -> str:
    return f"({some(difference.names, limit=2)})"


def find_differences(matches: Iterable[Match]) -> tuple[Difference, ...]:
    """Compare the hyper-parameters of two runs.

    Args:
        matches: Our parameters and what was saved for them.

    Returns:
        One record for each pair of values that differ.
    """
    found: dict[tuple[str, str, str], list[Match]] = {}
    values: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    for each in matches:
        theirs, ours = dict(each.saved.settings), our_settings(each.target)
        for key in ours:
            if key in theirs and not _equal(key, theirs, ours):
                place = (key, repr(_plain(theirs[key])), repr(_plain(ours[key])))
                values[place] = (_plain(theirs[key]), _plain(ours[key]))
                found.setdefault(place, []).append(each)
    return tuple(
        Difference(place[0], *values[place], tuple(each.target.name for each in where))
        for place, where in found.items()
    )


def our_settings(target: Target) -> dict[str, Any]:
    """Give what a parameter is trained with here, in the form the checkpoints of others have it.

    Args:
        target: The parameter.

    Returns:
        Name → value; for AdamW with the ratio and the exemption of vectors worked in.
    """
    group = target.group
    if target.algorithm == "muon":
        keys = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
        return {key: group[key] for key in (*keys, "extra_scale_factor", "weight_decay_mode")}
    decays = group["decay_vectors"] or not target.is_vector
    return {
        "lr": float(group["lr"]) * group["adamw_lr_ratio"],
        "weight_decay": group["weight_decay"] if decays else 0.0,
        "betas": tuple(group["betas"]),
        "eps": group["eps"],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    if isinstance(value, (list, tuple)):
        flat = tuple(_plain(each) for each in value)
        return "keller" if flat == KELLER else flat
    return "original" if value == "shape_scaling" else value


def _equal(key: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    one, other = _plain(theirs[key]), _plain(ours[key])
    if key == "ns_coefficients":
        return _schedule(one, theirs.get("ns_steps", 5)) == _schedule(other, ours["ns_steps"])
    if key == "weight_decay_mode" and not theirs.get("weight_decay") and not ours["weight_decay"]:
        return True
    return bool(_close(one, other))


def _schedule(coefficients: Any, steps: int) -> Any:
    try:
        return resolve_schedule(coefficients, steps)
    except (TypeError, ValueError):  # theirs need not be safe
        return coefficients


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (one, other))
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)

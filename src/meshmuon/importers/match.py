"""Whose state is whose: by name where both sides have names, else by order among parameters of one shape.

[Note: by order] An optimizer saves the order in which it was given its parameters, and no names unless it was given
those too. Several of them sort by shape or size, which keeps the order inside a shape. So the first saved matrix of a
shape is taken to be our first of that shape, and so on. That is right if both runs listed the parameters in the
model's order. Where the checkpoint has several groups with the same shape (embedding and head, in most models), the
order of groups is the user's own, and a guess would swap moments without any sign: that is refused without names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from meshmuon.config import Algorithm
from meshmuon.errors import CheckpointError, message, some
from meshmuon.importers.records import Saved, Target
from meshmuon.layout.names import normalise_names

Kind: TypeAlias = tuple[Algorithm, tuple[int, ...]]

_MODEL = "Load the checkpoint of this model"
_GIVE_NAMES = "Pass names=[...]: the parameters' names in the order the other optimizer was given them"
_ROUTING = "Train it with the same algorithm here (overrides=...), or load the checkpoint of this model"


@dataclass(frozen=True, slots=True)
class Match:
    """A parameter and the state that is meant for it.

    Attributes:
        target: Our parameter.
        saved: Its state.
        by: How it was found: "name" or "order".
    """

    target: Target
    saved: Saved
    by: str


def with_names(saved: Sequence[Saved], empty: Sequence[str], names: Sequence[str]) -> list[Saved]:
    """Give saved parameters the names a user knows.

    Args:
        saved: What the checkpoint holds, in order.
        empty: Saved parameters without state.
        names: One name for each.

    Returns:
        The same with names.

    Raises:
        CheckpointError: If they do not fit.
    """
    if empty or len(names) != len(saved):
        found = f"{len(names)} names for {len(saved)} saved parameters with state and {len(empty)} without"
        raise CheckpointError(message("names", found=found, do="Give one for each, all with state"))
    return [replace(each, name=name) for each, name in zip(saved, normalise_names(names), strict=True)]


def match(saved: Sequence[Saved], targets: Sequence[Target], *, named: bool, empty: Sequence[str]) -> list[Match]:
    """Find the state of every parameter.

    Args:
        saved: What the checkpoint holds.
        targets: Our parameters.
        named: Whether these have names of their own.
        empty: Saved parameters without state, for messages.

    Returns:
        One match for each of our parameters, in their order.

    Raises:
        CheckpointError: Names what is missing, left over or of the wrong shape.
    """
    problems: list[str] = []
    matches = _by_name([each for each in saved if each.name is not None], targets, problems) if named else []
    taken = {each.target.key for each in matches}
    rest = [each for each in targets if each.key not in taken]
    nameless = [each for each in saved if each.name is None or not named]
    if not problems:  # a wrong name would come back as a wrong count
        matches += _by_order(nameless, rest, problems)
    found = {each.target.key for each in matches}
    missing = [each.name for each in targets if each.key not in found]
    if missing and not problems:
        problems.append(message(f"parameter {some(map(repr, missing))}", found="no saved state", do=_MODEL))
    if problems and empty:
        do = "Pass the files of all ranks, if each saved its own; zeros stand for one that never had a gradient"
        problems.insert(0, message("the checkpoint", found=f"nothing saved for {some(empty)}", do=do))
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"nothing was loaded. {' | '.join(problems[:3])}{more}")
    return sorted(matches, key=lambda each: each.target.key)


def _by_name(saved: Iterable[Saved], targets: Iterable[Target], problems: list[str]) -> list[Match]:
    ours = {target.name: target for target in targets}
    matches: dict[str, Match] = {}
    for each in saved:
        name = str(each.name)
        subject, target = f"parameter {name!r}", ours.get(name)
        if name in matches:
            problems.append(message(subject, found="saved twice", do="Give each parameter one name"))
        elif target is None:
            found = f"saved at {each.label}, this optimizer has no parameter of that name"
            problems.append(message(subject, found=found, do=_MODEL))
        elif target.algorithm != each.algorithm:
            found = f"saved with {each.algorithm}, this optimizer trains it with {target.algorithm}"
            problems.append(message(subject, found=found, do=_ROUTING))
        elif target.shape != each.shape:
            found = f"saved state of shape {each.shape}, it should have {target.shape}"
            problems.append(message(subject, found=found, do=_MODEL))
        else:
            matches[name] = Match(target, each, "name")
    return list(matches.values())


def _by_order(saved: Iterable[Saved], targets: Iterable[Target], problems: list[str]) -> list[Match]:
    theirs, ours = defaultdict(list), defaultdict(list)
    for each in saved:
        theirs[each.algorithm, each.shape].append(each)
    for target in targets:
        ours[target.algorithm, target.shape].append(target)
    matches = []
    for kind in dict.fromkeys([*ours, *theirs]):
        here, there = ours[kind], theirs[kind]
        spare = {k: v for k, v in theirs.items() if v and not ours[k]}
        if len(here) != len(there) and (there or spare):  # what is simply missing is said by the caller
            problems.append(_unequal(kind, here, there, spare))
        elif len({each.group for each in there}) > 1:
            found = f"saved in several groups, {some(each.label for each in there)}, without names"
            subject = f"parameters {some(repr(each.name) for each in here)} of one shape {kind[1]}"
            problems.append(message(subject, found=found, do=_GIVE_NAMES))
        else:
            matches += [Match(target, each, "order") for target, each in zip(here, there, strict=False)]
    return matches


def _unequal(
    kind: Kind,
    here: Sequence[Target],
    there: Sequence[Saved],
    spare: dict[Kind, list[Saved]],
) -> str:
    algorithm, shape = kind
    if not here:
        found = f"state of {algorithm} of shape {shape}, which no parameter here takes"
        return message(some(each.label for each in there), found=found, do=_ROUTING)
    subject = f"parameter {some(repr(each.name) for each in here)}"
    shapes = some(f"{k[0]} {k[1]}" for k in spare)
    found = f"{len(here)} of shape {shape} that take {algorithm}, the checkpoint has {len(there)}" + (
        f" (and state of {shapes})" if spare else ""
    )
    return message(subject, found=found, do=_ROUTING)

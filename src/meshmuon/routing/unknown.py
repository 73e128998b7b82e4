"""What to say about parameters that no rule is for: all of them at once, so that one answer is enough."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence

from meshmuon.errors import message, some
from meshmuon.layout.names import starred
from meshmuon.routing.candidates import Candidate
from meshmuon.routing.rules import is_uncut_stack

_TWO_WAYS_OUT = (
    'Say how it is a stack of matrices, overrides={"NAME": View(experts=True)} or View(flatten=True), '
    'or send it to AdamW, overrides={"NAME": "adamw"}'
)
_EXPERTS_WAYS_OUT = (
    'If these are experts, one below the other, say so: overrides={"NAME": View(split_rows=(rows of one,) * experts)}; '
    'if it is one matrix: overrides={"NAME": "muon"}'
)
_WITH_THE_MODEL = "Pass the model: Muon(model) knows convolutions. Or by name: "


def what_to_do_about(unknown: Sequence[Candidate], known: Sequence[str]) -> str:
    """Ask how parameters are to be trained.

    Args:
        unknown: Those that no rule is for; at least one.
        known: Names of all others, which no proposed pattern may match.

    Returns:
        The text of an error.
    """
    first = unknown[0]
    uncut = [candidate.name for candidate in unknown if is_uncut_stack(candidate)]
    stacks = [candidate.name for candidate in unknown if candidate.name not in uncut]
    ways = [
        _proposed(way_out, _patterns(names, known))
        for way_out, names in ((_TWO_WAYS_OUT, stacks), (_EXPERTS_WAYS_OUT, uncut))
        if names
    ]
    hint = _WITH_THE_MODEL if not first.modules and first.tensor.ndim > 2 else ""
    found = f"{first.tensor.ndim}-D of shape {tuple(first.tensor.shape)}"
    return message(f"parameter {first.name!r}", found=found, do=hint + ". ".join(ways))


def _proposed(way_out: str, patterns: Sequence[str]) -> str:
    first, *others = patterns
    likewise = f". Likewise {some(map(repr, others), limit=20)}" if others else ""
    return way_out.replace("NAME", first) + likewise


def _patterns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names that differ in their numbers alone become one pattern, unless others would match it too."""
    several = Counter(map(starred, names))
    fits = {star for star, count in several.items() if count > 1 and not fnmatch.filter(known, star)}
    return list(dict.fromkeys(starred(name) if starred(name) in fits else name for name in names))

"""From whatever a user loaded to state dicts by rank and part, and to the one whose way of writing it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshmuon.errors import CheckpointError, message, one_of
from meshmuon.groups.keys import FOREIGN
from meshmuon.importers.dialects import DIALECTS, Dialect
from meshmuon.importers.records import StateDict

_WHERE = "state"
_FORMS = (
    'Pass the optimizer\'s state_dict(), a pair of them (or {"muon": ..., "adamw": ...}) where AdamW was a second '
    "optimizer, or a list with the file of every rank"
)


def unpack(state: Any) -> list[list[StateDict]]:
    """Sort what was given by rank, and inside by optimizer.

    Args:
        state: A state dict; a pair, or {"muon": ..., "adamw": ...}; or a list with one of these for each rank.

    Returns:
        For each rank, the state dicts of its optimizers.

    Raises:
        CheckpointError: If it is none of these.
    """
    if isinstance(state, Mapping):
        return _unpack_dict(state)
    if not isinstance(state, Sequence) or isinstance(state, (str, bytes)) or not state:
        raise CheckpointError(message(_WHERE, found=f"a {type(state).__name__}", do=_FORMS))
    items = [unpack(item) for item in state]
    single = [item[0][0] for item in items if len(item) == 1 and len(item[0]) == 1]
    # Files of several ranks describe the same groups; a Muon and an AdamW do not.
    if len(single) == len(items) and any(_structure(each) != _structure(single[0]) for each in single):
        return [single]
    if any(len(item) != 1 or len(item[0]) != len(items[0][0]) for item in items):
        found = "lists in lists that do not stand for ranks"
        raise CheckpointError(message(_WHERE, found=found, do=_FORMS))
    return [item[0] for item in items]


def _unpack_dict(state: Mapping[Any, Any]) -> list[list[StateDict]]:
    if "param_groups" in state:
        groups = state["param_groups"]
        fits = isinstance(groups, Sequence) and all(
            isinstance(g, Mapping) and isinstance(g.get("params"), Sequence) for g in groups
        )
        if not fits or not isinstance(state.get("state"), Mapping):
            raise CheckpointError(message(_WHERE, found="param_groups without params or state", do=_FORMS))
        return [[state]]
    if state and set(state) <= {"muon", "adamw"}:
        parts = [unpack(state[key]) for key in ("muon", "adamw") if key in state]
        if len({len(ranks) for ranks in parts}) == 1:
            return [[each for ranks in parts for each in ranks[i]] for i in range(len(parts[0]))]
        raise CheckpointError(message(_WHERE, found="files of different numbers of ranks", do=_FORMS))
    inside = [repr(key) for key, value in state.items() if isinstance(value, Mapping) and "param_groups" in value]
    do = f"Pass what is under {' or '.join(inside)}" if inside else _FORMS
    raise CheckpointError(message(_WHERE, found=f"a dict with the keys {sorted(map(str, state))[:5]}", do=do))


def _structure(state: StateDict) -> list[tuple[list[str], int]]:
    return [(sorted(group), len(group["params"])) for group in state["param_groups"]]


def find_dialect(parts: Sequence[StateDict], source: str) -> Dialect:
    """Tell who saved a checkpoint.

    Args:
        parts: The state dicts of one rank.
        source: "auto", or the user's word for it.

    Returns:
        Its way of writing.

    Raises:
        ValueError: If the word is unknown.
        CheckpointError: If it is not to be told, or there is no Muon in it.
    """
    if source != "auto" and source not in DIALECTS:
        raise ValueError(message("source", found=repr(source), do=f"Use {one_of(['auto', *DIALECTS])}"))
    groups = [group for part in parts for group in part["param_groups"]]
    keys = {key for group in groups if not _is_plain_adamw(group) for key in group} - _NO_SIGN
    if "decay_vectors" in keys or "extra_scale_factor" in keys:
        raise CheckpointError(
            message(_WHERE, found="a checkpoint of meshmuon itself", do="Use opt.load_state_dict(...)")
        )
    if not keys:
        found = "saved by torch.optim.AdamW or Adam: there is no momentum for the parameters that take Muon"
        do = "Start with fresh optimizer state, and warm the learning rate up"
        raise CheckpointError(message(_WHERE, found=found, do=do))
    return _told_by(keys) if source == "auto" else DIALECTS[source]


_NO_SIGN = {"params", "param_names", "names", *FOREIGN}


def _is_plain_adamw(group: Mapping[str, Any]) -> bool:
    return "betas" in group and "momentum" not in group and group.get("kind") != "muon"


def _told_by(keys: Collection[str]) -> Dialect:
    found = [dialect for dialect in DIALECTS.values() if dialect.known_by(keys)]
    if len(found) == 1:
        return found[0]
    candidates = found or list(DIALECTS.values())
    listed = ", ".join(f'source="{dialect.word}" ({dialect.title})' for dialect in candidates)
    what = "which could be of several" if found else "which are of none that is known"
    raise CheckpointError(
        message(_WHERE, found=f"groups with the keys {sorted(keys)}, {what}", do=f"Say whose it is: {listed}")
    )

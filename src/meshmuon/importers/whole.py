"""One state dict of the files of all ranks: owners' entries side by side, slices and stacks put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon.errors import CheckpointError, message
from meshmuon.importers.dialects import Dialect
from meshmuon.importers.records import StateDict

_ALL_RANKS = "Pass a list with the file of every rank, in the order of ranks"
_UNCUT = 1024  # nanochat's AdamW cuts parameters along their first dim over ranks, from this many numbers on


def whole_state(ranks: Sequence[StateDict], dialect: Dialect) -> dict[Any, dict[str, Any]]:
    """Put the state of all ranks together.

    Args:
        ranks: The same optimizer's state dict of each rank, in the order of ranks.
        dialect: Whose it is.

    Returns:
        Parameter number → its whole state.

    Raises:
        CheckpointError: If files are missing, or ranks do not agree.
    """
    keys = dict.fromkeys(key for rank in ranks for key in rank["state"])
    if dialect.word != "nanochat":
        return {key: _united([rank["state"].get(key) for rank in ranks], key) for key in keys}
    state: dict[Any, dict[str, Any]] = {}
    stacked = [group for group in ranks[0]["param_groups"] if group.get("kind") == "muon" and group["params"]]
    for group in stacked:
        state.update(_unstacked(ranks, group["params"]))
    for key in keys:
        if key not in state and not any(key in group["params"] for group in stacked):
            state[key] = _joined([rank["state"].get(key) for rank in ranks], key)
    return state


def _united(entries: Sequence[Mapping[str, Any] | None], key: Any) -> dict[str, Any]:
    """What one rank or several have of a parameter; owners alone have its momentum, all of them the rest."""
    result: dict[str, Any] = {}
    for entry in entries:
        for word, value in (entry or {}).items():
            if word in result and not _same(result[word], value):
                found = f"{word} differs between ranks"
                raise CheckpointError(message(f"saved parameter {key!r}", found=found, do="Save from one step"))
            result.setdefault(word, value)
    return result


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _joined(entries: Sequence[Mapping[str, Any] | None], key: Any) -> dict[str, Any]:
    """AdamW's moments: slices along the first dim, in the order of ranks; small ones whole on every rank."""
    there = [entry for entry in entries if entry]
    first = dict(there[0]) if there else {}
    if len(there) < 2 or "exp_avg" not in first:
        return _united(entries, key)
    if len(there) != len(entries):
        found = f"state on {len(there)} of {len(entries)} ranks"
        raise CheckpointError(message(f"saved parameter {key!r}", found=found, do=_ALL_RANKS))
    moments = ("exp_avg", "exp_avg_sq")
    # Slices of something trained differ; those of something that never had a gradient are all zeros.
    telling = first["exp_avg"].numel() < _UNCUT or bool(first["exp_avg_sq"].any())
    if telling and all(_same(first[word], entry[word]) for entry in there for word in moments):
        return first
    return {**first, **{word: torch.cat([entry[word] for entry in there]) for word in moments}}


def _unstacked(ranks: Sequence[StateDict], params: Sequence[Any]) -> dict[Any, dict[str, Any]]:
    """The matrices of a group lie stacked in the state of its first one; each rank has the next few of them."""
    chunks = [rank["state"].get(params[0], {}).get("momentum_buffer") for rank in ranks]
    held = [chunk for chunk in chunks if chunk is not None]
    if not held:
        return {}
    count, size = len(params), held[0].shape[0]
    # The last ranks' stacks are filled up with zeros, so that all are of one size.
    if len(held) != len(ranks) or any(chunk.shape != held[0].shape for chunk in held) or size != -(-count // len(held)):
        found = f"momentum of {size} matrices on {len(held)} of {len(ranks)} ranks, the group has {count}"
        raise CheckpointError(message(f"saved parameters {params[0]!r} to {params[-1]!r}", found=found, do=_ALL_RANKS))
    matrices = torch.cat(held).unbind()
    extra = {k: v for k, v in ranks[0]["state"][params[0]].items() if k != "momentum_buffer"}
    return {key: {"momentum_buffer": matrices[i], **(extra if i == 0 else {})} for i, key in enumerate(params)}

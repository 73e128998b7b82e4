"""load_foreign_state: another optimizer's checkpoint, taken as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon.errors import CheckpointError
from meshmuon.exchange.groups import global_rank
from meshmuon.importers.match import Match, match, with_names
from meshmuon.importers.read import Reader
from meshmuon.importers.records import targets
from meshmuon.importers.report import ImportReport, Left, Taken, find_differences
from meshmuon.importers.unpack import find_dialect, unpack
from meshmuon.layout.whole import laid_like
from meshmuon.muon import Muon


def load_foreign_state(
    opt: Muon, state: Any, *, source: str = "auto", names: Sequence[str] | None = None
) -> ImportReport:
    """Continue a run that began with another Muon: take the state its optimizer saved.

    Momentum and AdamW's moments are taken; hyper-parameters stay as they are here, and the report lists those that
    differ. Momentum that is a sum of gradients (heavy ball) is multiplied with 1 - momentum, in fp32, and rounded once
    to the dtype of the state here. Parameters are found by name where both sides have names, else by order among those
    of one shape (docs/moving-from.md). Everything is checked first: an error leaves the optimizer as it was.

    Whole tensors are cut for DTensor parameters; every rank passes the same checkpoint.

    Args:
        opt: The optimizer to load into.
        state: A state dict. Where AdamW was a second optimizer: a pair, or {"muon": ..., "adamw": ...}. Where each rank
            saved what it owns (Keller's and nanochat's): a list with every rank's file, in the order of ranks.
        source: "torch", "keller", "keller_2024", "moonlight", "dion", "nanochat" or "motif"; "auto" tells by content.
        names: The parameters' names in the order the checkpoint lists them, part after part and group after group, for
            one that has no names of its own.

    Returns:
        What was taken, what was not and why, and which hyper-parameters differ.

    Raises:
        TypeError: If `opt` is not ours.
        ValueError: If `source` is unknown.
        CheckpointError: Names what does not fit; nothing was changed.
    """
    if not isinstance(opt, Muon):
        raise TypeError(f"opt: a {type(opt).__name__}. Pass a meshmuon.Muon")
    ranks = unpack(state)
    dialect = find_dialect(ranks[0], source)
    reader = Reader(ranks, dialect)
    saved = reader.saved if names is None else with_names(reader.saved, reader.empty, names)
    ours = targets(opt)
    named = all("param_names" in group for group in opt.param_groups if group["params"])
    matches = match(saved, ours, named=named, empty=reader.empty)
    opt.load_state_dict(
        {"state": {each.target.key: _converted(each) for each in matches}, "param_groups": _packed(opt)}
    )
    return ImportReport(
        source=dialect.word,
        title=dialect.title,
        taken=tuple(Taken(m.target.name, m.target.algorithm, m.by, m.saved.factor) for m in matches),
        left=tuple(Left(key, len(who), reader.why_left(key)) for key, who in reader.left.items()),
        differences=find_differences(matches),
        notes=dialect.notes,
    )


def _packed(opt: Muon) -> list[dict[str, Any]]:
    """The groups as `state_dict` writes them. That itself is a collective under `grad_sync`, and not needed here."""
    numbers = iter(range(sum(len(group["params"]) for group in opt.param_groups)))
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in opt.param_groups]


def _converted(each: Match) -> dict[str, Tensor]:
    """A parameter's state in our form and layout. The dtype is settled when it is loaded, by rounding once."""
    result = {}
    for key, value in each.saved.state.items():
        if key == "momentum_buffer" and each.saved.factor != 1.0:
            value = value.to(torch.promote_types(value.dtype, torch.float32)) * each.saved.factor
        if key != "step":
            try:
                value = laid_like(
                    each.target.name, value, each.target.param, rank=global_rank(), layout=each.target.layout
                )
            except ValueError as error:
                raise CheckpointError(f"nothing was loaded. {error}") from error
        result[key] = value
    return result

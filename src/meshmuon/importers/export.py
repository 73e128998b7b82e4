"""export_torch_state: the way back, to torch.optim.Muon and torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshmuon.errors import CheckpointError, message, warn_user
from meshmuon.importers.records import Target, targets
from meshmuon.importers.report import our_settings
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.muon import Muon
from meshmuon.polar.coefficients import KELLER, resolve_schedule

_TORCH_RULES = ("original", "shape_scaling", "match_rms_adamw")


def export_torch_state(opt: Muon) -> dict[str, dict[str, Any]]:
    """Write the state for torch's own optimizers.

    The groups of both state dicts hold `param_names` where the parameters have names: build torch's optimizers with
    groups of these parameters, in this order, and load. AdamW's vectors stand in groups of their own where they are not
    decayed. Under `grad_sync` every rank must call.

    Args:
        opt: The optimizer.

    Returns:
        {"muon": state dict for torch.optim.Muon, "adamw": state dict for torch.optim.AdamW}.

    Raises:
        CheckpointError: If torch.optim.Muon cannot do what a group does: name, found, what to change.
    """
    if not isinstance(opt, Muon):
        raise TypeError(f"opt: a {type(opt).__name__}. Pass a meshmuon.Muon")
    state = opt.state_dict()["state"]
    groups: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    kept: dict[str, dict[int, Any]] = {"muon": {}, "adamw": {}}
    everything = targets(opt)
    for group in opt.param_groups:
        members = [each for each in everything if each.group is group]
        for part in _parts(members):
            algorithm = group["algorithm"]
            first = len(kept[algorithm])
            kept[algorithm].update({first + i: _entry(state[each.key]) for i, each in enumerate(part)})
            settings = _muon_settings(part) if algorithm == "muon" else _adamw_settings(part[0])
            names = {"param_names": [each.name for each in part]} if "param_names" in group else {}
            schedules = {}
            if "initial_lr" in group:  # as torch's schedulers find it when they go on
                schedules["initial_lr"] = float(group["initial_lr"]) * group.get("adamw_lr_ratio", 1.0)
            groups[algorithm].append(
                {**settings, **schedules, **names, "params": list(range(first, first + len(part)))}
            )
    return {word: {"state": kept[word], "param_groups": groups[word]} for word in groups}


def _parts(members: Sequence[Target]) -> list[list[Target]]:
    """A group, or its matrices and its vectors where only the former are decayed."""
    if not members or members[0].algorithm == "muon" or members[0].group["decay_vectors"]:
        return [list(members)] if members else []
    parts = ([each for each in members if not each.is_vector], [each for each in members if each.is_vector])
    return [part for part in parts if part]


def _entry(state: Mapping[str, Any]) -> dict[str, Any]:
    """torch keeps steps on the host, unless it is told otherwise."""
    return {key: (value.cpu() if key == "step" else value).detach().clone() for key, value in state.items()}


def _adamw_settings(target: Target) -> dict[str, Any]:
    return {**torch.optim.AdamW([torch.zeros(1)]).defaults, **our_settings(target)}


def _muon_settings(members: Sequence[Target]) -> dict[str, Any]:
    group = members[0].group
    for each in members:
        if each.param.ndim != 2 or MatrixView.of(group["view"]) != MatrixView():
            found = f"shape {each.shape} seen as {group['view']}; torch.optim.Muon knows whole 2-D matrices only"
            raise CheckpointError(message(f"parameter {each.name!r}", found=found, do="It cannot be exported"))
        if each.shape != tuple(each.param.shape):
            found = f"a plain shard of {each.shape}; torch.optim.Muon would orthogonalize each shard by itself"
            raise CheckpointError(message(f"parameter {each.name!r}", found=found, do="It cannot be exported"))
    refused = {
        "adjust_lr_fn": group["adjust_lr_fn"] not in _TORCH_RULES,
        "extra_scale_factor": group["extra_scale_factor"] != 1.0,
        "weight_decay_mode": group["weight_decay_mode"] != "decoupled" and group["weight_decay"] != 0,
    }
    for key, cannot in refused.items():
        if cannot:
            do = "Change it here first; meshmuon.convert_lr converts learning rates"
            found = f"{group[key]!r}, which torch.optim.Muon does not have"
            raise CheckpointError(message(f"{key} of {members[0].name!r}", found=found, do=do))
    schedule = resolve_schedule(group["ns_coefficients"], group["ns_steps"])
    if len(set(schedule)) > 1:
        warn_user(
            f"torch.optim.Muon has one triple for all steps: {group['ns_coefficients']!r} became Keller Jordan's there"
        )
    ours = {key: group[key] for key in ("weight_decay", "momentum", "nesterov", "eps", "ns_steps")}
    rule = "original" if group["adjust_lr_fn"] == "shape_scaling" else group["adjust_lr_fn"]
    defaults = torch.optim.Muon([torch.zeros(1, 1)]).defaults
    triple = schedule[0] if len(set(schedule)) == 1 else KELLER
    return {**defaults, **ours, "lr": float(group["lr"]), "ns_coefficients": triple, "adjust_lr_fn": rule}

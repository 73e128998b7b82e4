"""What we have no key or argument for: refused, saying which of ours was probably meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from meshmuon.config import Algorithm, Execution
from meshmuon.errors import message
from meshmuon.groups.keys import ADAMW_KEYS, MUON_ARGUMENTS, MUON_KEYS

_OTHERS_WORDS = {
    "warmup_step": "max_in_flight",
    "num_ns_steps": "ns_steps",
    "backend_steps": "ns_steps",
    "newton_schulz_steps": "ns_steps",
    "coefficients": "ns_coefficients",
    "mu": "momentum",
    "beta1": "betas",
    "wd": "weight_decay",
    "learning_rate": "lr",
    "adjust_lr": "adjust_lr_fn",
    "scale_mode": "adjust_lr_fn",
    "rms_scale": "adjust_lr_fn",
    "adamw_betas": "betas",
    "adam_betas": "betas",
    "adam_eps": "adamw_eps",
    "epsilon": "adamw_eps",
    "adamw_lr": "adamw_lr_ratio",
    "adam_lr": "adamw_lr_ratio",
    "fallback_lr_scale": "adamw_lr_ratio",
    "adamw_wd": "adamw_weight_decay",
    "chunk_size": "workspace_bytes",
    "none_grad": "release_grads",
    "is_muon_func": "overrides",
    "cautious_wd": "weight_decay_mode",
    "clip_config": "qk_clip",
}
# The same inside a group, where AdamW's values have their own names.
_OTHERS_KEYS = {
    **dict.fromkeys(("adamw_eps", "adam_eps", "epsilon"), "eps"),
    **dict.fromkeys(("adamw_weight_decay", "adamw_wd"), "weight_decay"),
    **dict.fromkeys(("adamw_lr", "adam_lr"), "lr"),
}
_GROUP_ONLY = tuple(key for key in MUON_KEYS if key not in MUON_ARGUMENTS)
_ARGUMENTS = {field.name for field in fields(Execution)} | {"overrides", "expert_keys"}
_NO_MESH = "Nothing is needed: meshes and layouts are read from the tensors"
_WITHOUT_OURS = dict.fromkeys(("distributed_mesh", "device_mesh", "mesh"), _NO_MESH)
_TORCH_FLAGS = {
    "maximize": "Negate the loss instead",
    "foreach": "Tensors are always processed together where that helps",
    "fused": "AdamW parameters always use torch's fused kernels where there are any",
    "capturable": "Steps can be captured as they are: use cuda_graph=True",
    "amsgrad": "AdamW parameters take AdamW as published; give those that need it to an optimizer of their own",
    "differentiable": "The orthogonalization is not meant to be differentiated through",
}


def refuse_keywords(given: Mapping[str, Any], *, known: Callable[..., Any]) -> None:
    """Refuse what the constructor has no argument for.

    Args:
        given: The keywords and their values.
        known: The constructor.

    Raises:
        TypeError: If a keyword is unknown; suggests ours.
    """
    ours = [name for name in inspect.signature(known).parameters if name not in ("self", "unknown")]
    refuse_unknown(given, ours, where="Muon(...)")


def refuse_unknown(unknown: Iterable[str], known: Sequence[str], *, where: str) -> None:
    """Refuse keywords that are not ours, saying which of ours was probably meant.

    Args:
        unknown: The keywords.
        known: Ours.
        where: What was called or written, for the message.

    Raises:
        TypeError: If there is any.
    """
    for name in unknown:
        if name in _TORCH_FLAGS:
            raise TypeError(message(f"{where} {name!r}", found="not supported", do=_TORCH_FLAGS[name]))
        raise TypeError(message(f"{where} {name!r}", found="unknown", do=_advice(name, known)))


def _advice(name: str, known: Sequence[str]) -> str:
    """Say what was probably meant; never a word that would be refused in turn."""
    if name in _WITHOUT_OURS:
        return _WITHOUT_OURS[name]
    if "params" in known and name in _GROUP_ONLY:
        return f"It is said of a parameter group: edit meshmuon.param_groups(model), e.g. group[{name!r}] = ..."
    words = _OTHERS_WORDS if "params" in known else {**_OTHERS_WORDS, **_OTHERS_KEYS}
    meant = words.get(name, name)
    if meant not in known and meant in _ARGUMENTS:
        return f"Give it to the optimizer: Muon(..., {meant}=...)"
    near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"These are known: {', '.join(known)}"


def refuse_others_keys(unknown: Sequence[str], algorithm: Algorithm, *, where: str) -> None:
    """Refuse keys of the other algorithm.

    Args:
        unknown: The keys that are none of the group's algorithm.
        algorithm: What the group takes.
        where: The group, for messages.

    Raises:
        TypeError: If one belongs to the other algorithm.
    """
    for key in unknown:
        is_adamws = key.startswith(("adamw_", "adam_")) and algorithm == "muon"
        if key in MUON_KEYS or key in ADAMW_KEYS or is_adamws:
            found = f"no hyper-parameter of {algorithm}, which this group takes"
            raise TypeError(message(f"{where}[{key!r}]", found=found, do="Remove it, or change the algorithm"))

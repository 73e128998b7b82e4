"""Parameter groups: what a user may write in one, and the plain, checked, complete form it takes in the optimizer.

A group dict holds numbers, strings and tuples only, so that it pickles and loads with `weights_only=True`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from torch import Tensor

from meshmuon.config import (
    Algorithm,
    LRRule,
    RouteChoice,
    WeightDecayMode,
    check_betas,
    check_bool,
    check_lr,
    check_number,
    check_state_dtype,
    check_word,
)
from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.mesh import layout_of, local
from meshmuon.layout.names import check_names, normalise_names
from meshmuon.layout.records import ParameterRecord, Routing
from meshmuon.layout.tensors import check_parameter
from meshmuon.polar.coefficients import plain_coefficients, resolve_schedule

_Check = Callable[[str, Any], Any]

_non_negative: _Check = partial(check_number, low=0.0)
_positive: _Check = partial(check_number, low=0.0, open_low=True)


def _check_rule(name: str, value: Any) -> str:
    return "original" if value is None else check_word(name, value, get_args(LRRule))


def _check_view(name: str, value: Any) -> dict[str, Any]:
    return MatrixView.of(value).as_dict()


def _check_route(name: str, value: Any) -> str:
    if value == "gram":
        raise ValueError(message(name, found="'gram' is not in this version", do='Use "auto" or "owner"'))
    return check_word(name, value, get_args(RouteChoice))


def _keep(name: str, value: Any) -> Any:
    return value


# The hyper-parameters of each algorithm: name → check. `_keep` ones are checked together, below.
MUON_KEYS: dict[str, _Check] = {
    "lr": check_lr,
    "weight_decay": _non_negative,
    "momentum": partial(check_number, low=0.0, high=1.0, open_high=True),
    "nesterov": check_bool,
    "ns_coefficients": _keep,
    "eps": _positive,
    "ns_steps": _keep,
    "adjust_lr_fn": _check_rule,
    "extra_scale_factor": _positive,
    "weight_decay_mode": lambda name, value: check_word(name, value, get_args(WeightDecayMode)),
    "state_dtype": check_state_dtype,
    "view": _check_view,
    "route": _check_route,
}
ADAMW_KEYS: dict[str, _Check] = {
    "lr": check_lr,
    "weight_decay": _non_negative,
    "betas": check_betas,
    "eps": _positive,
    "adamw_lr_ratio": _non_negative,
    "decay_vectors": check_bool,
}
_CONSTRUCTOR_NAMES = {("adamw", "eps"): "adamw_eps", ("adamw", "weight_decay"): "adamw_weight_decay"}
_KEYS = {"muon": MUON_KEYS, "adamw": ADAMW_KEYS}
_STRUCTURE = ("params", "param_names", "names", "algorithm", "use_muon", "kind")
# Written into groups by torch's schedulers.
_FOREIGN = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
# Of the distributed routes, which this version does not have yet.
_LATER = ("mode", "sharded")

_LATER_ARGUMENTS = {
    "qk_clip": None,
    "process_group": None,
    "grad_sync": "none",
    "max_grad_norm": None,
    "sharded": None,
    "offload": False,
}

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
    "clip_config": "qk_clip",
    "is_muon_func": "overrides",
    "distributed_mesh": "process_group",
    "cautious_wd": "weight_decay_mode",
}
_TORCH_FLAGS = {
    "maximize": "Negate the loss instead",
    "foreach": "Tensors are always processed together where that helps",
    "fused": "AdamW parameters always use torch's fused kernels where there are any",
    "capturable": "No value is read back from the device during a step, so nothing needs to be switched on",
    "differentiable": "The orthogonalization is not meant to be differentiated through",
}


def refuse_keywords(given: Mapping[str, Any], *, known: Callable[..., Any]) -> None:
    """Refuse what the constructor has no argument for.

    Args:
        given: The keywords and their values.
        known: The constructor.

    Raises:
        TypeError: If a keyword is unknown; suggests ours.
        ValueError: If it asks for something this version does not have.
    """
    for name, value in given.items():
        if name in _LATER_ARGUMENTS and value != _LATER_ARGUMENTS[name]:
            do = f"Leave it at {_LATER_ARGUMENTS[name]!r}"
            raise ValueError(message(name, found=f"{value!r} is not in this version", do=do))
    ours = [name for name in inspect.signature(known).parameters if name not in ("self", "unknown")]
    refuse_unknown([name for name in given if name not in _LATER_ARGUMENTS], ours, where="Muon(...)")


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
        near = difflib.get_close_matches(name, known, n=1)
        meant = _OTHERS_WORDS.get(name) or (near[0] if near else None)
        do = f"Did you mean {meant!r}?" if meant else f"Known are: {', '.join(known)}"
        raise TypeError(message(f"{where} {name!r}", found="unknown", do=do))


def check_defaults(defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the constructor's own values, under the constructor's names.

    Args:
        defaults: Per algorithm, name → value.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.
    """
    for algorithm, values in defaults.items():
        for key, check in _KEYS[algorithm].items():
            check(_CONSTRUCTOR_NAMES.get((algorithm, key), key), values[key])
    resolve_schedule(defaults["muon"]["ns_coefficients"], defaults["muon"]["ns_steps"])


def complete_group(
    group: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], *, index: int
) -> dict[str, Any]:
    """Turn a group as a user may write it into its plain, checked, complete form.

    Args:
        group: What the user wrote.
        defaults: Per algorithm, the values for what the group leaves out.
        index: Which group it is, for messages.

    Returns:
        A new dict: `params` (tensors, or (name, tensor) pairs), `algorithm` and all its hyper-parameters.

    Raises:
        TypeError: If it is not a dict, or has unknown keys or values of the wrong type.
        ValueError: If a value is out of range, or the algorithm is unclear.
    """
    where = f"param_groups[{index}]"
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(message(where, found=f"{type(group).__name__}", do='Write {"params": [...], ...}'))
    params = named_params(group, where=where)
    algorithm = _algorithm(group, params, where=where)
    keys = _KEYS[algorithm]
    unknown = [key for key in group if key not in (*_STRUCTURE, *_FOREIGN, *keys)]
    _refuse_others_keys(unknown, algorithm, where=where)
    refuse_unknown(unknown, [*keys, "algorithm", "param_names"], where=where)
    values = {**defaults[algorithm], **{key: group[key] for key in keys if key in group}}
    result: dict[str, Any] = {"params": params, "algorithm": algorithm}
    for key, check in keys.items():
        result[key] = check(f"{where}[{key!r}]", values[key])
    result.update({key: group[key] for key in _FOREIGN if key in group})
    if algorithm == "muon":
        schedule = resolve_schedule(result["ns_coefficients"], result["ns_steps"])
        result["ns_coefficients"] = plain_coefficients(result["ns_coefficients"], schedule)
    else:
        _settle_adamw(result, group)
    return result


def _refuse_others_keys(unknown: Sequence[str], algorithm: Algorithm, *, where: str) -> None:
    for key in unknown:
        if key in MUON_KEYS or key in ADAMW_KEYS:
            found = f"no hyper-parameter of {algorithm}, which this group takes"
            raise TypeError(message(f"{where}[{key!r}]", found=found, do="Remove it, or change the algorithm"))
        if key in _LATER:
            raise ValueError(message(f"{where}[{key!r}]", found="not in this version", do="Remove it"))


def _settle_adamw(result: dict[str, Any], group: Mapping[str, Any]) -> None:
    """A group's own lr and weight decay are meant as written: no ratio, and for vectors too."""
    if "lr" in group and "adamw_lr_ratio" not in group:
        result["adamw_lr_ratio"] = 1.0
    if "weight_decay" in group and "decay_vectors" not in group:
        result["decay_vectors"] = True


def named_params(group: Mapping[str, Any], *, where: str) -> list[Any]:
    """Read a group's parameters, giving them the names found beside them.

    Args:
        group: What the user wrote.
        where: The group, for messages.

    Returns:
        (name, tensor) pairs with normalised names, or bare tensors.

    Raises:
        ValueError: If the names do not fit, or a parameter is given twice.
        TypeError: If `params` is a set, whose order is random.
    """
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError(message(where, found="a set of parameters", do="Use a list: the order of a set is random"))
    if not isinstance(params, Iterable):
        found = f"params is a {type(params).__name__}"
        raise TypeError(message(where, found=found, do="Use a list of tensors, or of (name, tensor) pairs"))
    listed = [params] if isinstance(params, Tensor) else list(params)
    names = group.get("param_names", group.get("names"))
    if names is not None and not any(isinstance(item, tuple) for item in listed):
        names = list(names)
        if len(names) != len(listed):
            found = f"{len(names)} names for {len(listed)} parameters"
            raise ValueError(message(where, found=found, do="Give one name for each"))
        listed = list(zip(names, listed, strict=True))
    if listed and all(isinstance(item, tuple) and len(item) == 2 for item in listed):
        check_names((name for name, _ in listed), where=where)
        short = normalise_names(name for name, _ in listed)
        listed = [(name, tensor) for name, (_, tensor) in zip(short, listed, strict=True)]
    tensors = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in listed]
    if len({id(tensor) for tensor in tensors}) != len(tensors):
        raise ValueError(message(where, found="the same parameter twice", do="Give each parameter once"))
    return listed


def check_group_parameters(group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, index: int) -> None:
    """Check that a group's parameters can take its algorithm, and are not in another group.

    Args:
        group: The complete group.
        others: The groups the optimizer already has.
        index: Which group it will be.

    Raises:
        TypeError: If a parameter is of a kind that cannot be trained.
        ValueError: If it does not fit its algorithm or view, or is already there.
    """
    taken = {id(tensor) for other in others for tensor in other["params"]}
    taken_names = {name for other in others for name in other.get("param_names", ())}
    for position, item in enumerate(group["params"]):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (_unnamed(index, position), item)
        check_parameter(name, tensor)
        if id(tensor) in taken or name in taken_names:
            found = "already in another parameter group"
            raise ValueError(message(f"parameter {name!r}", found=found, do="Give each parameter once"))
        if group["algorithm"] == "muon":
            MatrixView.of(group["view"]).blocks(name, tuple(tensor.shape))


def group_records(param_groups: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> list[ParameterRecord]:
    """Describe every parameter of an optimizer as data.

    Args:
        param_groups: The optimizer's groups.
        reasons: Name → why it was routed so; a parameter without one was put into its group by the user.

    Returns:
        The records, in order.

    Raises:
        TypeError: If a parameter is of a kind that cannot be trained.
        ValueError: If it is a flat shard.
    """
    records = []
    for index, group in enumerate(param_groups):
        names = group.get("param_names") or [_unnamed(index, i) for i in range(len(group["params"]))]
        view = MatrixView.of(group.get("view"))
        for position, (name, tensor) in enumerate(zip(names, group["params"], strict=True)):
            check_parameter(name, tensor)
            reason = reasons.get(name, f"its group says {group['algorithm']}")
            routing = Routing(name, group["algorithm"], reason, view)
            records.append(
                ParameterRecord(
                    routing=routing,
                    group=index,
                    position=position,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    device=tensor.device,
                    local_shape=tuple(local(tensor).shape),
                    layout=layout_of(name, tensor),
                    route=group.get("route", "auto"),
                )
            )
    return records


def _unnamed(group: int, position: int) -> str:
    return f"params.{group}.{position}"


def _algorithm(group: Mapping[str, Any], params: Sequence[Any], *, where: str) -> Algorithm:
    said = {
        key: _SPELLINGS[key](f"{where}[{key!r}]", group[key])
        for key in ("algorithm", "use_muon", "kind")
        if group.get(key) is not None
    }
    if len(set(said.values())) > 1:
        raise ValueError(message(where, found=f"{said}", do="These contradict each other; keep `algorithm`"))
    if said:
        algorithm: Algorithm = next(iter(said.values()))
        return algorithm
    tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    odd = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, Tensor) or tensor.ndim != 2]
    if odd:
        found = f"no algorithm, and parameters that are not 2-D (positions {some(map(str, odd))})"
        raise ValueError(message(where, found=found, do='Add algorithm="muon" or algorithm="adamw" to the group'))
    return "muon"


_SPELLINGS: dict[str, _Check] = {
    "algorithm": lambda name, value: check_word(name, value, get_args(Algorithm)),
    "kind": lambda name, value: check_word(name, value, get_args(Algorithm)),
    "use_muon": lambda name, value: "muon" if check_bool(name, value) else "adamw",
}

"""The rules by which a saved state is taken back.

torch casts loaded floating state to the parameter's dtype and loads whatever it is given; here the declared dtype is
kept, and a state that does not fit is refused by the parameter's name, at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from meshmuon.errors import CheckpointError, message, some, warn_user
from meshmuon.layout.mesh import is_distributed, lies_like, placements
from meshmuon.layout.names import normalise_names
from meshmuon.state import STATE_KEYS, adapted_state, as_tensor

# Checks the hyper-parameters of a group and gives them back in plain form: (values, algorithm, where=) -> values.
CheckValues: TypeAlias = "Callable[..., dict[str, Any]]"
# Of torch's AdamW: the value with which it is another algorithm. Otherwise they say how, not what, and are dropped.
_OTHER_UPDATES = {"maximize": True, "amsgrad": True}
_TORCH_FLAGS = (*_OTHER_UPDATES, "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


def load_checked(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    *,
    check: CheckValues,
    load: Callable[[dict[str, Any]], None],
    on_host: bool = False,
) -> None:
    """Let torch load a state dict, checked before and put right after.

    Args:
        optimizer: The optimizer to load into.
        state_dict: The saved state.
        check: Checks the hyper-parameters of a group.
        load: torch's own `load_state_dict` of that optimizer.
        on_host: Whether state lives in host memory.

    Raises:
        CheckpointError: Names what does not fit; nothing was changed.
    """
    accepted: dict[str, Any] = {}

    def accept(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        accepted.update(check_state_dict(given, optimizer.param_groups, check=check))
        return {**accepted, "state": {}}  # torch would cast it, and bring it to the device

    def restore(_: Optimizer) -> None:
        for group, saved in zip(optimizer.param_groups, accepted["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                optimizer.state[param] = adapted_state(accepted["state"].get(key, {}), param, group, on_host=on_host)

    _check_mapping(state_dict)
    # Last before and first after torch's own work, so that a user's hooks see and may change everything.
    hooks = [
        optimizer.register_load_state_dict_pre_hook(accept),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def check_state_dict(
    state_dict: Mapping[str, Any], param_groups: list[dict[str, Any]], *, check: CheckValues
) -> dict[str, Any]:
    """Check that a state dict fits, before anything is changed, and bring it into this optimizer's order.

    Args:
        state_dict: What `load_state_dict` was given.
        param_groups: This optimizer's groups.
        check: Checks the hyper-parameters of a group.

    Returns:
        An equal state dict whose groups have every key this optimizer has, and its order of parameters.

    Raises:
        CheckpointError: Names the first parameter or hyper-parameter that does not fit.
    """
    _check_mapping(state_dict)
    saved_groups = state_dict.get("param_groups")
    if not isinstance(saved_groups, list) or not isinstance(state_dict.get("state"), Mapping):
        raise CheckpointError(message("state_dict", found="no state or param_groups", do="Pass opt.state_dict()"))
    _refuse_adamw(saved_groups, param_groups)
    if len(saved_groups) != len(param_groups):
        found = f"{len(saved_groups)} parameter groups, this optimizer has {len(param_groups)}"
        raise CheckpointError(message("state_dict", found=found, do="Build the optimizer as it was when saved"))
    state = state_dict["state"]
    groups = [
        _checked_group(saved, group, state, check=check, where=f"state_dict param_groups[{index}]")
        for index, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True))
    ]
    if not state and any(group["params"] for group in param_groups):
        warn_user("the checkpoint holds no optimizer state: starting afresh")
    return {**state_dict, "param_groups": groups}


def _check_mapping(state_dict: object) -> None:
    if not isinstance(state_dict, Mapping):
        found = f"a {type(state_dict).__name__}"
        raise CheckpointError(message("state_dict", found=found, do="Pass opt.state_dict()"))


def _refuse_adamw(saved_groups: Sequence[Any], param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Say what it is when somebody continues an AdamW run: counting its groups would not help."""
    is_adamw = saved_groups and all(isinstance(g, Mapping) and "amsgrad" in g and "betas" in g for g in saved_groups)
    muon = [(i, group) for i, group in enumerate(param_groups) if group["algorithm"] == "muon" and group["params"]]
    if is_adamw and muon:
        index, group = muon[0]
        name = repr(group["param_names"][0]) if group.get("param_names") else f"param_groups[{index}][0]"
        found = f"saved by torch.optim.AdamW or Adam, which has no momentum_buffer for {name} and others that take Muon"
        do = "Do not load it: start with fresh optimizer state, and warm the learning rate up"
        raise CheckpointError(message("state_dict", found=found, do=do))


def _checked_group(
    saved: Any, group: Mapping[str, Any], state: Mapping[Any, Any], *, check: CheckValues, where: str
) -> dict[str, Any]:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), Sequence):
        raise CheckpointError(message(where, found="no params", do="Pass opt.state_dict()"))
    order = _order(saved, group, where=where) if len(saved["params"]) == len(group["params"]) else None
    if order is None:
        _refuse_other_names(saved, group, where=where)
        found = f"{len(saved['params'])} parameters, this optimizer has {len(group['params'])}"
        raise CheckpointError(message(where, found=found, do="Build the optimizer as it was when saved"))
    algorithm = group["algorithm"]
    if saved.get("algorithm", algorithm) != algorithm:
        found = f"saved with {saved['algorithm']}, this optimizer trains it with {algorithm}"
        raise CheckpointError(message(where, found=found, do="Use the overrides of the saved run"))
    names = group.get("param_names") or [f"{where}[{i}]" for i in range(len(order))]
    ids = [saved["params"][i] for i in order]
    if state:
        for name, param, key in zip(names, group["params"], ids, strict=True):
            _check_entry(name, param, state.get(key), algorithm)
    result = {**_checked_values(saved, group, check=check, where=where), "algorithm": algorithm, "params": ids}
    if "param_names" in group:
        result["param_names"] = list(group["param_names"])
    return result


def _checked_values(
    saved: Mapping[str, Any], group: Mapping[str, Any], *, check: CheckValues, where: str
) -> dict[str, Any]:
    """Our values with the saved ones over them, all of them checked."""
    l2 = saved.get("decoupled_weight_decay") is False and saved.get("weight_decay")
    others = [key for key, value in _OTHER_UPDATES.items() if saved.get(key) is value]
    for key in [*others, *(["decoupled_weight_decay"] if l2 else [])]:
        found = f"{saved[key]!r}, which is another algorithm"
        raise CheckpointError(message(f"{where}[{key!r}]", found=found, do="Start with fresh optimizer state"))
    values = {**group, **{key: value for key, value in saved.items() if key not in _TORCH_FLAGS}}
    try:
        checked = check(values, group["algorithm"], where=where)
    except (TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    if checked.get("view") != group.get("view"):
        found = f"{checked['view']}, this optimizer has {group['view']}"
        raise CheckpointError(message(f"{where}['view']", found=found, do="Use the overrides of the saved run"))
    return {**values, **checked}


def _refuse_other_names(saved: Mapping[str, Any], group: Mapping[str, Any], *, where: str) -> None:
    """Name what one side has and the other has not, where both have names."""
    if "param_names" not in saved or "param_names" not in group:
        return
    theirs, ours = list(normalise_names(saved["param_names"])), list(group["param_names"])
    for names, what in (([n for n in ours if n not in theirs], "no"), ([n for n in theirs if n not in ours], "also")):
        if names:
            found = f"the checkpoint has {what} {some(names)}"
            raise CheckpointError(message(where, found=found, do="Load the checkpoint of this model"))


def _order(saved: Mapping[str, Any], group: Mapping[str, Any], *, where: str) -> list[int]:
    """Which saved parameter is each of ours: by name where both sides have names, else by position."""
    positions = list(range(len(group["params"])))
    if "param_names" not in saved or "param_names" not in group:
        return positions
    theirs = {name: i for i, name in enumerate(normalise_names(saved["param_names"]))}
    missing = [name for name in group["param_names"] if name not in theirs]
    if missing:
        found = f"no parameter called {some(missing)}; it has {some(theirs)}"
        raise CheckpointError(message(where, found=found, do="Load the checkpoint of this model"))
    return [theirs[name] for name in group["param_names"]]


def _check_entry(name: str, param: Tensor, entry: Mapping[str, Any] | None, algorithm: str) -> None:
    expected = STATE_KEYS[algorithm]
    found = sorted(entry) if entry else []
    if entry is None or any(key not in entry for key in expected):
        other = "adamw" if algorithm == "muon" else "muon"
        hint = f"it was saved by {other}" if all(k in found for k in STATE_KEYS[other]) else "the checkpoint is partial"
        what = f"state {found or 'missing'}, {algorithm} needs {list(expected)}"
        raise CheckpointError(message(f"parameter {name!r}", found=what, do=f"Check the routing: {hint}"))
    for key in expected:
        shape = tuple(as_tensor(entry[key]).shape)
        expected_shape = () if key == "step" else tuple(param.shape)
        if shape != expected_shape:
            what = f"saved {key} of shape {shape}, it should have {expected_shape}"
            raise CheckpointError(message(f"parameter {name!r}", found=what, do="Load the checkpoint of this model"))
        if key != "step" and is_distributed(entry[key]) and not lies_like(entry[key], param):
            what = f"saved {key} placed {placements(entry[key])}, the parameter {placements(param)} or on another mesh"
            do = "Load it with torch.distributed.checkpoint, which lays it out anew, or call full_tensor() on it first"
            raise CheckpointError(message(f"parameter {name!r}", found=what, do=do))

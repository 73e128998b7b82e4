"""From a group as a user may write it to its plain, checked, complete form, and to records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import Tensor

from meshmuon.checks import check_bool, check_word
from meshmuon.config import Algorithm, Orthogonalizer
from meshmuon.errors import message, some
from meshmuon.groups.keys import KEYS, STRUCTURE, Check, check_values, foreign_keys
from meshmuon.groups.unknown import refuse_others_keys, refuse_unknown
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.mesh import local
from meshmuon.layout.names import check_names, normalise_names
from meshmuon.layout.plain import PlainLayouts, Sharded
from meshmuon.layout.records import ParameterRecord, Routing
from meshmuon.layout.tensors import check_parameter


def complete_group(
    group: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]],
    *,
    orthogonalizer: Orthogonalizer,
    index: int,
) -> dict[str, Any]:
    """Turn a group as a user may write it into its plain, checked, complete form.

    Args:
        group: What the user wrote.
        defaults: Per algorithm, the values for what the group leaves out.
        orthogonalizer: The optimizer's.
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
    keys = KEYS[algorithm]
    foreign = foreign_keys(group, algorithm)
    unknown = [key for key in group if key not in (*STRUCTURE, *foreign, *keys)]
    refuse_others_keys(unknown, algorithm, where=where)
    refuse_unknown(unknown, [*keys, "algorithm", "param_names"], where=where)
    values = {**defaults[algorithm], **{key: group[key] for key in keys if key in group}}
    checked = check_values(values, algorithm, orthogonalizer=orthogonalizer, where=where)
    result: dict[str, Any] = {"params": params, "algorithm": algorithm, **checked}
    result.update({key: group[key] for key in foreign})
    if algorithm == "adamw":
        _settle_adamw(result, group)
    return result


def read_once(group: Any) -> Any:
    """Make a list of parameters that can be read only once.

    Args:
        group: What the user wrote.

    Returns:
        The group itself, or a copy with a list where it had a generator.
    """
    if isinstance(group, Mapping) and isinstance(group.get("params"), Iterator):
        return {**group, "params": list(group["params"])}
    return group


def declare_shards(group: Mapping[str, Any], layouts: PlainLayouts, *, index: int) -> None:
    """Take what a group says about its shards. Kept beside the groups: a process group cannot be saved with them.

    Args:
        group: What the user wrote; its `sharded` is one `Sharded` for all of its parameters, or name → `Sharded`.
        layouts: Where plain tensors lie; written.
        index: Which group it is.

    Raises:
        TypeError: If it is neither.
        ValueError: If a group is missing, or this rank is not in it.
    """
    said = group.get("sharded")
    if said is None:
        return
    if isinstance(said, Mapping):
        for name, shard in said.items():
            layouts.declare(normalise_names([name]), shard)
        return
    if not isinstance(said, Sharded):
        where = f"param_groups[{index}]['sharded']"
        raise TypeError(message(where, found=f"a {type(said).__name__}", do="Write Sharded(dim, group)"))
    listed = named_params(group, where=f"param_groups[{index}]")
    names = (item[0] if isinstance(item, tuple) else _unnamed(index, i) for i, item in enumerate(listed))
    layouts.declare(names, said)


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
    params = params.items() if isinstance(params, Mapping) else params
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
    seen: dict[int, str] = {}
    for position, item in enumerate(listed):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (position, item)
        if id(tensor) in seen:
            found = f"the same parameter twice, {seen[id(tensor)]} and {name!r}"
            raise ValueError(message(where, found=found, do="Give each parameter once"))
        seen[id(tensor)] = repr(name)
    return listed


def unnamed(params: Iterable[Any]) -> list[Any]:
    """Leave out the names of parameters that have some.

    Args:
        params: Tensors or (name, tensor) pairs.

    Returns:
        The tensors.
    """
    return [item[1] if isinstance(item, tuple) else item for item in params]


def check_group_parameters(
    group: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, layouts: PlainLayouts, index: int
) -> None:
    """Check that a group's parameters can take its algorithm, and are not in another group.

    Args:
        group: The complete group.
        others: The groups the optimizer already has.
        layouts: Where plain tensors lie.
        index: Which group it will be.

    Raises:
        TypeError: If a parameter is of a kind that cannot be trained.
        ValueError: If it does not fit its algorithm or view, or is already there.
    """
    taken, taken_names = _places(others)
    for position, item in enumerate(group["params"]):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (_unnamed(index, position), item)
        check_parameter(name, tensor)
        if id(tensor) in taken or name in taken_names:
            first = taken.get(id(tensor)) or f"another parameter of that name in {taken_names[name]}"
            found = f"already in another parameter group: {first}"
            raise ValueError(message(f"parameter {name!r}", found=found, do="Give each parameter once"))
        if group["algorithm"] == "muon":
            MatrixView.of(group["view"]).blocks(name, layouts.shape_of(name, tensor))


def _places(param_groups: Sequence[Mapping[str, Any]]) -> tuple[dict[int, str], dict[str, str]]:
    """Where parameters are: by identity, and by name."""
    tensors, names = {}, {}
    for index, group in enumerate(param_groups):
        where = f"param_groups[{index}]"
        called = group.get("param_names") or [_unnamed(index, i) for i in range(len(group["params"]))]
        tensors.update({id(t): f"{name!r} of {where}" for name, t in zip(called, group["params"], strict=True)})
        names.update(dict.fromkeys(group.get("param_names", ()), where))
    return tensors, names


def group_records(
    param_groups: Sequence[Mapping[str, Any]], routings: Mapping[str, Routing], layouts: PlainLayouts
) -> list[ParameterRecord]:
    """Describe every parameter of an optimizer as data.

    Args:
        param_groups: The optimizer's groups.
        routings: Name → how it was routed; a parameter without one was put into its group by the user.
        layouts: Where plain tensors lie.

    Returns:
        The records, in order.

    Raises:
        TypeError: If a parameter is of a kind that cannot be trained.
        ValueError: If it is a flat shard.
    """
    records = []
    for index, group in enumerate(param_groups):
        names = group.get("param_names") or [_unnamed(index, i) for i in range(len(group["params"]))]
        for position, (name, tensor) in enumerate(zip(names, group["params"], strict=True)):
            check_parameter(name, tensor)
            known = routings.get(name, Routing(name, group["algorithm"], f"its group says {group['algorithm']}"))
            # AdamW's groups have no views; how a weight is stored still matters to QK-clip.
            view = known.view if group["algorithm"] == "adamw" else MatrixView.of(group.get("view"))
            routing = replace(known, algorithm=group["algorithm"], view=view)
            layout = layouts.layout_of(name, tensor)
            records.append(
                ParameterRecord(
                    routing=routing,
                    group=index,
                    position=position,
                    shape=tuple(tensor.shape) if layout is None else layout.shape,
                    dtype=tensor.dtype,
                    device=tensor.device,
                    local_shape=tuple(local(tensor).shape),
                    layout=layout,
                    route=group.get("route", "auto"),
                    mode=group.get("mode", "exact"),
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
    tensors = unnamed(params)
    odd = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, Tensor) or tensor.ndim != 2]
    if odd:
        found = f"no algorithm, and parameters that are not 2-D (positions {some(map(str, odd))})"
        do = 'Add algorithm="muon" or algorithm="adamw" to the group, or pass the model: Muon(model) makes the groups'
        raise ValueError(message(where, found=found, do=do))
    return "muon"


_SPELLINGS: dict[str, Check] = {
    "algorithm": lambda name, value: check_word(name, value, get_args(Algorithm)),
    "kind": lambda name, value: check_word(name, value, get_args(Algorithm)),
    "use_muon": lambda name, value: "muon" if check_bool(name, value) else "adamw",
}

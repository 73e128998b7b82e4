"""From a model, or names, or groups, to one `Routing` per parameter and the groups they make."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from meshmuon.checks import check_words
from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.names import check_names, normalise_names
from meshmuon.layout.records import Routing
from meshmuon.layout.tensors import check_parameter
from meshmuon.routing.candidates import Candidate
from meshmuon.routing.heads import ends_of_heads, followed_layers, heads_of
from meshmuon.routing.overrides import Choice, Choices, Overrides
from meshmuon.routing.rules import RULES
from meshmuon.routing.unknown import what_to_do_about


@dataclass(frozen=True, slots=True)
class RoutedTensor:
    """A parameter together with its routing, before it is put into a group."""

    tensor: Tensor
    routing: Routing


def route_model(
    model: nn.Module, *, expert_keys: Sequence[str] = ("experts",), overrides: Overrides = None
) -> list[RoutedTensor]:
    """Route every trainable parameter of a model.

    Args:
        model: The model; wrapped by DDP, torch.compile or activation checkpointing or not.
        expert_keys: Words in the name of a stack of experts.
        overrides: Pattern → "muon", "adamw" or a view; or a callable (name, parameter) → the same or None.

    Returns:
        Parameters with their routing, in the model's order, each tensor once.

    Raises:
        ValueError: If a parameter cannot be routed, or nothing is trainable.
        TypeError: If a parameter is of a kind that cannot be trained.
    """
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    everywhere: list[tuple[str, Tensor]] = []
    modules = dict(model.named_modules(remove_duplicate=True))
    for prefix, module in modules.items():
        # A parametrized tensor lies in a list of its own, below the module it belongs to.
        path = prefix.split(".")
        owner = modules[".".join(path[:-2])] if path[-2:-1] == ["parametrizations"] else module
        for leaf, tensor in module._parameters.items():
            if tensor is not None:
                everywhere.append((f"{prefix}.{leaf}".removeprefix("."), tensor))
                holders.setdefault(tensor, []).append((everywhere[-1][0], owner))
    raw = [(name, tensor) for name, tensor in model.named_parameters()]
    names = normalise_names(name for name, _ in raw)
    heads, followed, ends = heads_of(model), followed_layers(model), ends_of_heads(everywhere)
    adapters = _adapters_in(modules)
    candidates = [
        Candidate(
            name=name,
            tensor=tensor,
            modules=tuple(module for _, module in holders.get(tensor, ())),
            all_names=tuple(normalise_names(path for path, _ in holders.get(tensor, ()))),
            head=heads.get(tensor, ""),
            ends_a_head=tensor in ends,
            is_followed=tensor in followed,
            is_adapter=not adapters.isdisjoint(itertools.accumulate(raw_name.split("."), "{}.{}".format)),
            expert_keys=tuple(expert_keys),
        )
        for name, (raw_name, tensor) in zip(names, raw, strict=True)
    ]
    return _route(candidates, overrides)


def _adapters_in(modules: Mapping[str, nn.Module]) -> set[str]:
    """What peft's layers say they have added, by name. A module that is trained beside a frozen twin is no adapter."""
    found = set()
    for prefix, module in modules.items():
        added = getattr(type(module), "adapter_layer_names", ())
        if isinstance(added, (tuple, list, set)):
            found |= {f"{prefix}.{name}".removeprefix(".") for name in added if name != "modules_to_save"}
    return found


def route_names(
    pairs: Iterable[tuple[str, Tensor]],
    *,
    expert_keys: Sequence[str] = ("experts",),
    overrides: Overrides = None,
) -> list[RoutedTensor]:
    """Route parameters by name and shape alone.

    Args:
        pairs: (name, tensor), e.g. `model.named_parameters()`.
        expert_keys: Words in the name of a stack of experts.
        overrides: As in `route_model`.

    Returns:
        Parameters with their routing, in order.

    Raises:
        ValueError: If a parameter cannot be routed, is given twice, or nothing is trainable.
        TypeError: If a parameter is of a kind that cannot be trained.
    """
    listed = list(pairs)
    check_names((name for name, _ in listed), where="params")
    names = normalise_names(name for name, _ in listed)
    pairs = [(name, tensor) for name, (_, tensor) in zip(names, listed, strict=True)]
    seen: dict[Tensor, str] = {}
    for name, tensor in pairs:
        check_parameter(name, tensor)
        first = seen.setdefault(tensor, name)
        if first != name:
            found = f"the same tensor as {first!r}"
            do = "Give each tensor once; Muon(model) understands tied parameters"
            raise ValueError(message(f"parameter {name!r}", found=found, do=do))
    ends = ends_of_heads(pairs)
    candidates = [
        Candidate(name=name, tensor=tensor, ends_a_head=tensor in ends, expert_keys=tuple(expert_keys))
        for name, tensor in pairs
    ]
    return _route(candidates, overrides)


@dataclass(frozen=True, slots=True)
class RoutedGroups:
    """Group dicts as a user may write them, and by name, what was routed or left out here."""

    groups: list[dict[str, Any]]
    routings: dict[str, Routing]
    frozen: tuple[str, ...] = ()


def route_params(params: Any, *, expert_keys: Sequence[str], overrides: Overrides) -> RoutedGroups:
    """Read what `Muon` accepts as its first argument.

    Args:
        params: A model, (name, tensor) pairs, group dicts, or matrices.
        expert_keys: Words in the name of a stack of experts.
        overrides: As in `route_model`.

    Returns:
        Groups and routings.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is empty or cannot be routed.
    """
    expert_keys = check_words("expert_keys", expert_keys)
    if isinstance(params, nn.Module):
        routed = route_model(params, expert_keys=expert_keys, overrides=overrides)
        return _routed_groups(routed, params.named_parameters())
    if isinstance(params, (Tensor, str, bytes)) or not isinstance(params, Iterable):
        found = f"a {type(params).__name__}"
        raise TypeError(message("params", found=found, do="Pass the model: Muon(model, lr=...)"))
    if isinstance(params, (set, frozenset)):
        raise TypeError(message("params", found="a set", do="Use a list: the order of a set is random"))
    if isinstance(params, Mapping) and "params" in params and not all(isinstance(v, Tensor) for v in params.values()):
        do = 'Put it in a list: Muon([{"params": ..., "algorithm": ...}])'
        raise TypeError(message("params", found="one group dict", do=do))
    listed: list[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not listed:
        raise ValueError(message("params", found="an empty parameter list", do="Pass the model: Muon(model, lr=...)"))
    if all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in listed):
        return _routed_groups(route_names(listed, expert_keys=expert_keys, overrides=overrides), listed)
    if overrides is not None:
        do = "Pass the model or named parameters; in group dicts write algorithm= and view= instead"
        raise ValueError(message("overrides", found="given with parameters that have no names to match", do=do))
    if all(isinstance(item, Mapping) for item in listed):
        return RoutedGroups(listed, {})
    if not all(isinstance(item, Tensor) for item in listed):
        kinds = sorted({type(item).__name__ for item in listed})
        do = "Pass the model, model.named_parameters(), group dicts, or matrices"
        raise TypeError(message("params", found=f"a list of {', '.join(kinds)}", do=do))
    odd = [f"position {i}: {tuple(t.shape)}" for i, t in enumerate(listed) if t.ndim != 2]
    if odd:
        found = f"bare tensors that are not all matrices ({some(odd, limit=3)})"
        do = (
            "Without names an embedding looks like a weight matrix, and a bias cannot be orthogonalized. "
            "Pass the model, Muon(model, ...), or Muon(model.named_parameters(), ...)"
        )
        raise TypeError(message("params", found=found, do=do))
    return RoutedGroups([{"params": listed, "algorithm": "muon"}], {})


def _routed_groups(routed: Sequence[RoutedTensor], named: Iterable[tuple[str, Tensor]]) -> RoutedGroups:
    if not routed:
        raise ValueError(message("params", found="no trainable parameter", do="Unfreeze something (requires_grad)"))
    frozen = normalise_names(name for name, tensor in named if not tensor.requires_grad)
    return RoutedGroups(groups_of(routed), {item.routing.name: item.routing for item in routed}, tuple(frozen))


def param_groups(
    model: nn.Module, *, expert_keys: Sequence[str] = ("experts",), overrides: Overrides = None
) -> list[dict[str, Any]]:
    """Make the parameter groups `Muon(model)` would make, for those who want to edit them.

    Args:
        model: The model.
        expert_keys: Words in the name of a stack of experts.
        overrides: Pattern → "muon", "adamw" or a view; or a callable.

    Returns:
        Group dicts with named parameters, to be passed to `Muon`: one for Muon per view, one for AdamW; and one without
        weight decay for norms and biases of two dims and more, if there are any.
    """
    expert_keys = check_words("expert_keys", expert_keys)
    routed = route_model(model, expert_keys=expert_keys, overrides=overrides)
    apart = [item.routing.like_a_vector and item.tensor.ndim >= 2 for item in routed]
    together, alone = (
        groups_of(list(itertools.compress(routed, which))) for which in (map(operator.not_, apart), apart)
    )
    return [*together, *({**group, "weight_decay": 0.0} for group in alone)]


def groups_of(routed: Sequence[RoutedTensor]) -> list[dict[str, Any]]:
    """Put routed parameters into as few groups as their algorithms and views allow.

    Args:
        routed: Parameters with their routing.

    Returns:
        Group dicts, Muon's first, each with named parameters and plain values.
    """
    groups: dict[tuple[str, MatrixView], dict[str, Any]] = {}
    for item in sorted(routed, key=lambda r: r.routing.algorithm == "adamw"):
        routing = item.routing
        view = routing.view if routing.algorithm == "muon" else MatrixView()
        group = groups.setdefault((routing.algorithm, view), {"params": [], "algorithm": routing.algorithm})
        if routing.algorithm == "muon":
            group["view"] = view.as_dict()
        group["params"].append((routing.name, item.tensor))
    return list(groups.values())


def _route(candidates: Sequence[Candidate], overrides: Overrides) -> list[RoutedTensor]:
    chosen = Choices(overrides)
    routed, unknown = [], []
    for candidate in candidates:
        choice = chosen.choice(candidate.name, candidate.tensor)
        if not candidate.tensor.requires_grad:
            continue
        check_parameter(candidate.name, candidate.tensor)
        routing = _decide(candidate, choice)
        if routing is None:
            unknown.append(candidate)
        else:
            routed.append(RoutedTensor(candidate.tensor, routing))
    if unknown:
        raise ValueError(what_to_do_about(unknown, [item.routing.name for item in routed]))
    chosen.check_all_matched([candidate.name for candidate in candidates])
    return routed


def _proposed(candidate: Candidate) -> Routing | None:
    return next((routing for rule in RULES if (routing := rule(candidate)) is not None), None)


def _decide(candidate: Candidate, choice: Choice | None) -> Routing | None:
    """One parameter's route, if it can be known. Whether its view fits is asked later, of its global shape."""
    if isinstance(choice, MatrixView):
        return Routing(candidate.name, "muon", "override: a view", choice)
    proposed = _proposed(candidate)
    if choice == "adamw":
        return replace(proposed or Routing(candidate.name, "adamw", ""), algorithm="adamw", reason="override")
    if choice == "muon":
        view = proposed.view if proposed is not None else MatrixView()
        return Routing(candidate.name, "muon", "override", view)
    return proposed

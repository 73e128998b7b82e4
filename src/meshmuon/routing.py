"""Which parameter takes which algorithm, and the reason.

`route_model` asks the modules, `route_names` has names and shapes only. Both give one `Routing` per parameter.
The rules stand in `_RULES`, first match wins; `overrides` win over all of them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import TWO_WAYS_OUT, MatrixView
from meshmuon.layout.names import normalise_names
from meshmuon.layout.records import Routing
from meshmuon.layout.tensors import FLAT_SHARD, check_parameter

Choice: TypeAlias = "str | MatrixView"
Overrides: TypeAlias = "Mapping[str, Choice] | Callable[[str, Tensor], Choice | None] | None"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDING_WORDS = ("embed", "wte", "wpe", "tok_emb", "pos_emb", "position_emb")
_HEAD_NAMES = (
    "lm_head",
    "unembed",
    "unembedding",
    "embed_out",
    "classifier",
    "to_logits",
    "logits",
    "output_layer",
)
# Too common inside a model to mean "head" anywhere but at its top.
_TOP_HEAD_NAMES = ("head", "heads", "output", "fc", "score")
_TOP_PREFIXES = ("model", "transformer", "backbone")
_LORA_WORDS = ("lora_a", "lora_b", "lora_down", "lora_up", "lora_embedding", "lora_magnitude")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a rule may look at: one trainable parameter and the modules that hold it (several if it is tied)."""

    name: str
    tensor: Tensor
    modules: tuple[nn.Module, ...] = ()
    all_names: tuple[str, ...] = ()
    is_head_by_size: bool = False
    expert_keys: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rsplit(".", 1)[-1].lower()

    @property
    def owner(self) -> str:
        """What the reason says about where the knowledge comes from."""
        if not self.modules:
            return "by name"
        kind = type(self.modules[0])
        return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


Rule: TypeAlias = "Callable[[Candidate], Routing | None]"


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
    for prefix, module in model.named_modules(remove_duplicate=True):
        for leaf, tensor in module._parameters.items():
            if tensor is not None:
                holders.setdefault(tensor, []).append((f"{prefix}.{leaf}" if prefix else leaf, module))
    raw = [(name, tensor) for name, tensor in model.named_parameters()]
    names = normalise_names(name for name, _ in raw)
    head = _head_by_size(model)
    candidates = [
        Candidate(
            name=name,
            tensor=tensor,
            modules=tuple(module for _, module in holders.get(tensor, ())),
            all_names=tuple(normalise_names(path for path, _ in holders.get(tensor, ()))),
            is_head_by_size=tensor is head,
            expert_keys=tuple(expert_keys),
        )
        for name, (_, tensor) in zip(names, raw, strict=True)
    ]
    return _route(candidates, overrides)


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
    names = normalise_names(name for name, _ in listed)
    candidates = [
        Candidate(name=name, tensor=tensor, expert_keys=tuple(expert_keys))
        for name, (_, tensor) in zip(names, listed, strict=True)
    ]
    seen: dict[Tensor, str] = {}
    for candidate in candidates:
        check_parameter(candidate.name, candidate.tensor)
        first = seen.setdefault(candidate.tensor, candidate.name)
        if first != candidate.name:
            found = f"the same tensor as {first!r}"
            do = "Give each tensor once; Muon(model) understands tied parameters"
            raise ValueError(message(f"parameter {candidate.name!r}", found=found, do=do))
    return _route(candidates, overrides)


@dataclass(frozen=True, slots=True)
class RoutedGroups:
    """Group dicts as a user may write them, and the reasons for those parameters that were routed here."""

    groups: list[dict[str, Any]]
    reasons: dict[str, str]


def route_params(params: Any, *, expert_keys: Sequence[str], overrides: Overrides) -> RoutedGroups:
    """Read what `Muon` accepts as its first argument.

    Args:
        params: A model, (name, tensor) pairs, group dicts, or matrices.
        expert_keys: Words in the name of a stack of experts.
        overrides: As in `route_model`.

    Returns:
        Groups and reasons.

    Raises:
        TypeError: If it is none of these.
        ValueError: If it is empty or cannot be routed.
    """
    if isinstance(params, nn.Module):
        return _routed_groups(route_model(params, expert_keys=expert_keys, overrides=overrides))
    if isinstance(params, (Tensor, str, bytes)) or not isinstance(params, Iterable):
        found = f"a {type(params).__name__}"
        raise TypeError(message("params", found=found, do="Pass the model: Muon(model, lr=...)"))
    if isinstance(params, (set, frozenset)):
        raise TypeError(message("params", found="a set", do="Use a list: the order of a set is random"))
    listed = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not listed:
        raise ValueError(
            message("params", found="an empty parameter list", do="Pass the model: Muon(model, lr=...)")
        )
    if all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in listed):
        return _routed_groups(route_names(listed, expert_keys=expert_keys, overrides=overrides))
    if overrides is not None:
        do = "Pass the model or named parameters; in group dicts write algorithm= and view= instead"
        raise ValueError(
            message("overrides", found="given with parameters that have no names to match", do=do)
        )
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


def _routed_groups(routed: Sequence[RoutedTensor]) -> RoutedGroups:
    if not routed:
        raise ValueError(
            message("params", found="no trainable parameter", do="Unfreeze something (requires_grad)")
        )
    return RoutedGroups(groups_of(routed), {item.routing.name: item.routing.reason for item in routed})


def param_groups(
    model: nn.Module, *, expert_keys: Sequence[str] = ("experts",), overrides: Overrides = None
) -> list[dict[str, Any]]:
    """Make the parameter groups `Muon(model)` would make, for those who want to edit them.

    Args:
        model: The model.
        expert_keys: Words in the name of a stack of experts.
        overrides: Pattern → "muon", "adamw" or a view; or a callable.

    Returns:
        Group dicts with named parameters, to be passed to `Muon`: one for Muon per view, one for AdamW.
    """
    return groups_of(route_model(model, expert_keys=expert_keys, overrides=overrides))


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
    chosen = _Overrides(overrides)
    routed = []
    for candidate in candidates:
        choice = chosen.choice(candidate)
        if not candidate.tensor.requires_grad:
            continue
        check_parameter(candidate.name, candidate.tensor)
        routed.append(RoutedTensor(candidate.tensor, _decide(candidate, choice)))
    chosen.check_all_matched([candidate.name for candidate in candidates])
    return routed


def _decide(candidate: Candidate, choice: Choice | None) -> Routing:
    if isinstance(choice, MatrixView):
        choice.blocks(candidate.name, tuple(candidate.tensor.shape))
        return Routing(candidate.name, "muon", "override: a view", choice)
    if choice == "adamw":
        return Routing(candidate.name, "adamw", "override")
    proposed = next((routing for rule in _RULES if (routing := rule(candidate)) is not None), None)
    if choice == "muon":
        view = proposed.view if proposed is not None else MatrixView()
        view.blocks(candidate.name, tuple(candidate.tensor.shape))
        return Routing(candidate.name, "muon", "override", view)
    if proposed is None:
        found = f"{candidate.tensor.ndim}-D of shape {tuple(candidate.tensor.shape)}"
        do = TWO_WAYS_OUT.replace("NAME", candidate.name)
        raise ValueError(message(f"parameter {candidate.name!r}", found=found, do=do))
    return proposed


class _Overrides:
    """The user's last word, whether given as patterns or as a function; the last matching pattern wins."""

    def __init__(self, overrides: Overrides) -> None:
        if overrides is not None and not callable(overrides) and not isinstance(overrides, Mapping):
            do = 'Use {pattern: "muon" | "adamw" | View(...)} or a function (name, parameter) -> one of these'
            raise TypeError(message("overrides", found=f"{overrides!r}", do=do))
        self._function = overrides if callable(overrides) else None
        self._patterns = dict(overrides) if isinstance(overrides, Mapping) else {}
        self._matched: set[str] = set()
        for pattern, choice in self._patterns.items():
            if not isinstance(pattern, str):
                raise TypeError(
                    message("overrides", found=f"the key {pattern!r}", do="Keys are patterns of names")
                )
            _check_choice(f"overrides[{pattern!r}]", choice)

    def choice(self, candidate: Candidate) -> Choice | None:
        if self._function is not None:
            chosen = self._function(candidate.name, candidate.tensor)
            if chosen is not None:
                _check_choice(f"overrides({candidate.name!r})", chosen)
            return chosen
        result = None
        for pattern, choice in self._patterns.items():
            if fnmatch.fnmatchcase(candidate.name, pattern):
                self._matched.add(pattern)
                result = choice
        return result

    def check_all_matched(self, names: list[str]) -> None:
        for pattern in self._patterns:
            if pattern not in self._matched:
                do = f"Patterns match whole names, as fnmatch does. There are: {some(names)}"
                raise ValueError(message(f"overrides[{pattern!r}]", found="matches no parameter", do=do))


def _check_choice(subject: str, choice: object) -> None:
    if not isinstance(choice, MatrixView) and choice not in ("muon", "adamw"):
        raise ValueError(message(subject, found=f"{choice!r}", do='Use "muon", "adamw" or View(...)'))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.endswith("Embedding")


def _flat_shard(c: Candidate) -> Routing | None:
    matrix_modules = (nn.Linear, nn.Embedding, *_CONVOLUTIONS, *_TRANSPOSED)
    if c.tensor.ndim == 1 and c.leaf == "weight" and any(isinstance(m, matrix_modules) for m in c.modules):
        found = f"the 1-D weight of a {c.owner}, {c.tensor.numel():,} elements"
        raise ValueError(message(f"parameter {c.name!r}", found=found, do=FLAT_SHARD))
    return None


def _few_dims(c: Candidate) -> Routing | None:
    return Routing(c.name, "adamw", "fewer than 2 dims") if c.tensor.ndim < 2 else None


def _embedding(c: Candidate) -> Routing | None:
    if any(_is_embedding(module) for module in c.modules):
        others = [name for name in c.all_names if name != c.name]
        tied = f", tied to {some(others, limit=2)}" if others else ""
        return Routing(c.name, "adamw", f"embedding{tied}")
    # With modules at hand their type decides; only a bare parameter (`pos_embed`) is judged by its own name.
    name = c.leaf if c.modules else c.name.lower()
    if any(word in name for word in _EMBEDDING_WORDS) and not _is_head_name(c.name):
        return Routing(c.name, "adamw", "embedding, by name")
    return None


def _is_head_name(name: str) -> bool:
    parts = [part.lower() for part in name.split(".") if not part.isdigit()]
    parts = parts[:-1] if parts and parts[-1] in ("weight", "kernel") else parts
    if parts and parts[-1] in _HEAD_NAMES:
        return True
    path = [part for part in parts[:-1] if part not in _TOP_PREFIXES]
    return bool(parts) and parts[-1] in _TOP_HEAD_NAMES and not path


def _head_by_size(model: nn.Module) -> Tensor | None:
    """The last nn.Linear, if it alone has the shape of an embedding.

    Alone: with a small vocabulary, the layers of every block may happen to have that shape too.
    """
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    weights = (getattr(module, "weight", None) for module in model.modules() if _is_embedding(module))
    vocabularies = {weight.shape for weight in weights if isinstance(weight, Tensor)}
    if not linears or linears[-1].shape not in vocabularies:
        return None
    return linears[-1] if sum(weight.shape == linears[-1].shape for weight in linears) == 1 else None


def _head(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2:
        return None
    if _is_head_name(c.name):
        return Routing(c.name, "adamw", "output head, by name")
    if c.is_head_by_size:
        return Routing(c.name, "adamw", "output head: the last nn.Linear, shaped like the embedding")
    return None


def _bias(c: Candidate) -> Routing | None:
    return Routing(c.name, "adamw", "bias, by name") if "bias" in c.leaf else None


def _low_rank_factor(c: Candidate) -> Routing | None:
    if any(word in c.name.lower() for word in _LORA_WORDS):
        return Routing(c.name, "adamw", "low-rank factor (LoRA), by name")
    return None


def _convolution(c: Candidate) -> Routing | None:
    module = next((m for m in c.modules if isinstance(m, (*_CONVOLUTIONS, *_TRANSPOSED))), None)
    if module is None:
        return None
    view = MatrixView(flatten=True, transposed=isinstance(module, _TRANSPOSED))
    if module.groups != 1:
        return Routing(c.name, "adamw", f"grouped convolution ({module.groups} groups)", view)
    seen = "(out, in·k)" if view.transposed else "(out, rest)"
    return Routing(c.name, "muon", f"{c.owner} seen as {seen}", view)


def _experts(c: Candidate) -> Routing | None:
    key = next((key for key in c.expert_keys if key in c.name), None)
    if c.tensor.ndim < 3 or key is None:
        return None
    return Routing(c.name, "muon", f'stack of experts ("{key}" in its name)', MatrixView(experts=True))


def _vector_in_disguise(c: Candidate) -> Routing | None:
    if c.tensor.ndim >= 3 and sum(size > 1 for size in c.tensor.shape) <= 1:
        return Routing(c.name, "adamw", "a vector: one dim is larger than 1")
    return None


def _hidden_matrix(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2:
        return None
    # transformers' GPT-2 layer, found by its class name: transformers is no dependency of ours.
    stored_in_out = any(type(m).__name__ == "Conv1D" and not isinstance(m, nn.Conv1d) for m in c.modules)
    return Routing(c.name, "muon", f"hidden matrix ({c.owner})", MatrixView(transposed=stored_in_out))


_RULES: tuple[Rule, ...] = (
    _flat_shard,
    _few_dims,
    _embedding,
    _head,
    _bias,
    _low_rank_factor,
    _convolution,
    _experts,
    _vector_in_disguise,
    _hidden_matrix,
)

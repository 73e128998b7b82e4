"""From one whole state dict to records in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon.config import Algorithm
from meshmuon.errors import CheckpointError, message, some
from meshmuon.importers.dialects import Dialect
from meshmuon.importers.records import Saved, StateDict
from meshmuon.importers.whole import whole_state
from meshmuon.layout.names import normalise_names
from meshmuon.state import STATE_KEYS

_DROPPED = {
    "second_momentum_buffer": "the second moment of NorMuon's per-neuron step sizes, which meshmuon does not have",
    "variance_neuron": "the second moment of NorMuon's per-neuron step sizes, which meshmuon does not have",
}
_FLAGS = ("use_muon",)  # say what the other keys say already
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Reader:
    """Reads a checkpoint of one dialect.

    Args:
        ranks: For each rank, the state dicts of its optimizers.
        dialect: Whose they are.
    """

    def __init__(self, ranks: Sequence[Sequence[StateDict]], dialect: Dialect) -> None:
        self._ranks = ranks
        self._dialect = dialect
        self._groups = 0
        self.saved: list[Saved] = []
        self.empty: list[str] = []  # labels of parameters without any state
        self.left: dict[str, list[str]] = {}  # key → labels of parameters whose state has it
        for index, part in enumerate(ranks[0]):
            self._read(part, whole_state([rank[index] for rank in ranks], dialect), self._prefix(index))

    @staticmethod
    def why_left(key: str) -> str:
        """Say why something was not taken."""
        return _DROPPED.get(key, "nothing here has such state")

    def _prefix(self, part: int) -> str:
        return f"part {part} of the checkpoint, " if len(self._ranks[0]) > 1 else ""

    def _read(self, part: StateDict, state: Mapping[Any, Mapping[str, Any]], prefix: str) -> None:
        for index, group in enumerate(part["param_groups"]):
            self._refuse_other_algorithms(group, f"{prefix}param_groups[{index}]")
            names = _names(group)
            for position, key in enumerate(group["params"]):
                label = f"{prefix}param_groups[{index}]['params'][{position}]"
                self._read_entry(label, names[position], group, state.get(key) or {})
            self._groups += 1
        known = {key for group in part["param_groups"] for key in group["params"]}
        for key in state:
            if key not in known:
                found = f"the state of a parameter {key!r} that is in no group"
                raise CheckpointError(message(f"{prefix}state", found=found, do="Save the checkpoint anew"))

    def _refuse_other_algorithms(self, group: Mapping[str, Any], where: str) -> None:
        algorithm = group.get("algorithm", "muon")
        l2 = group.get("decoupled_weight_decay") is False and group.get("weight_decay")
        others = [key for key in ("maximize", "amsgrad") if group.get(key)] + (["decoupled_weight_decay"] if l2 else [])
        if algorithm not in ("muon", "adamw"):
            others.append("algorithm")
        for key in others:
            found = f"{group[key]!r}, which is an algorithm that meshmuon does not have"
            raise CheckpointError(message(f"{where}[{key!r}]", found=found, do="Start with fresh optimizer state"))

    def _read_entry(self, label: str, name: str | None, group: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        algorithm = self._algorithm(group, entry)
        if algorithm is None:
            self.empty.append(label if name is None else f"{label} ({name!r})")
            return
        moments = self._dialect.moments if self._dialect.moments[1] in entry else _MOMENTS
        theirs = (self._dialect.momentum,) if algorithm == "muon" else ("step", *moments)
        ours = STATE_KEYS[algorithm]
        entry = {"step": group.get("step"), **entry} if algorithm == "adamw" else entry  # dion counts by group
        state = {word: _checked(label, entry.get(key), key) for word, key in zip(ours, theirs, strict=True)}
        shapes = {tuple(value.shape) for word, value in state.items() if word != "step"}
        if len(shapes) > 1:
            found = f"moments of different shapes, {some(map(str, sorted(shapes)))}"
            raise CheckpointError(message(label, found=found, do="The checkpoint is damaged"))
        for key in entry:
            if key not in theirs and key not in _FLAGS:
                self.left.setdefault(key, []).append(name or label)
        read = self._dialect.muon if algorithm == "muon" else self._dialect.adamw
        settings = read(group)
        if algorithm == "adamw" and "betas" in group:  # a plain AdamW beside the Muon
            settings = {key: group[key] for key in ("lr", "weight_decay", "betas", "eps") if key in group}
        factor = self._factor(label, settings) if algorithm == "muon" else 1.0
        self.saved.append(Saved(label, name, algorithm, self._groups, state, factor, settings))

    def _algorithm(self, group: Mapping[str, Any], entry: Mapping[str, Any]) -> Algorithm | None:
        if self._dialect.moments[1] in entry or _MOMENTS[1] in entry:
            return "adamw"
        if self._dialect.momentum in entry and group.get("algorithm", "muon") == "muon":
            return "muon"
        return None

    def _factor(self, label: str, settings: Mapping[str, Any]) -> float:
        """A sum of gradients becomes their moving average: the sum is the average divided by 1 - momentum."""
        if not self._dialect.heavy_ball:
            return 1.0
        momentum = settings.get("momentum")
        if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
            found = f"the momentum {momentum!r}, by which its buffer cannot be rescaled"
            raise CheckpointError(message(label, found=found, do="Put the momentum of the run into its group"))
        return 1.0 - momentum


def _names(group: Mapping[str, Any]) -> list[str | None]:
    """A group's names: torch's, Motif's, or the keys themselves, as torch.distributed.checkpoint gives them."""
    params = group["params"]
    names = group.get("param_names", group.get("names"))
    if names is None and params and all(isinstance(key, str) for key in params):
        names = params
    if names is None or len(names) != len(params):
        return [None] * len(params)
    return list(normalise_names(names))


def _checked(label: str, value: Any, key: str) -> Tensor:
    """A tensor of real numbers; a step may be a number."""
    if key == "step" and (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    if key != "step" and isinstance(value, Tensor) and value.is_floating_point():
        return value.detach()
    found = f"no {key}" if value is None else f"{key} is a {type(value).__name__}"
    raise CheckpointError(message(label, found=found, do="The checkpoint is damaged, or source= is wrong"))

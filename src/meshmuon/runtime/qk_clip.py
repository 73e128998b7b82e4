"""QK-clip in a step: from what the user knows of logits to scaled rows, the same on every rank that holds a layer.

logits of this rank → by global head → largest over all ranks that hold the layers → factors → rows that lie here
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshmuon.errors import message, some
from meshmuon.exchange.status import Watched
from meshmuon.layout.heads import AttentionLayer, HeadParameter, Slots, attention_layers
from meshmuon.layout.mesh import layout_of, local
from meshmuon.plan.bucket import Plan
from meshmuon.runtime.lookup import parameter_of
from meshmuon.runtime.spans import span
from meshmuon.update.qk_clip import RowScaled, clip_factors, scale_rows_, usable_logits

# Takes the element-wise maximum over ranks; written.
Largest: TypeAlias = Callable[[tuple[int, ...], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Team:
    """Layers that the same ranks hold, on one device: their logits travel together.

    Attributes:
        ranks: Global ranks; nobody if only this one is known.
        layers: The layers.
        device: Where they are.
        parameters: Everything that is scaled.
        key_of: For each q head of all layers, its k head.
        rows: For each row that lies here, which factor it takes.
    """

    ranks: tuple[int, ...]
    layers: tuple[AttentionLayer, ...]
    device: torch.device
    parameters: tuple[HeadParameter, ...]
    key_of: Tensor
    rows: Tensor

    @property
    def q_heads(self) -> int:
        return sum(layer.q_heads for layer in self.layers)

    @property
    def k_heads(self) -> int:
        return sum(layer.k_heads for layer in self.layers)

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer], *, rank: int) -> _Team:
        first = layers[0]
        device = first.parameters[0].record.device
        heads, keys = sum(layer.q_heads for layer in layers), sum(layer.k_heads for layer in layers)
        q, k, key_of, rows = 0, 0, [], []
        for layer in layers:
            slots = Slots(q=q, whole=heads + q, k=2 * heads + k, none=2 * heads + keys)
            key_of.append(k + torch.arange(layer.q_heads, device="cpu") // (layer.q_heads // layer.k_heads))
            for parameter in layer.parameters:
                every = layer.slots_of(parameter, slots)
                rows += [every[start:stop] for start, stop in parameter.held(rank)]
            q, k = q + layer.q_heads, k + layer.k_heads
        parameters = tuple(p for layer in layers for p in layer.parameters)
        here = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")
        return cls(first.team, tuple(layers), device, parameters, torch.cat(key_of).to(device), here.to(device))


@dataclass(frozen=True, slots=True)
class GivenLogits:
    """What this rank was given: logits by global head for each team, or why they cannot be used."""

    packed: tuple[Tensor | None, ...] = ()
    refused: Exception | None = None

    def told(self, watched: list[Watched]) -> list[Watched]:
        """Let peers hear of a refusal before it is raised, or they would wait for this rank.

        Args:
            watched: Every parameter, as it is told to peers.

        Returns:
            The same, refused.

        Raises:
            Exception: The refusal itself, if there is no parameter to tell it with.
        """
        if self.refused is None:
            return watched
        if not watched:
            raise self.refused
        return [dataclasses.replace(each, refused=each.refused or self.refused) for each in watched]


class HeadClip:
    """Scales the heads of a plan's attention layers.

    Args:
        plan: The plan, with the user's `qk_clip`.
        largest: Takes the maximum over ranks.

    Raises:
        ValueError: If the parameters are not as `qk_clip` says.
    """

    def __init__(self, plan: Plan, largest: Largest) -> None:
        self._clip = plan.execution.qk_clip
        self._rank = plan.rank
        self._largest = largest
        self._last: list[tuple[Tensor, Tensor]] = []
        self._found_here: dict[str, tuple[int, ...]] = {}
        layers: tuple[AttentionLayer, ...] = ()
        if self._clip is not None:
            layers = attention_layers(plan.parameters, self._clip, may_lack=plan.execution.allow_no_muon)
        self._layers = {layer.name: layer for layer in layers if not layer.team or plan.rank in layer.team}
        together: dict[tuple[Any, ...], list[AttentionLayer]] = {}
        for layer in self._layers.values():
            together.setdefault((layer.team, str(layer.parameters[0].record.device)), []).append(layer)
        # Sorted: every rank begins the same reductions in the same order.
        self._teams = [_Team.of(together[key], rank=plan.rank) for key in sorted(together)]

    def read(self, qk_logits: Mapping[Any, Any] | None) -> GivenLogits:
        """Check what the user gave, and place it by global head. Raises nothing: peers must hear of it first.

        Args:
            qk_logits: Layer → the largest logit of each head, or of this rank's; None: nothing is known here.

        Returns:
            What `scale_` takes.
        """
        self._last = []
        try:
            given = None if qk_logits is None else self._checked(qk_logits)
            packed = [
                None if given is None else usable_logits(torch.cat([self._placed(each, given) for each in team.layers]))
                for team in self._teams
            ]
        except (TypeError, ValueError) as error:
            # On a GPU the step goes on with a flag that says no: this rank must be there for its reductions.
            return GivenLogits((None,) * len(self._teams), refused=error)
        return GivenLogits(tuple(packed))

    def scale_(self, given: GivenLogits, param_groups: Sequence[Mapping[str, Any]], proceed: Tensor | None) -> None:
        """Scale the heads that are over the threshold on any rank. Every rank that holds a layer must call.

        Args:
            given: This rank's logits.
            param_groups: The optimizer's groups; the parameters of the layers are written.
            proceed: A device flag; where it is False nothing changes. None means go.
        """
        for team, packed in zip(self._teams, given.packed, strict=True):
            if packed is not None or len(team.ranks) > 1:
                with span("qk_clip"):
                    self._scale(team, packed, param_groups, proceed)

    def _scale(
        self, team: _Team, packed: Tensor | None, param_groups: Sequence[Mapping[str, Any]], proceed: Tensor | None
    ) -> None:
        assert self._clip is not None
        if packed is None:  # other ranks may know more
            packed = torch.full((team.q_heads,), -torch.inf, dtype=torch.float32, device=team.device)
        logits, threshold = self._largest(team.ranks, packed), self._clip.threshold
        factors = clip_factors(logits, team.key_of, keys=team.k_heads, threshold=threshold, proceed=proceed)
        over = factors[team.q_heads : 2 * team.q_heads] < 1
        self._last.append((over.sum(), logits.amax()))
        if over.device.type == "cpu" and not bool(over.any()):
            return  # on a GPU, to ask would be to wait
        parameters = [
            RowScaled(local(parameter_of(param_groups, p.record)).detach(), p.row_dim) for p in team.parameters
        ]
        scale_rows_(parameters, team.rows, factors)

    def metrics(self) -> dict[str, float]:
        """Give numbers about the last step, waiting for them; nothing without `qk_clip`."""
        if self._clip is None:
            return {}
        return {
            "qk_clipped_heads": float(sum(int(count) for count, _ in self._last)),
            "qk_max_logit": max((float(most) for _, most in self._last), default=-math.inf),
        }

    def _checked(self, qk_logits: Any) -> dict[str, Tensor]:
        if self._clip is None:
            do = "Tell the optimizer which parameters make q and k: Muon(..., qk_clip=QKClip(...))"
            raise ValueError(message("qk_logits", found="given without qk_clip", do=do))
        if not isinstance(qk_logits, Mapping):
            do = "Give a dict, layer → tensor of the largest logit of each head"
            raise TypeError(message("qk_logits", found=f"a {type(qk_logits).__name__}", do=do))
        given = {str(key): value for key, value in qk_logits.items()}
        unknown = [key for key in given if key not in self._layers]
        if unknown or len(given) < len(qk_logits):
            twice = "a layer twice, as a number and as a word"
            found = f"no layer {some(map(repr, unknown))} here" if unknown else twice
            do = f"{self._clip.q!r} gives the layers {some(map(repr, self._layers))}"
            raise ValueError(message("qk_logits", found=found, do=do))
        missing = [name for name in self._layers if name not in given]
        if missing:
            do = "Give every layer that this rank holds, or None at steps without logits"
            raise ValueError(message("qk_logits", found=f"nothing for layer {some(map(repr, missing))}", do=do))
        return given

    def _placed(self, layer: AttentionLayer, given: Mapping[str, Any]) -> Tensor:
        """A layer's logits by global head, -inf where this rank knows nothing."""
        subject, logits = f"qk_logits[{layer.name!r}]", given[layer.name]
        if not isinstance(logits, Tensor):
            do = "Give a tensor with the largest logit of each head"
            raise TypeError(message(subject, found=f"a {type(logits).__name__}", do=do))
        if logits.ndim != 1 or logits.is_complex():
            found = f"a {logits.dtype} tensor of shape {tuple(logits.shape)}"
            raise ValueError(message(subject, found=found, do=f"Give one number for each of {layer.q_heads} heads"))
        device = layer.parameters[0].record.device
        mine = local(logits.detach()).to(device, torch.float32, non_blocking=device.type == "cuda")
        layout = layout_of(subject, logits)
        if layout is None and len(mine) == layer.q_heads:
            return mine
        if layout is None:
            heads = self._heads_here(layer)
            if len(heads) != len(mine):
                found = f"{len(mine)} heads"
                some_heads = f" or of the {len(heads)} of this rank" if 0 < len(heads) < layer.q_heads else ""
                do = f"Give the logits of all {layer.q_heads} heads{some_heads}, or a DTensor that says which they are"
                raise ValueError(message(subject, found=found, do=do))
        elif layout.shape != (layer.q_heads,):
            found = f"a DTensor of {layout.shape[0]} heads"
            raise ValueError(message(subject, found=found, do=f"It must have {layer.q_heads}, over all ranks"))
        else:
            region = layout.region(self._rank)[0] if self._rank in layout.ranks else ()
            heads = tuple(head for start, stop in region for head in range(start, stop))
        placed = torch.full((layer.q_heads,), -torch.inf, dtype=torch.float32, device=device)
        for first, last, start in _runs(heads):
            placed[first:last] = mine[start : start + last - first]
        return placed

    def _heads_here(self, layer: AttentionLayer) -> tuple[int, ...]:
        if layer.name not in self._found_here:  # a step must not do such arithmetic for every layer
            self._found_here[layer.name] = layer.heads_of(self._rank)
        return self._found_here[layer.name]


def _runs(heads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending numbers as (first, beyond the last, where they begin): slices are written without waiting."""
    runs: list[tuple[int, int, int]] = []
    for index, head in enumerate(heads):
        if runs and runs[-1][1] == head:
            runs[-1] = (runs[-1][0], head + 1, runs[-1][2])
        else:
            runs.append((head, head + 1, index))
    return runs

"""Attention heads as rows: which rows of which parameters make the q and k heads of a layer. By global row, as data.

[Note: slots] Every row of q or k is multiplied with one number out of a table of factors; `Slots` says where a layer's
factors stand in it. Rows that belong to no head (v, for one) point at a factor that is always 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshmuon.config import QKClip
from meshmuon.errors import message, some
from meshmuon.layout.records import ParameterRecord
from meshmuon.layout.shard_layout import Intervals

Side = Literal["q", "k", "qk"]
_OF_Q_OR_K = re.compile(r"(?=.*bias)(^|_)(q|k|qk|qkv|query|key|in)(_|$)")


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the factors of a layer begin: of q heads, of those of their rows that take the whole, and of k heads."""

    q: int
    whole: int
    k: int
    none: int


@dataclass(frozen=True, slots=True)
class HeadParameter:
    """A parameter whose rows are heads: of q, of k, or of both."""

    record: ParameterRecord
    side: Side

    @property
    def row_dim(self) -> int:
        """The dim that its rows are counted along."""
        ndim = len(self.record.shape)
        return self.record.routing.view.row_dim(ndim) if ndim > 1 else 0

    @property
    def rows(self) -> int:
        """How many rows it has, over all ranks."""
        return self.record.shape[self.row_dim]

    def held(self, rank: int) -> Intervals:
        """Give the rows a rank holds, in the order it stores them."""
        layout = self.record.layout
        return ((0, self.rows),) if layout is None else layout.region(rank)[self.row_dim]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The heads of one layer.

    Attributes:
        name: What `{layer}` stands for.
        clip: What the user said of all layers.
        parameters: q and k, or the fused one, first; then their biases.
        q_heads: Number of q heads.
        k_heads: Number of k heads.
        team: Global ranks that hold them, ascending; nobody if that is not known.
    """

    name: str
    clip: QKClip
    parameters: tuple[HeadParameter, ...]
    q_heads: int
    k_heads: int
    team: tuple[int, ...]

    def slots_of(self, parameter: HeadParameter, slots: Slots) -> Tensor:
        """Give the slot of every row of a parameter, over all ranks. See [Note: slots].

        Args:
            parameter: One of the layer's.
            slots: Where the layer's factors stand.

        Returns:
            int64, one for each row.
        """
        dim = self.clip.head_dim
        found = torch.full((parameter.rows,), slots.none, device="cpu")
        q, k = torch.arange(self.q_heads, device="cpu"), torch.arange(self.k_heads, device="cpu")
        if parameter.side == "qk":
            assert self.clip.fused_rows is not None
            first, second, *_ = self.clip.fused_rows
            groups = found.view(-1, sum(self.clip.fused_rows))
            groups[:, :first] = (slots.q + q).repeat_interleave(dim).view(-1, first)
            groups[:, first : first + second] = (slots.k + k).repeat_interleave(dim).view(-1, second)
        elif parameter.side == "q":
            heads = found.view(self.q_heads, -1)
            heads[:, :dim] = (slots.q + q)[:, None]
            heads[:, dim:] = (slots.whole + q)[:, None]  # mla's part with positions, whose k is shared by all heads
        else:
            found.view(self.k_heads, -1)[:, :dim] = (slots.k + k)[:, None]  # the rest of mla's makes v
        return found

    def may_need(self, bias: str) -> bool:
        """Say whether a bias may be a part of this layer's logits, and is not scaled along: `attn.q_bias`, for one.

        Args:
            bias: Its name.
        """
        scaled = [parameter.record.name for parameter in self.parameters]
        module, _, leaf = bias.rpartition(".")
        beside = module in {name.rpartition(".")[0] for name in scaled}
        named_so = _OF_Q_OR_K.search(leaf) is not None or bias in map(_bias_of, scaled)
        return beside and named_so and bias not in scaled

    def heads_of(self, rank: int) -> tuple[int, ...]:
        """Give the q heads a rank computes with, as far as the layout tells.

        FSDP gathers what it cut before the rank computes; `_StridedShard` is how it cuts what tensor parallelism has
        cut already. What is left of a strided layout without the strided axes is the rank's tensor-parallel shard.

        Args:
            rank: A global rank.

        Returns:
            Global numbers of heads, ascending; none if it has parts of heads.
        """
        q = self.parameters[0]
        layout = q.record.layout
        if layout is None:
            return tuple(range(self.q_heads))
        strided = [cut.axis for cut in layout.cuts[q.row_dim] if cut.factor > 1]
        has = torch.zeros(q.rows, dtype=torch.int64, device="cpu")
        for peer in layout.neighbours(rank, strided):
            for start, stop in q.held(peer):
                has[start:stop] = 1
        no_head = self.q_heads
        heads = self.slots_of(q, Slots(q=0, whole=0, k=no_head, none=no_head)).clamp(max=no_head)
        held, all_rows = (torch.bincount(heads, rows, no_head + 1)[:-1] for rows in (has, torch.ones_like(has)))
        if bool(((held > 0) & (held < all_rows)).any()):
            return ()
        return tuple(held.nonzero().flatten().tolist())


def attention_layers(records: Iterable[ParameterRecord], clip: QKClip, *, may_lack: bool) -> tuple[AttentionLayer, ...]:
    """Find the layers that a pattern names.

    Args:
        records: Every parameter.
        clip: The patterns, and what a head is.
        may_lack: Whether there may be no layer at all: a pipeline stage without attention.

    Returns:
        The layers, in the order of their q.

    Raises:
        ValueError: If a pattern matches nothing, q or k of a layer is missing, or rows are not heads.
    """
    known = {record.name: record for record in records}
    q, k = (_matches(pattern, known) for pattern in (clip.q, clip.k))
    if may_lack and not q and not k:
        return ()
    for word, found in (("q", q), ("k", k)):
        if not found:
            pattern = getattr(clip, word)
            do = f"The names here are {some(map(repr, known), limit=4)}. Leave qk_clip out on a stage without attention"
            raise ValueError(message(f"QKClip({word}=)", found=f"no parameter is called like {pattern!r}", do=do))
    for layer in (*q, *k):
        if layer not in q or layer not in k:
            lost, there = ("q", k) if layer not in q else ("k", q)
            name = getattr(clip, lost).replace("{layer}", layer)
            odd = f"{there[layer].name!r} is trained here, {name!r} is not"
            raise ValueError(message(f"QKClip({lost}=)", found=odd, do="Name q and k of the same layers; train both"))
    return tuple(_layer(name, clip, q[name], k[name], known) for name in q)


def _matches(pattern: str, known: Mapping[str, ParameterRecord]) -> dict[str, ParameterRecord]:
    before, after = map(re.escape, pattern.split("{layer}"))
    found = ((re.fullmatch(f"{before}(.+){after}", name), record) for name, record in known.items())
    return {match[1]: record for match, record in found if match is not None}


def _layer(
    name: str, clip: QKClip, q: ParameterRecord, k: ParameterRecord, known: Mapping[str, ParameterRecord]
) -> AttentionLayer:
    sides: list[tuple[ParameterRecord, Side]] = [(q, "qk")] if clip.fused_rows is not None else [(q, "q"), (k, "k")]
    parameters = [HeadParameter(record, side) for record, side in sides]
    for weight in tuple(parameters):
        if len(weight.record.shape) != 2:
            found = f"{len(weight.record.shape)}-D of shape {weight.record.shape}"
            raise ValueError(message(_subject(weight), found=found, do="QK-clip scales rows of 2-D parameters"))
        bias = known.get(_bias_of(weight.record.name))
        if bias is not None and bias.shape == (weight.rows,):
            parameters.append(HeadParameter(bias, weight.side))
    if len({str(parameter.record.device) for parameter in parameters}) > 1:
        found = f"on {' and '.join(sorted({str(p.record.device) for p in parameters}))}"
        do = "Put the q and k of a layer on one device"
        raise ValueError(message(_subject(parameters[0]), found=found, do=do))
    q_heads, k_heads = _counted(clip, parameters[: len(sides)])
    if q_heads % k_heads or (clip.kind != "gqa" and q_heads != k_heads):
        found = f'{q_heads} q heads and {k_heads} k heads with kind="{clip.kind}"'
        do = 'Correct head_dim, or give kind="gqa" where k heads are shared by the same number of q heads each'
        raise ValueError(message(_subject(parameters[0]), found=found, do=do))
    return AttentionLayer(name, clip, tuple(parameters), q_heads, k_heads, _team(name, parameters))


def _bias_of(weight: str) -> str:
    """`q_proj.bias` for `q_proj.weight`, `in_proj_bias` for `in_proj_weight`; nothing for other names."""
    stem = weight.removesuffix("weight")
    return f"{stem}bias" if stem != weight else ""


def _counted(clip: QKClip, weights: Sequence[HeadParameter]) -> tuple[int, int]:
    """The number of q heads and of k heads, from rows and from what the user said: both must agree."""
    rows = [weight.rows for weight in weights]
    if clip.fused_rows is not None:
        groups, odd = divmod(rows[0], sum(clip.fused_rows))
        if odd:
            found = f"{rows[0]} rows, fused_rows={clip.fused_rows}"
            do = "They must sum to the number of rows, or to a part of it that repeats"
            raise ValueError(message(_subject(weights[0]), found=found, do=do))
        rows = [groups * part for part in clip.fused_rows[:2]]
    counted = []
    for weight, count, said in zip((weights[0], weights[-1]), rows, (clip.q_heads, clip.k_heads), strict=True):
        heads = clip.q_heads if clip.kind == "mla" else said or count // clip.head_dim
        of_a_head = count // heads if heads else 0
        fits = of_a_head >= clip.head_dim if clip.kind == "mla" else of_a_head == clip.head_dim
        if not heads or count % heads or not fits:
            found = f"{count} rows, head_dim={clip.head_dim}, {heads or 'no'} heads"
            raise ValueError(message(_subject(weight), found=found, do="Correct head_dim or the number of heads"))
        counted.append(heads)
    return counted[0], counted[1]


def _team(name: str, parameters: Iterable[HeadParameter]) -> tuple[int, ...]:
    teams = {tuple(sorted(p.record.layout.ranks)): p.record.name for p in parameters if p.record.layout is not None}
    if len(teams) > 1:
        first, second = list(teams.items())[:2]
        found = f"{first[1]!r} lies on ranks {some(map(str, first[0]))}, {second[1]!r} on {some(map(str, second[0]))}"
        do = "Put the parameters of a layer on the same ranks: they agree on its logits"
        raise ValueError(message(f"qk_clip, layer {name!r}", found=found, do=do))
    return next(iter(teams), ())


def _subject(parameter: HeadParameter) -> str:
    return f"qk_clip, parameter {parameter.record.name!r}"

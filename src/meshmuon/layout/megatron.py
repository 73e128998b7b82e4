"""Shards as Megatron-LM and Transformer Engine mark them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshmuon.errors import message, some
from meshmuon.layout.names import normalise_names
from meshmuon.layout.plain import WHOLE, Sharded


def megatron_shards(model: nn.Module, group: Any, *, parts: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    """Read the shards of a model from the attributes that Megatron-LM and Transformer Engine put on parameters.

    `tensor_model_parallel=True` says that a parameter is cut, `partition_dim` along which dim. The attributes do not
    name the group: it is given here.

    Args:
        model: The model.
        group: The tensor-parallel process group.
        parts: For fused parameters, name → the global sizes of the parts of which each rank holds a piece.

    Returns:
        Name → `Sharded`, for `Muon(model, sharded=...)`.

    Raises:
        ValueError: If `parts` names a parameter that is not there or not cut.
    """
    given = parts or {}
    sizes = dict(zip(normalise_names(given), given.values(), strict=True))
    pairs = list(model.named_parameters())
    names = normalise_names(name for name, _ in pairs)
    cut = {n: t for n, (_, t) in zip(names, pairs, strict=True) if getattr(t, "tensor_model_parallel", False)}
    unknown = [name for name in sizes if name not in cut]
    if unknown:
        found = f"no parameter {some(map(repr, unknown))} that is marked as cut"
        raise ValueError(message("parts", found=found, do=f"The names here are {some(map(repr, cut), limit=4)}"))
    return {
        name: Sharded(int(getattr(tensor, "partition_dim", WHOLE)), group, sizes.get(name))
        for name, tensor in cut.items()
    }

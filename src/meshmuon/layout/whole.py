"""A whole tensor, laid out like a parameter: each rank keeps its part of what it has anyway. Nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshmuon.errors import message
from meshmuon.layout.mesh import layout_of, like, local
from meshmuon.layout.shard_layout import ShardLayout


def laid_like(name: str, value: Tensor, param: Tensor, *, rank: int, layout: ShardLayout | None = None) -> Tensor:
    """Lay a tensor out like a parameter.

    Args:
        name: The parameter, for messages.
        value: The whole tensor, the same on every rank; or one that lies like the parameter already.
        param: The parameter.
        rank: This rank, counted over the job.
        layout: Where a plain parameter lies; DTensors say so themselves.

    Returns:
        A tensor of the parameter's layout.

    Raises:
        ValueError: If it is a DTensor of another layout.
    """
    if isinstance(value, DTensor):
        fits = isinstance(param, DTensor) and value.device_mesh == param.device_mesh
        if fits and tuple(value.placements) == tuple(param.placements):  # type: ignore[attr-defined]
            return value
        found = f"state placed {tuple(value.placements)} on another mesh or otherwise than the parameter"
        raise ValueError(
            message(f"parameter {name!r}", found=found, do="Call full_tensor() on it first, on every rank")
        )
    layout = layout_of(name, param) or layout
    if layout is None:
        return value
    if rank not in layout.ranks:
        return like(param, value.new_empty(local(param).shape))
    part = value
    for dim, intervals in enumerate(layout.region(rank)):
        pieces = [part.narrow(dim, start, stop - start) for start, stop in intervals]
        part = torch.cat(pieces, dim) if pieces else part.narrow(dim, 0, 0)
    return like(param, part.to(local(param).device))

"""From DTensors to layouts: the only code that reads placements."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon.errors import message
from meshmuon.layout.shard_layout import Cut, ShardLayout


def layout_of(name: str, tensor: Tensor) -> ShardLayout | None:
    """Describe where a tensor lies.

    Args:
        name: The parameter, for messages.
        tensor: The parameter.

    Returns:
        Its layout, or None for a plain tensor.

    Raises:
        ValueError: If a placement is not one of Shard, _StridedShard and Replicate.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    cuts: list[list[Cut]] = [[] for _ in range(tensor.ndim)]
    for axis, placement in enumerate(tensor.placements):
        cut = _cut(name, axis, mesh.size(axis), placement)
        if cut is not None:
            cuts[placement.dim % tensor.ndim].append(cut)  # type: ignore[attr-defined]
    mesh_shape = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    return ShardLayout(tuple(tensor.shape), mesh_shape, _ranks_on(mesh), tuple(map(tuple, cuts)))


# A model has few meshes and many parameters: to list thousands of ranks for each took most of the time of planning.
_RANKS: weakref.WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = weakref.WeakKeyDictionary()


def _ranks_on(mesh: DeviceMesh) -> tuple[int, ...]:
    if mesh not in _RANKS:
        _RANKS[mesh] = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return _RANKS[mesh]


def _cut(name: str, axis: int, parts: int, placement: Any) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    # _StridedShard is not a Shard in every version of torch, and says is_shard() == False: ask for it first.
    if isinstance(placement, _StridedShard):
        return Cut(axis, parts, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(axis, parts)
    do = "Reduce it first: an optimizer needs whole values, in Shard or Replicate placements"
    raise ValueError(message(f"parameter {name!r}", found=f"the placement {placement}", do=do))


def local(tensor: Tensor) -> Tensor:
    """Give what this rank holds of a tensor, as a plain tensor that shares its memory.

    Args:
        tensor: A DTensor or a plain tensor.

    Returns:
        The local tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def odd_placements(param: Tensor) -> str:
    """Say how a gradient lies that lies on the mesh of its parameter, but otherwise than that.

    Args:
        param: The parameter, with or without a gradient.

    Returns:
        Its placements in words; nothing if it lies as it should, or is not there, or not on that mesh.
    """
    grad = param.grad
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor) or placements(grad) == placements(param):
        return ""
    return str(placements(grad)) if grad.device_mesh == param.device_mesh else ""


def is_distributed(tensor: Tensor) -> bool:
    """Tell whether a tensor says itself how it lies on a mesh.

    Args:
        tensor: Any tensor.

    Returns:
        True for a DTensor.
    """
    return isinstance(tensor, DTensor)


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Give this rank's part of a result the layout of another tensor.

    Args:
        tensor: The tensor that says how it lies.
        part: What this rank holds of the result.

    Returns:
        A DTensor like the first, or the part itself if that is plain.
    """
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def zeros_like(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    on_host: bool = False,
) -> Tensor:
    """Make zeros that lie as another tensor does.

    Args:
        tensor: The tensor that says how.
        dtype: Their dtype, if not the tensor's own.
        memory_format: How they are stored.
        on_host: Whether what each rank holds is in host memory, from which a GPU can copy without help.

    Returns:
        A DTensor or a plain tensor without gradient.
    """
    if not on_host:
        return torch.zeros_like(tensor, dtype=dtype, memory_format=memory_format).detach()
    part = local(tensor)
    zeros = torch.zeros_like(
        part.detach(), dtype=dtype, memory_format=memory_format, device="cpu", pin_memory=part.is_cuda
    )
    if not isinstance(tensor, DTensor):
        return zeros
    # `from_local` would bring it to the mesh's own device; FSDP2 keeps offloaded parameters this way too.
    described = torch.empty_like(tensor.detach(), dtype=dtype, memory_format=memory_format, device="meta")
    assert isinstance(described, DTensor)
    return DTensor(zeros, described._spec, requires_grad=False)


def lies_like(value: Tensor, tensor: Tensor) -> bool:
    """Tell whether two tensors lie alike: both plain, or both on one mesh with the same placements.

    Args:
        value: A DTensor or a plain tensor.
        tensor: Another.

    Returns:
        True if what a rank holds of one goes with what it holds of the other.
    """
    if not isinstance(value, DTensor) or not isinstance(tensor, DTensor):
        return isinstance(value, DTensor) == isinstance(tensor, DTensor)
    return value.device_mesh == tensor.device_mesh and placements(value) == placements(tensor)


def placements(tensor: Tensor) -> tuple[Any, ...] | str:
    """Say how a tensor lies on its mesh.

    Args:
        tensor: A DTensor or a plain tensor.

    Returns:
        Its placements, or "whole".
    """
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else "whole"


def mesh_groups(tensor: Tensor) -> dict[tuple[int, ...], Any]:
    """Give the process groups a tensor's mesh already has, by their ranks: no new one is needed for these.

    Args:
        tensor: A DTensor or a plain tensor.

    Returns:
        Global ranks, ascending → the group.
    """
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return {}  # a rank outside the mesh is in none of its groups
    groups = (tensor.device_mesh.get_group(axis) for axis in range(tensor.device_mesh.ndim))
    return {tuple(sorted(ranks_of(group))): group for group in groups}


def ranks_of(group: Any) -> list[int]:
    """Give the global ranks of a process group.

    Args:
        group: The group.

    Returns:
        Global ranks in the order of the group.
    """
    from torch.distributed import get_process_group_ranks

    return list(get_process_group_ranks(group))

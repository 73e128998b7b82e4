"""How plain tensors lie among ranks. Nothing in such a tensor says so: the user does, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshmuon.checks import check_sizes
from meshmuon.errors import message, some
from meshmuon.layout import mesh
from meshmuon.layout.shard_layout import Cut, ShardLayout

WHOLE = -1


@dataclass(frozen=True, slots=True)
class Sharded:
    """A plain tensor that is one of the equal shards of a parameter, as Megatron and Transformer Engine make them.

    Attributes:
        dim: The dim that is cut; -1 if the tensor is whole.
        group: The process group whose ranks hold the shards, in their order. Never guessed.
        parts: Where each rank holds a piece of every part of a fused parameter: the global sizes of the parts along
            `dim`, e.g. (gate, up), or (q, k, v).
    """

    dim: int
    group: Any
    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(message("Sharded(dim=)", found=repr(self.dim), do="Give the tensor dim that is cut, or -1"))
        if self.parts is not None:
            object.__setattr__(self, "parts", check_sizes("Sharded(parts=)", self.parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        return self  # a process group cannot be copied, and need not be


class PlainLayouts:
    """Where plain tensors lie: shards that were declared, and replicas on the ranks of one group.

    Args:
        sharded: Name → its shard.
        replicas: The process group whose ranks hold all other plain tensors; None: not known.
        syncs: Whether the optimizer averages their gradients: then there are no others, and one process is a group.
    """

    def __init__(
        self, sharded: Mapping[str, Sharded] | None = None, replicas: Any = None, *, syncs: bool = False
    ) -> None:
        self._sharded = dict(sharded or {})
        self._replicas = replicas
        self._syncs = syncs
        for name, shard in self._sharded.items():
            _check_group(f"sharded[{name!r}]", shard)
        if replicas is not None:
            _check_member("process_group", replicas)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainLayouts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_to_leave_the_job()
        return (_of_one_process, (self._syncs,))

    def refuse_to_leave_the_job(self) -> None:
        """Refuse to be pickled with process groups.

        Raises:
            TypeError: If there are any.
        """
        if self._sharded or self._replicas is not None:
            found = "a process group, which exists in this job only"
            raise TypeError(message("optimizer", found=found, do="Save opt.state_dict() instead of the optimizer"))

    @property
    def splits_replicas(self) -> bool:
        """Whether ranks were said to hold the same plain tensors, to share their matrices."""
        return self._syncs or self._replicas is not None

    def declare(self, names: Iterable[str], shard: Sharded) -> None:
        """Take what a parameter group says of its parameters.

        Args:
            names: The parameters.
            shard: How each of them is cut.
        """
        for name in names:
            _check_group(f"parameter {name!r}", shard)
            self._sharded[name] = shard

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forget what is declared inside, if an error is raised there."""
        before = dict(self._sharded)
        try:
            yield
        except BaseException:
            self._sharded = before
            raise

    def check_all_found(self, names: Iterable[str]) -> None:
        """Refuse declarations about parameters that do not exist.

        Args:
            names: All parameters.

        Raises:
            ValueError: If one was not found.
        """
        known = set(names)
        lost = [name for name in self._sharded if name not in known]
        if lost:
            found = f"no parameter named {some(map(repr, lost))}"
            raise ValueError(
                message("sharded", found=found, do=f"The names here are {some(map(repr, sorted(known)), limit=4)}")
            )

    def layout_of(self, name: str, tensor: Tensor) -> ShardLayout | None:
        """Describe where a parameter lies, be it a DTensor or plain.

        Args:
            name: The parameter.
            tensor: What this rank holds of it.

        Returns:
            Its layout; None for a plain tensor of which nothing is known but that it is here.

        Raises:
            ValueError: If the declaration does not fit the tensor.
        """
        if isinstance(tensor, DTensor):
            if self._syncs:
                do = "Leave grad_sync out: FSDP and TP average gradients themselves"
                raise ValueError(message(f"parameter {name!r}", found="a DTensor, with grad_sync", do=do))
            if name in self._sharded:
                do = "Leave it out of sharded=: a DTensor says itself where it lies"
                raise ValueError(message(f"parameter {name!r}", found="a DTensor in sharded=", do=do))
            return mesh.layout_of(name, tensor)
        shard = self._sharded.get(name)
        if shard is not None and shard.dim != WHOLE:
            return _shard_layout(name, tensor, shard)
        if self.splits_replicas:
            ranks = (0,) if self._replicas is None else tuple(mesh.ranks_of(self._replicas))
            return ShardLayout(tuple(tensor.shape), (len(ranks),), ranks, ((),) * tensor.ndim)
        _refuse_forgotten(name, tensor, declared=shard is not None)
        return None

    def shape_of(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Give a parameter's logical shape.

        Args:
            name: The parameter.
            tensor: What this rank holds of it.

        Returns:
            The global shape.
        """
        layout = self.layout_of(name, tensor)
        return tuple(tensor.shape) if layout is None else layout.shape

    def groups(self) -> dict[tuple[int, ...], Any]:
        """Give the process groups that were named, by their ascending global ranks."""
        named = [shard.group for shard in self._sharded.values() if shard.dim != WHOLE] + [self._replicas]
        return {tuple(sorted(mesh.ranks_of(group))): group for group in named if group is not None}


def _of_one_process(syncs: bool) -> PlainLayouts:
    return PlainLayouts(syncs=syncs)


def plain_layouts(params: Any, *, sharded: Any, process_group: Any, syncs: bool) -> PlainLayouts:
    """Read what the constructor was told about plain tensors.

    Args:
        params: What the optimizer is for; `DistributedDataParallel` brings its own group.
        sharded: Name → `Sharded`, or None.
        process_group: The ranks that hold the same plain tensors, or None.
        syncs: Whether the optimizer averages gradients itself; over all ranks, if no group is named.

    Returns:
        Where plain tensors lie.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a group is missing, or this rank is not in it.
    """
    from meshmuon.layout.names import normalise_names

    if sharded is not None and not isinstance(sharded, Mapping):
        do = "Write {name: Sharded(dim, group)}"
        raise TypeError(message("sharded", found=f"a {type(sharded).__name__}", do=do))
    wrapped = isinstance(params, nn.parallel.DistributedDataParallel)
    if syncs and (wrapped or sharded):
        found = "given with DistributedDataParallel" if wrapped else "given with sharded="
        do = "One of the two averages gradients: pass the bare model, or leave grad_sync out"
        raise ValueError(message("grad_sync", found=found, do=do))
    if process_group is None and wrapped:
        process_group = params.process_group
    if process_group is None and syncs and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    shards = sharded or {}
    return PlainLayouts(dict(zip(normalise_names(shards), shards.values(), strict=True)), process_group, syncs=syncs)


def _in_use() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _check_group(subject: str, shard: object) -> None:
    if not isinstance(shard, Sharded):
        raise TypeError(message(subject, found=f"a {type(shard).__name__}", do="Write Sharded(dim, group)"))
    if shard.dim == WHOLE:
        return
    if shard.group is None:
        if _in_use():
            found = f"cut along dim {shard.dim}, but no group"
            do = "Name the group whose ranks hold the shards: Sharded(dim, group); dim=-1 says that it is whole"
            raise ValueError(message(subject, found=found, do=do))
        return
    _check_member(subject, shard.group)


def _check_member(subject: str, group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        # torch gives a number instead of a group to ranks that are not in it
        found = "not a group of this rank" if type(group) is int else f"a {type(group).__name__}"
        do = "Pass a process group that this rank is a member of, e.g. mesh.get_group()"
        raise ValueError(message(subject, found=found, do=do))
    if dist.get_rank() not in mesh.ranks_of(group):
        found = f"a group of ranks {some(map(str, mesh.ranks_of(group)))}, without this one ({dist.get_rank()})"
        raise ValueError(message(subject, found=found, do="Pass a group that this rank is a member of"))


def _shard_layout(name: str, tensor: Tensor, shard: Sharded) -> ShardLayout | None:
    subject = f"parameter {name!r}"
    if not 0 <= shard.dim < tensor.ndim:
        found = f"cut along dim {shard.dim}, but {tensor.ndim}-D"
        raise ValueError(message(subject, found=found, do="Give the tensor dim that is cut; -1 for a whole tensor"))
    if shard.group is None:
        return None
    ranks = tuple(mesh.ranks_of(shard.group))
    size = tensor.shape[shard.dim] * len(ranks)
    if shard.parts is not None:
        odd = [part for part in shard.parts if part % len(ranks)]
        if odd or sum(shard.parts) != size:
            found = f"parts {shard.parts} of {size} along dim {shard.dim} on {len(ranks)} ranks"
            do = "Give the global sizes: they must sum to the global size, and each be cut into equal pieces"
            raise ValueError(message(subject, found=found, do=do))
    cuts: list[tuple[Cut, ...]] = [()] * tensor.ndim
    cuts[shard.dim] = (Cut(0, len(ranks), sizes=shard.parts or ()),)
    shape = tuple(size if dim == shard.dim else length for dim, length in enumerate(tensor.shape))
    return ShardLayout(shape, (len(ranks),), ranks, tuple(cuts))


def _refuse_forgotten(name: str, tensor: Tensor, *, declared: bool) -> None:
    """A shard that is taken for a whole matrix would be orthogonalized alone: another algorithm, silently."""
    if getattr(tensor, "tensor_model_parallel", False) and not declared and _in_use():
        found = "marked as a tensor-parallel shard (tensor_model_parallel), but no group was named for it"
        do = "Pass sharded=megatron_shards(model, group)"
        raise ValueError(message(f"parameter {name!r}", found=found, do=do))

"""State that lives on one rank only: momentum of the matrices it owns, moments of the stretches it updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshmuon.layout.mesh import zeros_like
from meshmuon.layout.records import Matrix, ParameterRecord
from meshmuon.plan.bucket import Bucket, Plan
from meshmuon.plan.flat import FlatBucket, Stretch
from meshmuon.runtime.lookup import parameter_of
from meshmuon.runtime.offload import Load
from meshmuon.update.momentum import state_dtype

# Puts together a flat tensor of which each rank of a team has a part, and zeros elsewhere.
Together: TypeAlias = Callable[[tuple[int, ...], Tensor], Tensor]
WholeState: TypeAlias = dict[Tensor, dict[str, Tensor]]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class OwnedState:
    """What this rank keeps under `grad_sync`; elsewhere it does not exist.

    Args:
        plan: Who owns what.
        param_groups: The optimizer's groups.
        before: The state under an earlier plan, with other owners; taken over by `catch_up`.
        on_host: Whether it lives in host memory.
    """

    def __init__(
        self,
        plan: Plan,
        param_groups: Sequence[Mapping[str, Any]],
        before: OwnedState | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self.plan = plan
        # One that has not caught up itself has nothing of its own yet.
        self._before: OwnedState | None = before if before is None or before._before is None else before._before
        # The sum of the bits of the whole state that was loaded for a parameter, until ranks have compared it.
        self.loaded: dict[Tensor, int] = {} if before is None else before.loaded
        # Records say where a tensor stood when the plan was made; a user may have edited the groups since.
        self._params = {record.place: parameter_of(param_groups, record) for record in plan.parameters}
        self._dtypes = {
            record.place: state_dtype(parameter_of(param_groups, record), param_groups[record.group])
            for record in plan.parameters
            if record.routing.algorithm == "muon"
        }
        self._momentum: dict[tuple[object, ...], Tensor] = {}
        self._moments: dict[tuple[object, ...], dict[str, Tensor]] = {}
        for matrix in self.matrices():
            param, dtype = self._parameter(matrix.parameter), self._dtypes[matrix.parameter.place]
            self._momentum[_key(matrix)] = zeros_like(
                matrix.block.select(param), dtype=dtype, memory_format=torch.contiguous_format, on_host=on_host
            )
        for stretch in self.stretches():
            param = self._parameter(stretch.parameter)
            part = param.detach().reshape(-1)[stretch.start : stretch.stop]
            fresh = {key: zeros_like(part, on_host=on_host) for key in _MOMENTS}
            self._moments[_key(stretch)] = {"step": torch.zeros((), dtype=torch.float32, device=param.device), **fresh}

    def _parameter(self, record: ParameterRecord) -> Tensor:
        return self._params[record.place]

    def matrices(self) -> list[Matrix]:
        """Give the matrices this rank owns."""
        return [matrix for bucket in self.plan.buckets for matrix in bucket.owned_by(self.plan.rank)]

    def stretches(self) -> list[Stretch]:
        """Give the stretches this rank updates."""
        return [s for bucket in self.plan.flat for s in bucket.owned_by(self.plan.rank)]

    def momentum(self, matrix: Matrix) -> Tensor:
        """Give the momentum of a matrix this rank owns, in the dims of its block."""
        return self._momentum[_key(matrix)]

    def moments(self, stretch: Stretch) -> dict[str, Tensor]:
        """Give AdamW's state of a stretch this rank updates."""
        return self._moments[_key(stretch)]

    def move(self, *, on_host: bool) -> None:
        """Bring it to host memory or back to the parameters' devices.

        Args:
            on_host: Where to.
        """
        momentum = {
            _key(matrix): self._moved(self.momentum(matrix), matrix.parameter, on_host=on_host)
            for matrix in self.matrices()
        }
        moments = {
            _key(stretch): {
                key: self._moved(value, stretch.parameter, on_host=on_host) if key in _MOMENTS else value
                for key, value in self.moments(stretch).items()
            }
            for stretch in self.stretches()
        }
        self._momentum, self._moments = momentum, moments  # all of it, or, where memory is lacking, nothing

    def _moved(self, value: Tensor, record: ParameterRecord, *, on_host: bool) -> Tensor:
        device = torch.device("cpu") if on_host else self._parameter(record).device
        if value.device == device:  # what is pinned stays pinned
            return value
        return zeros_like(value, on_host=True).copy_(value) if on_host else value.to(device)

    def forget(self, params: Sequence[Tensor]) -> None:
        """Begin anew for some parameters.

        Args:
            params: Which; those that are not here are passed over.
        """
        gone = set(params)
        for matrix in self.matrices():
            if self._parameter(matrix.parameter) in gone:
                self.momentum(matrix).zero_()
        for stretch in self.stretches():
            if self._parameter(stretch.parameter) in gone:
                for value in self.moments(stretch).values():
                    value.zero_()
        if self._before is not None:
            self._before.forget(params)

    def replace_parameter(self, old: Tensor, new: Tensor) -> None:
        """Go on with another tensor in a parameter's place, which has the same state.

        Args:
            old: The tensor that was replaced.
            new: What stands there now.
        """
        self._params = {place: new if param is old else param for place, param in self._params.items()}
        if self._before is not None:
            self._before.replace_parameter(old, new)

    def loads(self) -> list[Load]:
        """Give what a step needs of it at one time, in order."""
        return [*map(self.momentum_load, self.plan.buckets), *map(self.moments_load, self.plan.flat)]

    def momentum_load(self, bucket: Bucket) -> Load:
        """Give the momentum of a bucket's matrices that this rank owns."""
        buffers = [self.momentum(matrix) for matrix in bucket.owned_by(self.plan.rank)]
        return Load(bucket.number, bucket.device, buffers)

    def moments_load(self, bucket: FlatBucket) -> Load:
        """Give both moments of each of a bucket's stretches that this rank updates."""
        mine = bucket.owned_by(self.plan.rank)
        return Load(id(bucket), bucket.device, [self.moments(stretch)[key] for stretch in mine for key in _MOMENTS])

    @property
    def numel(self) -> int:
        """How many numbers of state are kept here."""
        moments = sum(each[key].numel() for each in self._moments.values() for key in _MOMENTS)
        return moments + sum(buffer.numel() for buffer in self._momentum.values())

    def catch_up(self, together: Together) -> None:
        """Take over what other ranks owned under an earlier plan. Every rank must ask; later calls do nothing.

        Args:
            together: Puts together what ranks have.
        """
        self.loaded = {}  # by all ranks, or none: else they would not have come here
        before, self._before = self._before, None
        if before is None:
            return
        # A rank that alone made its plan anew, and has the others' again, must not wait: they have no `before`.
        same_owners = _owners(before.plan) == _owners(self.plan)
        self.take(before._scattered() if same_owners else before.whole(together))

    def whole(self, together: Together) -> WholeState:
        """Give the whole state of every parameter, in torch's form. Every rank must ask.

        Args:
            together: Puts together what ranks have.

        Returns:
            Parameter → its state; the same on every rank.
        """
        mine = self._scattered()
        result: WholeState = {}
        for record in self.plan.parameters:
            param = self._parameter(record)
            assert record.layout is not None
            team = tuple(sorted(record.layout.ranks))
            result[param] = {key: _united(value, team, together) for key, value in mine[param].items()}
        return result

    def _scattered(self) -> WholeState:
        """What this rank has, at its place in tensors of the parameters' shapes; zeros elsewhere."""
        result: WholeState = {}
        for record in self.plan.parameters:
            param = self._parameter(record)
            if record.routing.algorithm == "muon":
                made = {"momentum_buffer": _zeros(param, self._dtypes[record.place])}
            else:
                made = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    **{k: _zeros(param, param.dtype) for k in _MOMENTS},
                }
            result[self._parameter(record)] = made
        for matrix in self.matrices():
            full = result[self._parameter(matrix.parameter)]
            matrix.block.select(full["momentum_buffer"]).copy_(self.momentum(matrix))
        for stretch in self.stretches():
            full = result[self._parameter(stretch.parameter)]
            for key in _MOMENTS:
                full[key].view(-1)[stretch.start : stretch.stop].copy_(self.moments(stretch)[key])
            if stretch.start == 0:
                full["step"].copy_(self.moments(stretch)["step"])
        return result

    def take(self, whole: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Take this rank's part of a whole state.

        Args:
            whole: Parameter → its state. Those without any, or with another algorithm's, keep what they have.
        """
        for matrix in self.matrices():
            state = whole.get(self._parameter(matrix.parameter), {})
            if "momentum_buffer" in state:
                self.momentum(matrix).copy_(matrix.block.select(state["momentum_buffer"]))
        for stretch in self.stretches():
            state = whole.get(self._parameter(stretch.parameter), {})
            if "exp_avg" in state:
                for key in _MOMENTS:
                    flat = state[key].reshape(-1)[stretch.start : stretch.stop]
                    self.moments(stretch)[key].copy_(flat)
                self.moments(stretch)["step"].copy_(state["step"])


def _owners(plan: Plan) -> dict[object, int]:
    """Who has the state of each matrix and each stretch."""
    found: dict[object, int] = {}
    for bucket in plan.buckets:
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            block = matrix.block
            found[matrix.name, block.rows, block.cols, block.lead_index] = bucket.team[owner]
    for flat in plan.flat:
        found.update({(each.parameter.name, each.start, each.stop): flat.team[each.owner] for each in flat.stretches})
    return found


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(param.shape, dtype=dtype, device=param.device)


def _united(value: Tensor, team: tuple[int, ...], together: Together) -> Tensor:
    """Whole numbers of 4 bytes travel: an odd count of 2-byte ones is made even."""
    flat = value.reshape(-1)
    padded = torch.cat([flat, flat.new_zeros(flat.numel() % 2)]) if value.dtype.itemsize == 2 else flat
    return together(team, padded)[: flat.numel()].view(value.shape)


def _key(owned: Matrix | Stretch) -> tuple[object, ...]:
    record = owned.parameter
    if isinstance(owned, Stretch):
        return (*record.place, owned.start)
    return (*record.place, owned.block.rows, owned.block.cols, owned.block.lead_index)

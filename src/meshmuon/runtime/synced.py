"""The step under `grad_sync`: gradients are averaged on their way to the owners, where alone there is state.

gradients of all ranks → average at the owner → momentum → polar factor → back to everyone → apply
gradients of all ranks → average at the owner → AdamW on its stretch   → back to everyone
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.exchange.contributions import Contributions
from meshmuon.exchange.exchange import Exchange
from meshmuon.layout.records import Matrix, ParameterRecord, Place, wire_dtype
from meshmuon.plan.bucket import Bucket, Plan
from meshmuon.plan.flat import GRAIN, FlatBucket, Stretch
from meshmuon.polar.orthogonalize import orthogonalize_stack
from meshmuon.runtime import pipeline
from meshmuon.runtime.lookup import decays, parameter_of
from meshmuon.runtime.offload import ResidentState
from meshmuon.runtime.owned_state import OwnedState
from meshmuon.runtime.spans import span
from meshmuon.update.adamw import AdamWRule, AdamWTensors, update_adamw_
from meshmuon.update.apply import ApplyRule, apply_update_
from meshmuon.update.momentum import MomentumRule, update_momentum_
from meshmuon.update.tensors import MatrixTensors

_ROW = 4096
_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True)
class SyncedStep:
    """One step. Made anew for each.

    Attributes:
        plan: Who owns what.
        param_groups: The optimizer's groups.
        exchange: Brings directions back.
        contributions: Averages gradients.
        owned: This rank's state.
        access: Brings it to where it is updated.
        present: Whether a parameter has a gradient on any rank, by its group and position.
        unscale: GradScaler's factor on this rank, or None. Applied before gradients are averaged: after an overflow on
            one rank alone, each has a scale of its own.
        proceed: A device flag, or None.
        clip: What averages are multiplied with, so that their norm is bounded; None: nothing.
    """

    plan: Plan
    param_groups: Sequence[Mapping[str, Any]]
    exchange: Exchange
    contributions: Contributions
    owned: OwnedState
    access: ResidentState
    present: Mapping[tuple[int, int], bool]
    unscale: Tensor | None
    proceed: Tensor | None
    clip: Tensor | None = None

    def take(self) -> None:
        """Take the step: bucket by bucket, or, to clip by the norm of all averages, in two rounds."""
        bound = self.plan.execution.max_grad_norm
        if bound is None:
            self._run([self._matrices(bucket) for bucket in self.plan.buckets])
            self._run([self._stretches(bucket) for bucket in self.plan.flat])
            return
        averages: dict[object, Tensor] = {}
        self._run([self._averaged(bucket, averages) for bucket in self._buckets])
        clipped = dataclasses.replace(self, clip=self._clip(averages, bound))
        clipped._run([clipped._matrices(bucket, averages) for bucket in self.plan.buckets])
        clipped._run([clipped._stretches(bucket, averages) for bucket in self.plan.flat])

    @property
    def _buckets(self) -> list[Bucket | FlatBucket]:
        return [*self.plan.buckets, *self.plan.flat]

    def _run(self, journeys: list[Iterator[None]]) -> None:
        pipeline.run(
            (pipeline.Journey(journey, 0) for journey in journeys),
            max_in_flight=self.plan.execution.max_in_flight,
            workspace_bytes=self.plan.execution.workspace_bytes,  # each bucket takes at most its part of it
        )

    def _averaged(self, bucket: Bucket | FlatBucket, averages: dict[object, Tensor]) -> Iterator[None]:
        """The first half of a journey: this rank's part of the average, kept for the second."""
        with span("gather", bucket if isinstance(bucket, Bucket) else None):
            packed, spread = self._packed(bucket)
            pending = self.contributions.average(bucket.team, packed, spread, rank=self.plan.rank)
        if pending.in_flight:
            yield
        averages[id(bucket)] = pending.wait()

    def _packed(self, bucket: Bucket | FlatBucket) -> tuple[Tensor, Sequence[int]]:
        """This rank's contribution, by owner; zeros where it has no gradient."""
        if isinstance(bucket, FlatBucket):
            parts = [self._flat_gradient(s.parameter)[s.start : s.stop] for s in bucket.stretches]
            return self._unscaled(torch.cat(parts)), bucket.spread
        way = self.exchange.table(bucket).back
        dtype = wire_dtype(bucket.matrices[0].parameter.dtype)
        packed = torch.empty(sum(way.spread), dtype=dtype, device=bucket.device)
        for matrix, offset in zip(bucket.matrices, way.offsets, strict=True):
            assert offset is not None
            grad = self._parameter(matrix.parameter).grad
            place = _seen(packed, offset, matrix)
            place.zero_() if grad is None else place.copy_(matrix.block.select(grad))
        return self._unscaled(packed), way.spread

    def _unscaled(self, packed: Tensor) -> Tensor:
        return packed if self.unscale is None else packed.mul_(self.unscale.to(packed.device))

    def _matrices(self, bucket: Bucket, averages: dict[object, Tensor] | None = None) -> Iterator[None]:
        """The journey of a bucket of matrices."""
        held = {} if averages is None else averages
        if averages is None:
            yield from self._averaged(bucket, held)
        group = self.param_groups[bucket.group]
        average = held.pop(id(bucket))
        inputs = average.new_empty(average.numel(), dtype=bucket.recipe.input_dtype)
        with span("momentum", bucket), self.access.on_device(self.owned.momentum_load(bucket)) as buffers:
            owned = self._owned(bucket, average, buffers)
            update_momentum_(owned, inputs, MomentumRule.of(group, unscale=self.clip, proceed=self.proceed))
        stack = [inputs.view(-1, *bucket.wide_shape)]
        del average, owned, inputs
        with span("polar", bucket):
            directions = orthogonalize_stack(stack, bucket.recipe)
        with span("scatter", bucket):
            scattered = self.exchange.scatter(bucket, directions)
        if scattered.in_flight:
            yield
        with span("apply", bucket):
            apply_update_(self._everyones(bucket), scattered.wait(), ApplyRule.of(group, proceed=self.proceed))

    def _owned(self, bucket: Bucket, average: Tensor, buffers: Sequence[Tensor]) -> list[MatrixTensors]:
        """The matrices of a bucket that this rank owns, as whole ones with averaged gradients."""
        items = []
        offset = 0
        for matrix, buffer in zip(bucket.owned_by(self.plan.rank), buffers, strict=True):
            param = matrix.block.select(self._parameter(matrix.parameter).detach())
            present = self._is_present(matrix.parameter)
            whole = dataclasses.replace(matrix, share=None, logical_shape=matrix.scaled_shape)
            grad = _seen(average, offset, matrix) if present else None
            place = Place(offset, offset)
            items.append(MatrixTensors(whole, param, grad, buffer, place, present))
            offset += math.prod(matrix.shape)
        return items

    def _everyones(self, bucket: Bucket) -> list[MatrixTensors]:
        """All matrices of a bucket, to be moved along the directions that came back."""
        items = []
        for matrix, place in zip(bucket.matrices, self.exchange.places(bucket), strict=True):
            param = matrix.block.select(self._parameter(matrix.parameter).detach())
            items.append(MatrixTensors(matrix, param, None, param, place, self._is_present(matrix.parameter)))
        return items

    def _stretches(self, bucket: FlatBucket, averages: dict[object, Tensor] | None = None) -> Iterator[None]:
        """The journey of a bucket of element-wise parameters."""
        held = {} if averages is None else averages
        if averages is None:
            yield from self._averaged(bucket, held)
        average = held.pop(id(bucket))
        mine = bucket.owned_by(self.plan.rank)
        results = [self._flat(s.parameter)[s.start : s.stop].clone() for s in mine]
        with span("adamw"), self.access.on_device(self.owned.moments_load(bucket)) as moments:
            self._update_stretches(bucket, mine, results, average, moments)
        own = torch.cat(results) if results else average.new_empty(0, dtype=bucket.dtype)
        pending = self.contributions.give(bucket.team, own, bucket.spread)
        if pending.in_flight:
            yield
        received = pending.wait().split([stretch.numel for stretch in bucket.stretches])
        for stretch, part in zip(bucket.stretches, received, strict=True):
            _write_flat(self._parameter(stretch.parameter).detach(), stretch.start, part)

    def _update_stretches(
        self,
        bucket: FlatBucket,
        mine: Sequence[Stretch],
        results: Sequence[Tensor],
        average: Tensor,
        moments: Sequence[Tensor],
    ) -> None:
        """AdamW on the stretches this rank owns: `moments` has two of each."""
        grads = average.split([stretch.numel for stretch in mine])
        for decayed in (False, True):
            tensors = [
                AdamWTensors(result, grad, first, second, self.owned.moments(stretch)["step"])
                for stretch, result, grad, first, second in zip(
                    mine, results, grads, moments[::2], moments[1::2], strict=True
                )
                if decays(self.param_groups, stretch.parameter) == decayed and self._is_present(stretch.parameter)
            ]
            group = self.param_groups[bucket.group]
            update_adamw_(tensors, AdamWRule.of(group, decays=decayed, unscale=self.clip, proceed=self.proceed))

    def _clip(self, averages: Mapping[object, Tensor], bound: float) -> Tensor:
        """The factor that brings the norm of all averages down to the bound.

        Sums of squares of fixed parts, added in the order of their size: the same bits on any number of ranks.
        """
        if not self._buckets:
            return torch.ones((), device="cpu")  # nothing to clip: all parameters are empty
        parts = []
        for bucket in self._buckets:
            squares, counts = _squares(bucket, averages[id(bucket)], self.plan.rank)
            parts.append(self.contributions.give(bucket.team, squares, counts).wait())
        norm = _sum(torch.cat([part.to(parts[0].device) for part in parts]).sort().values).sqrt()
        return (bound / (norm + _CLIP_EPS)).clamp(max=1.0)

    def _parameter(self, record: ParameterRecord) -> Tensor:
        return parameter_of(self.param_groups, record)

    def _is_present(self, record: ParameterRecord) -> bool:
        return self.present[record.place]

    def _flat(self, record: ParameterRecord) -> Tensor:
        return self._parameter(record).detach().reshape(-1)

    def _flat_gradient(self, record: ParameterRecord) -> Tensor:
        param = self._parameter(record)
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        return grad.reshape(-1).to(wire_dtype(param.dtype))


def _seen(flat: Tensor, offset: int, matrix: Matrix) -> Tensor:
    """A matrix's part of a flat buffer, in the dims of its block."""
    rows, cols = matrix.shape
    return matrix.block.unfold(flat[offset : offset + rows * cols].view(1, rows, cols))


def _write_flat(param: Tensor, start: int, part: Tensor) -> None:
    if param.is_contiguous():
        param.view(-1)[start : start + part.numel()].copy_(part)
    else:
        flat = param.reshape(-1)
        flat[start : start + part.numel()].copy_(part)
        param.copy_(flat.view(param.shape))


def _squares(bucket: Bucket | FlatBucket, average: Tensor, rank: int) -> tuple[Tensor, list[int]]:
    """Sums of squares over each matrix or grain this rank owns, and how many of them every member has."""
    sizes = _sizes(bucket)
    mine = sizes[bucket.team.index(rank)]
    sums = [_sum(part.double().square()) for part in average.split(mine)]
    return (torch.stack(sums) if sums else average.new_empty(0, dtype=torch.float64)), [len(each) for each in sizes]


def _sizes(bucket: Bucket | FlatBucket) -> list[list[int]]:
    """For each member of the team, the sizes of the parts whose squares are added by themselves."""
    sizes: list[list[int]] = [[] for _ in bucket.team]
    if isinstance(bucket, Bucket):
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            sizes[owner].append(math.prod(matrix.shape))
    else:
        for stretch in bucket.stretches:
            starts = range(stretch.start, stretch.stop, GRAIN)
            sizes[stretch.owner] += [min(GRAIN, stretch.stop - start) for start in starts]
    return sizes


def _sum(numbers: Tensor) -> Tensor:
    """Add up a vector by rows of one length: a plain sum is split differently among threads."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % _ROW))
    return padded.view(-1, _ROW).sum(dim=1).sum()

"""From the records of a plan to plain tensors: what this rank holds of parameters, gradients and state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.exchange.gradients import settle_gradients
from meshmuon.kernels.tables import whereabouts
from meshmuon.layout.mesh import local, odd_placements
from meshmuon.layout.records import Matrix, ParameterRecord, Place
from meshmuon.plan.bucket import Bucket, Plan
from meshmuon.plan.route import Route
from meshmuon.runtime.lookup import decays, parameter_of
from meshmuon.runtime.offload import Load, batches
from meshmuon.update.adamw import AdamWTensors
from meshmuon.update.tensors import MatrixTensors


@dataclass(frozen=True, slots=True)
class ElementwisePart:
    """AdamW parameters that are updated by one call.

    Attributes:
        number: Its place among the parts of a step.
        group: Index of their parameter group.
        decays: Whether weight decay is meant for them.
        tensors: Parameters, gradients and state.
    """

    number: int
    group: int
    decays: bool
    tensors: list[AdamWTensors]

    @property
    def load(self) -> Load:
        """Both moments of each."""
        moments = [moment for item in self.tensors for moment in (item.exp_avg, item.exp_avg_sq)]
        return Load(("adamw", self.number), self.tensors[0].param.device, moments)

    def with_moments(self, moments: Sequence[Tensor]) -> list[AdamWTensors]:
        """Give the tensors with other moments, e.g. copies on the device.

        Args:
            moments: Two for each parameter.

        Returns:
            New records.
        """
        triples = zip(self.tensors, moments[::2], moments[1::2], strict=True)
        return [dataclasses.replace(item, exp_avg=first, exp_avg_sq=second) for item, first, second in triples]


class LocalTensors:
    """Looks up the tensors behind records. From here on there is no DTensor any more.

    Args:
        param_groups: The optimizer's groups.
        state: Its state, by parameter.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        self._param_groups = param_groups
        self._state = state

    def _parameter(self, record: ParameterRecord) -> Tensor:
        return parameter_of(self._param_groups, record)

    def whereabouts(self, plan: Plan) -> tuple[object, ...]:
        """Give where all tensors of a step lie, and how: what a captured CUDA graph depends on.

        Args:
            plan: The plan.

        Returns:
            Addresses, dtypes and strides; None for a gradient that is not there.
        """
        found: list[object] = []
        for record in plan.parameters:
            param = self._parameter(record)
            found.append(whereabouts(local(param)))
            found.append(None if param.grad is None else whereabouts(local(param.grad)))
            found.extend(whereabouts(local(value)) for value in self._state[param].values())
        return tuple(found)

    def settle_gradients(self, plan: Plan) -> None:
        """Lay gradients out like their parameters, where all ranks have agreed to take the step.

        Args:
            plan: The plan.
        """
        settle_gradients(self._parameter(record) for record in plan.parameters if record.layout is not None)

    def presence(self, plan: Plan, agreed: Tensor | None) -> dict[tuple[int, int], bool]:
        """Tell which parameters have a gradient on any rank.

        Args:
            plan: The plan.
            agreed: What ranks have agreed on, in the order of the plan; None: this one is alone. On a GPU this waits.

        Returns:
            (group, position) → whether it has.
        """
        if agreed is None:
            here = [self._parameter(record).grad is not None for record in plan.parameters]
        else:
            here = agreed.bool().tolist()
        return {record.place: has for record, has in zip(plan.parameters, here, strict=True)}

    def present(self, bucket: Bucket) -> Bucket:
        """Leave out the matrices without a gradient, where no other rank counts on them.

        Args:
            bucket: The bucket.

        Returns:
            The bucket itself, or a smaller one.
        """
        if bucket.route is not Route.LOCAL:
            return bucket
        params = self._param_groups[bucket.group]["params"]
        kept = tuple([m for m in bucket.matrices if params[m.parameter.position].grad is not None])
        return bucket if len(kept) == len(bucket.matrices) else dataclasses.replace(bucket, matrices=kept)

    def matrices(self, bucket: Bucket, *, places: Sequence[Place]) -> list[MatrixTensors]:
        """Give what this rank holds of a bucket's matrices.

        Args:
            bucket: The bucket.
            places: Where each stands in the bucket's flat buffers.

        Returns:
            One record per matrix.
        """
        items = []
        params = self._param_groups[bucket.group]["params"]
        for matrix, place in zip(bucket.matrices, places, strict=True):  # every call counts: a model has many matrices
            param = params[matrix.parameter.position]
            select, grad = matrix.block.select, param.grad
            if matrix.block.whole and type(grad) is Tensor and matrix.parameter.layout is None:
                items.append(MatrixTensors(matrix, param, grad, self._state[param]["momentum_buffer"], place, True))
                continue
            # One that lies otherwise is laid out anew in a step; who asks between steps does without it.
            grad = None if grad is None or odd_placements(param) else select(local(grad))
            buffer = select(local(self._state[param]["momentum_buffer"]))
            items.append(MatrixTensors(matrix, select(local(param)), grad, buffer, place, grad is not None))
        return items

    def release_gradients(self, matrices: Sequence[MatrixTensors]) -> list[MatrixTensors]:
        """Let go of gradients that have been read whole; those cut into blocks go at the end of the step.

        Args:
            matrices: Whose gradients have been read.

        Returns:
            The same records without gradients.
        """
        for item in matrices:
            if item.param.numel() == math.prod(item.matrix.parameter.local_shape):
                self._parameter(item.matrix.parameter).grad = None
        return [dataclasses.replace(item, grad=None) for item in matrices]

    def elementwise(self, plan: Plan, *, in_parts: bool = False) -> list[ElementwisePart]:
        """Give what this rank holds of the parameters that take AdamW.

        Args:
            plan: The plan.
            in_parts: Whether state has to be brought, and so in parts of a bounded size.

        Returns:
            Those with a gradient, by group, whether they are decayed, and device.
        """
        alike: dict[tuple[int, bool, torch.device], list[AdamWTensors]] = {}
        for record in plan.elementwise:
            param = self._parameter(record)
            if param.grad is not None:
                state = {key: local(value) for key, value in self._state[param].items()}
                item = AdamWTensors(param=local(param), grad=local(param.grad), **state)
                kind = (record.group, decays(self._param_groups, record), item.param.device)
                alike.setdefault(kind, []).append(item)
        found: list[ElementwisePart] = []
        for (group, decayed, _), tensors in alike.items():
            for part in batches(tensors) if in_parts else [tensors]:
                found.append(ElementwisePart(len(found), group, decayed, part))
        return found

    def loads(self, plan: Plan) -> list[Load]:
        """Give the state a step needs at one time, in the order it will ask for it.

        Args:
            plan: The plan.

        Returns:
            One load for each bucket with gradients and each part of the rest.
        """
        buckets = [self.present(bucket) for bucket in plan.buckets]
        momentum = [
            Load(bucket.number, bucket.device, [self._momentum(matrix) for matrix in bucket.matrices])
            for bucket in buckets
        ]
        return momentum + [part.load for part in self.elementwise(plan, in_parts=True)]

    def _momentum(self, matrix: Matrix) -> Tensor:
        return matrix.block.select(local(self._state[self._parameter(matrix.parameter)]["momentum_buffer"]))

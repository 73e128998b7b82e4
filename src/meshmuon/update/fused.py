"""The element-wise work of a bucket in one launch on the way in and one on the way out, where kernels can do it.

Plain torch (`momentum.py`, `apply.py`) is the reference, and does the work everywhere else: on a CPU, in fp64, and for
views that are no stack of strided matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmuon.kernels import elementwise
from meshmuon.kernels.self_check import check_kernels
from meshmuon.kernels.tables import Slot, TensorTable, build_tables, count_partials
from meshmuon.plan.bucket import Bucket
from meshmuon.plan.route import Route
from meshmuon.update.apply import ApplyRule, apply_update_
from meshmuon.update.momentum import MomentumRule, update_momentum_
from meshmuon.update.scale import scale_factor
from meshmuon.update.tensors import MatrixTensors

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Launch:
    """One table, and which of a bucket's matrices it lists."""

    table: TensorTable
    positions: list[int]


class BucketUpdates:
    """Momentum and update of buckets. Keeps the tables of each from step to step."""

    def __init__(self) -> None:
        self._launches: dict[int, list[_Launch]] = {}
        self._scales: dict[int, tuple[object, float]] = {}
        self._numbers: dict[tuple[str, int, torch.device], tuple[tuple[float, ...], Tensor]] = {}

    def momentum(
        self, bucket: Bucket, matrices: Sequence[MatrixTensors], inputs: Tensor, rule: MomentumRule, after: ApplyRule
    ) -> Tensor | None:
        """Advance the momentum of a bucket's matrices, and write what will be orthogonalized.

        Args:
            bucket: The bucket.
            matrices: What this rank holds of its matrices.
            inputs: The bucket's flat buffer; written.
            rule: The numbers of this step.
            after: The rule that `apply` will follow: tables hold the factors of both.

        Returns:
            Partial sums of squares of the inputs, where they come for free.
        """
        slots = _slots(matrices, after) if bucket.recipe.fused else None
        if slots is None:
            self._launches.pop(bucket.number, None)
            update_momentum_(matrices, inputs, rule)
            return None
        check_kernels(bucket.device, bucket.recipe.dtype)
        launches = self._current(bucket.number, slots, scales=(after.adjust_lr_fn, after.extra_scale_factor))
        whole = bucket.route is Route.LOCAL and len(launches) == 1
        count = sum(item.matrix.count for item in matrices)
        partials = inputs.new_empty(count_partials(count, bucket.wide_shape), dtype=torch.float64) if whole else None
        for launch in launches:
            elementwise.update_momentum(
                launch.table,
                inputs,
                numbers=self._live("momentum", bucket, elementwise.momentum_numbers(rule.momentum, l2=rule.l2)),
                nesterov=rule.nesterov,
                l2=bool(rule.l2),
                unscale=None if rule.unscale is None else rule.unscale.to(bucket.device, torch.float32),
                proceed=rule.proceed,
                partials=partials,
            )
        return partials

    def apply(self, bucket: Bucket, matrices: Sequence[MatrixTensors], directions: Tensor, rule: ApplyRule) -> None:
        """Write the update into the parameters of a bucket.

        Args:
            bucket: The bucket.
            matrices: What this rank holds of its matrices.
            directions: The bucket's flat buffer of directions; used up.
            rule: The numbers of this step.
        """
        launches = self._launches.get(bucket.number)
        if launches is None:
            apply_update_(matrices, directions, rule)
            return
        if isinstance(rule.lr, Tensor):
            lr = rule.lr.to(bucket.device, torch.float32)
        else:
            lr = self._live("lr", bucket, (rule.lr,))
        for launch in launches:
            elementwise.apply_update(
                launch.table,
                directions,
                lr=lr,
                weight_decay=self._live("decay", bucket, (rule.weight_decay,)),
                mode=rule.weight_decay_mode,
                proceed=rule.proceed,
            )

    def _current(self, number: int, slots: Sequence[Slot], *, scales: tuple[object, float]) -> list[_Launch]:
        launches = self._launches.get(number, [])
        listed = sum(len(launch.positions) for launch in launches)
        if listed == len(slots) and self._scales[number] == scales:
            try:
                for launch in launches:
                    mine = [slots[i] for i in launch.positions]
                    if not launch.table.is_current(mine):
                        launch.table.update(mine)
                return launches
            except ValueError:  # other dtypes, sizes or alignment than before
                pass
        launches = [_Launch(table, positions) for table, positions in build_tables(slots)]
        self._launches[number], self._scales[number] = launches, scales
        return launches

    def _live(self, name: str, bucket: Bucket, values: tuple[float, ...]) -> Tensor:
        """Numbers of a group in device memory, rewritten in the order of the stream when they change.

        Always the same memory: a captured CUDA graph reads what is there when it is replayed.
        """
        key = (name, bucket.group, bucket.device)
        before, tensor = self._numbers.get(key, (None, None))
        if tensor is None:
            tensor = torch.empty(len(values), device=bucket.device)
        if before != values:
            for place, value in zip(tensor.unbind(), values, strict=True):
                place.fill_(value)
            self._numbers[key] = (values, tensor)
        return tensor


def _slots(matrices: Sequence[MatrixTensors], after: ApplyRule) -> list[Slot] | None:
    """The matrices as kernels see them; None if one of them is nothing that kernels can work on."""
    scales: dict[tuple[int, int], float] = {}
    slots = []
    for item in matrices:
        param, buffer = _stack(item.param, item), _stack(item.buffer, item)
        grad = None if item.grad is None else _stack(item.grad, item)
        if param is None or buffer is None or (grad is None) != (item.grad is None):
            return None
        matrix = item.matrix
        shape = matrix.scaled_shape
        if shape not in scales:
            scales[shape] = after.extra_scale_factor * scale_factor(shape, after.adjust_lr_fn)
        slots.append(
            Slot(
                param=param,
                buffer=buffer,
                grad=grad,
                input_offset=item.place.input,
                direction_offset=item.place.direction,
                padded=matrix.wide_shape if matrix.share is None else matrix.block.shape,
                turned=matrix.share is None and matrix.tall,
                scale=scales[shape],
            )
        )
    return slots


def _stack(tensor: Tensor, item: MatrixTensors) -> Tensor | None:
    if tensor.dtype not in _DTYPES:
        return None
    rows, cols = item.matrix.block.shape
    if tensor.shape in ((rows, cols), (item.matrix.count, rows, cols)):
        return tensor
    try:
        return tensor.view(item.matrix.count, rows, cols)
    except RuntimeError:  # strides that no view has
        return None

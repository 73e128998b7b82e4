"""The element-wise work of a bucket in one launch on the way in and one on the way out, where kernels can do it.

Plain torch (`momentum.py`, `apply.py`) is the reference, and does the work everywhere else: on a CPU, in fp64, and for
views that are no stack of strided matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.kernels import elementwise
from meshmuon.kernels.self_check import check_kernels
from meshmuon.kernels.tables import Slot, TensorTable, build_tables, count_partials
from meshmuon.plan.bucket import Bucket, Plan
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
        self._slots: dict[int, list[Slot]] = {}
        self._numbers: dict[tuple[str, int, torch.device], tuple[tuple[float, ...], Tensor]] = {}

    def prepare(self, bucket: Bucket, matrices: Sequence[MatrixTensors], after: ApplyRule) -> None:
        """Make the tables of a bucket without launching anything that a CUDA graph would repeat.

        Args:
            bucket: The bucket.
            matrices: What this rank holds of its matrices.
            after: The rule that `apply` will follow.
        """
        slots = self._slots_of(bucket, matrices, after)
        assert slots is not None or not bucket.recipe.fused
        if slots is not None:
            self._current(bucket.number, slots, scales=_scales(after))
            _let_go(slots)

    def refresh(self, param_groups: Sequence[Mapping[str, Any]], plan: Plan) -> None:
        """Rewrite the live numbers of all groups.

        Args:
            param_groups: The optimizer's groups.
            plan: The plan: which groups work where.
        """
        for group, device in {(bucket.group, bucket.device) for bucket in plan.buckets}:
            values = param_groups[group]
            before = MomentumRule.of(values, unscale=None, proceed=None)
            self.live("momentum", group, device, elementwise.momentum_numbers(before.momentum, l2=before.l2))
            self.live("decay", group, device, (values["weight_decay"],))
            if not _is_on(values["lr"], device):
                self.live("lr", group, device, (float(values["lr"]),))
        for group, device in {(record.group, record.device) for record in plan.elementwise}:
            values = param_groups[group]
            self.adamw_lr(group, device, values["lr"] * values["adamw_lr_ratio"])

    def adamw_lr(self, group: int, device: torch.device, lr: float | Tensor) -> Tensor:
        """Give AdamW's learning rate as a number in device memory.

        Args:
            group: Whose.
            device: Where.
            lr: What it is now.

        Returns:
            One number.
        """
        if isinstance(lr, Tensor) and _is_on(lr, device):
            return lr
        return self.live("adamw lr", group, device, (float(lr),))[0]

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
        slots = self._slots_of(bucket, matrices, after) if bucket.recipe.fused else None
        if slots is None:
            self._launches.pop(bucket.number, None)
            update_momentum_(matrices, inputs, rule)
            return None
        check_kernels(bucket.device, bucket.recipe.dtype)
        launches = self._current(bucket.number, slots, scales=_scales(after))
        _let_go(slots)
        whole = bucket.route is Route.LOCAL and len(launches) == 1
        partials = None
        if whole:
            count = inputs.numel() // math.prod(bucket.wide_shape)
            partials = inputs.new_empty(count_partials(count, bucket.wide_shape), dtype=torch.float64)
        values = elementwise.momentum_numbers(rule.momentum, l2=rule.l2)
        numbers = self.live("momentum", bucket.group, bucket.device, values)
        for launch in launches:
            elementwise.update_momentum(
                launch.table,
                inputs,
                numbers=numbers,
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
        if isinstance(rule.lr, Tensor) and _is_on(rule.lr, bucket.device):
            lr = rule.lr.to(torch.float32)
        else:
            lr = self.live("lr", bucket.group, bucket.device, (float(rule.lr),))
        for launch in launches:
            elementwise.apply_update(
                launch.table,
                directions,
                lr=lr,
                weight_decay=self.live("decay", bucket.group, bucket.device, (rule.weight_decay,)),
                mode=rule.weight_decay_mode,
                proceed=rule.proceed,
            )

    def _slots_of(self, bucket: Bucket, matrices: Sequence[MatrixTensors], after: ApplyRule) -> list[Slot] | None:
        """The matrices as kernels see them. Only gradients are new from step to step; None: nothing for kernels."""
        known = self._slots.get(bucket.number, [])
        if len(known) == len(matrices) and self._scales.get(bucket.number) == _scales(after):
            if _refill(known, matrices):
                return known
            _let_go(known)
        slots = _slots(matrices, after)
        if slots is not None:
            self._slots[bucket.number] = slots
        return slots

    def forget_tensors(self) -> None:
        """Let go of all tensors; tables of addresses are kept. For state that was lent for one step only."""
        self._slots.clear()

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

    def live(self, name: str, group: int, device: torch.device, values: tuple[float, ...]) -> Tensor:
        """Keep numbers of a group in device memory, rewritten in the order of the stream when they change.

        Always the same memory: a captured CUDA graph reads what is there when it is replayed.

        Args:
            name: What they are.
            group: Whose.
            device: Where.
            values: What they are now.

        Returns:
            fp32, one number each.
        """
        key = (name, group, device)
        before, tensor = self._numbers.get(key, (None, None))
        if tensor is None:
            tensor = torch.empty(len(values), device=device)
        if before != values:
            for place, value in zip(tensor.unbind(), values, strict=True):
                place.fill_(value)
            self._numbers[key] = (values, tensor)
        return tensor


def _is_on(lr: float | Tensor, device: torch.device) -> bool:
    return isinstance(lr, Tensor) and lr.device == device


def _scales(after: ApplyRule) -> tuple[object, float]:
    return (after.adjust_lr_fn, after.extra_scale_factor)


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


def _let_go(slots: Sequence[Slot]) -> None:
    """Keep slots without gradients: they must be gone when the user lets go of them. Tables know their addresses."""
    for slot in slots:
        slot.grad = None


def _refill(slots: Sequence[Slot], matrices: Sequence[MatrixTensors]) -> bool:
    """Put the gradients of this step into slots; False if other tensors have taken the place of theirs."""
    for slot, item in zip(slots, matrices):  # every call counts: a model has many matrices
        grad = item.grad
        if slot.param is not item.param or slot.buffer is not item.buffer:
            return False
        if grad is not None and grad.dtype not in _DTYPES:
            return False
        slot.grad = grad  # a gradient has the shape of its parameter
    return True


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

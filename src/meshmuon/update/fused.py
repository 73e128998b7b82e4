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
from meshmuon.kernels.landing import Landing
from meshmuon.kernels.self_check import check_kernels
from meshmuon.kernels.tables import Slot, TensorTable, build_tables, count_partials
from meshmuon.plan.bucket import Bucket, Plan
from meshmuon.plan.route import Route
from meshmuon.update.apply import ApplyRule, apply_update_
from meshmuon.update.momentum import MomentumRule, update_momentum_
from meshmuon.update.slots import let_go, refilled, scales_of, slots_of
from meshmuon.update.tensors import MatrixTensors


@dataclass(slots=True)
class _Launch:
    """One table, and which of a bucket's matrices it lists."""

    table: TensorTable
    positions: list[int]


@dataclass(slots=True)
class _Prepared:
    """What is kept of a bucket from step to step: its tables, and the tensors they list, without gradients."""

    scales: tuple[object, float]
    slots: list[Slot]
    launches: list[_Launch]


class BucketUpdates:
    """Momentum and update of buckets. Keeps the tables of each from step to step."""

    def __init__(self) -> None:
        self._prepared: dict[int, _Prepared] = {}
        self._numbers: dict[tuple[str, int, torch.device], tuple[tuple[float, ...], Tensor]] = {}

    def prepare(self, bucket: Bucket, matrices: Sequence[MatrixTensors], after: ApplyRule) -> bool:
        """Make the tables of a bucket without launching anything that a CUDA graph would repeat.

        Args:
            bucket: The bucket.
            matrices: What this rank holds of its matrices.
            after: The rule that `apply` will follow.

        Returns:
            False if there is something that kernels cannot work on, such as gradients in fp64.
        """
        return self._tables(bucket.number, matrices, after) is not None

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
        launches = self._tables(bucket.number, matrices, after) if bucket.recipe.fused else None
        if launches is None:
            self._prepared.pop(bucket.number, None)
            update_momentum_(matrices, inputs, rule)
            return None
        check_kernels(bucket.device, bucket.recipe.dtype)
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
                proceed=None if rule.proceed is None else rule.proceed.to(bucket.device),
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
        prepared = self._prepared.get(bucket.number)
        if prepared is None:
            apply_update_(matrices, directions, rule)
            return
        lr, decay, proceed = self._numbers_of(bucket, rule)
        for launch in prepared.launches:
            elementwise.apply_update(
                launch.table, directions, lr=lr, weight_decay=decay, mode=rule.weight_decay_mode, proceed=proceed
            )

    def landing(self, bucket: Bucket, rule: ApplyRule) -> Landing | None:
        """Say which parameters can take their steps where directions are computed, so that `apply` has nothing to do.

        Args:
            bucket: The bucket, whose momentum has been advanced.
            rule: The numbers of this step.

        Returns:
            All of the bucket's, or None.
        """
        prepared = self._prepared.get(bucket.number)
        if not bucket.may_land or prepared is None or len(prepared.launches) != 1:
            return None
        table = prepared.launches[0].table
        if not table.can_be_landed_on:
            return None
        lr, decay, proceed = self._numbers_of(bucket, rule)
        cautious = rule.weight_decay_mode == "cautious"
        return Landing(table, lr, None if rule.weight_decay_mode == "l2" else decay, cautious, proceed)

    def _numbers_of(self, bucket: Bucket, rule: ApplyRule) -> tuple[Tensor, Tensor, Tensor | None]:
        """Learning rate, weight decay and whether to proceed, where the bucket is."""
        if isinstance(rule.lr, Tensor) and _is_on(rule.lr, bucket.device):
            lr = rule.lr.to(torch.float32)
        else:
            lr = self.live("lr", bucket.group, bucket.device, (float(rule.lr),))
        decay = self.live("decay", bucket.group, bucket.device, (rule.weight_decay,))
        return lr, decay, None if rule.proceed is None else rule.proceed.to(bucket.device)

    def forget_tensors(self) -> None:
        """Let go of all tensors; tables of addresses are kept. For state that was lent for one step only."""
        for prepared in self._prepared.values():
            prepared.slots = []

    def _tables(self, number: int, matrices: Sequence[MatrixTensors], after: ApplyRule) -> list[_Launch] | None:
        """The tables of a bucket, brought up to date; None if kernels cannot work on what it holds."""
        known = self._prepared.get(number)
        if known is not None and known.scales != scales_of(after):
            known = None
        slots = refilled(known.slots, matrices) if known is not None else None
        slots = slots or slots_of(matrices, after)
        if slots is None:
            return None
        try:
            launches = _current(known.launches if known is not None else [], slots)
            self._prepared[number] = _Prepared(scales_of(after), slots, launches)
            return launches
        finally:
            let_go(slots)

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
            tensor = torch.empty(len(values), dtype=torch.float32, device=device)
        if before != values:
            for place, value in zip(tensor.unbind(), values, strict=True):
                place.fill_(value)
            self._numbers[key] = (values, tensor)
        return tensor


def _is_on(lr: float | Tensor, device: torch.device) -> bool:
    return isinstance(lr, Tensor) and lr.device == device


def _current(launches: list[_Launch], slots: Sequence[Slot]) -> list[_Launch]:
    """The same tables with the addresses of this step, or new ones where those do not fit any more."""
    if launches and sum(len(launch.positions) for launch in launches) == len(slots):
        try:
            for launch in launches:
                mine = [slots[i] for i in launch.positions]
                if not launch.table.is_current(mine):
                    launch.table.update(mine)
            return launches
        except ValueError:  # other dtypes, sizes or alignment than before
            pass
    return [_Launch(table, positions) for table, positions in build_tables(slots)]

"""The numbers behind `opt.metrics()`: sums over what each rank holds, added up over ranks, then put into words.

Directions are not kept by a step. They are found anew here, on the same journey, from what the step left behind: its
momentum, and its gradients as long as nobody has dropped them. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshmuon.layout.mesh import local
from meshmuon.layout.records import Matrix, ParameterRecord
from meshmuon.plan.bucket import Bucket
from meshmuon.plan.route import Route
from meshmuon.plan.sent import sent_in_a_step
from meshmuon.polar.orthogonalize import orthogonalize_stack
from meshmuon.preparation import Ready
from meshmuon.runtime.graphs import Signals
from meshmuon.runtime.local_tensors import LocalTensors
from meshmuon.runtime.lookup import parameter_of
from meshmuon.runtime.sharded import sharded_directions
from meshmuon.update.momentum import MomentumRule, look_ahead
from meshmuon.update.scale import scale_factor
from meshmuon.update.tensors import in_parts

# What is summed up for each parameter.
_WEIGHT, _MOMENTUM, _UPDATE, _ERROR, _MATRICES = range(5)
_SUMS = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """A look at an optimizer between two steps.

    Attributes:
        ready: The plan, and what carries it out.
        tensors: What this rank holds.
        param_groups: The optimizer's groups.
        state: Its state.
        last: What the last step was told: whether it happened, and GradScaler's factor.
        sums: For each parameter, by group and position, what this rank knows of it.
    """

    ready: Ready
    tensors: LocalTensors
    param_groups: Sequence[Mapping[str, Any]]
    state: Mapping[Tensor, Mapping[str, Tensor]]
    last: Signals
    sums: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def take(self) -> dict[str, float]:
        """Measure. Every rank that holds part of a parameter must ask.

        Returns:
            Numbers by name; what they mean stands at `Muon.metrics`.
        """
        plan = self.ready.plan
        for record in plan.parameters:
            if _lies_here(record, plan.rank):
                param = local(parameter_of(self.param_groups, record)).detach()
                self.sums[record.place] = torch.zeros(_SUMS, dtype=torch.float64, device=param.device)
                self._add(record, _WEIGHT, _squares(param))
        for bucket in plan.buckets:
            self._measure_bucket(bucket)
        if self.ready.owned is None:
            for record in plan.parameters:
                if _lies_here(record, plan.rank):
                    self._measure_state(record)
        else:
            self._measure_stretches()
        self._add_up_over_ranks()
        sent, exchanges = sent_in_a_step(plan)
        return {**self._in_words(), "bytes_sent": float(sent), "exchanges": float(exchanges)}

    def _add(self, record: ParameterRecord, what: int, value: Tensor, *, times: float | None = None) -> None:
        """Add to a parameter's sum; what several ranks add is counted once."""
        times = 1 / _replicas(record) if times is None else times
        self.sums[record.place][what] += value.to(torch.float64) * times

    def _measure_bucket(self, bucket: Bucket) -> None:
        """Find the directions of a bucket: how orthogonal they are, and how far they move the parameters."""
        rank, exchange = self.ready.plan.rank, self.ready.exchange
        group = self.param_groups[bucket.group]
        lr = float(group["lr"]) * group["extra_scale_factor"]
        if self.ready.owned is not None:
            directions = orthogonalize_stack([self._owned_stack(bucket)], bucket.recipe)
            self._measure_stack(bucket, directions)
            for matrix, direction in zip(_computed_here(bucket, rank), directions, strict=True):
                length = lr * scale_factor(matrix.scaled_shape, group["adjust_lr_fn"])
                self._add(matrix.parameter, _UPDATE, _squares(direction), times=length**2)
            return
        matrices = self.tensors.matrices(bucket, places=exchange.places(bucket))
        inputs = torch.empty(exchange.buffer_size(bucket), dtype=bucket.recipe.input_dtype, device=bucket.device)
        look_ahead(matrices, inputs, MomentumRule.of(group, unscale=self.last.unscale, proceed=self.last.proceed))
        if bucket.route is Route.SHARDED:
            journey = sharded_directions(bucket, matrices, inputs, self.ready.contributions, rank=rank)
            flat = _result(journey)
        else:
            stack = [exchange.gather(bucket, inputs).wait()]
            del inputs
            directions = orthogonalize_stack(stack, bucket.recipe)
            self._measure_stack(bucket, directions)
            flat = exchange.scatter(bucket, directions).wait()
        for item in matrices:
            length = lr * scale_factor(item.matrix.scaled_shape, group["adjust_lr_fn"])
            record = item.matrix.parameter
            self._add(record, _UPDATE, _squares(item.direction_in(flat)), times=length**2 / _replicas(record))

    def _measure_stack(self, bucket: Bucket, directions: Tensor) -> None:
        """|X·Xᵀ - I|² / m of each matrix that was computed here."""
        for matrix, direction in zip(_computed_here(bucket, self.ready.plan.rank), directions, strict=True):
            wide = direction.to(torch.float32)
            gram = wide @ wide.mT
            gram.diagonal().sub_(1)
            copies = 1 if matrix.share is None else len(matrix.share.copies)
            times = copies / _replicas(matrix.parameter)
            self._add(matrix.parameter, _ERROR, _squares(gram), times=times / len(gram))
            self._add(matrix.parameter, _MATRICES, torch.ones((), device="cpu"), times=times)

    def _owned_stack(self, bucket: Bucket) -> Tensor:
        """Under `grad_sync`: the momentum of the matrices this rank owns."""
        owned = self.ready.owned
        assert owned is not None
        stack = []
        for matrix in _computed_here(bucket, self.ready.plan.rank):
            buffer = owned.momentum(matrix).to(bucket.device)
            self._add(matrix.parameter, _MOMENTUM, _squares(buffer), times=1.0)
            whole = buffer.reshape(matrix.shape)
            stack.append((whole.mT if matrix.tall else whole).to(bucket.recipe.input_dtype))
        empty = torch.empty(0, *bucket.wide_shape, dtype=bucket.recipe.input_dtype, device=bucket.device)
        return torch.stack(stack) if stack else empty

    def _measure_state(self, record: ParameterRecord) -> None:
        param = parameter_of(self.param_groups, record)
        state = {key: local(value) for key, value in self.state[param].items()}
        if record.routing.algorithm == "muon":
            self._add(record, _MOMENTUM, _squares(state["momentum_buffer"]))
            return
        self._add(record, _MOMENTUM, _squares(state["exp_avg"]))
        self._add(record, _UPDATE, self._adamw_update(record, state))

    def _measure_stretches(self) -> None:
        """Under `grad_sync`: the moments of the stretches this rank updates."""
        owned = self.ready.owned
        assert owned is not None
        for stretch in owned.stretches():
            moments = owned.moments(stretch)
            self._add(stretch.parameter, _MOMENTUM, _squares(moments["exp_avg"]), times=1.0)
            self._add(stretch.parameter, _UPDATE, self._adamw_update(stretch.parameter, moments), times=1.0)

    def _adamw_update(self, record: ParameterRecord, state: Mapping[str, Tensor]) -> Tensor:
        """|lr · m / (sqrt(v) + eps)|² with AdamW's corrected moments."""
        group = self.param_groups[record.group]
        step = float(state["step"])
        if step == 0:
            return torch.zeros((), device="cpu")
        first, second = (state[key].to(torch.float32) for key in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        if not second.isfinite().all():  # by inf an update would be divided away, and nothing be seen
            return torch.full((), torch.nan, device="cpu")
        update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        return _squares(update) * (float(group["lr"]) * group["adamw_lr_ratio"]) ** 2

    def _add_up_over_ranks(self) -> None:
        """One sum for each set of ranks that holds parameters together."""
        teams: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for record in self.ready.plan.parameters:
            if record.place in self.sums and record.layout is not None and len(record.layout.ranks) > 1:
                teams.setdefault(tuple(sorted(record.layout.ranks)), []).append(record.place)
        for team in sorted(teams):
            keys = teams[team]
            device = self.sums[keys[0]].device
            packed = torch.stack([self.sums[key].to(device) for key in keys])
            total = self.ready.contributions.total(team, packed)
            self.sums.update(zip(keys, total, strict=True))

    def _in_words(self) -> dict[str, float]:
        records = [r for r in self.ready.plan.parameters if r.place in self.sums]
        parts: dict[str, list[ParameterRecord]] = {}
        for record in records:
            algorithm = str(record.routing.algorithm)
            parts.setdefault(algorithm, []).append(record)
            if sum(group["algorithm"] == algorithm for group in self.param_groups) > 1:
                parts.setdefault(f"{algorithm}.{record.group}", []).append(record)
        sums = self._sums_of(records)
        found = {
            "dead": float(
                sum(not total for r, total in zip(records, sums[:, _MOMENTUM].tolist(), strict=True) if r.numel)
            ),
            "non_finite": float((~sums[:, :_ERROR].isfinite().all(dim=1)).sum()),
        }
        for name, part in parts.items():
            count = max(1, sum(record.numel for record in part))
            totals = self._sums_of(part).sum(dim=0).tolist()
            weight, update = math.sqrt(totals[_WEIGHT] / count), math.sqrt(totals[_UPDATE] / count)
            found[f"{name}/weight_rms"], found[f"{name}/update_rms"] = weight, update
            found[f"{name}/update_ratio"] = update / weight if weight else 0.0
            found[f"{name}/momentum_norm"] = math.sqrt(totals[_MOMENTUM])
            if totals[_MATRICES]:
                found[f"{name}/orthogonality_error"] = math.sqrt(totals[_ERROR] / totals[_MATRICES])
        return found

    def _sums_of(self, records: Sequence[ParameterRecord]) -> Tensor:
        rows = [self.sums[record.place].cpu() for record in records]
        return torch.stack(rows) if rows else torch.zeros(0, _SUMS, dtype=torch.float64, device="cpu")


def _lies_here(record: ParameterRecord, rank: int) -> bool:
    return record.layout is None or rank in record.layout.ranks


def _replicas(record: ParameterRecord) -> int:
    """How many ranks hold each number of a parameter."""
    layout = record.layout
    return 1 if layout is None else math.prod(layout.mesh_shape[axis] for axis in layout.replica_axes)


def _computed_here(bucket: Bucket, rank: int) -> list[Matrix]:
    """The matrices of a bucket's stack on this rank, one entry for each."""
    if bucket.route is Route.LOCAL:
        return [matrix for matrix in bucket.matrices for _ in range(matrix.count)]
    return bucket.owned_by(rank)


def _squares(tensor: Tensor) -> Tensor:
    # In fp32 1e-25 is nothing and 1e25 inf. In parts: torch makes a copy in fp64 first.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in in_parts(tensor)]
    return torch.stack(norms).square().sum()


def _result(journey: Generator[None, None, Tensor]) -> Tensor:
    """Run a generator to its end, without anybody else's turn, for what it returns."""

    def run() -> Generator[None, None, None]:
        found.append((yield from journey))

    found: list[Tensor] = []
    for _ in run():
        pass
    return found[0]

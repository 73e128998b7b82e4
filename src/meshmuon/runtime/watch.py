"""Every gradient, looked at once at the beginning of a step, before anything is decided or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.exchange.status import Watched
from meshmuon.layout.mesh import is_distributed, odd_placements
from meshmuon.layout.records import ParameterRecord, wire_dtype
from meshmuon.layout.tensors import usable_gradient
from meshmuon.plan.bucket import Plan
from meshmuon.runtime.lookup import parameter_of
from meshmuon.update.momentum import largest_gradient, state_dtype


@dataclass(frozen=True, slots=True)
class _Known:
    """What stays true of a parameter as long as its plan holds."""

    record: ParameterRecord
    largest: float
    shared: bool
    simple: bool  # a plain tensor whose gradient goes nowhere: most there are


class GradientWatch:
    """Looks at the gradients of a plan's parameters.

    Args:
        plan: The plan.
        param_groups: The optimizer's groups, as the plan was made for them.
    """

    def __init__(self, plan: Plan, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._syncs = plan.execution.syncs
        self._known = [self._know(record, plan, param_groups) for record in plan.parameters]

    def _know(self, record: ParameterRecord, plan: Plan, param_groups: Sequence[Mapping[str, Any]]) -> _Known:
        param, group = parameter_of(param_groups, record), param_groups[record.group]
        largest = largest_gradient(param, state_dtype(param, group) if group["algorithm"] == "muon" else None)
        if self._syncs:
            largest = min(largest, _largest_summand(record, plan))
        simple = not self._syncs and not is_distributed(param)
        return _Known(record, largest, record.layout is not None, simple)

    def look(self, param_groups: Sequence[Mapping[str, Any]]) -> list[Watched]:
        """Give every gradient, for the decision whether the step happens.

        Args:
            param_groups: The optimizer's groups.

        Returns:
            One record per parameter, in the order of the plan.
        """
        found = []
        for known in self._known:  # every call counts: a model has many parameters
            record = known.record
            param = param_groups[record.group]["params"][record.position]
            grad = param.grad
            if known.simple and type(grad) is Tensor and grad.layout is torch.strided:
                found.append(Watched(record.name, grad, known.largest, known.shared))
            else:
                found.append(self._look_closely(known, param))
        return found

    def _look_closely(self, known: _Known, param: Tensor) -> Watched:
        record, largest = known.record, known.largest
        grad, refused = None, None
        try:
            grad = None if param.grad is None else usable_gradient(record.name, param, travels=self._syncs)
        except (TypeError, ValueError) as error:
            refused = error  # told to the peers before it is raised, or they would wait for this rank
        placed = odd_placements(param)
        if placed and record.layout is not None and grad is not None:  # perhaps a summand
            largest = min(largest, torch.finfo(grad.dtype).max / len(record.layout.ranks))
        return Watched(record.name, grad, largest, known.shared, refused, may_lack=self._syncs, placed=placed)


def _largest_summand(record: ParameterRecord, plan: Plan) -> float:
    """The largest gradient whose sum over all ranks does not overflow in what sums are made in."""
    sent = wire_dtype(record.dtype)
    summed = sent if plan.execution.grad_sync == "reduce_scatter" else torch.promote_types(sent, torch.float32)
    ranks = plan.ranks if record.layout is None else len(record.layout.ranks)
    return torch.finfo(summed).max / ranks

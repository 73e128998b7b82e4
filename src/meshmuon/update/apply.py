"""After the orthogonalization: decay the parameter and step along the direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshmuon.config import LRRule, WeightDecayMode
from meshmuon.kernels.crew import share_elementwise
from meshmuon.update.scale import scale_factor
from meshmuon.update.tensors import MatrixTensors, at_least_fp32, crosswise, fill_, math_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRule:
    """The numbers of one step.

    Attributes:
        lr: Learning rate, a number or a tensor.
        weight_decay: Its coefficient.
        weight_decay_mode: "decoupled", "cautious" (only where direction and parameter agree in sign), or "l2" (nothing
            is left to do here).
        adjust_lr_fn: The lr rule.
        extra_scale_factor: One more factor on the update.
        proceed: A device flag; where it is False nothing changes. None means go.
    """

    lr: float | Tensor
    weight_decay: float
    weight_decay_mode: WeightDecayMode
    adjust_lr_fn: LRRule
    extra_scale_factor: float
    proceed: Tensor | None = None

    @classmethod
    def of(cls, group: Mapping[str, Any], *, proceed: Tensor | None) -> ApplyRule:
        """Read the numbers of a parameter group."""
        keys = ("weight_decay", "weight_decay_mode", "adjust_lr_fn", "extra_scale_factor")
        return cls(lr=at_least_fp32(group["lr"]), **{key: group[key] for key in keys}, proceed=proceed)


def apply_update_(matrices: Iterable[MatrixTensors], directions: Tensor, rule: ApplyRule) -> None:
    """Write the update into the parameters: p·(1 - lr·wd) - lr·extra·scale·direction, in fp32, rounded once.

    Each operation is rounded by itself: a fused multiply-add would give some elements other bits than the same
    elements of a shard.

    Args:
        matrices: The tensors; each `param` is written.
        directions: The bucket's flat buffer of directions; used up.
        rule: The numbers of this step.
    """
    active = [item for item in matrices if item.active]
    work = partial(_apply_one_, directions=directions, rule=rule)
    share_elementwise(work, active, device=directions.device, numbers=directions.numel())


def _apply_one_(item: MatrixTensors, *, directions: Tensor, rule: ApplyRule) -> None:
    dtype = math_dtype(item.param)
    lr = rule.lr if rule.proceed is None else rule.proceed.to(item.param.device, dtype) * rule.lr
    size = lr * (rule.extra_scale_factor * scale_factor(item.matrix.scaled_shape, rule.adjust_lr_fn))
    direction = item.direction_in(directions).to(dtype)
    param = item.param.to(dtype)  # the parameter itself, if it has that dtype
    if crosswise(param, direction):
        turned = torch.empty_like(param)
        fill_(turned, direction)
        direction = turned
    if rule.weight_decay and rule.weight_decay_mode != "l2":
        factor = 1.0 - lr * rule.weight_decay
        if rule.weight_decay_mode == "cautious":
            agree = direction * param > 0
            decayed = param * factor
            param.copy_(torch.where(agree, decayed, param, out=decayed))
        else:
            param.mul_(factor)
    param.sub_(direction.mul_(size))
    if param is not item.param:
        item.param.copy_(param)

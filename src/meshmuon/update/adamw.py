"""Everything that is not a hidden matrix: torch's own AdamW kernels, on plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshmuon._compat import has_fused_adamw


@dataclass(frozen=True, slots=True)
class AdamWTensors:
    """One parameter, its gradient and its state."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWRule:
    """The numbers of one step.

    Attributes:
        lr: Learning rate, a number or a tensor.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        grad_scale: What the gradients are still multiplied with (GradScaler), or None.
        proceed: A device flag; where it is False nothing changes. None means go.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_scale: Tensor | None = None
    proceed: Tensor | None = None


def update_adamw_(tensors: Sequence[AdamWTensors], rule: AdamWRule) -> None:
    """Take one AdamW step on tensors of one device.

    The fused kernel wherever torch has one, else foreach: never a mixture, since the two differ in the last bits.

    Args:
        tensors: Parameters and state; written. Gradients are only read.
        rule: The numbers of this step.
    """
    tensors = [item for item in tensors if item.param.numel()]
    if not tensors:
        return
    fused = has_fused_adamw(tensors[0].param.device)
    dense = [_Dense(item.param) for item in tensors]
    device = tensors[0].param.device
    scale = None if rule.grad_scale is None else rule.grad_scale.to(device, torch.float32)
    found_inf = None if scale is None else torch.zeros((), device=device)
    if rule.proceed is not None:
        found_inf = torch.logical_not(rule.proceed).to(torch.float32)
    if not fused and found_inf is not None:
        raise RuntimeError(
            f"torch has no fused AdamW on {device}, so no GradScaler and no deciding on the device there"
        )
    adamw(
        [item.work for item in dense],
        [_readable(t.grad, t.param, copy=scale is not None) for t in tensors],
        [item.exp_avg for item in tensors],
        [item.exp_avg_sq for item in tensors],
        [],
        [item.step for item in tensors],
        foreach=not fused,
        fused=fused,
        grad_scale=scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )
    for item in dense:
        item.write_back()


def _readable(grad: Tensor, param: Tensor, *, copy: bool) -> Tensor:
    """The gradient as the kernels want it; a copy if they are to unscale, since they write the result back."""
    return grad.to(param.dtype, copy=copy).contiguous()


class _Dense:
    """A parameter as the kernels want it: contiguous, by a copy where it is not."""

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.work = param if param.is_contiguous() else param.contiguous()

    def write_back(self) -> None:
        if self.work is not self.param:
            self.param.copy_(self.work)

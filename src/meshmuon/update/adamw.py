"""Everything that is not a hidden matrix: torch's own AdamW kernels, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from meshmuon._compat import has_fused_adamw
from meshmuon.update.momentum import read_gradient
from meshmuon.update.tensors import at_least_fp32

_NO_TAIL = 64  # numbers: a multiple of what any vector register holds, and of a cache line, in every dtype


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
        unscale: What gradients are multiplied with when read (GradScaler, clipping), or None.
        proceed: A device flag; where it is False nothing changes. None means go.
    """

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    unscale: Tensor | None = None
    proceed: Tensor | None = None

    @classmethod
    def of(cls, group: Mapping[str, Any], *, decays: bool, unscale: Tensor | None, proceed: Tensor | None) -> AdamWRule:
        """Read the numbers of a parameter group."""
        lr, ratio = at_least_fp32(group["lr"]), group["adamw_lr_ratio"]
        return cls(
            lr=lr if ratio == 1.0 else lr * ratio,
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"] if decays else 0.0,
            unscale=unscale,
            proceed=proceed,
        )


def update_adamw_(tensors: Sequence[AdamWTensors], rule: AdamWRule) -> None:
    """Take one AdamW step on tensors of one device.

    The fused kernel wherever torch has one, else foreach: never a mixture, since the two differ in the last bits.

    Args:
        tensors: Parameters and state; written. Gradients are only read.
        rule: The numbers of this step.
    """
    for empty in (item for item in tensors if not item.param.numel()):
        # A rank's empty shard counts steps, too: which rank's count a checkpoint keeps is not ours to say.
        empty.step.add_(1 if rule.proceed is None else rule.proceed.to(empty.step))
    tensors = [item for item in tensors if item.param.numel()]
    if rule.unscale is not None:  # a gradient that its parameter's dtype cannot hold before it is unscaled
        update_adamw_(
            [_unscaled(item, rule.unscale) for item in tensors if _is_wider(item)], replace(rule, unscale=None)
        )
        tensors = [item for item in tensors if not _is_wider(item)]
    if not tensors:
        return
    fused = has_fused_adamw(tensors[0].param.device)
    work = [_Work(item, copy_grad=rule.unscale is not None) for item in tensors]
    device = tensors[0].param.device
    # The kernels divide, and round to the gradient's dtype only what they have used.
    scale = None if rule.unscale is None else rule.unscale.double().reciprocal().to(device, torch.float32)
    found_inf = None if scale is None else torch.zeros((), dtype=torch.float32, device=device)
    if rule.proceed is not None:
        found_inf = torch.logical_not(rule.proceed).to(device, torch.float32)
    if not fused and found_inf is not None:
        raise RuntimeError(
            f"torch has no fused AdamW on {device}, so no GradScaler and no deciding on the device there"
        )
    adamw(
        [item.param for item in work],
        [item.grad for item in work],
        [item.exp_avg for item in work],
        [item.exp_avg_sq for item in work],
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
    for item in work:
        item.write_back()


def _is_wider(item: AdamWTensors) -> bool:
    return torch.promote_types(item.grad.dtype, item.param.dtype) != item.param.dtype


def _unscaled(item: AdamWTensors, unscale: Tensor) -> AdamWTensors:
    arithmetic = torch.promote_types(item.grad.dtype, torch.float32)
    return replace(item, grad=read_gradient(item.grad, dtype=arithmetic, unscale=unscale))


class _Work:
    """The tensors as the kernels want them: contiguous, and on a CPU free of tails, by copies where they are not.

    A CPU kernel computes what does not fill a vector register with other instructions, which round differently; where
    the tail falls depends on the shard. Zeros up to a multiple of any register's length leave no tail.
    """

    def __init__(self, tensors: AdamWTensors, *, copy_grad: bool) -> None:
        self._tensors = tensors
        param = tensors.param
        self._padding = -param.numel() % _NO_TAIL if param.device.type == "cpu" else 0
        self.param, self.exp_avg, self.exp_avg_sq = map(self._fitting, (param, tensors.exp_avg, tensors.exp_avg_sq))
        # Kernels that unscale write the result back: never into the user's gradient.
        self.grad = self._fitting(tensors.grad.to(param.dtype, copy=copy_grad))

    def _fitting(self, tensor: Tensor) -> Tensor:
        return pad(tensor.reshape(-1), (0, self._padding)) if self._padding else tensor.contiguous()

    def write_back(self) -> None:
        pairs = (
            (self._tensors.param, self.param),
            (self._tensors.exp_avg, self.exp_avg),
            (self._tensors.exp_avg_sq, self.exp_avg_sq),
        )
        for tensor, work in pairs:
            if work is not tensor:
                tensor.copy_(work.reshape(-1)[: tensor.numel()].view(tensor.shape))

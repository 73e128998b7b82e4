"""Before the orthogonalization: gradient → momentum → the matrix whose polar factor is taken."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.kernels.crew import share_elementwise
from meshmuon.update.tensors import MatrixTensors, crosswise, fill_, math_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumRule:
    """The numbers of one step.

    Attributes:
        momentum: Weight of the past in the moving average.
        nesterov: Whether to look ahead: average the gradient with the new buffer.
        l2: Weight decay added to the gradient; 0 unless the mode is "l2".
        unscale: What gradients are multiplied with when read (GradScaler), or None.
        proceed: A device flag; where it is False nothing changes. None means go.
    """

    momentum: float
    nesterov: bool
    l2: float = 0.0
    unscale: Tensor | None = None
    proceed: Tensor | None = None

    @classmethod
    def of(cls, group: Mapping[str, Any], *, unscale: Tensor | None, proceed: Tensor | None) -> MomentumRule:
        """Read the numbers of a parameter group."""
        l2 = group["weight_decay"] if group["weight_decay_mode"] == "l2" else 0.0
        return cls(momentum=group["momentum"], nesterov=group["nesterov"], l2=l2, unscale=unscale, proceed=proceed)


def update_momentum_(matrices: Sequence[MatrixTensors], inputs: Tensor, rule: MomentumRule) -> None:
    """Advance the momentum of each matrix, and write what will be orthogonalized.

    buf = lerp(buf, g, 1 - momentum); input = lerp(g, buf, momentum) if nesterov else buf: the form of torch.optim.Muon.
    All in fp32, rounded once to the buffer's dtype. Gradients are only read.

    Args:
        matrices: The tensors; each `buffer` is written.
        inputs: The bucket's flat buffer; written.
        rule: The numbers of this step.
    """
    work = functools.partial(_update_one_, inputs=inputs, rule=rule)
    share_elementwise(work, matrices, device=inputs.device, numbers=inputs.numel())


def _update_one_(item: MatrixTensors, *, inputs: Tensor, rule: MomentumRule) -> None:
    wanted = item.input_in(inputs)
    if item.grad is None:
        if wanted is not None:
            wanted.zero_()  # what travels depends on the plan only, never on which gradients there are
        return
    grad = read_gradient(item.grad, dtype=math_dtype(item.param), unscale=rule.unscale)
    if rule.l2:
        grad = grad + item.param.to(grad.dtype) * rule.l2
    buffer = item.buffer.to(grad.dtype)  # may be the buffer itself
    if rule.proceed is not None:
        # lerp(buf, buf, w) is buf, exactly: a step that must not happen leaves momentum alone, and stays finite.
        grad = torch.where(rule.proceed.to(grad.device), grad, buffer)
    if buffer is item.buffer:
        buffer.lerp_(grad, 1.0 - rule.momentum)
    else:
        item.buffer.copy_(torch.lerp(buffer, grad, 1.0 - rule.momentum))
    del buffer  # may be a copy
    if wanted is not None:
        _look_ahead(wanted, grad, item.buffer, rule)


def look_ahead(matrices: Sequence[MatrixTensors], inputs: Tensor, rule: MomentumRule) -> None:
    """Write what the last step orthogonalized; the momentum alone where gradients are gone, or nothing happened.

    Args:
        matrices: The tensors; only read.
        inputs: The bucket's flat buffer; written.
        rule: The numbers of that step.
    """
    for item in matrices:
        wanted = item.input_in(inputs)
        if wanted is None:
            continue
        buffer = item.buffer.to(item.param.device)
        if item.grad is None:
            fill_(wanted, buffer)
            continue
        grad = read_gradient(item.grad, dtype=math_dtype(item.param), unscale=rule.unscale)
        if rule.l2:
            grad = grad + item.param.to(grad.dtype) * rule.l2
        if rule.proceed is not None:
            grad = torch.where(rule.proceed.to(grad.device), grad, buffer.to(grad.dtype))  # lerp(buf, buf, w) is buf
        _look_ahead(wanted, grad, buffer, rule)


def _look_ahead(wanted: Tensor, grad: Tensor, buffer: Tensor, rule: MomentumRule) -> None:
    """Write what will be orthogonalized. From the stored (rounded) buffer, so that a resumed run has the same bits."""
    if not rule.nesterov:
        fill_(wanted, buffer)
        return
    wide = buffer.to(grad.dtype)
    if wanted.dtype == grad.dtype and not crosswise(wanted, grad):
        torch.lerp(grad, wide, rule.momentum, out=wanted)
    else:
        fill_(wanted, torch.lerp(grad, wide, rule.momentum, out=None if wide is buffer else wide))


def state_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Give the dtype a parameter's momentum is kept in.

    Args:
        param: The parameter.
        group: Its group.

    Returns:
        The group's `state_dtype`, or the parameter's own dtype.
    """
    declared = group.get("state_dtype")
    result: torch.dtype = param.dtype if declared is None else getattr(torch, declared)
    return result


def largest_gradient(param: Tensor, buffer: torch.dtype | None) -> float:
    """Give the largest magnitude a gradient may have without leaving inf behind.

    For Muon, half the largest number of the arithmetic (the difference of two larger ones overflows inside a lerp), and
    no more than the buffer can hold.

    Args:
        param: The parameter.
        buffer: The dtype of its momentum, or None for a parameter that has none.

    Returns:
        The bound; whatever is finite passes for AdamW.
    """
    return _largest(param.dtype, math_dtype(param), buffer)


@functools.cache
def _largest(param: torch.dtype, arithmetic: torch.dtype, buffer: torch.dtype | None) -> float:
    if buffer is None:
        return torch.finfo(param).max
    return min(torch.finfo(arithmetic).max / 2, torch.finfo(buffer).max)


def read_gradient(grad: Tensor, *, dtype: torch.dtype, unscale: Tensor | None) -> Tensor:
    """Read a gradient in the dtype of the arithmetic, without GradScaler's factor.

    Args:
        grad: The gradient; never written.
        dtype: The dtype to compute in.
        unscale: The inverse of the scale, or None.

    Returns:
        The gradient itself or a new tensor.
    """
    grad = grad.to(dtype)
    return grad if unscale is None else grad * unscale.to(device=grad.device, dtype=dtype)

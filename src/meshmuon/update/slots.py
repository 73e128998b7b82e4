"""The matrices of a bucket as kernels see them: stacks of strided matrices, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshmuon.kernels.tables import Slot
from meshmuon.update.apply import ApplyRule
from meshmuon.update.scale import scale_factor
from meshmuon.update.tensors import MatrixTensors

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scales_of(after: ApplyRule) -> tuple[object, float]:
    """Give what the factors in slots follow from, besides shapes.

    Args:
        after: The rule of the update.

    Returns:
        To be compared.
    """
    return (after.adjust_lr_fn, after.extra_scale_factor)


def slots_of(matrices: Sequence[MatrixTensors], after: ApplyRule) -> list[Slot] | None:
    """See matrices as kernels do.

    Args:
        matrices: What this rank holds of a bucket's.
        after: The rule of the update, whose factors slots hold.

    Returns:
        One for each; None if one of them is nothing that kernels can work on.
    """
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


def refilled(slots: list[Slot], matrices: Sequence[MatrixTensors]) -> list[Slot] | None:
    """Put the gradients of this step into slots that were kept.

    Args:
        slots: Of an earlier step.
        matrices: What this rank holds now.

    Returns:
        The same slots; None if other tensors have taken the place of theirs.
    """
    if len(slots) != len(matrices):
        return None
    for slot, item in zip(slots, matrices):  # every call counts: a model has many matrices
        grad = item.grad
        known = slot.param is item.param and slot.buffer is item.buffer
        if not known or (grad is not None and grad.dtype not in _DTYPES):
            let_go(slots)
            return None
        slot.grad = grad  # of the parameter's shape, as torch sees to
    return slots


def let_go(slots: Sequence[Slot]) -> None:
    """Keep no gradients: they must be gone when the user lets go of them. Tables know their addresses.

    Args:
        slots: What is kept.
    """
    for slot in slots:
        slot.grad = None


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

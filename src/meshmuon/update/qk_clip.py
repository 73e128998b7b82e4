"""QK-clip: bring the largest attention logit of a head back to a threshold, by scaling the rows that make its q and k.

[Note: shared k heads] A logit is q·k, so q·a and k·b make it a·b times as large. A head that is over the threshold by
1/g needs a·b = g. The k head takes b = sqrt(the largest g among its q heads), each q head a = g/b. Alone with its k
head, that is sqrt(g) for both. Where one of several is not over (g = 1), b is 1: k and that q head keep their bits.

Source: Kimi K2 (https://arxiv.org/abs/2507.20534), section 2.1, there for k heads that are not shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowScaled:
    """What this rank holds of a parameter whose rows are heads.

    Attributes:
        param: A plain tensor; written.
        dim: The dim its rows are counted along.
    """

    param: Tensor
    dim: int


def usable_logits(logits: Tensor) -> Tensor:
    """Take what is not finite for not said: it would set a head to zero, or to NaN.

    Args:
        logits: The largest logit of each head.

    Returns:
        The same, -inf where nothing can be said.
    """
    return torch.where(logits.isfinite(), logits, -torch.inf)


def clip_factors(
    logits: Tensor, key_of: Tensor, *, keys: int, threshold: float, proceed: Tensor | None = None
) -> Tensor:
    """Give the factors of q and k heads. See [Note: shared k heads].

    Args:
        logits: The largest logit of each q head, fp32; not NaN.
        key_of: For each q head, its k head.
        keys: Number of k heads.
        threshold: What logits are brought back to.
        proceed: A device flag; where it is False all factors are 1. None means go.

    Returns:
        A table, one after the other: the factor of each q head; its whole factor, for rows whose k is left alone; the
        factor of each k head; 1. Exactly 1 for all heads that are not over the threshold.
    """
    bound = logits.new_full((), threshold)
    whole = bound / logits.clamp(min=bound)  # not `threshold / tensor`: that multiplies with a rounded reciprocal
    one = torch.ones_like(bound)
    if proceed is not None:
        whole = torch.where(proceed.to(whole.device), whole, one)
    largest = whole.new_zeros(keys).scatter_reduce_(0, key_of, whole, "amax")
    key = largest.sqrt_()
    return torch.cat([whole / key[key_of], whole, key, one.view(1)])


def scale_rows_(parameters: Iterable[RowScaled], rows: Tensor, factors: Tensor) -> None:
    """Multiply rows with their factors, in fp32, rounded once.

    Args:
        parameters: Whose rows; each `param` is written.
        rows: For each row of all of them, one parameter after the other, which factor it takes.
        factors: The table of factors.
    """
    items = list(parameters)
    taken = factors[rows].split([item.param.shape[item.dim] for item in items])
    for item, factor in zip(items, taken, strict=True):
        if item.param.numel():
            # A 16-bit tensor times an fp32 one is computed in fp32, and rounded when it is written.
            item.param.mul_(factor.view([-1 if dim == item.dim else 1 for dim in range(item.param.ndim)]))

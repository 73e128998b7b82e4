"""What is read from a checkpoint, and what it is for: one record per parameter on either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from torch import Tensor

from meshmuon.config import Algorithm
from meshmuon.layout.shard_layout import ShardLayout
from meshmuon.muon import Muon

StateDict: TypeAlias = Mapping[str, Any]
Settings: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of one parameter as another optimizer saved it, under our names.

    Attributes:
        label: Where it stands in the checkpoint.
        name: The parameter's name; None if the checkpoint does not say.
        algorithm: What it was trained with.
        group: Which of the checkpoint's groups it is in, counted over all parts.
        state: `momentum_buffer`, or `step`, `exp_avg` and `exp_avg_sq`.
        factor: What the momentum is multiplied with to become a moving average.
        settings: The hyper-parameters it was trained with, in our words, as far as the checkpoint tells.
    """

    label: str
    name: str | None
    algorithm: Algorithm
    group: int
    state: Mapping[str, Any]
    factor: float
    settings: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its tensors."""
        key = "momentum_buffer" if self.algorithm == "muon" else "exp_avg"
        return tuple(self.state[key].shape)


@dataclass(frozen=True, slots=True)
class Target:
    """One parameter of our optimizer.

    Attributes:
        name: Its name, or where it stands in the groups.
        key: Its number in a state dict.
        param: The parameter.
        group: Its group.
        shape: Its shape over all ranks.
        layout: Where it lies; None: whole, here.
        is_vector: Whether it is not decayed unless that was asked for.
    """

    name: str
    key: int
    param: Tensor
    group: Mapping[str, Any]
    shape: tuple[int, ...]
    layout: ShardLayout | None
    is_vector: bool

    @property
    def algorithm(self) -> Algorithm:
        """What it is trained with."""
        algorithm: Algorithm = self.group["algorithm"]
        return algorithm


def targets(opt: Muon) -> list[Target]:
    """Give every parameter of an optimizer, in the order of its state dict.

    Args:
        opt: The optimizer. Parameters that the model has replaced are followed first.

    Returns:
        The records.
    """
    records = opt.plan.parameters
    starts = [0, *accumulate(len(group["params"]) for group in opt.param_groups)]
    found = [
        Target(
            name=record.name,
            key=starts[record.group] + record.position,
            param=opt.param_groups[record.group]["params"][record.position],
            group=opt.param_groups[record.group],
            shape=record.shape,
            layout=record.layout,
            is_vector=record.is_vector,
        )
        for record in records
    ]
    return sorted(found, key=lambda each: each.key)

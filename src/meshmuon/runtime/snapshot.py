"""What a plan was made for, to notice when it no longer holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.layout.mesh import placements

# What a plan depends on.
_PLANNED_KEYS = ("algorithm", "ns_coefficients", "ns_steps", "eps", "view", "state_dtype", "route", "mode")
# What steps read, and plans do not depend on: checked when it was edited. So is the lr, which schedulers edit at every
# step, and which may be a tensor on a device: of that only what would poison all parameters is looked for.
_READ_KEYS = (
    "adjust_lr_fn",
    "weight_decay_mode",
    "weight_decay",
    "momentum",
    "nesterov",
    "extra_scale_factor",
    "betas",
    "adamw_lr_ratio",
    "decay_vectors",
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as it was. Held by reference: its id alone may be given to another tensor once it is gone."""

    tensor: Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    placements: object

    @classmethod
    def of(cls, tensor: Tensor) -> _Seen:
        return cls(tensor, tensor.shape, tensor.dtype, tensor.device, placements(tensor))

    def is_same(self, tensor: Tensor) -> bool:
        return (
            tensor is self.tensor
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.device == self.device
            and placements(tensor) == self.placements
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors and settings a plan was made for.

    accelerate replaces the tensors of an optimizer's groups after construction; `model.to` moves or casts them.
    """

    settings: tuple[tuple[Any, ...], ...]
    read: tuple[tuple[Any, ...], ...]
    tensors: tuple[tuple[_Seen, ...], ...]

    @classmethod
    def of(cls, param_groups: Sequence[Mapping[str, Any]]) -> Snapshot:
        """Remember what a plan was made for.

        Args:
            param_groups: The optimizer's groups.

        Returns:
            The snapshot.
        """
        tensors = tuple(tuple(map(_Seen.of, group["params"])) for group in param_groups)
        # Copied: views are dicts, and a user's edit in place would change what is remembered, too.
        return cls(copy.deepcopy(_values(param_groups, _PLANNED_KEYS)), _values(param_groups, _READ_KEYS), tensors)

    def holds_for(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether the plan is still the right one.

        Args:
            param_groups: The optimizer's groups as they are now.

        Returns:
            False if a tensor was replaced, moved or cast, or a setting the plan depends on was changed.
        """
        return _values(param_groups, _PLANNED_KEYS) == self.settings and all(
            len(seen) == len(group["params"]) and all(map(_Seen.is_same, seen, group["params"]))
            for seen, group in zip(self.tensors, param_groups, strict=True)
        )

    def is_as_checked(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether nothing was edited that steps read, and plans do not depend on; but for an lr that is usable.

        Args:
            param_groups: The optimizer's groups as they are now.

        Returns:
            Whether.
        """
        return _values(param_groups, _READ_KEYS) == self.read and all(_is_lr(group.get("lr")) for group in param_groups)


def _is_lr(lr: Any) -> bool:
    if isinstance(lr, Tensor):  # on a GPU its value stays there: nobody waits for it
        return lr.is_floating_point() and lr.numel() == 1 and (lr.device.type != "cpu" or 0 <= float(lr) < math.inf)
    return isinstance(lr, (int, float)) and 0 <= lr < math.inf


def _values(param_groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(group.get(key) for key in keys) for group in param_groups)

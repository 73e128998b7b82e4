"""What a plan was made for, to notice when it no longer holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.layout.mesh import placements

# What a plan depends on.
_PLANNED_KEYS = ("algorithm", "ns_coefficients", "ns_steps", "eps", "view", "state_dtype", "route", "mode")
# What is checked when it was edited. Numbers are read, and checked, at each step.
_WORDS = ("adjust_lr_fn", "weight_decay_mode")


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
    words: tuple[tuple[Any, ...], ...]
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
        return cls(copy.deepcopy(_values(param_groups, _PLANNED_KEYS)), _values(param_groups, _WORDS), tensors)

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

    def has_words_of(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether no word was edited that steps read, and plans do not depend on.

        Args:
            param_groups: The optimizer's groups as they are now.

        Returns:
            Whether.
        """
        return _values(param_groups, _WORDS) == self.words


def _values(param_groups: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(group.get(key) for key in keys) for group in param_groups)

"""From a record to the tensor it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshmuon.layout.records import ParameterRecord


def parameter_of(param_groups: Sequence[Mapping[str, Any]], record: ParameterRecord) -> Tensor:
    """Find the parameter of a record.

    Args:
        param_groups: The optimizer's groups.
        record: The record.

    Returns:
        The tensor.
    """
    tensor: Tensor = param_groups[record.group]["params"][record.position]
    return tensor


def decays(param_groups: Sequence[Mapping[str, Any]], record: ParameterRecord) -> bool:
    """Tell whether weight decay is meant for a parameter that takes AdamW: vectors only where the group says so.

    Args:
        param_groups: The optimizer's groups.
        record: The record.

    Returns:
        True if it is.
    """
    return not record.is_vector or bool(param_groups[record.group]["decay_vectors"])

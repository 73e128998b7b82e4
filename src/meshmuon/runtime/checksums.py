"""Whether ranks that are said to hold the same plain tensors do: sums of their bits, to be compared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon.layout.mesh import local
from meshmuon.layout.records import ParameterRecord
from meshmuon.plan.bucket import Plan
from meshmuon.runtime.lookup import parameter_of
from meshmuon.update.tensors import in_parts

_PRIME = 2**31 - 1


def checksums(param_groups: Sequence[Mapping[str, Any]], state_sums: Mapping[Tensor, int], plan: Plan) -> Tensor:
    """Sum up the bits of plain tensors that several ranks are said to hold alike, and of their state.

    Args:
        param_groups: The optimizer's groups.
        state_sums: The sum of a parameter's state; none: 0.
        plan: The plan.

    Returns:
        int32, on the host, one for each parameter; 0 for all others.
    """
    sums = []
    for record in plan.parameters:
        param = parameter_of(param_groups, record)
        total = _bits(param) + state_sums.get(param, 0) if _is_replica(param, record) else 0
        sums.append(torch.tensor(total % _PRIME, dtype=torch.int32, device="cpu"))
    return torch.stack(sums)


def sums_of_state(state: Mapping[Tensor, Mapping[str, Any]]) -> dict[Tensor, int]:
    """Sum up the bits of the state of each parameter.

    Args:
        state: An optimizer's state, by parameter.

    Returns:
        Parameter → a number.
    """
    return {param: sum(_bits(local(value)) for value in values.values()) for param, values in state.items()}


def _is_replica(param: Tensor, record: ParameterRecord) -> bool:
    layout = record.layout
    return layout is not None and not any(layout.cuts) and len(layout.ranks) > 1 and local(param) is param


def _bits(tensor: Tensor) -> int:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    sums = [part.sum(dtype=torch.int64) for part in in_parts(tensor.detach().contiguous().view(words))]
    return int(torch.stack(sums).sum())

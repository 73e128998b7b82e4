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


def checksums(param_groups: Sequence[Mapping[str, Any]], plan: Plan) -> Tensor | None:
    """Sum up the bits of plain tensors that several ranks are said to hold alike.

    Args:
        param_groups: The optimizer's groups.
        plan: The plan.

    Returns:
        int32, one for each parameter, 0 for all others; None if there is no such parameter.
    """
    sums = [_bits(parameter_of(param_groups, record).detach(), record) for record in plan.parameters]
    found = next((each for each in sums if each is not None), None)
    if found is None:
        return None
    return torch.stack([torch.zeros_like(found) if each is None else each.to(found.device) for each in sums])


def _bits(param: Tensor, record: ParameterRecord) -> Tensor | None:
    layout = record.layout
    if layout is None or any(layout.cuts) or len(layout.ranks) == 1 or local(param) is not param:
        return None
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
    total = param.contiguous().view(-1).view(words).sum(dtype=torch.int64)
    return total.remainder(2**31 - 1).to(torch.int32)

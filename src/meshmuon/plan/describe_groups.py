"""Hyper-parameters in words: for people, and exactly, for comparing ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from meshmuon.errors import some

_NOT_SHOWN = ("params", "param_names", "algorithm")


def describe_group(group: Mapping[str, Any]) -> str:
    """Put the hyper-parameters of one group on one line.

    Args:
        group: The group.

    Returns:
        Its algorithm, size and values.
    """
    shown = {key: value for key, value in group.items() if key not in _NOT_SHOWN and value not in (None, {})}
    values = ", ".join(f"{key}={_short(value)}" for key, value in shown.items())
    return f"{group['algorithm']}, {len(group['params'])} tensors, {values}"


def exact_values(group: Mapping[str, Any]) -> str:
    """Put the hyper-parameters of one group into words that differ if any of them does.

    Args:
        group: The group.

    Returns:
        Every value, with all digits; of a tensor on an accelerator only that it is one (to read it is to wait).
    """
    values = ((key, value) for key, value in group.items() if key not in _NOT_SHOWN)
    return ", ".join(f"{key}={_exact(value)}" for key, value in values)


def _exact(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return str(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"


def describe_groups(param_groups: Sequence[Mapping[str, Any]], *, frozen: Sequence[str] = ()) -> str:
    """Put the hyper-parameters of each group on one line.

    Args:
        param_groups: The optimizer's groups.
        frozen: Names of parameters that were left out when it was built.

    Returns:
        The lines, one more about frozen parameters if there are any, and one where the defaults differ from
        torch.optim.Muon's.
    """
    lines = [f"Parameter Group {index}: {describe_group(group)}" for index, group in enumerate(param_groups)]
    added_since = {name for group in param_groups for name in group.get("param_names", ())}
    if left_out := [name for name in frozen if name not in added_since]:
        count = f"{len(left_out)} tensor{'s' if len(left_out) > 1 else ''}"
        lines.append(f"Left out, frozen when the optimizer was made: {count}: {some(left_out, limit=3)}")
    muon = [group for group in param_groups if group["algorithm"] == "muon"]
    if any(g["ns_coefficients"] == "polar_express" and g["adjust_lr_fn"] == "match_rms_adamw" for g in muon):
        lines.append(
            "Defaults that differ from torch.optim.Muon: polar_express coefficients, and match_rms_adamw, so keep your "
            'AdamW lr. For torch\'s: ns_coefficients="keller", adjust_lr_fn="original".'
        )
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""What state each parameter has, eagerly and everywhere: its keys, dtypes, device and layout."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshmuon._compat import has_fused_adamw
from meshmuon.exchange.groups import global_rank
from meshmuon.layout.mesh import is_distributed, local, placements, zeros_like
from meshmuon.layout.whole import laid_like
from meshmuon.update.momentum import state_dtype

STATE_KEYS = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}


def fresh_state(param: Tensor, group: Mapping[str, Any], *, on_host: bool = False) -> dict[str, Tensor]:
    """Make the state of a parameter that has not moved yet.

    Args:
        param: The parameter.
        group: Its group.
        on_host: Whether it lives in host memory.

    Returns:
        `momentum_buffer` for Muon; `step`, `exp_avg` and `exp_avg_sq` for AdamW.
    """
    if group["algorithm"] == "muon":
        return {"momentum_buffer": zeros_like(param, dtype=state_dtype(param, group), on_host=on_host)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=_step_device(param)),
        "exp_avg": zeros_like(param, memory_format=torch.contiguous_format, on_host=on_host),
        "exp_avg_sq": zeros_like(param, memory_format=torch.contiguous_format, on_host=on_host),
    }


def complete_state_(
    state: MutableMapping[Tensor, Any], param_groups: Sequence[Mapping[str, Any]], *, on_host: bool = False
) -> None:
    """See to it that every parameter has the state it needs, where it belongs, and that nothing else is kept.

    Args:
        state: The optimizer's state, by parameter; written.
        param_groups: Its groups.
        on_host: Whether state lives in host memory.
    """
    complete = {}
    with torch.inference_mode(False), torch.no_grad():  # state made in inference mode could not be written outside it
        for group in param_groups:
            for param in group["params"]:
                has = state.get(param, {})
                fits = state_fits(has, param, group, on_host=on_host)
                complete[param] = has if fits else adapted_state(has, param, group, on_host=on_host)
    state.clear()
    state.update(complete)


def lacks_state(state: Mapping[Tensor, Any], param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether somebody has taken state away: `opt.state.clear()` is how torch's optimizers are begun afresh.

    Args:
        state: The optimizer's state, by parameter.
        param_groups: Its groups.

    Returns:
        True if a parameter has no entry, or an empty one. Asked at every step, so it looks no closer.
    """
    return len(state) < sum(len(group["params"]) for group in param_groups) or not all(state.values())


def state_fits(state: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], *, on_host: bool = False) -> bool:
    """Tell whether a parameter has exactly the state it needs, where and as it needs it.

    Args:
        state: What it has.
        param: The parameter.
        group: Its group.
        on_host: Whether state lives in host memory.

    Returns:
        True if nothing needs to be done.
    """
    if set(state) != set(STATE_KEYS[group["algorithm"]]):
        return False
    if any(key != "step" and placements(value) != placements(param) for key, value in state.items()):
        return False
    if "step" in state and as_tensor(state["step"]).device != _step_device(param):
        return False
    if on_host and param.is_cuda and not all(local(value).is_pinned() for key, value in state.items() if key != "step"):
        return False
    device = torch.device("cpu") if on_host else param.device
    dtype = state_dtype(param, group) if group["algorithm"] == "muon" else param.dtype
    return all(
        (value.shape, value.dtype, value.device) == (param.shape, dtype, device)
        for key, value in state.items()
        if key != "step"
    )


def adapted_state(
    state: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], *, on_host: bool = False
) -> dict[str, Tensor]:
    """Bring existing state where it belongs and to the declared dtypes; make it afresh where it does not fit.

    Args:
        state: Saved or earlier state of this parameter, or nothing.
        param: The parameter.
        group: Its group.
        on_host: Whether it lives in host memory, or on the parameter's device.

    Returns:
        New tensors; the given ones are left alone.
    """
    result = fresh_state(param, group, on_host=on_host)
    if set(state) >= set(result) and all(as_tensor(state[key]).shape == value.shape for key, value in result.items()):
        for key, value in result.items():
            saved = as_tensor(state[key])
            if is_distributed(value) and not is_distributed(saved):
                saved = laid_like("state", saved, value, rank=global_rank())  # each rank takes its part of the whole
            value.copy_(saved)
    return result


def as_tensor(value: Any) -> Tensor:
    """Give a saved value as a tensor: one that is none yet does not go to whatever device is the default now.

    Args:
        value: A tensor, or a number.

    Returns:
        The tensor itself, or a new one on the CPU.
    """
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _step_device(param: Tensor) -> torch.device:
    return param.device if has_fused_adamw(param.device) else torch.device("cpu")

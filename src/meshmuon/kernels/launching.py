"""Launch kernels again and again with little host time.

Triton binds, specializes and looks up every launch anew, which takes 40 to 60 µs of host time: more than most of our
kernels take on the device. Here a compiled kernel is found by what it was compiled for, and asked to run directly.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from meshmuon.kernels.availability import is_interpreted, launching_on

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Hashable, ...], **options: Any
) -> None:
    """Launch a kernel on a row of programs.

    Args:
        kernel: A `triton.jit` function whose compile-time constants come last.
        programs: How many; none launches nothing.
        arguments: Its other arguments: tensors on one device (the first one is), numbers, tuples of numbers, None.
        constants: Its compile-time constants.
        **options: How it is compiled.
    """
    if not programs:
        return
    device = arguments[0].device
    with launching_on(device):
        if is_interpreted() or torch.version.hip is not None:  # Triton looks at more than `_kind` does on AMD's GPUs
            kernel[(programs,)](*arguments, *constants, **options)
            return
        kinds, values = [], []
        for x in arguments:
            value = x.data_ptr() if isinstance(x, Tensor) else x  # Triton asks the driver about tensors
            kinds.append(_kind(x, value))
            values.append(value)
        key = (id(kernel), device, tuple(kinds), constants, *options.values())
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = kernel[(programs,)](*arguments, *constants, **options)
        else:
            run(compiled, programs, (*values, *constants), device)


def run(compiled: Any, programs: int, arguments: tuple[Any, ...], device: torch.device) -> None:
    """Launch a compiled kernel, with arguments of the kind it was compiled for.

    Args:
        compiled: What Triton gave at the first launch.
        programs: How many.
        arguments: All of its arguments, constants included.
        device: The current device.
    """
    hooks, driver = _triton()
    if _listens(hooks.launch_enter_hook) or _listens(hooks.launch_exit_hook):
        compiled[(programs, 1, 1)](*arguments)
        return
    stream = driver.active.get_current_stream(device.index)
    nothing = (None, None, None)  # launch metadata and hooks
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *nothing, *arguments)


@functools.cache
def _triton() -> tuple[Any, Any]:
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver


def _listens(hook: Any) -> bool:
    """Whether somebody wants to hear of launches, such as a profiler."""
    return bool(getattr(hook, "calls", hook))


def _kind(x: Any, value: Any) -> Hashable:
    """What Triton specializes an argument on."""
    if isinstance(x, Tensor):
        return (x.dtype, value % 16 == 0)
    if isinstance(x, tuple):
        return tuple([_kind(each, each) for each in x])
    if isinstance(x, int):
        return (x == 1, x % 16 == 0, x.bit_length() > 31)
    return None if x is None else type(x).__name__

"""The kernels for Hopper that are written in CUDA C++: where they run, and how they come there.

NVRTC compiles them when they are first asked for, what they share before each of them, in a thread of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from typing import Literal, TypeVar

import torch

from meshmuon.errors import message, warn_user
from meshmuon.kernels.availability import has_triton, is_interpreted
from meshmuon.kernels.cuda import MachineCode, compile_once

Source = Literal["clusters.cu", "few_tiles.cu"]
Kernel = TypeVar("Kernel")
SHARED = ("instructions.cuh", "hopper.cuh")  # by all of them, in this order
DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def why_impossible(device: torch.device, dtype: torch.dtype) -> str:
    """Say why they cannot run somewhere.

    Args:
        device: Where.
        dtype: Of the operands.

    Returns:
        The reason; empty if they can.
    """
    if device.type != "cuda":
        return "not on a Hopper GPU"
    if not has_triton():  # then nothing is of ours
        return "Triton is not installed"
    if is_interpreted():
        return "kernels are interpreted"
    if dtype not in DTYPES:
        return f"products in {dtype}"
    return "" if torch.cuda.is_available() and _is_hopper(device) else "not on a Hopper GPU"


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def machine_code(source: Source, dtype: torch.dtype) -> Future[MachineCode]:
    """Have a kernel compiled in the background: it takes seconds, the first time on a machine.

    Python waits for its threads: a process that ends before, after an error say, ends when the kernel is compiled.

    Args:
        source: Its file.
        dtype: Of the operands.

    Returns:
        What it will be compiled to.
    """
    # Here, not in the thread: two threads that import modules which need each other can find half of one.
    import triton.runtime.cache  # noqa: F401

    thread = ThreadPoolExecutor(max_workers=1)
    try:
        return thread.submit(_compile, source, DTYPES[dtype])
    except RuntimeError as error:  # the machine has no more threads
        failed: Future[MachineCode] = Future()
        failed.set_exception(error)
        return failed
    finally:
        thread.shutdown(wait=False)


def _compile(source: Source, element: str) -> MachineCode:
    folder = resources.files("meshmuon.kernels")
    text = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in (*SHARED, source))
    return compile_once(text, architecture="sm_90a", options=[f'-DELEMENT="{element}"'])


def load_kernel(source: Source, dtype: torch.dtype, *, load: Callable[[bytes], Kernel]) -> Kernel | str:
    """Load a kernel onto a device; warn if it cannot be had, or is slower than it could be.

    Args:
        source: Its file.
        dtype: Of the operands.
        load: Given its machine code, loads it.

    Returns:
        What was loaded, or why it was not.
    """
    try:
        code = machine_code(source, dtype).result()
        if code.slow:
            do = "It is right, but slow. A torch that was built with CUDA 12.8 or 13.0 has a compiler that does better"
            warn_user(message(f"the kernel {source}", found=f"NVRTC says: {code.slow}", do=do))
        return load(code.cubin)
    except (OSError, RuntimeError, AttributeError) as error:  # the last: a driver without one of these calls
        found = f"{type(error).__name__}: {error}"
        do = "Triton's kernel and cuBLAS are used instead, and are slower. Install torch with its CUDA packages"
        warn_user(message(f"the kernel {source}", found=found, do=do))
        return found

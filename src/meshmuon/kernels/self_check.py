"""Each kernel against plain torch, on first use on a device. A wrong one is refused loudly, never silently replaced."""

from __future__ import annotations

import functools
import math
import threading

import torch

from meshmuon._compat import plain_arithmetic
from meshmuon.errors import message
from meshmuon.kernels import clusters
from meshmuon.kernels.availability import runs_here
from meshmuon.kernels.problems import CHECKS, SYMMETRIC
from meshmuon.kernels.symmetric_matmul import FEW, HALVES, POINTERS, TMA
from meshmuon.kernels.whole_matmul import WHOLE

_ROUNDINGS = 16  # how many units in the last place of the largest number a result may be off
# For what came over a wire; for products that are no part of a program; for those of small matrices.
_RARE = ("measure", FEW, HALVES, TMA, POINTERS, WHOLE)
_thread = threading.local()  # `checking`: what runs in it runs to be compared


@functools.cache
def check_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Run every kernel that most steps run on a small problem, and compare it with torch.

    Args:
        device: Where.
        dtype: What products are computed in.

    Raises:
        RuntimeError: Names the kernel that is wrong.
    """
    clusters.begin_to_compile(device, dtype)  # what needs it is checked last
    in_fp32 = dtype == torch.float32 and device.type != "cpu"  # there products are whole ones
    for name in CHECKS:
        if name not in _RARE and not (in_fp32 and name in SYMMETRIC):
            check_kernel(name, device, dtype)


def check_kernels_ahead(device: torch.device, dtype: torch.dtype, *, alone: str | None = None) -> None:
    """Check kernels when an optimizer is made. Compiling all of them takes seconds, and less side by side.

    Args:
        device: Where; nothing is done on a CPU, where they are interpreted, nor under a FakeTensorMode.
        dtype: What products are computed in.
        alone: The only kernel to check; None: all that most steps run.

    Raises:
        RuntimeError: Names the kernel that is wrong.
    """
    if runs_here(device):
        if alone is None:
            check_kernels(device, dtype)
        else:
            check_alone(alone, device, dtype)


@functools.cache
def check_alone(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Check a kernel that runs before, or without, the others.

    Args:
        name: Of the kernel.
        device: Where.
        dtype: What products are computed in.

    Raises:
        RuntimeError: If it is wrong there.
    """
    check_kernel(name, device, dtype)


def check_before_use(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Check a kernel that is about to run, where that is the first time, and unless it runs to be checked.

    Args:
        name: Of the kernel.
        device: Where; nothing is done on a CPU, where it is interpreted.
        dtype: What products are computed in.

    Returns:
        Whether it may be remembered to be right: not while it runs to be checked.

    Raises:
        RuntimeError: If it is wrong there.
    """
    checking = getattr(_thread, "checking", False)
    if runs_here(device) and not checking:
        check_alone(name, device, dtype)
    return not checking


def check_kernel(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """Run one kernel on a small problem and compare it with torch.

    Args:
        name: Of the kernel, in `CHECKS`.
        device: Where.
        dtype: What products are computed in.

    Returns:
        How far it is off, as a share of what rounding explains.

    Raises:
        RuntimeError: If that is too far; or while a CUDA graph is captured, when nothing can be compared.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        found = "its first use is in a CUDA graph, and nothing can be compared with torch while one is captured"
        raise RuntimeError(message(f"kernel {name}", found=found, do="Run what you capture once before, by itself"))
    _thread.checking = True
    try:
        with plain_arithmetic():
            got, expected = CHECKS[name](device, dtype)
    finally:
        _thread.checking = False
    bound = _ROUNDINGS * torch.finfo(got.dtype).eps * float(expected.abs().max())
    worst = float((got.double() - expected.double()).abs().max())
    if not worst <= bound < math.inf:  # NaN fails too
        found = f"off by {worst:.2e} on {device}, where rounding explains {bound:.2e}"
        do = 'Do not train with it: use Orthogonalizer(kernels="torch"), and report this'
        raise RuntimeError(message(f"kernel {name}", found=found, do=do))
    return worst / bound

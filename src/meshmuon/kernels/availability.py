"""Whether kernels can run here, and the message if they cannot."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from meshmuon.errors import message


@functools.cache
def has_triton() -> bool:
    """Tell whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str:
    """Say which Triton is installed, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


@functools.cache
def is_interpreted() -> bool:
    """Tell whether kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), on a CPU; imports Triton."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def runs_here(device: torch.device) -> bool:
    """Tell whether kernels are going to run on a GPU: not on a CPU, where they are interpreted, nor by fake tensors."""
    return device.type == "cuda" and type(torch.empty(0, device="cpu")) is Tensor


def check_runnable(name: str, *tensors: Tensor) -> None:
    """Refuse to launch a kernel where it cannot run.

    Args:
        name: The function the user called.
        *tensors: What it was called with; all have to be on one GPU.

    Raises:
        ModuleNotFoundError: If Triton is not installed.
        ValueError: If a tensor is not on the GPU of the first one.
    """
    if not has_triton():
        raise ModuleNotFoundError(message(name, found="Triton is not installed", do="pip install triton"))
    device = tensors[0].device
    together = all(tensor.device == device for tensor in tensors)
    if together and (device.type == "cuda" or (device.type == "cpu" and is_interpreted())):
        return
    found = "tensors on " + ", ".join(sorted({str(tensor.device) for tensor in tensors}))
    raise ValueError(message(name, found=found, do="Put all of them on one GPU (or set TRITON_INTERPRET=1 for a CPU)"))


class launching_on:
    """Make a device current where it is not: Triton launches on the current one. Costs next to nothing otherwise.

    Args:
        device: Where a kernel is going to run.
    """

    __slots__ = ("_guard",)

    def __init__(self, device: torch.device) -> None:
        elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        self._guard = torch.cuda.device(device) if elsewhere else None

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)

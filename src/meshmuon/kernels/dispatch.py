"""Which products run in kernels of our own, and why: decided once per shape, told in the plan, checked before use."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from meshmuon.config import KernelChoice
from meshmuon.errors import message
from meshmuon.kernels.availability import has_triton, is_interpreted
from meshmuon.kernels.configs import Architecture, architecture_of
from meshmuon.kernels.cpu_products import prefers_onednn

# In 16 bits: below it a product by itself is launch-bound either way, and cuBLAS has smaller tiles. All products in one
# launch take half of the host's time, and of the device's between half and one and a half of it (benchmarks/NOTES.md).
# In fp32: below it kernels of ours are as fast as cuBLAS, and give a matrix the same bits in every batch.
SMALLEST_SIDE = 256


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A choice and its reason.

    Attributes:
        products: "triton" for our symmetric products, "whole" for our products in fp32, "torch" for torch's.
        fused: Whether element-wise work is fused in kernels of ours.
        reason: Why, in a few words.
    """

    products: Literal["triton", "whole", "torch"]
    fused: bool
    reason: str

    @property
    def library(self) -> str:
        """What its products are by."""
        return "torch" if self.products == "torch" else "triton"


@functools.lru_cache(maxsize=4096)
def choose_kernels(
    choice: KernelChoice,
    *,
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    given: torch.dtype = torch.float32,
    one_launch: bool = False,
    architecture: Architecture | None = None,
) -> Dispatch:
    """Choose what the products of one shape are computed with.

    Args:
        choice: The user's.
        m: The short side.
        dtype: What products are computed in.
        device: Where.
        given: The dtype of the parameters.
        one_launch: Whether all products of an iteration would be one launch.
        architecture: Of a GPU that is elsewhere, with everything installed; None: look at the device.

    Returns:
        The choice, with its reason.

    Raises:
        ValueError: If "triton" was asked for and cannot run here.
    """
    if choice == "torch":
        return Dispatch("torch", False, "asked for")
    if choice == "auto" and device.type == "cpu":
        library = ", fp32 by oneDNN" if dtype == torch.float32 and prefers_onednn() else ""
        return Dispatch("torch", False, f"on a CPU{library}")
    ours = _products_of_ours(dtype, m, interpreted=device.type == "cpu")
    missing = _what_is_missing(device, elsewhere=architecture is not None)
    if not missing and ours is None:
        missing = f"products in {dtype}"
    if not missing and given == torch.float64 and device.type != "cpu":
        missing = f"parameters in {given}"  # kernels read in fp32, where 1e60 is infinite
    if choice == "triton":
        if missing or ours is None:
            raise ValueError(message('kernels="triton"', found=missing, do='Use kernels="auto"'))
        return Dispatch(ours, True, "asked for")
    if missing:
        return Dispatch("torch", False, missing)
    architecture = architecture or architecture_of(device)
    if architecture != "hopper":
        return Dispatch("torch", False, f"our kernels are not measured on {architecture}")
    if ours == "whole":
        return Dispatch("whole", True, f"fp32, short side below {SMALLEST_SIDE}")
    if m < SMALLEST_SIDE:
        small = Dispatch("torch", True, f"short side below {SMALLEST_SIDE}")
        return Dispatch("triton", True, "all products in one launch") if one_launch else small
    return Dispatch("triton", True, "symmetric results cost half")


def _products_of_ours(dtype: torch.dtype, m: int, *, interpreted: bool) -> Literal["triton", "whole"] | None:
    """Symmetric ones in 16 bits, and in whatever is interpreted; whole ones in fp32 for small matrices."""
    if interpreted or dtype in (torch.float16, torch.bfloat16):
        return "triton"
    return "whole" if dtype == torch.float32 and m < SMALLEST_SIDE else None


def _what_is_missing(device: torch.device, *, elsewhere: bool) -> str:
    if elsewhere:
        return ""
    if not has_triton():
        return "Triton is not installed"
    if device.type == "cpu" and not is_interpreted():
        return "on a CPU"
    return "" if device.type in ("cuda", "cpu") else f"on {device.type}"

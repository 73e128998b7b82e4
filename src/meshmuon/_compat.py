"""Every difference between torch versions and between kinds of devices. The only place that asks what is there."""

from __future__ import annotations

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices


def has_fused_adamw(device: torch.device) -> bool:
    """Tell whether torch has a fused AdamW kernel for a device.

    Args:
        device: The device.

    Returns:
        True on CPU, CUDA and a few others.
    """
    return device.type in _get_fused_kernels_supported_devices()

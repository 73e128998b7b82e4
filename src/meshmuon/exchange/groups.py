"""What this process knows about its peers, without asking them."""

from __future__ import annotations

import torch.distributed as dist


def world_size() -> int:
    """Give the number of processes of this job; 1 if torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_rank() -> bool:
    """Tell whether this process is the one that speaks for all."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

"""Names for the parts of a step in a profile: `meshmuon::polar bucket 3`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from meshmuon.plan.bucket import Bucket

_NOTHING = nullcontext()


def span(what: str, bucket: Bucket | None = None) -> AbstractContextManager[Any]:
    """Name what is done inside, for torch.profiler and, under `emit_nvtx`, for Nsight.

    Args:
        what: momentum, gather, polar, scatter, apply, adamw or qk_clip.
        bucket: Whose; its number is that of `print(opt.plan)`.

    Returns:
        A context; nothing at all while nobody is profiling, since a step has few microseconds to lose.
    """
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    number = "" if bucket is None else f" bucket {bucket.number}"
    return torch.profiler.record_function(f"meshmuon::{what}{number}")

"""An answer to the question whether a step happens: by parameter, perhaps still on its way to the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ELSEWHERE = "a parameter that other ranks hold"


@dataclass(frozen=True, slots=True)
class Report:
    """An answer, perhaps on its way to the host.

    Attributes:
        step: Which step it is about.
        names: The parameters.
        bad: For each, whether a gradient was not usable on any rank; one more for anything on a connected mesh.
        torn: For each, whether some ranks had a gradient and some had none; None for a rank that is alone.
        differing: For each, whether its hyper-parameters were not the same on all ranks; likewise.
        overflow: Whether GradScaler saw an overflow; None if it is not there.
        arrived: When it is here; None if it is.
        present: For each, whether any rank has a gradient; None if nobody was asked.
        refusal: What was wrong on this rank, if it was this one.
        laid_anew: Whether any gradient lies otherwise than its parameter; None if nobody was asked.
    """

    step: int
    names: tuple[str, ...]
    bad: Tensor
    torn: Tensor | None = None
    differing: Tensor | None = None
    overflow: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    present: Tensor | None = None
    refusal: Exception | None = None
    laid_anew: Tensor | None = None

    def go(self) -> Tensor:
        """Whether the step happens, as a flag on the device."""
        wrong = [row.any() for row in (self.bad, self.torn, self.differing) if row is not None]
        if self.overflow is not None:
            wrong.append(self.overflow != 0)
        return ~(wrong[0] if len(wrong) == 1 else torch.stack(wrong).any())

    def named(self, row: Tensor | None) -> list[str]:
        """The parameters a row is about, or what stands for them where the last of it, a connected mesh, is meant."""
        if row is None or not bool(row.any()):
            return []
        return [name for name, told in zip(self.names, row.tolist(), strict=False) if told] or [ELSEWHERE]

    def sent(self) -> Report:
        """Start its copy to the host. Pinned memory: a copy to any other waits for the device."""

        def to_host(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

        fields = ("bad", "torn", "differing", "overflow")
        answers: dict[str, Any] = {name: to_host(getattr(self, name)) for name in fields}
        arrived = torch.cuda.Event() if self.bad.is_cuda else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self.bad.device))
        return dataclasses.replace(self, **answers, arrived=arrived, present=None)

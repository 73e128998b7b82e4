"""What every rank tells its peers at the beginning of a step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from meshmuon.kernels.crew import share_elementwise
from meshmuon.kernels.peaks import PeakFinder, can_find

_LARGEST = 2**31 - 1


class Row(IntEnum):
    """What every rank tells its peers about each parameter, each step: a number, of which all learn the largest."""

    BAD = 0
    ABSENT = 1
    PRESENT = 2
    REFUSED = 3
    OVERFLOW = 4
    NEW_PLAN = 5
    OWN_BAD = 6  # of parameters that this rank shares with nobody: the same in every column
    OWN_REFUSED = 7
    PLACED = 8  # a number for how the gradient lies; 0 if there is none
    SETTINGS = 9
    MINUS_PLACED = 10
    MINUS_SETTINGS = 11  # the largest of -h is minus the least of h: the two tell whether all have the same h


class Alarms(NamedTuple):
    """What must stop ranks of other meshes as well: bools, for each parameter or for anything anywhere.

    Attributes:
        bad: A gradient is not usable.
        torn: Some ranks have a gradient, and some have none.
        refused: A rank cannot take a gradient at all, or has it laid out otherwise than others.
        overflow: GradScaler saw inf.
        new_plan: A rank has made its plan anew.
        differing: Ranks have other hyper-parameters.
        odd: A gradient is not laid out like its parameter.
    """

    bad: Tensor
    torn: Tensor
    refused: Tensor
    overflow: Tensor
    new_plan: Tensor
    differing: Tensor
    odd: Tensor


@dataclass(frozen=True, slots=True)
class Told:
    """What the ranks of a mesh have told each other, for each parameter.

    Attributes:
        bad: Whether a gradient is not usable.
        torn: Whether some ranks have a gradient, and some have none.
        refused: Whether a rank cannot take the gradient at all, or has it laid out otherwise than others.
        differing: Whether ranks have other hyper-parameters.
        present: Whether any rank has a gradient.
        alarms: What must stop other meshes as well; those of parameters that a rank shares with nobody among them.
    """

    bad: Tensor
    torn: Tensor
    refused: Tensor
    differing: Tensor
    present: Tensor
    alarms: Alarms

    @classmethod
    def of(cls, rows: Tensor) -> Told:
        """Read the rows that have come back.

        Args:
            rows: One for each `Row`, of which each rank has sent its own.

        Returns:
            What they mean.
        """
        true = rows[: Row.PLACED].bool()
        bad, present = true[Row.BAD], true[Row.PRESENT]
        differing = rows[Row.SETTINGS] != -rows[Row.MINUS_SETTINGS]
        laid_otherwise = present & (rows[Row.PLACED] != -rows[Row.MINUS_PLACED])
        refused = true[Row.REFUSED] | laid_otherwise
        torn = true[Row.ABSENT] & present & ~refused
        alarms = Alarms(
            bad=bad | true[Row.OWN_BAD],
            torn=torn,
            refused=refused | true[Row.OWN_REFUSED],
            overflow=true[Row.OVERFLOW],
            new_plan=true[Row.NEW_PLAN],
            differing=differing,
            odd=rows[Row.PLACED] > number_of(""),
        )
        return cls(bad, torn, refused, differing, present, alarms)


@dataclass(slots=True)  # not frozen: one is made for every tensor at every step, in a third of the time
class Watched:
    """A parameter's gradient, if it has one.

    Attributes:
        name: The parameter.
        grad: What this rank holds of the gradient.
        largest: The largest magnitude its arithmetic can take.
        shared: Whether other ranks hold the parameter too.
        refused: Why the gradient, or something else that was given for the step, cannot be used at all, if so.
        may_lack: Whether a rank may be without a gradient that others have: it then counts as zero.
        placed: How the gradient lies, in words; empty: as its parameter.
    """

    name: str
    grad: Tensor | None
    largest: float
    shared: bool
    refused: Exception | None = None
    may_lack: bool = False
    placed: str = ""


class Limits:
    """The largest magnitudes that gradients may have: the same from step to step, so brought to the device once."""

    def __init__(self) -> None:
        self._known: tuple[torch.device | None, torch.dtype | None, list[float], Tensor]
        self._known = (None, None, [], torch.empty(0, device="cpu"))

    def on(self, device: torch.device, watched: Sequence[Watched]) -> Tensor:
        """Give them on a device.

        Args:
            device: Where.
            watched: Every parameter.

        Returns:
            One number each, fp64 if a gradient is.
        """
        largest = [w.largest for w in watched]
        wide = any(w.grad is not None and w.grad.dtype == torch.float64 for w in watched)
        dtype = torch.float64 if wide else torch.float32
        if (device, dtype, largest) != self._known[:3]:
            # An fp64 parameter's limit would be inf in fp32, and inf no larger than it.
            finite = [min(limit, torch.finfo(dtype).max) for limit in largest]
            self._known = (device, dtype, largest, _on(device, finite, dtype))
        return self._known[3]


def unusable(
    watched: Sequence[Watched], limits: Tensor, unscale: Tensor | None, *, finder: PeakFinder | None = None
) -> Tensor:
    """Find gradients that arithmetic could not take. NaN fails any comparison.

    Args:
        watched: Every parameter.
        limits: The largest magnitude of each.
        unscale: What gradients will be multiplied with when read, or None.
        finder: The kernel that looks at all of them at once; None: torch does.

    Returns:
        One bool per parameter.
    """
    alike: dict[tuple[torch.device, torch.dtype, PeakFinder | None], list[int]] = {}
    for i, item in enumerate(watched):
        grad = item.grad
        if grad is not None and grad.numel():
            chosen = finder if finder is not None and can_find(grad) else None
            alike.setdefault((grad.device, grad.dtype, chosen), []).append(i)
    device, found = limits.device, None
    for (_, dtype, chosen), indices in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        grads = [grad for i in indices if (grad := watched[i].grad) is not None]
        peak = _peaks(grads) if chosen is None else chosen.find(grads)
        peak = peak.to(device, wide, non_blocking=device.type == "cuda")
        peak = peak if unscale is None else peak * unscale.to(device, peak.dtype)
        if len(indices) == len(watched):
            return (peak <= limits).logical_not_()
        if found is None:
            found = torch.zeros(len(watched), dtype=torch.bool, device=device)
        here = _on(device, indices)
        found[here] = ~(peak <= limits[here])
    return torch.zeros(len(watched), dtype=torch.bool, device=device) if found is None else found


def _peaks(grads: list[Tensor]) -> Tensor:
    """Give the largest magnitude in each; NaN if there is one."""
    device = grads[0].device
    if device.type == "cpu":
        numbers = sum(grad.numel() for grad in grads)
        return torch.stack(share_elementwise(_peak, grads, device=device, numbers=numbers))
    return torch.stack(torch._foreach_norm(grads, float("inf")))


def _peak(grad: Tensor) -> Tensor:
    least, most = torch.aminmax(grad)  # ten times as fast on a CPU as the norm
    return torch.maximum(-least, most)


def _on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Bring numbers to a device without waiting for it."""
    on_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def status(
    watched: Sequence[Watched],
    bad: Tensor,
    overflow: Tensor | None,
    *,
    settings: Sequence[int],
    unshared: Sequence[bool],
) -> Tensor:
    """Say what this rank has to tell, brought to the device without waiting for it.

    Args:
        watched: Every parameter.
        bad: For each, whether its gradient is not usable.
        overflow: What GradScaler saw, or None.
        settings: For each, a number for its hyper-parameters.
        unshared: For each, whether nobody else is asked about it.

    Returns:
        int32, one row for each `Row`.
    """
    own_refused = any(w.refused is not None and own for w, own in zip(watched, unshared, strict=True))
    placed = [0 if w.grad is None else number_of(w.placed) for w in watched]
    known: dict[Row, Sequence[int]] = {
        Row.ABSENT: [w.shared and w.grad is None and not w.may_lack for w in watched],
        Row.PRESENT: [w.shared and w.grad is not None for w in watched],
        Row.REFUSED: [w.refused is not None for w in watched],
        Row.OWN_BAD: unshared,  # to be asked on the device whether these are
        Row.OWN_REFUSED: [own_refused] * len(watched),
        Row.PLACED: placed,
        Row.SETTINGS: settings,
        Row.MINUS_PLACED: [-h or -_LARGEST for h in placed],
        Row.MINUS_SETTINGS: [-h for h in settings],
    }
    nothing = [0] * len(watched)
    host = torch.tensor(
        [known.get(row, nothing) for row in Row], dtype=torch.int32, device="cpu", pin_memory=bad.is_cuda
    )
    rows = host.to(bad.device, non_blocking=True)
    rows[Row.BAD] = bad
    rows[Row.OWN_BAD] = (bad & rows[Row.OWN_BAD].bool()).any()
    if overflow is not None:
        rows[Row.OVERFLOW] = overflow.ne(0)
    return rows


@functools.cache
def number_of(words: str) -> int:
    """Give a number for some words, the same on every rank: 1 for none, more for any."""
    return 1 if not words else 2 + (zlib.crc32(words.encode()) >> 2)

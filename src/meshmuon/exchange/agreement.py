"""Whether a step happens: decided before anything is changed, the same everywhere.

On a CPU the answer is read at once. On a GPU it stays a device flag that is multiplied into every write, so that the
host never waits; who was to blame is looked up when the answer has arrived by itself, at a later call.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.config import NonFinite
from meshmuon.errors import (
    GradientMismatchError,
    NonFiniteGradientError,
    NonFiniteGradientWarning,
    PlanMismatchError,
    message,
    some,
    warn_user,
)
from meshmuon.exchange.peers import AgreedRefusalError, Peers, Row

_ELSEWHERE = "a parameter that other ranks hold"
_LARGEST = 2**31 - 1


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on: known on the host (`flag` is None), or decided by the device.

    `present` tells for each parameter whether any rank has a gradient; None where each rank has its own answer.
    """

    go: bool
    flag: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Report:
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
        return [name for name, told in zip(self.names, row.tolist(), strict=False) if told] or [_ELSEWHERE]


class Agreement:
    """Decides each step from the gradients of all ranks, and keeps count."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._steps = 0
        self._skipped = 0
        self._overflows = 0
        self._on_their_way: deque[_Report] = deque()
        self._limits: tuple[torch.device | None, torch.dtype | None, list[float], Tensor]
        self._limits = (None, None, [], torch.empty(0))
        self._laid_anew = False  # whether gradients lie otherwise than their parameters, as all ranks have found

    def check(
        self, watched: Sequence[Watched], *, peers: Peers, found_inf: Tensor | None, unscale: Tensor | None
    ) -> Verdict:
        """Decide whether the step happens.

        Args:
            watched: Every parameter, in the order of the plan.
            peers: The ranks to agree with.
            found_inf: GradScaler's own finding, or None.
            unscale: What the gradients will be multiplied with when read, or None.

        Returns:
            The verdict, the same on every rank.

        Raises:
            NonFiniteGradientError: Under "raise", if a gradient is not finite. Nothing has been changed.
            GradientMismatchError: If only some ranks have a gradient for a parameter they share. Likewise.
            AgreedRefusalError: Holds this rank's own error about a gradient; its peers raise too.
        """
        self.collect(wait=False)
        self._steps += 1
        if not isinstance(found_inf, Tensor):
            found_inf = None  # GradScaler gives the number 0 when there is no gradient at all
        if peers.alone and (refused := next((w.refused for w in watched if w.refused), None)):
            raise AgreedRefusalError(refused)
        nothing_to_read = self._policy == "ignore" or all(w.grad is None for w in watched)
        if peers.alone and found_inf is None and nothing_to_read:
            return Verdict(go=True)
        otherwise = peers.device if found_inf is None else found_inf.device
        device = next((w.grad.device for w in watched if w.grad is not None), otherwise)
        at_once = device.type == "cpu" or self._policy == "raise" or self._steps == 1 or self._laid_anew
        if not at_once and not peers.alone:
            for item in watched:
                item.refused = item.refused or _came_late(item)
        report = self._report(watched, peers, found_inf=found_inf, unscale=unscale, device=device)
        if at_once:
            self._laid_anew = report.laid_anew is not None and bool(report.laid_anew)
            return Verdict(go=self._account(report, watched, peers), present=report.present)
        self._on_their_way.append(_sent(report))
        return Verdict(go=True, flag=report.go(), present=report.present)

    def _report(
        self,
        watched: Sequence[Watched],
        peers: Peers,
        *,
        found_inf: Tensor | None,
        unscale: Tensor | None,
        device: torch.device,
    ) -> _Report:
        if self._policy != "ignore":
            bad = _unusable(watched, self._limits_on(device, watched), unscale)
        else:
            bad = torch.zeros(len(watched), dtype=torch.bool, device=device)
        overflow = None if found_inf is None else found_inf.to(device, torch.float32)
        names = tuple(w.name for w in watched)
        if peers.alone:
            return _Report(self._steps, names, bad, overflow=overflow)
        told = peers.combine(_status(watched, bad, overflow, peers))
        bad, absent, present, refused, scaled, new_plan, own_bad, own_refused = told[: Row.PLACED].bool()
        differing = told[Row.SETTINGS] != -told[Row.MINUS_SETTINGS]
        refused = refused | (present & (told[Row.PLACED] != -told[Row.MINUS_PLACED]))  # each rank lays it out otherwise
        torn = absent & present & ~refused
        # What one mesh has learned must stop the others as well.
        odd = told[Row.PLACED] > _number("")
        rows = (bad | own_bad, torn, refused | own_refused, scaled, new_plan, differing, odd)
        found = torch.stack([row.any() for row in rows])
        beyond = peers.spread(found.to(torch.int32)).bool()
        if device.type == "cpu":
            if bool(beyond[4]) or bool(beyond[5]):
                peers.meet(again=True)  # names what differs
                return self._report(watched, peers, found_inf=found_inf, unscale=unscale, device=device)
            if bool(beyond[2]):
                self._raise_refusal(watched, refused)
        else:  # nothing is written, and it is reported with the others when the answer has arrived
            torn, beyond[1] = torn | refused, beyond[1] | beyond[2]
        bad, torn, differing = (torch.cat([row, beyond[i : i + 1]]) for row, i in ((bad, 0), (torn, 1), (differing, 5)))
        refusal = next((w.refused for w in watched if w.refused is not None), None)
        overflow = beyond[3].float()
        return _Report(
            self._steps, names, bad, torn, differing, overflow, present=present, refusal=refusal, laid_anew=beyond[6]
        )

    def _limits_on(self, device: torch.device, watched: Sequence[Watched]) -> Tensor:
        """The largest magnitudes on a device: the same from step to step, so brought there once."""
        largest = [w.largest for w in watched]
        dtype = torch.float64 if any(w.grad is not None and w.grad.dtype == torch.float64 for w in watched) else None
        if (device, dtype, largest) != self._limits[:3]:
            self._limits = (device, dtype, largest, _on(device, largest, dtype or torch.float32))
        return self._limits[3]

    def _raise_refusal(self, watched: Sequence[Watched], refused: Tensor) -> None:
        mine = next((w.refused for w in watched if w.refused is not None), None)
        if mine is not None:
            raise AgreedRefusalError(mine)
        names = [w.name for w, elsewhere in zip(watched, refused.tolist(), strict=True) if elsewhere]
        what = some(names or [_ELSEWHERE])
        found = (
            f"another rank cannot use the gradient of {what}, or has it laid out otherwise, or cannot use its qk_logits"
        )
        do = "Nothing was changed. That rank says why"
        raise GradientMismatchError(message(f"step {self._steps}", found=found, do=do))

    def collect(self, *, wait: bool) -> None:
        """Count and warn about the answers that have arrived since.

        Args:
            wait: Whether to wait for all of them.
        """
        while self._on_their_way:
            report = self._on_their_way[0]
            if report.arrived is not None and not report.arrived.query():
                if not wait:
                    return
                report.arrived.synchronize()
            self._account(self._on_their_way.popleft())

    def counts(self) -> dict[str, float]:
        """Give the counts for `metrics()`, waiting for those on their way."""
        self.collect(wait=True)
        return {
            "steps": float(self._steps),
            "skipped_non_finite": float(self._skipped),
            "skipped_grad_scaler": float(self._overflows),
        }

    def _account(self, report: _Report, watched: Sequence[Watched] | None = None, peers: Peers | None = None) -> bool:
        """Count a step that was decided, tell the user where that is due, and say whether it happened."""
        if odd := report.named(report.differing):
            found = f"not the same hyper-parameters on all ranks for {some(odd)}"
            do = "Nothing was changed. Set lr and all else alike on every rank"
            raise PlanMismatchError(message(f"step {report.step}", found=found, do=do))
        if torn := report.named(report.torn):
            text = self._torn_message(report.step, torn, watched, peers)
            # This rank's own reason says more; but it is asked with the others, who wait for its answer.
            raise GradientMismatchError(text if report.refusal is None else str(report.refusal)) from report.refusal
        if report.overflow is not None and bool(report.overflow.item()):
            self._overflows += 1  # GradScaler expects these and lowers its scale: no reason to warn
            return False
        bad = report.named(report.bad)
        if not bad:
            return True
        found = f"NaN, inf or numbers too large in the gradient of {some(bad)}"
        if self._policy == "raise":
            do = "Nothing was changed. Look at the loss and the inputs of this step"
            raise NonFiniteGradientError(message(f"step {report.step}", found=found, do=do))
        self._skipped += 1
        do = 'The step was skipped and nothing was changed; non_finite="raise" stops instead'
        warn_user(message(f"step {report.step}", found=found, do=do), NonFiniteGradientWarning)
        return False

    def _torn_message(
        self, step: int, torn: Sequence[str], watched: Sequence[Watched] | None, peers: Peers | None
    ) -> str:
        where = "some ranks"
        if watched is not None and peers is not None:  # decided at once, so every rank is here to be asked
            without = peers.ranks_without([w.name for w in watched if w.shared and w.grad is None])
            if lacking := without.get(torn[0]):
                where = f"ranks {some(map(str, lacking))}"
        found = f"no usable gradient on {where} for {some(torn)}, though others have one"
        do = "Nothing was changed. Every rank that holds a part of a parameter must give it a gradient, or none may"
        return message(f"step {step}", found=found, do=do)


def _unusable(watched: Sequence[Watched], limits: Tensor, unscale: Tensor | None) -> Tensor:
    """One bool per parameter: whether its arithmetic could not take some magnitude. NaN fails any comparison."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, item in enumerate(watched):
        if item.grad is not None and item.grad.numel():
            alike.setdefault((item.grad.device, item.grad.dtype), []).append(i)
    device = limits.device
    found = torch.zeros(len(watched), dtype=torch.bool, device=device)
    for (_, dtype), indices in alike.items():
        peaks = torch._foreach_norm([watched[i].grad for i in indices], float("inf"))  # type: ignore[misc]
        peak = torch.stack(peaks).to(device, torch.promote_types(dtype, torch.float32), non_blocking=True)
        peak = peak if unscale is None else peak * unscale.to(device, peak.dtype)
        if len(indices) == len(watched):
            return ~(peak <= limits)
        here = _on(device, indices)
        found[here] = ~(peak <= limits[here])
    return found


def _on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Bring numbers to a device without waiting for it."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _status(watched: Sequence[Watched], bad: Tensor, overflow: Tensor | None, peers: Peers) -> Tensor:
    """What this rank has to tell: a row of numbers for each `Row`. Brought to the device without waiting for it."""
    settings, unshared = peers.settings_hashes(), peers.unshared
    own_refused = any(w.refused is not None and own for w, own in zip(watched, unshared, strict=True))
    known = [
        [w.shared and w.grad is None and not w.may_lack for w in watched],
        [w.shared and w.grad is not None for w in watched],
        [w.refused is not None for w in watched],
        [False] * len(watched),
        unshared,
        [own_refused] * len(watched),
        placed := [0 if w.grad is None else _number(w.placed) for w in watched],
        settings,
        [-h or -_LARGEST for h in placed],
        [-h for h in settings],
    ]
    host = torch.tensor(known, dtype=torch.int32, pin_memory=bad.is_cuda)
    absent, present, refused, new_plan, own, *others = host.to(bad.device, non_blocking=True)
    own_bad = (bad & own.bool()).any().to(torch.int32).expand(len(watched))
    scaled = torch.zeros_like(absent) if overflow is None else overflow.ne(0).expand(len(watched)).to(torch.int32)
    return torch.stack([bad.to(torch.int32), absent, present, refused, scaled, new_plan, own_bad, *others])


@functools.cache
def _number(words: str) -> int:
    """A number for some words, the same on every rank: 1 for none, more for any."""
    return 1 if not words else 2 + (zlib.crc32(words.encode()) >> 2)


def _came_late(item: Watched) -> Exception | None:
    """Laying a gradient out anew is a collective. Where the device decides, nobody can know whether all take part."""
    if not item.placed:
        return None
    found = f"a gradient placed {item.placed}, otherwise than its parameter, though none was at the first step"
    do = "Reduce or redistribute it before the step, or give it so from the first step on"
    return ValueError(message(f"parameter {item.name!r}", found=found, do=do))


def _sent(report: _Report) -> _Report:
    """Start the copy of a report to the host. Pinned memory: a copy to any other waits for the device."""

    def to_host(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

    fields = ("bad", "torn", "differing", "overflow")
    answers: dict[str, Any] = {name: to_host(getattr(report, name)) for name in fields}
    arrived = torch.cuda.Event() if report.bad.is_cuda else None
    if arrived is not None:
        arrived.record()
    return dataclasses.replace(report, **answers, arrived=arrived, present=None)

"""Whether a step happens: decided before anything is changed, the same everywhere.

On a CPU the answer is read at once. On a GPU it stays a device flag that is multiplied into every write, so that the
host never waits; who was to blame is looked up when the answer has arrived by itself, at a later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    name: str
    grad: Tensor | None
    largest: float
    shared: bool
    refused: Exception | None = None
    may_lack: bool = False


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
        torn: For each, whether some ranks had a gradient and some had none.
        differing: For each, whether its hyper-parameters were not the same on all ranks.
        overflow: Whether GradScaler saw an overflow.
        arrived: When it is here; None if it is.
        present: For each, whether any rank has a gradient; None if nobody was asked.
        refusal: What was wrong on this rank, if it was this one.
    """

    step: int
    names: tuple[str, ...]
    bad: Tensor
    torn: Tensor
    differing: Tensor
    overflow: Tensor
    arrived: torch.cuda.Event | None = None
    present: Tensor | None = None
    refusal: Exception | None = None


class Agreement:
    """Decides each step from the gradients of all ranks, and keeps count."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._steps = 0
        self._skipped = 0
        self._overflows = 0
        self._on_their_way: deque[_Report] = deque()

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
        read = self._policy != "ignore"
        if peers.alone and (refused := next((w.refused for w in watched if w.refused), None)):
            raise AgreedRefusalError(refused)
        if peers.alone and found_inf is None and not (read and any(w.grad is not None for w in watched)):
            return Verdict(go=True)
        report = self._report(watched, peers, found_inf=found_inf, unscale=unscale, read=read)
        if report.bad.device.type == "cpu" or self._policy == "raise" or self._steps == 1:
            return Verdict(go=self._account(report, watched, peers), present=report.present)
        flag = ~(report.bad.any() | report.torn.any() | report.differing.any()) & (report.overflow == 0)
        self._on_their_way.append(_sent(report))
        return Verdict(go=True, flag=flag, present=report.present)

    def _report(
        self, watched: Sequence[Watched], peers: Peers, *, found_inf: Tensor | None, unscale: Tensor | None, read: bool
    ) -> _Report:
        grads = [w.grad for w in watched if w.grad is not None]
        device = grads[0].device if grads else (torch.device("cpu") if found_inf is None else found_inf.device)
        bad = (
            _unusable(watched, device, unscale) if read else torch.zeros(len(watched), dtype=torch.bool, device=device)
        )
        overflow = torch.zeros((), device=device) if found_inf is None else found_inf.to(device, torch.float32)
        names = tuple(w.name for w in watched)
        if peers.alone:
            none = torch.zeros_like(bad)
            return _Report(self._steps, names, bad, none, none, overflow)
        told = peers.combine(_status(watched, bad, overflow, peers.settings_hashes()))
        bad, absent, present, refused, scaled, new_plan = told[: Row.SETTINGS].bool()
        differing = told[Row.SETTINGS] != -told[Row.MINUS_SETTINGS]
        torn = absent & present & ~refused
        # What one mesh has learned must stop the others as well.
        found = torch.stack([row.any() for row in (bad, torn, refused, scaled, new_plan, differing)])
        beyond = peers.spread(found.to(torch.int32)).bool()
        if device.type == "cpu":
            if bool(beyond[4]) or bool(beyond[5]):
                peers.meet(again=True)  # names what differs
                return self._report(watched, peers, found_inf=found_inf, unscale=unscale, read=read)
            if bool(beyond[2]):
                self._raise_refusal(watched, refused)
        else:  # nothing is written, and it is reported with the others when the answer has arrived
            torn, beyond[1] = torn | refused, beyond[1] | beyond[2]
        bad, torn, differing = (torch.cat([row, beyond[i : i + 1]]) for row, i in ((bad, 0), (torn, 1), (differing, 5)))
        refusal = next((w.refused for w in watched if w.refused is not None), None)
        overflow = beyond[3].float()
        return _Report(self._steps, names, bad, torn, differing, overflow, present=present, refusal=refusal)

    def _raise_refusal(self, watched: Sequence[Watched], refused: Tensor) -> None:
        mine = next((w.refused for w in watched if w.refused is not None), None)
        if mine is not None:
            raise AgreedRefusalError(mine)
        names = [w.name for w, elsewhere in zip(watched, refused.tolist(), strict=True) if elsewhere]
        what = some(names) or "a parameter of another mesh"
        found = f"another rank cannot use the gradient of {what}, or its qk_logits"
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
        if bool(report.differing.any()):
            odd = [name for name, differs in zip(report.names, report.differing.tolist(), strict=False) if differs]
            found = f"not the same hyper-parameters on all ranks for {some(odd) or 'a parameter of another mesh'}"
            do = "Nothing was changed. Set lr and all else alike on every rank"
            raise PlanMismatchError(message(f"step {report.step}", found=found, do=do))
        torn = [name for name, split in zip(report.names, report.torn.tolist(), strict=False) if split]
        if bool(report.torn.any()):
            text = self._torn_message(report.step, torn or ["a parameter of another mesh"], watched, peers)
            # This rank's own reason says more; but it is asked with the others, who wait for its answer.
            raise GradientMismatchError(text if report.refusal is None else str(report.refusal)) from report.refusal
        if bool(report.overflow.item()):
            self._overflows += 1  # GradScaler expects these and lowers its scale: no reason to warn
            return False
        if not bool(report.bad.any()):
            return True
        bad = [name for name, unusable in zip(report.names, report.bad.tolist(), strict=False) if unusable]
        found = f"NaN, inf or numbers too large in the gradient of {some(bad) or 'a parameter of another mesh'}"
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


def _unusable(watched: Sequence[Watched], device: torch.device, unscale: Tensor | None) -> Tensor:
    """One bool per parameter: whether its arithmetic could not take some magnitude. NaN fails any comparison."""
    alike: dict[tuple[torch.device, torch.dtype, float], list[int]] = {}
    for i, item in enumerate(watched):
        if item.grad is not None and item.grad.numel():
            alike.setdefault((item.grad.device, item.grad.dtype, item.largest), []).append(i)
    found = torch.zeros(len(watched), dtype=torch.bool, device=device)
    for (_, _, largest), indices in alike.items():
        peaks = torch._foreach_norm([watched[i].grad.detach() for i in indices], float("inf"))  # type: ignore[union-attr]
        peak = torch.stack(peaks).to(torch.promote_types(peaks[0].dtype, torch.float32))
        peak = peak if unscale is None else peak * unscale.to(peak.device, peak.dtype)
        unusable = (~(peak <= largest)).to(device, non_blocking=True)
        if len(indices) == len(watched):
            return unusable
        found[_on(device, indices)] = unusable
    return found


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Bring whole numbers to a device without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _status(watched: Sequence[Watched], bad: Tensor, overflow: Tensor, settings: Sequence[int]) -> Tensor:
    """What this rank has to tell: a row of numbers for each `Row`. Brought to the device without waiting for it."""
    known = [
        [w.shared and w.grad is None and not w.may_lack for w in watched],
        [w.shared and w.grad is not None for w in watched],
        [w.refused is not None for w in watched],
        [False] * len(watched),
        settings,
        [-h for h in settings],
    ]
    host = torch.tensor(known, dtype=torch.int32, pin_memory=bad.is_cuda)
    absent, present, refused, new_plan, plus, minus = host.to(bad.device, non_blocking=True)
    scaled = overflow.ne(0).expand(len(watched)).to(torch.int32)
    return torch.stack([bad.to(torch.int32), absent, present, refused, scaled, new_plan, plus, minus])


def _sent(report: _Report) -> _Report:
    """Start the copy of a report to the host. Pinned memory: a copy to any other waits for the device."""

    def to_host(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

    answers = [to_host(each) for each in (report.bad, report.torn, report.differing, report.overflow)]
    arrived = torch.cuda.Event() if report.bad.is_cuda else None
    if arrived is not None:
        arrived.record()
    bad, torn, differing, overflow = answers
    return _Report(report.step, report.names, bad, torn, differing, overflow, arrived, refusal=report.refusal)

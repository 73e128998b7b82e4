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
from meshmuon.exchange.health import AgreedRefusalError
from meshmuon.exchange.peers import Peers
from meshmuon.exchange.report import ELSEWHERE, Report
from meshmuon.exchange.status import Limits, Told, Watched, status, unusable
from meshmuon.kernels.peaks import PeakFinder
from meshmuon.kernels.self_check import check_alone


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on: as far as the host knows (`go`), and as the device has decided (`flag`, if it has).

    `present` tells for each parameter whether any rank has a gradient; None where each rank has its own answer.
    """

    go: bool
    flag: Tensor | None = None
    present: Tensor | None = None


class Agreement:
    """Decides each step from the gradients of all ranks, and keeps count."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._steps = 0
        self._skipped = 0
        self._overflows = 0
        self._on_their_way: deque[Report] = deque()
        self._limits = Limits()
        self._finder = PeakFinder()
        self._laid_anew = False  # whether gradients lie otherwise than their parameters, as all ranks have found

    def check(
        self,
        watched: Sequence[Watched],
        *,
        peers: Peers,
        found_inf: Tensor | None,
        unscale: Tensor | None,
        fused: bool = False,
    ) -> Verdict:
        """Decide whether the step happens.

        Args:
            watched: Every parameter, in the order of the plan.
            peers: The ranks to agree with.
            found_inf: GradScaler's own finding, or None.
            unscale: What the gradients will be multiplied with when read, or None.
            fused: Whether kernels of ours may look at them.

        Returns:
            The verdict, the same on every rank.

        Raises:
            NonFiniteGradientError: Under "raise", if a gradient is not finite. Nothing has been changed.
            GradientMismatchError: If only some ranks have a gradient for a parameter they share. Likewise.
            AgreedRefusalError: Holds this rank's own error about a gradient; its peers raise too.
        """
        self._collect_due(alone=peers.alone)
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
        at_once = _is_host(device) or self._policy == "raise" or self._steps == 1 or self._laid_anew
        if not at_once and not peers.alone:
            for item in watched:
                item.refused = item.refused or _came_late(item)
        report = self._report(watched, peers, found_inf=found_inf, unscale=unscale, device=device, fused=fused)
        if at_once:
            self._laid_anew = report.laid_anew is not None and bool(report.laid_anew)
            # A flag that is known already: so that the first step runs, and compiles, the same kernels as all others.
            flag = None if _is_host(device) or self._policy == "raise" else report.go()
            return Verdict(go=self._account(report, watched, peers), flag=flag, present=report.present)
        self._on_their_way.append(report.sent())
        return Verdict(go=True, flag=report.go(), present=report.present)

    def _report(
        self,
        watched: Sequence[Watched],
        peers: Peers,
        *,
        found_inf: Tensor | None,
        unscale: Tensor | None,
        device: torch.device,
        fused: bool,
    ) -> Report:
        if self._policy != "ignore":
            finder = self._finder if fused else None
            if fused:
                check_alone("peaks", device)
            bad = unusable(watched, self._limits.on(device, watched), unscale, finder=finder)
        else:
            bad = torch.zeros(len(watched), dtype=torch.bool, device=device)
        overflow = None if found_inf is None else found_inf.to(device, torch.float32)
        names = tuple(w.name for w in watched)
        if peers.alone:
            return Report(self._steps, names, bad, overflow=overflow)
        ours = status(watched, bad, overflow, settings=peers.settings_hashes(), unshared=peers.unshared)
        told = Told.of(peers.combine(ours))
        # What one mesh has learned must stop the others as well.
        alarms = peers.anywhere(told)
        torn, any_torn = told.torn, alarms.torn
        if _is_host(device):
            if alarms.new_plan or alarms.differing:
                peers.meet(again=True)  # names what differs
                return self._report(watched, peers, found_inf=found_inf, unscale=unscale, device=device, fused=fused)
            if alarms.refused:
                self._raise_refusal(watched, told.refused)
        else:  # nothing is written, and it is reported with the others when the answer has arrived
            torn, any_torn = torn | told.refused, any_torn | alarms.refused
        return Report(
            self._steps,
            names,
            torch.cat([told.bad, alarms.bad]),
            torch.cat([torn, any_torn]),
            torch.cat([told.differing, alarms.differing]),
            alarms.overflow[0].float(),
            present=told.present,
            refusal=next((w.refused for w in watched if w.refused is not None), None),
            laid_anew=alarms.odd[0],
        )

    def _raise_refusal(self, watched: Sequence[Watched], refused: Tensor) -> None:
        mine = next((w.refused for w in watched if w.refused is not None), None)
        if mine is not None:
            raise AgreedRefusalError(mine)
        names = [w.name for w, elsewhere in zip(watched, refused.tolist(), strict=True) if elsewhere]
        what = some(names or [ELSEWHERE])
        found = (
            f"another rank cannot use the gradient of {what}, or has it laid out otherwise, or cannot use its qk_logits"
        )
        do = "Nothing was changed. That rank says why"
        raise GradientMismatchError(message(f"step {self._steps}", found=found, do=do))

    def _collect_due(self, *, alone: bool) -> None:
        """Look at the answers that have arrived; with peers, at those of the step before the last, arrived or not.

        An answer may be an error. All ranks must meet it at the same step: one that left earlier would be waited for.
        """
        if alone:
            self.collect(wait=False)
            return
        while self._on_their_way and self._on_their_way[0].step < self._steps:
            self._take_first()

    def collect(self, *, wait: bool) -> None:
        """Count and warn about the answers that have arrived since.

        Args:
            wait: Whether to wait for all of them.
        """
        while self._on_their_way:
            arrived = self._on_their_way[0].arrived
            if not wait and arrived is not None and not arrived.query():
                return
            self._take_first()

    def _take_first(self) -> None:
        report = self._on_their_way.popleft()
        if report.arrived is not None:
            report.arrived.synchronize()
        self._account(report)

    def counts(self) -> dict[str, float]:
        """Give the counts for `metrics()`, waiting for those on their way."""
        self.collect(wait=True)
        return {
            "steps": float(self._steps),
            "skipped_non_finite": float(self._skipped),
            "skipped_grad_scaler": float(self._overflows),
        }

    def _account(self, report: Report, watched: Sequence[Watched] | None = None, peers: Peers | None = None) -> bool:
        """Count a step that was decided, tell the user where that is due, and say whether it happened."""
        if odd := report.named(report.differing):
            found = f"not the same hyper-parameters, or not the same optimizer, on all ranks for {some(odd)}"
            do = "Nothing was changed. Set lr and all else alike on every rank, and step optimizers in the same order"
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


def _is_host(device: torch.device) -> bool:
    """Whether answers can be read without waiting for a device."""
    return device.type == "cpu"


def _came_late(item: Watched) -> Exception | None:
    """Laying a gradient out anew is a collective. Where the device decides, nobody can know whether all take part."""
    if not item.placed:
        return None
    found = f"a gradient placed {item.placed}, otherwise than its parameter, though none was at the first step"
    do = "Reduce or redistribute it before the step, or give it so from the first step on"
    return ValueError(message(f"parameter {item.name!r}", found=found, do=do))

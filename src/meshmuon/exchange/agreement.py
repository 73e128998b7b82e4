"""Whether a step happens: decided before anything is changed, the same everywhere.

On a CPU the answer is read at once. On a GPU it stays a device flag that is multiplied into every write, so that the
host never waits; who was to blame is looked up when the answer has arrived by itself, at a later call.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshmuon.config import NonFinite
from meshmuon.errors import NonFiniteGradientError, NonFiniteGradientWarning, message, some


@dataclass(frozen=True, slots=True)
class NamedGradient:
    """A gradient, the parameter it belongs to, and the largest magnitude its arithmetic can take."""

    name: str
    tensor: Tensor
    largest: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on: known on the host (`flag` is None), or decided by the device."""

    go: bool
    flag: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    """An answer on its way to the host: which gradients were finite, and whether GradScaler saw an overflow."""

    step: int
    names: tuple[str, ...]
    finite: Tensor
    overflow: Tensor
    arrived: torch.cuda.Event | None


class Agreement:
    """Decides each step from the gradients, and keeps count."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._steps = 0
        self._skipped = 0
        self._overflows = 0
        self._on_their_way: deque[_Report] = deque()

    def check(self, gradients: Sequence[NamedGradient], *, found_inf: Tensor | None, unscale: Tensor | None) -> Verdict:
        """Decide whether the step happens.

        Args:
            gradients: Every gradient of the step.
            found_inf: GradScaler's own finding, or None.
            unscale: What the gradients will be multiplied with when read, or None.

        Returns:
            The verdict.

        Raises:
            NonFiniteGradientError: Under "raise", if a gradient is not finite. Nothing has been changed.
        """
        self.collect(wait=False)
        self._steps += 1
        if not isinstance(found_inf, Tensor):
            found_inf = None  # GradScaler gives the number 0 when there is no gradient at all
        watched = [g for g in gradients if g.tensor.numel()] if self._policy != "ignore" else []
        if not watched and found_inf is None:
            return Verdict(go=True)
        device = watched[0].tensor.device if watched else found_inf.device  # type: ignore[union-attr]
        names, finite = _finite(watched, device, unscale)
        overflow = torch.zeros((), device=device) if found_inf is None else found_inf.to(device, torch.float32)
        report = _Report(self._steps, names, finite, overflow, None)
        if device.type == "cpu" or self._policy == "raise" or self._steps == 1:
            return Verdict(go=self._account(report))
        flag = finite.all() & (overflow == 0)
        self._on_their_way.append(_sent(report))
        return Verdict(go=True, flag=flag)

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

    def _account(self, report: _Report) -> bool:
        """Count a step that was decided, tell the user where that is due, and say whether it happened."""
        if bool(report.overflow.item()):
            self._overflows += 1  # GradScaler expects these and lowers its scale: no reason to warn
            return False
        finite = report.finite.tolist()
        if all(finite):
            return True
        bad = [name for name, good in zip(report.names, finite, strict=True) if not good]
        found = f"NaN, inf or numbers too large in the gradient of {some(bad)}"
        if self._policy == "raise":
            do = "Nothing was changed. Look at the loss and the inputs of this step"
            raise NonFiniteGradientError(message(f"step {report.step}", found=found, do=do))
        self._skipped += 1
        do = 'The step was skipped and nothing was changed; non_finite="raise" stops instead'
        warnings.warn(message(f"step {report.step}", found=found, do=do), NonFiniteGradientWarning, stacklevel=2)
        return False


def _finite(
    gradients: Sequence[NamedGradient], device: torch.device, unscale: Tensor | None
) -> tuple[tuple[str, ...], Tensor]:
    """Names, and one bool for each: whether its arithmetic can take every magnitude. NaN fails any comparison."""
    alike: dict[tuple[torch.device, torch.dtype, float], list[NamedGradient]] = {}
    for gradient in gradients:
        key = (gradient.tensor.device, gradient.tensor.dtype, gradient.largest)
        alike.setdefault(key, []).append(gradient)
    finite = [torch.ones(0, dtype=torch.bool, device=device)]
    for (_, _, largest), members in alike.items():
        peaks = torch._foreach_norm([member.tensor.detach() for member in members], float("inf"))
        peak = torch.stack(peaks).to(torch.promote_types(peaks[0].dtype, torch.float32))
        peak = peak if unscale is None else peak * unscale.to(peak.device, peak.dtype)
        finite.append((peak <= largest).to(device, non_blocking=True))
    names = tuple(member.name for members in alike.values() for member in members)
    return names, torch.cat(finite)


def _sent(report: _Report) -> _Report:
    """Start the copy of a report to the host. Pinned memory: a copy to any other waits for the device."""
    arrived = torch.cuda.Event() if report.finite.is_cuda else None
    finite = torch.empty_like(report.finite, device="cpu", pin_memory=report.finite.is_cuda)
    overflow = torch.empty_like(report.overflow, device="cpu", pin_memory=report.overflow.is_cuda)
    finite.copy_(report.finite, non_blocking=True)
    overflow.copy_(report.overflow, non_blocking=True)
    if arrived is not None:
        arrived.record()
    return _Report(report.step, report.names, finite, overflow, arrived)

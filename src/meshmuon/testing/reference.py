"""The oracle: Muon in plain lines, one matrix at a time, and the exact polar factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshmuon.config import LRRule, WeightDecayMode
from meshmuon.polar.coefficients import Triple
from meshmuon.polar.orthogonalize import orthogonalize
from meshmuon.update.scale import scale_factor


@dataclass
class ReferenceMuon:
    """Muon on 2-D tensors, as simple as it can be said. With the default `polar` it must match `Muon` bit for bit.

    Attributes:
        params: The matrices; written by `step`.
        lr: Learning rate.
        weight_decay: Its coefficient.
        momentum: Weight of the past.
        nesterov: Whether to look ahead.
        adjust_lr_fn: The lr rule.
        weight_decay_mode: How to decay.
        polar: From the averaged gradient to its direction, in fp32.
        state_dtype: Dtype of the momentum; None: the parameter's own.
        buffers: The momentum of each matrix.
    """

    params: Sequence[Tensor]
    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    adjust_lr_fn: LRRule | None = "match_rms_adamw"
    weight_decay_mode: WeightDecayMode = "decoupled"
    polar: Callable[[Tensor], Tensor] = orthogonalize
    state_dtype: torch.dtype | None = None
    buffers: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Update every matrix that has a gradient.

        Args:
            grads: One per matrix, or None; never written.
        """
        self.buffers = self.buffers or [torch.zeros_like(p, dtype=self.state_dtype or p.dtype) for p in self.params]
        for p, g, buf in zip(self.params, grads, self.buffers, strict=True):
            if g is None:
                continue
            wide = torch.promote_types(p.dtype, torch.float32)
            g = g.to(wide)
            if self.weight_decay_mode == "l2":
                g = g + p.to(wide) * self.weight_decay
            buf.copy_(torch.lerp(buf.to(wide), g, 1 - self.momentum))
            u = torch.lerp(g, buf.to(wide), self.momentum) if self.nesterov else buf.to(wide)
            direction = self.polar(u)
            new = p.to(wide)
            if self.weight_decay_mode == "decoupled":
                new = new * (1 - self.lr * self.weight_decay)
            elif self.weight_decay_mode == "cautious":
                new = torch.where(direction * new > 0, new * (1 - self.lr * self.weight_decay), new)
            rows, cols = p.shape
            p.copy_(new - direction * (self.lr * scale_factor((rows, cols), self.adjust_lr_fn)))


def svd_polar(x: Tensor) -> Tensor:
    """Compute the exact polar factor U·Vᵀ in float64.

    Args:
        x: (..., m, n).

    Returns:
        A float64 tensor of that shape; directions in which x is zero (to rounding) stay zero.
    """
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    keep = s > max(x.shape[-2:]) * torch.finfo(torch.float64).eps * s[..., :1]
    return (u * keep.unsqueeze(-2)) @ vh


def plain_newton_schulz(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """Run the iteration as it is written in papers, in float64: the truth its 16- and 32-bit forms approximate.

    Args:
        x: (m, n).
        schedule: One triple per step.

    Returns:
        A float64 (m, n).
    """
    y = x.double()
    y = y.T if x.shape[0] > x.shape[1] else y
    y = y / y.norm().clamp_min(torch.finfo(torch.float64).tiny)
    for a, b, c in schedule:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y

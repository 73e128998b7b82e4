"""Other Muons, written anew from their descriptions: their update, and the layout of the state they save.

Newton-Schulz runs in fp32 here (theirs: bf16), so that a difference of state shows and not one of rounding.
Distributed ones run as several objects on the same tensors, one for each rank, stepped one after the other.

    Keller Jordan   https://github.com/KellerJordan/Muon, https://kellerjordan.github.io/posts/muon/
    Moonlight       https://github.com/MoonshotAI/Moonlight, https://arxiv.org/abs/2502.16982
    dion            https://github.com/microsoft/dion
    nanochat        https://github.com/karpathy/nanochat
    Motif           https://huggingface.co/Motif-Technologies/optimizer, https://arxiv.org/abs/2511.07464
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshmuon.polar.coefficients import KELLER, YOU
from meshmuon.testing import plain_newton_schulz


def ema(state: dict[str, Any], grad: Tensor, momentum: float, *, nesterov: bool = True) -> Tensor:
    buf = state.setdefault("momentum_buffer", torch.zeros_like(grad))
    buf.copy_(momentum * buf + (1 - momentum) * grad)
    return momentum * buf + (1 - momentum) * grad if nesterov else buf


def heavy_ball(buf: Tensor, grad: Tensor, momentum: float, *, nesterov: bool) -> Tensor:
    buf.copy_(momentum * buf + grad)
    return grad + momentum * buf if nesterov else buf


def adam_direction(m: Tensor, v: Tensor, grad: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    m.copy_(betas[0] * m + (1 - betas[0]) * grad)
    v.copy_(betas[1] * v + (1 - betas[1]) * grad * grad)
    return (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)


def move_(param: Tensor, direction: Tensor, *, lr: float, decay: float, scale: float = 1.0) -> None:
    param.copy_(param * (1 - lr * decay) - lr * scale * direction)


def keller_scale(shape: torch.Size) -> float:
    return max(1.0, shape[-2] / shape[-1]) ** 0.5


def moonlight_scale(shape: torch.Size) -> float:
    return 0.2 * math.sqrt(max(shape[-2:]))


class KellerMuon(Optimizer):
    """`Muon`: one group of lr, weight_decay and momentum; a rank has the momentum of every world-th matrix."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float, rank: int = 0, world: int = 1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.rank, self.world = rank, world

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"][self.rank :: self.world]:
                u = plain_newton_schulz(ema(self.state[p], p.grad, group["momentum"]), (KELLER,) * 5)
                move_(p, u, lr=group["lr"], decay=group["weight_decay"], scale=keller_scale(p.shape))


class KellerMuonWithAuxAdam(Optimizer):
    """`MuonWithAuxAdam`: groups say `use_muon`; matrices are sorted by size; Adam's state is on every rank."""

    def __init__(self, groups: list[dict[str, Any]], rank: int = 0, world: int = 1):
        for group in groups:
            if group["use_muon"]:
                group["params"] = sorted(group["params"], key=lambda p: p.size(), reverse=True)
        super().__init__(groups, {})
        self.rank, self.world = rank, world

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rule = {"lr": group["lr"], "decay": group["weight_decay"]}
            if group["use_muon"]:
                for p in group["params"][self.rank :: self.world]:
                    u = plain_newton_schulz(ema(self.state[p], p.grad, group["momentum"]), (KELLER,) * 5)
                    move_(p, u, scale=keller_scale(p.shape), **rule)
                continue
            for p in group["params"]:
                s = self.state[p]
                s.setdefault("exp_avg", torch.zeros_like(p)), s.setdefault("exp_avg_sq", torch.zeros_like(p))
                s["step"] = s.get("step", 0) + 1
                u = adam_direction(s["exp_avg"], s["exp_avg_sq"], p.grad, s["step"], group["betas"], group["eps"])
                if self.rank == 0:  # the ranks share their tensors here
                    move_(p, u, **rule)


class Moonlight(Optimizer):
    """One group of matrices and then the rest; `use_muon` stands in the state; heavy ball; `moment1`, `moment2`."""

    def __init__(self, lr: float, wd: float, muon_params: Any, adamw_params: Any, momentum: float = 0.95):
        defaults = {"lr": lr, "wd": wd, "momentum": momentum, "nesterov": True, "ns_steps": 5}
        super().__init__([*muon_params, *adamw_params], {**defaults, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8})
        self.state.update({p: {"use_muon": True} for p in muon_params})
        self.state.update({p: {"use_muon": False} for p in adamw_params})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for p in group["params"]:
            s, rule = self.state[p], {"lr": group["lr"], "decay": group["wd"]}
            if s["use_muon"]:
                buf = s.setdefault("momentum_buffer", torch.zeros_like(p))
                u = heavy_ball(buf, p.grad, group["momentum"], nesterov=group["nesterov"])
                move_(p, plain_newton_schulz(u, (KELLER,) * group["ns_steps"]), scale=moonlight_scale(p.shape), **rule)
            else:
                m, v = s.setdefault("moment1", torch.zeros_like(p)), s.setdefault("moment2", torch.zeros_like(p))
                s["step"] = s.get("step", 0) + 1
                beta1, beta2 = group["adamw_betas"]
                adam_direction(m, v, p.grad, s["step"], (beta1, beta2), 0.0)
                u = m / (group["adamw_eps"] + v.sqrt())  # eps before the correction
                move_(p, u * (1 - beta2 ** s["step"]) ** 0.5 / (1 - beta1 ** s["step"]), **rule)


class Dion(Optimizer):
    """Groups say `algorithm` and count `step`; state is `momentum` (heavy ball for Muon) and `variance`, made early."""

    def __init__(self, groups: Any, lr: float, mu: float, weight_decay: float, nesterov: bool, adjust_lr: str | None):
        defaults = {"lr": lr, "mu": mu, "beta1": 0.9, "beta2": 0.95, "weight_decay": weight_decay, "algorithm": "muon"}
        more = {"step": 0, "epsilon": 1e-8, "nesterov": nesterov, "flatten": False, "adjust_lr": adjust_lr}
        super().__init__(groups, {**defaults, **more})
        for group in self.param_groups:
            keys = ("momentum",) if group["algorithm"] == "muon" else ("momentum", "variance")
            self.state.update({p: {key: torch.zeros_like(p) for key in keys} for p in group["params"]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                s, rule = self.state[p], {"lr": group["lr"], "decay": group["weight_decay"]}
                if group["algorithm"] == "muon":
                    u = heavy_ball(s["momentum"], p.grad, group["mu"], nesterov=group["nesterov"])
                    rules = {"spectral_norm": math.sqrt(p.shape[0] / p.shape[1]), "rms_norm": moonlight_scale(p.shape)}
                    scale = rules.get(group["adjust_lr"], 1.0)
                    move_(p, plain_newton_schulz(u, YOU), scale=scale, **rule)
                else:
                    betas = (group["beta1"], group["beta2"])
                    u = adam_direction(s["momentum"], s["variance"], p.grad, group["step"], betas, group["epsilon"])
                    move_(p, u, **rule)


class Motif(Optimizer):
    """Groups say `use_muon`, the matrices' one has `names`; heavy ball; `moment1`, `moment2`, a tensor for the step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float, momentum: float):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": True, "ns_steps": 5}
        adamw = {"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
        super().__init__(groups, {**defaults, **adamw, "none_grad": True, "use_muon": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rule = {"lr": group["lr"], "decay": group["weight_decay"]}
            for p in group["params"]:
                s = self.state[p]
                if group["use_muon"]:
                    buf = s.setdefault("momentum_buffer", torch.zeros_like(p))
                    u = heavy_ball(buf, p.grad, group["momentum"], nesterov=group["nesterov"])
                    move_(p, plain_newton_schulz(u, (KELLER,) * 5), scale=moonlight_scale(p.shape), **rule)
                    continue
                m, v = s.setdefault("moment1", torch.zeros_like(p)), s.setdefault("moment2", torch.zeros_like(p))
                s.setdefault("step", torch.zeros(())).add_(1)
                betas, eps = group["adamw_betas"], group["adamw_eps"]
                move_(p, adam_direction(m, v, p.grad, int(s["step"]), betas, eps), **rule)


class NanochatDistMuon(Optimizer):
    """The first months' `DistMuon`: groups by shape with a `zero_buffer`; momentum on owners only; no weight decay."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float, rank: int, world: int):
        alike = {shape: [p for p in params if p.shape == shape] for shape in sorted({p.shape for p in params})}
        groups = [{"params": each, "zero_buffer": torch.zeros(shape)} for shape, each in alike.items()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "nesterov": True, "ns_steps": 5})
        self.rank, self.world = rank, world

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"][self.rank :: self.world]:
                u = plain_newton_schulz(ema(self.state[p], p.grad, group["momentum"]), (KELLER,) * 5)
                move_(p, u, lr=group["lr"], decay=0.0, scale=keller_scale(p.shape))


class NanochatMuonAdamW(Optimizer):
    """`DistMuonAdamW`: groups say `kind`. A Muon group's matrices are stacked, each rank has the next few of them, in
    the state of the group's first parameter; beside them NorMuon's second moment. AdamW's moments are cut along the
    first dim from 1024 numbers on. `normuon=False` leaves out what is no Muon, to compare the rest."""

    def __init__(self, groups: list[dict[str, Any]], rank: int = 0, world: int = 1, *, normuon: bool = True):
        super().__init__(groups, {})
        self.rank, self.world, self.normuon = rank, world, normuon

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (self._muon if group["kind"] == "muon" else self._adamw)(group)

    def _muon(self, group: dict[str, Any]) -> None:
        params, shape = group["params"], group["params"][0].shape
        size = -(-len(params) // self.world)
        s = self.state[params[0]]
        bufs = s.setdefault("momentum_buffer", torch.zeros(size, *shape))
        along = -1 if shape[0] >= shape[1] else -2
        seconds = s.setdefault("second_momentum_buffer", torch.zeros_like(bufs).mean(along, keepdim=True))
        for p, buf, second in zip(params[self.rank * size :], bufs, seconds, strict=False):
            u = plain_newton_schulz(ema({"momentum_buffer": buf}, p.grad, group["momentum"]), (KELLER,) * 5)
            if self.normuon:
                mean = u.square().mean(along, keepdim=True)
                second.copy_(group["beta2"] * second + (1 - group["beta2"]) * mean)
                scaled = u * second.clamp_min(1e-10).rsqrt()
                u = scaled * (u.norm() / scaled.norm())
            mask = u * p >= 0
            p.copy_(p - group["lr"] * keller_scale(shape) * (u + group["weight_decay"] * p * mask))

    def _adamw(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            n = p.shape[0] // self.world
            cut = slice(self.rank * n, (self.rank + 1) * n) if p.numel() >= 1024 else slice(None)
            s = self.state[p]
            s.setdefault("exp_avg", torch.zeros_like(p[cut])), s.setdefault("exp_avg_sq", torch.zeros_like(p[cut]))
            s["step"] = s.get("step", 0) + 1
            u = adam_direction(s["exp_avg"], s["exp_avg_sq"], p.grad[cut], s["step"], group["betas"], group["eps"])
            if p.numel() >= 1024 or self.rank == 0:  # the ranks share their tensors here
                move_(p[cut], u, lr=group["lr"], decay=group["weight_decay"])

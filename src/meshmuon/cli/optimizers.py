"""The optimizers that `meshmuon train` compares, made alike: the same betas, weight decay and routing for all.

AdamW has betas (0.9, 0.95), eps 1e-8 and decoupled weight decay on every parameter with at least 2 dims, embedding and
head included, none on norms: what `Muon` does with the parameters it gives to AdamW. Every Muon has momentum 0.95 with
Nesterov and decays its matrices likewise. torch.optim.Muon keeps its own coefficients and dtype (Keller's, bf16).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from meshmuon import Muon, param_groups, polar_express
from meshmuon.cli.settings import OptimizerConfig
from meshmuon.testing import ReferenceMuon, plain_newton_schulz

BETAS = (0.9, 0.95)
NS_STEPS = 5


class Optimizers:
    """Torch optimizers that step together, under one learning rate.

    Args:
        parts: One or two optimizers that share a model's parameters out.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)

    def step(self, *, lr: float) -> None:
        """Take a step.

        Args:
            lr: Learning rate of this step.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad()

    def __str__(self) -> str:
        return "\n".join(str(part) for part in self.parts)


class PlainMuon(Optimizer):
    """`ReferenceMuon` as a torch optimizer: plain lines, and products in fp64.

    Args:
        params: Matrices.
        config: Learning rate, weight decay and lr rule.
    """

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        super().__init__(params, {"lr": config.lr})
        schedule = polar_express(NS_STEPS)
        self._reference = ReferenceMuon(
            params,
            weight_decay=config.weight_decay,
            adjust_lr_fn=config.adjust_lr_fn,
            polar=lambda u: plain_newton_schulz(u, schedule).to(u.dtype),
        )
        for param in params:  # in torch's place, where a checkpoint finds it
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Not supported.
        """
        group = self.param_groups[0]
        self._reference.lr = group["lr"]
        self._reference.buffers = [self.state[param]["momentum_buffer"] for param in group["params"]]
        self._reference.step([param.grad for param in group["params"]])

    def __str__(self) -> str:
        return f"reference Muon in plain lines, fp64 products, on {len(self._reference.params)} matrices"


def build_optimizers(config: OptimizerConfig, model: nn.Module) -> Optimizers:
    """Make an optimizer for a model.

    Args:
        config: Which one, and its numbers.
        model: The model, wrapped as it will be trained.

    Returns:
        One or two torch optimizers that step together.
    """
    return Optimizers(_BUILDERS[config.name](config, model))


def _muon(config: OptimizerConfig, model: nn.Module) -> list[Optimizer]:
    return [
        Muon(
            model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn=config.adjust_lr_fn,
            ns_steps=NS_STEPS,
            betas=BETAS,
        )
    ]


def _adamw(config: OptimizerConfig, model: nn.Module) -> list[Optimizer]:
    return [_adamw_of(config, list(model.parameters()))]


def _torch_muon(config: OptimizerConfig, model: nn.Module) -> list[Optimizer]:
    matrices, rest = _routed(model)
    muon = torch.optim.Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        ns_steps=NS_STEPS,
        adjust_lr_fn=config.adjust_lr_fn,
    )
    return [muon, _adamw_of(config, rest)]


def _reference(config: OptimizerConfig, model: nn.Module) -> list[Optimizer]:
    matrices, rest = _routed(model)
    return [PlainMuon(matrices, config), _adamw_of(config, rest)]


_BUILDERS: dict[str, Callable[[OptimizerConfig, nn.Module], list[Optimizer]]] = {
    "muon": _muon,
    "adamw": _adamw,
    "torch-muon": _torch_muon,
    "reference": _reference,
}


def _adamw_of(config: OptimizerConfig, params: Sequence[Tensor]) -> Optimizer:
    # One fused call cannot mix device meshes (tensor parallelism leaves norms plain), so each mesh is a group.
    groups: dict[tuple[bool, object], list[Tensor]] = {}
    for param in params:
        groups.setdefault((param.ndim >= 2, getattr(param, "device_mesh", None)), []).append(param)
    decayed = [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]
    return AdamW(decayed, lr=config.lr, betas=BETAS, fused=True)


def _routed(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices and the rest, by the same rules as `Muon(model)`."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for group in param_groups(model):
        tensors = [param for _, param in group["params"]]
        (matrices if group["algorithm"] == "muon" else rest).extend(tensors)
    return matrices, rest

"""What the conformance tests share: a small model, the tables of torch's optimizer tests for `Muon`, and the oracle."""

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from tests.conformance.error_table import TRIPLE, optim_error_inputs
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.testing._internal.common_optimizers import OptimizerInfo, OptimizerInput

from meshmuon import Muon, Orthogonalizer, orthogonalize
from meshmuon.testing import ReferenceMuon

MATRICES = ("fc1.weight", "fc2.weight")  # what must take Muon in `Net`; said here, not asked of the routing


class Net(nn.Module):
    """One of everything: embedding, two hidden matrices, biases, a norm, an output head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.fc1 = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.fc2 = nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.fc2(self.norm(self.fc1(self.embed(tokens))).relu()))


def make_net(*, dtype: torch.dtype = torch.float32, tied: bool = False) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net = Net(tied=tied).to(dtype)
        with torch.no_grad():  # norms and biases start at 1 and 0: decay would not show
            for param in net.parameters():
                param.add_(torch.randn_like(param), alpha=0.3)
    return net


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (16,), generator=generator), torch.randint(11, (16,), generator=generator)


def loss_of(net: nn.Module, step: int) -> Tensor:
    tokens, targets = batch(step)
    return nn.functional.cross_entropy(net(tokens).float(), targets)


def set_grads(net: nn.Module, step: int, *, factor: float = 1.0, without: Iterable[str] = ()) -> None:
    """Gradients that are a function of step and name alone."""
    for name, param in net.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
        grad = torch.randn(param.shape, generator=generator).to(param.dtype) * factor
        param.grad = None if name in set(without) else grad


def train(net: nn.Module, opt: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        set_grads(net, step)
        opt.step()


def snapshot(net: nn.Module, opt: Optimizer) -> dict[str, Tensor]:
    """Every parameter and every state tensor, by name."""
    result = {}
    for name, param in net.named_parameters():
        result[name] = param.detach().clone()
        for key, value in opt.state.get(param, {}).items():
            result[f"{name} {key}"] = value.detach().clone()
    return result


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, names, dtypes and shapes included."""
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, f"{key} differs in kind"
        apart = (found[key].double() - value.double()).abs()
        assert torch.equal(found[key], value), (
            f"{key} differs in {int((apart != 0).sum())} places, by up to {apart.max()}"
        )


class TaillessAdamW:
    """torch's fused AdamW on copies that are padded to 64 numbers.

    torch's CPU kernel rounds what does not fill a vector register otherwise than the rest, so what a number becomes
    would depend on how a tensor is sharded. Ours leaves no tail; that may be a bit in the last few numbers.
    """

    def __init__(self, groups: Iterable[Any], **kwargs: Any) -> None:
        self.twins: dict[Tensor, nn.Parameter] = {}
        padded = []
        for group in groups:
            group = group if isinstance(group, dict) else {"params": [group]}
            padded.append({**group, "params": [self._twin(param) for param in group["params"]]})
        self.inner = torch.optim.AdamW([group for group in padded if group["params"]], fused=True, **kwargs)
        self.param_groups = self.inner.param_groups

    def _twin(self, param: Tensor) -> nn.Parameter:
        flat = nn.functional.pad(param.detach().reshape(-1), (0, -param.numel() % 64))
        return self.twins.setdefault(param, nn.Parameter(flat))

    @torch.no_grad()
    def step(self, take: Callable[[Optimizer], Any] = lambda inner: inner.step()) -> None:
        for param, twin in self.twins.items():
            twin[: param.numel()].copy_(param.reshape(-1))
            grad = param.grad
            twin.grad = None if grad is None else nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % 64))
        take(self.inner)
        for param, twin in self.twins.items():
            param.copy_(twin[: param.numel()].view(param.shape))

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        def cut(param: Tensor, value: Tensor) -> Tensor:
            return value if value.ndim == 0 else value[: param.numel()].view(param.shape)

        found = ((param, self.inner.state.get(twin, {})) for param, twin in self.twins.items())
        return {param: {key: cut(param, value) for key, value in state.items()} for param, state in found}


class Oracle:
    """The reference on the matrices of a copy of the model, torch's fused AdamW on the rest."""

    def __init__(self, net: nn.Module, *, matrices: Iterable[str] = MATRICES, **kwargs: Any) -> None:
        self.net = copy.deepcopy(net)
        named = dict(self.net.named_parameters())
        self.matrices = {name: named[name] for name in matrices}
        rest = [param for name, param in named.items() if name not in self.matrices]
        given = dict(kwargs)
        lr = float(given.pop("lr", 1e-3))
        ratio = given.pop("adamw_lr_ratio", 1.0)
        decay = given.get("weight_decay", 0.1)
        for_all = given.pop("adamw_weight_decay", None)
        self.ratio = ratio
        self.adamw = TaillessAdamW(
            [
                {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay if for_all is None else for_all},
                {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0 if for_all is None else for_all},
            ],
            lr=lr * ratio,
            betas=given.pop("betas", (0.9, 0.95)),
            eps=given.pop("adamw_eps", 1e-8),
        )
        dtype = given.pop("state_dtype", None)
        choice = given.pop("orthogonalizer", Orthogonalizer())
        polar: Callable[[Tensor], Tensor] = partial(
            orthogonalize,
            coefficients=given.pop("ns_coefficients", "polar_express"),
            steps=given.pop("ns_steps", 5),
            form=choice.form,
            dtype=choice.dtype,
        )
        extra = given.pop("extra_scale_factor", 1.0)  # a power of two: exact wherever it is multiplied in
        for execution in ("release_grads", "max_in_flight", "workspace_bytes", "non_finite"):
            given.pop(execution, None)
        self.muon = ReferenceMuon(
            list(self.matrices.values()),
            lr=lr,
            polar=lambda u: polar(u) * extra,
            state_dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            **given,
        )

    def step(self, *, lr: float | None = None, momentum: float | None = None) -> None:
        if lr is not None:
            self.muon.lr = lr
            for group in self.adamw.param_groups:
                group["lr"] = lr * self.ratio
        if momentum is not None:
            self.muon.momentum = momentum
        self.muon.step([param.grad for param in self.matrices.values()])
        self.adamw.step()

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            set_grads(self.net, step)
            self.step()

    def snapshot(self) -> dict[str, Tensor]:
        result = snapshot(self.net, self.adamw)
        for name, buffer in zip(self.matrices, self.muon.buffers, strict=True):
            result[f"{name} momentum_buffer"] = buffer.clone()
        return result


def optim_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    table: dict[str, dict[str, Any]] = {
        "default": {},
        "non-default lr": {"lr": 0.01},
        "zero lr": {"lr": 0.0},
        "Tensor lr": {"lr": torch.tensor(2.0**-9, device=device)},
        "double Tensor lr": {"lr": torch.tensor(0.003, dtype=torch.float64, device=device)},
        "no weight_decay": {"weight_decay": 0.0},
        "non-default weight_decay": {"weight_decay": 0.3},
        "non-default momentum": {"momentum": 0.8},
        "no momentum": {"momentum": 0.0},
        "no nesterov": {"nesterov": False, "momentum": 0.9},
        "keller": {"ns_coefficients": "keller", "adjust_lr_fn": "original"},
        "you": {"ns_coefficients": "you"},
        "one triple": {"ns_coefficients": TRIPLE, "ns_steps": 6},
        "a triple per step": {"ns_coefficients": (TRIPLE, (3.0, -3.5, 1.5), (1.875, -1.25, 0.375)), "ns_steps": 3},
        "ten steps": {"ns_steps": 10},
        "adjust_lr_fn None": {"adjust_lr_fn": None, "lr": 0.01},
        "spectral": {"adjust_lr_fn": "spectral"},
        "unit_rms_norm": {"adjust_lr_fn": "unit_rms_norm", "lr": 0.01},
        "no adjustment": {"adjust_lr_fn": "none", "lr": 0.01},
        "l2": {"weight_decay_mode": "l2", "weight_decay": 0.2},
        "cautious": {"weight_decay_mode": "cautious", "weight_decay": 0.5, "lr": 0.01},
        "momentum in bfloat16": {"state_dtype": torch.bfloat16},
        "momentum in float16": {"state_dtype": "float16"},
        "momentum in float64": {"state_dtype": torch.float64},
        "extra_scale_factor": {"extra_scale_factor": 0.5},
        "gram": {"orthogonalizer": Orthogonalizer(form="gram")},
        "svd": {"orthogonalizer": Orthogonalizer(form="svd")},
        "adamw's own": {"betas": (0.8, 0.99), "adamw_eps": 1e-6, "adamw_lr_ratio": 0.3, "adamw_weight_decay": 0.05},
        "one bucket at a time": {"max_in_flight": 1, "workspace_bytes": 1},
        "release_grads": {"release_grads": True},
        "non_finite ignored": {"non_finite": "ignore"},
    }
    return [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in table.items()]


SCHEDULERS: dict[str, list[Callable[[Optimizer], Any]]] = {
    "StepLR": [lambda opt: lr_scheduler.StepLR(opt, gamma=0.5, step_size=2)],
    "ReduceLROnPlateau": [lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1)],
    "StepLR and ReduceLROnPlateau": [
        lambda opt: lr_scheduler.StepLR(opt, gamma=0.9, step_size=3),
        lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1),
    ],
    "CosineAnnealingLR": [lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=20, eta_min=1e-4)],
    "LinearLR": [lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.2, total_iters=4)],
    "LambdaLR": [lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch))],
    "warmup, then cosine": [
        lambda opt: lr_scheduler.SequentialLR(
            opt,
            [
                lr_scheduler.LinearLR(opt, start_factor=0.25, total_iters=3),
                lr_scheduler.CosineAnnealingLR(opt, T_max=20),
            ],
            milestones=[3],
        )
    ],
    "CyclicLR": [lambda opt: lr_scheduler.CyclicLR(opt, base_lr=0.001, max_lr=0.02, step_size_up=3)],
    "OneCycleLR": [lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=30)],
}
CYCLE_MOMENTUM = ("CyclicLR", "OneCycleLR")
MUON_INFO = OptimizerInfo(
    Muon,
    optim_inputs_func=optim_inputs,
    optim_error_inputs_func=optim_error_inputs,
    scheduler_inputs=tuple(SCHEDULERS.values()),
    supported_impls=(),
    not_og_supported_flags=(),
    supports_complex=False,
    supports_multiple_devices=False,
    supports_fused_on=("cpu", "cuda"),
)
INPUTS = {given.desc: given.kwargs for given in optim_inputs("cpu")}

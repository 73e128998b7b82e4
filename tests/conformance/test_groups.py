"""Parameter groups: their own values count, later ones are checked like the constructor's, and AdamW is torch's."""

import copy
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import (
    MATRICES,
    Net,
    Oracle,
    TaillessAdamW,
    assert_same,
    make_net,
    set_grads,
    snapshot,
    train,
)
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from meshmuon import Muon, param_groups
from meshmuon.testing import ReferenceMuon


def _matrices(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(6, 9, generator=generator)) for _ in range(count)]


def _grads(params: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in params]


GROUP_VALUES: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"weight_decay": 0.4},
    {"lr": 0.005, "weight_decay": 0.0},
    {"momentum": 0.5, "nesterov": False},
    {"adjust_lr_fn": "spectral", "weight_decay_mode": "l2"},
    {},
]


@pytest.mark.parametrize("swapped", [False, True], ids=["right", "sabotage: two groups swapped"])
def test_groups_values_are_respected(swapped: bool) -> None:
    params = _matrices(len(GROUP_VALUES))
    twins = [param.detach().clone() for param in params]
    opt = Muon([{"params": [param], **values} for param, values in zip(params, GROUP_VALUES, strict=True)], lr=0.01)
    values = GROUP_VALUES[1::-1] + GROUP_VALUES[2:] if swapped else GROUP_VALUES
    references = [ReferenceMuon([twin], **{"lr": 0.01, **given}) for twin, given in zip(twins, values, strict=True)]
    for step in range(6):
        for param, reference, grad in zip(params, references, _grads(params, step), strict=True):
            param.grad = grad
            reference.step([grad])
        opt.step()
    equal = [torch.equal(param, twin) for param, twin in zip(params, twins, strict=True)]
    assert equal == [not swapped] * 2 + [True] * 4


def test_values_changed_in_a_group_count_from_the_next_step() -> None:
    params = _matrices(2)
    twins = [param.detach().clone() for param in params]
    opt = Muon([{"params": [param]} for param in params])
    references = [ReferenceMuon([twin]) for twin in twins]
    for step in range(6):
        if step == 3:
            for holder in (opt.param_groups[1].__setitem__, references[1].__setattr__):
                holder("lr", 0.05), holder("weight_decay", 0.0), holder("momentum", 0.7)
        for param, reference, grad in zip(params, references, _grads(params, step), strict=True):
            param.grad = grad
            reference.step([grad])
        opt.step()
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize("spelling", [{"algorithm": "adamw"}, {"use_muon": False}, {"kind": "adamw"}], ids=str)
def test_adamw_group_takes_its_own_values_as_written(spelling: dict[str, Any]) -> None:
    """A group's own lr wins over the ratio, its own weight decay holds for vectors too."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in [(5, 4), (7,), (3, 3)]]
    twins = copy.deepcopy(params)
    own = {"lr": 0.03, "weight_decay": 0.2, "betas": (0.7, 0.9), "eps": 1e-5}
    opt = Muon([{"params": params[:2], **own, **spelling}, {"params": params[2:]}], adamw_lr_ratio=0.1)
    torchs = TaillessAdamW(twins[:2], **own)
    for step in range(6):
        for param, twin, grad in zip(params, twins, _grads(params, step), strict=True):
            param.grad, twin.grad = grad, grad.clone()
        opt.step()
        torchs.step()
    for param, twin in zip(params[:2], twins[:2], strict=True):
        assert torch.equal(param, twin)
        assert_same(opt.state[param], torchs.state[twin])


ADAMW: dict[str, dict[str, Any]] = {
    "default": {},
    "ratio": {"lr": 0.01, "adamw_lr_ratio": 0.3},
    "zero ratio": {"adamw_lr_ratio": 0.0},
    "betas and eps": {"betas": (0.0, 0.999), "adamw_eps": 1e-4},
    "no decay": {"weight_decay": 0.0},
    "decay for vectors too": {"adamw_weight_decay": 0.3},
    "decay of its own, none": {"weight_decay": 0.5, "adamw_weight_decay": 0.0},
    "tensor lr": {"lr": torch.tensor(0.01), "adamw_lr_ratio": 1.0},
    "tensor lr, ratio": {"lr": torch.tensor(0.01, dtype=torch.float64), "adamw_lr_ratio": 0.3},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kwargs", ADAMW.values(), ids=ADAMW)
def test_adamw_part_is_torchs_fused_adamw(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    net = make_net(dtype=dtype)
    opt, oracle = Muon(net, **kwargs), Oracle(net, **kwargs)
    train(net, opt, range(7))
    oracle.train(range(7))
    ours, theirs = snapshot(net, opt), oracle.snapshot()
    rest = [key for key in theirs if key.split()[0] not in MATRICES]
    assert len(rest) == 4 * 6
    assert_same({key: ours[key] for key in rest}, {key: theirs[key] for key in rest})


@pytest.mark.parametrize(
    "wrong", [{"adamw_lr_ratio": 0.31}, {"betas": (0.9, 0.96)}, {"adamw_weight_decay": 0.1}], ids=str
)
def test_sabotage_another_adamw_differs(wrong: dict[str, Any]) -> None:
    net = make_net()
    right = {"lr": 0.01, "adamw_lr_ratio": 0.3}
    opt, oracle = Muon(net, **right), Oracle(net, **{**right, **wrong})
    train(net, opt, range(7))
    oracle.train(range(7))
    assert torch.equal(net.fc1.weight, oracle.net.fc1.weight)
    assert not torch.equal(net.norm.weight, oracle.net.norm.weight)


def _without_head(net: Net) -> list[dict[str, Any]]:
    groups = param_groups(net)
    for group in groups:
        group["params"] = [(name, param) for name, param in group["params"] if name != "head.weight"]
    return groups


def test_added_group_trains_like_one_from_the_start() -> None:
    net, twin = make_net(), make_net()
    late = {"algorithm": "adamw", "lr": 0.02}
    opt = Muon(_without_head(net))
    opt.add_param_group({"params": [("head.weight", net.head.weight)], **late})
    whole = Muon([*_without_head(twin), {"params": [("head.weight", twin.head.weight)], **late}])
    assert set(opt.state) == set(net.parameters())
    train(net, opt, range(6))
    train(twin, whole, range(6))
    assert_same(snapshot(net, opt), snapshot(twin, whole))
    assert [g["algorithm"] for g in opt.state_dict()["param_groups"]] == ["muon", "adamw", "adamw"]


def _matrix() -> tuple[str, nn.Parameter]:
    return ("late.weight", nn.Parameter(torch.rand(3, 4)))


@pytest.mark.parametrize(
    ("group", "error", "regex"),
    [
        ({"lr": -1}, ValueError, r"param_groups\[2\]\['lr'\]: -1"),
        ({"lr": torch.tensor([0.1, 0.2])}, ValueError, r"\['lr'\]"),
        ({"weight_decay": -0.1}, ValueError, r"\['weight_decay'\]"),
        ({"momentum": 1.0}, ValueError, r"\['momentum'\]"),
        ({"nesterov": 1}, TypeError, r"\['nesterov'\]"),
        ({"ns_steps": 0}, ValueError, "ns_steps"),
        ({"ns_coefficients": (9.0, 9.0, 9.0)}, ValueError, "ns_coefficients"),
        ({"eps": 0}, ValueError, r"\['eps'\]"),
        ({"adjust_lr_fn": "arbitrary"}, ValueError, r"\['adjust_lr_fn'\]"),
        ({"weight_decay_mode": "adam"}, ValueError, r"\['weight_decay_mode'\]"),
        ({"state_dtype": torch.int8}, ValueError, r"\['state_dtype'\]"),
        ({"view": {"heads": 5}}, ValueError, "late.weight.*heads"),
        ({"algorithm": "sgd"}, ValueError, r"\['algorithm'\]"),
        ({"algorithm": "adamw", "betas": (1.0, 0.9)}, ValueError, r"\['betas'\]"),
        ({"algorithm": "adamw", "momentum": 0.9}, TypeError, "no hyper-parameter of adamw"),
        ({"algorithm": "adamw", "momentum": 0.9, "initial_lr": 0.1}, TypeError, "no hyper-parameter of adamw"),
        ({"algorithm": "muon", "betas": (0.9, 0.9), "max_momentum": 0.9}, TypeError, "no hyper-parameter of muon"),
        ({"maximize": True}, TypeError, "'maximize': not supported"),
        ({"momentun": 0.9}, TypeError, "Did you mean 'momentum'"),
        ({"params": [("fc1.weight", nn.Parameter(torch.rand(3, 4)))]}, ValueError, "'fc1.weight'.*already"),
        ({"params": nn.Parameter(torch.rand(3, 4))}, ValueError, "with/without names"),
        ({"params": [("late.bias", nn.Parameter(torch.rand(3)))]}, ValueError, 'algorithm="adamw"'),
        ({"params": [("late.weight", torch.zeros(3, 4, dtype=torch.int32))]}, TypeError, "'late.weight'.*int32"),
        ({"params": [("late.weight", torch.rand(3, 4, requires_grad=True) * 2)]}, ValueError, "non-leaf"),
        ({"params": {nn.Parameter(torch.rand(3, 4))}}, TypeError, "set"),
        ([nn.Parameter(torch.rand(3, 4))], TypeError, r"param_groups\[2\]"),
    ],
    ids=str,
)
def test_add_param_group_is_checked_like_the_constructor(group: Any, error: type[Exception], regex: str) -> None:
    net, twin = make_net(), make_net()
    opt, untouched = Muon(net), Muon(twin)
    train(net, opt, range(2))
    train(twin, untouched, range(2))
    with pytest.raises(error, match=regex):
        opt.add_param_group({"params": [_matrix()], **group} if isinstance(group, dict) else group)
    assert len(opt.param_groups) == 2
    train(net, opt, range(2, 5))
    train(twin, untouched, range(2, 5))
    assert_same(snapshot(net, opt), snapshot(twin, untouched))


def test_add_param_group_does_not_write_into_the_given_dict_and_takes_a_tensor_once() -> None:
    first, second = _matrices(2)
    opt = Muon([first])
    given = {"params": second, "lr": 0.5}
    opt.add_param_group(given)
    assert set(given) == {"params", "lr"} and given["params"] is second
    with pytest.raises(ValueError, match="already in another"):
        opt.add_param_group({"params": [first]})


def test_empty_parameters_are_no_trouble() -> None:
    net = Net()
    empty = nn.Parameter(torch.empty(0, 4))
    opt = Muon([*net.named_parameters(), ("empty.weight", empty), ("empty.bias", nn.Parameter(torch.empty(0)))])
    set_grads(net, 0)
    empty.grad = torch.empty(0, 4)
    opt.step()
    assert opt.state[empty]["momentum_buffer"].shape == (0, 4)
    Muon(net).load_state_dict(Muon(net).state_dict())


@pytest.mark.parametrize("make", [OneCycleLR, CyclicLR], ids=lambda make: make.__name__)
def test_groups_that_a_scheduler_has_written_into_make_another_optimizer(make):
    """It writes momentum into every group, also into those of AdamW, which keep it as somebody else's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = Muon(model, lr=0.01)
    make(opt, 0.01, 10)
    again = Muon(opt.param_groups)
    assert [dict(g, params=0) for g in again.param_groups] == [dict(g, params=0) for g in opt.param_groups]
    assert "momentum" in again.param_groups[1] and again.param_groups[1]["algorithm"] == "adamw"

"""opt.metrics(): each number against what the step really did."""

import math
from unittest import mock

import pytest
import torch
from tests.distributed import scenarios
from torch import nn

from meshmuon import Muon, View, scale_factor
from meshmuon.errors import NonFiniteGradientError
from meshmuon.exchange import agreement


def rms(tensors):
    return math.sqrt(sum(t.double().square().sum() for t in tensors) / sum(t.numel() for t in tensors))


def trained(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 16), torch.nn.LayerNorm(16))
    opt = Muon(model, lr=0.02, weight_decay=0.0, overrides={"0.weight": View(split_rows=(24, 16))}, **settings)
    for step in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn_like(p) * (step + 1)
        opt.step()
    moves = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return model, opt, moves


MATRICES = ("0.weight", "1.weight")


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False}, {"offload": True}, {"grad_sync": "optimizer", "nesterov": False}], ids=str
)
def test_numbers_are_those_of_the_last_step(settings):
    model, opt, moves = trained(**settings)
    params = dict(model.named_parameters())
    found = opt.metrics()
    assert found["muon/update_rms"] == pytest.approx(rms([moves[n] for n in MATRICES]), rel=1e-4)
    assert found["muon/weight_rms"] == pytest.approx(rms([params[n].detach() for n in MATRICES]), rel=1e-6)
    assert found["muon/update_ratio"] == pytest.approx(found["muon/update_rms"] / found["muon/weight_rms"])
    others = [name for name in params if name not in MATRICES]
    assert found["adamw/update_rms"] == pytest.approx(rms([moves[n] for n in others]), rel=1e-3)
    state = opt.state_dict()["state"]
    norm = math.sqrt(sum(s["momentum_buffer"].double().square().sum() for s in state.values() if "step" not in s))
    assert found["muon/momentum_norm"] == pytest.approx(norm, rel=1e-6)
    blocks = [*moves["0.weight"].split([24, 16]), moves["1.weight"]]
    errors = []
    for block in blocks:
        x = block.double() / (0.02 * scale_factor(tuple(block.shape), "match_rms_adamw"))
        x = x if x.shape[0] <= x.shape[1] else x.mT
        errors.append(((x @ x.mT - torch.eye(len(x))).square().sum() / len(x)).item())
    assert found["muon/orthogonality_error"] == pytest.approx(math.sqrt(sum(errors) / len(errors)), rel=1e-3)
    assert (found["dead"], found["non_finite"], found["bytes_sent"], found["exchanges"]) == (0, 0, 0, 0)
    assert all(type(value) is float for value in found.values())


def test_nothing_is_written():
    model, opt, _ = trained()
    before = [p.detach().clone() for p in model.parameters()]
    state = [value.clone() for each in opt.state.values() for value in each.values()]
    opt.metrics()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(
        torch.equal(v, w) for v, w in zip((v for s in opt.state.values() for v in s.values()), state, strict=True)
    )


def test_without_gradients_the_momentum_tells():
    _, opt, _ = trained(nesterov=False)
    exact = opt.metrics()
    opt.zero_grad()
    assert opt.metrics() == exact, "without nesterov the momentum is what was orthogonalized"


def test_dead_and_broken_parameters_are_counted():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    opt = Muon(model)
    assert opt.metrics()["dead"] == 4
    model[0].weight.grad = torch.randn(8, 8)
    opt.step()
    assert opt.metrics()["dead"] == 3
    with torch.no_grad():
        model[1].bias[0] = math.nan
    found = opt.metrics()
    assert found["non_finite"] == 1 and math.isnan(found["adamw/weight_rms"])


def test_several_groups_have_numbers():
    params = [torch.randn(8, 8).requires_grad_() for _ in range(2)]
    opt = Muon([{"params": [p], "algorithm": "muon"} for p in params])
    assert {"muon.0/weight_rms", "muon.1/weight_rms"} <= opt.metrics().keys()


def test_every_view_is_measured():
    _, table = scenarios.chosen("fsdp2")
    params = {n: (scenarios.tensor_for("p", n, s, torch.float32).requires_grad_(), v) for n, (s, v, _) in table.items()}
    opt = Muon(scenarios.groups_for(params), lr=0.02, weight_decay=0.0)
    before = {name: tensor.detach().clone() for name, (tensor, _) in params.items()}
    for name, (tensor, _) in params.items():
        tensor.grad = scenarios.tensor_for("g", name, tensor.shape, torch.float32)
    opt.step()
    found = opt.metrics()
    for index, (name, (tensor, view)) in enumerate(params.items()):
        kind = "adamw" if view == "adamw" else "muon"
        expected = rms([tensor.detach() - before[name]])
        assert found[f"{kind}.{index}/update_rms"] == pytest.approx(expected, rel=2e-3), name


def test_a_gradient_that_was_not_used_does_not_count():
    model, opt, _ = trained(nesterov=False)
    exact = opt.metrics()
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with pytest.warns(UserWarning, match="skipped"):
        opt.step()
    found = opt.metrics()
    assert {k: found[k] for k in exact if "/" in k} == {k: v for k, v in exact.items() if "/" in k}
    assert found["non_finite"] == 0


def test_scaled_gradients_are_unscaled():
    model = torch.nn.Linear(24, 40, bias=False)
    scaled = Muon(model, lr=0.02, weight_decay=0.0)
    before = model.weight.detach().clone()
    scaled.grad_scale = torch.tensor(1024.0)
    for _ in range(2):
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(40, 24) * 1024
        scaled.step()
    del scaled.grad_scale
    found = scaled.metrics()["muon/update_rms"]
    assert found == pytest.approx(rms([model.weight.detach() - before]), rel=1e-4)


@pytest.mark.filterwarnings("ignore::meshmuon.errors.NonFiniteGradientWarning")
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_after_a_skipped_step_directions_are_those_of_momentum(scale, policy):
    """Gradients that were not used do not count, whatever a scaler made of them."""
    params = {"w": nn.Parameter(torch.randn(8, 12)), "other": nn.Parameter(torch.zeros(4, 4))}
    opt = Muon(params.items(), lr=0.1, non_finite=policy)
    for param in params.values():
        param.grad = torch.randn_like(param)
    opt.step()
    after_a_step = opt.metrics()
    kept = {name: param.grad for name, param in params.items()}
    for param in params.values():
        param.grad = None
    expected = opt.metrics()
    params["w"].grad, params["other"].grad = torch.randn(8, 12) * scale, torch.full((4, 4), torch.inf)
    opt.grad_scale = torch.tensor(scale)
    if policy == "skip":
        opt.step()
    else:
        with pytest.raises(NonFiniteGradientError, match="other"):
            opt.step()
    del opt.grad_scale
    found = opt.metrics()
    for key in ("muon/update_rms", "muon/orthogonality_error", "muon/momentum_norm"):
        assert found[key] == expected[key]
    assert found["muon/orthogonality_error"] != after_a_step["muon/orthogonality_error"]
    for name, param in params.items():
        param.grad = kept[name]
    opt.step()
    assert opt.metrics()["muon/orthogonality_error"] != expected["muon/orthogonality_error"], "gradients count again"


@pytest.mark.filterwarnings("ignore::meshmuon.errors.NonFiniteGradientWarning")
@pytest.mark.parametrize("mode", ["decoupled", "l2"])
def test_the_same_where_the_device_decides(mode):
    """As on a GPU: the host goes on, and a flag says later that the step was not taken."""
    param = nn.Parameter(torch.randn(8, 12))
    opt = Muon([("w", param)], lr=0.1, weight_decay_mode=mode, weight_decay=0.5)
    param.grad = torch.randn(8, 12)
    opt.step()
    param.grad = None
    expected = opt.metrics()
    with mock.patch.object(agreement, "_is_host", return_value=False):
        param.grad = torch.randn(8, 12)
        param.grad[0, 0] = torch.inf
        opt.step()
        found = opt.metrics()
        for key in ("muon/update_rms", "muon/orthogonality_error", "muon/momentum_norm"):
            assert found[key] == expected[key]
        param.grad = torch.randn(8, 12)
        opt.step()
    assert opt.metrics()["muon/orthogonality_error"] != expected["muon/orthogonality_error"]


def test_a_step_that_was_refused_before_it_began_counts_no_gradients():
    param = nn.Parameter(torch.randn(8, 12))
    opt = Muon([("w", param)], lr=0.1)
    param.grad = torch.randn(8, 12)
    opt.step()
    param.grad = None
    expected = opt.metrics()
    param.grad = torch.randn(8, 12)
    opt.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="'lr'"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.1
    assert opt.metrics()["muon/orthogonality_error"] == expected["muon/orthogonality_error"]


@pytest.mark.parametrize("size", [1e-28, 1e25])
def test_tiny_and_large_numbers_are_neither_dead_nor_broken(size):
    model = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.mul_(size)
    opt = Muon(model)
    model.weight.grad = torch.full((8, 8), size) + size * torch.eye(8)
    opt.step()
    found = opt.metrics()
    assert (found["dead"], found["non_finite"]) == (0.0, 0.0)
    expected = opt.state[model.weight]["momentum_buffer"].double().norm().item()
    assert found["muon/momentum_norm"] == pytest.approx(expected)


def test_an_infinite_second_moment_is_counted():
    """It divides the update away: all other numbers look healthy."""
    param = nn.Parameter(torch.ones(4, 4))
    opt = Muon([{"params": [param], "algorithm": "adamw"}], allow_no_muon=True)
    param.grad = torch.eye(4)
    opt.step()
    assert opt.metrics()["non_finite"] == 0
    opt.state[param]["exp_avg_sq"][0, 0] = torch.inf
    assert opt.metrics()["non_finite"] == 1


def test_empty_parameters_are_not_dead():
    full, empty = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(0, 4))
    opt = Muon([("full", full), ("empty", empty)])
    assert opt.metrics()["dead"] == 1
    full.grad, empty.grad = torch.eye(4), torch.ones(0, 4)
    opt.step()
    assert opt.metrics()["dead"] == 0

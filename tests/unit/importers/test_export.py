"""The way back: torch's own optimizers load what we export, and go on as we would have."""

import copy
from typing import Any

import pytest
import torch
from tests.unit.importers.tools import (
    AFTER,
    BEFORE,
    Net,
    assert_moves_alike,
    make_net,
    snapshot,
    through_a_file,
    train,
    twin_of,
)
from torch import nn

from meshmuon import CheckpointError, Muon, Orthogonalizer, View, export_torch_state, load_foreign_state

SETTINGS: dict[str, Any] = {
    "lr": 0.01,
    "momentum": 0.9,
    "ns_coefficients": "keller",
    "adamw_lr_ratio": 0.3,
    "orthogonalizer": Orthogonalizer(dtype="bfloat16", form="standard"),
}


def torchs_own(net: nn.Module, states: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """As docs/moving-from.md says."""
    params = dict(net.named_parameters())
    made = []
    for kind, word in ((torch.optim.Muon, "muon"), (torch.optim.AdamW, "adamw")):
        groups = [{"params": [params[n] for n in g["param_names"]]} for g in states[word]["param_groups"]]
        made.append(kind(groups))
        made[-1].load_state_dict(states[word])
    return made


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [None, 0.05])
def test_torch_goes_on_where_we_stopped(rule: str, decay: float | None) -> None:
    net, opt = twin_of(make_net(), **SETTINGS, adjust_lr_fn=rule, adamw_weight_decay=decay)
    train(net, [opt], BEFORE)
    states = through_a_file(export_torch_state(opt))
    twin = copy.deepcopy(net)
    theirs = torchs_own(twin, states)
    assert len(states["adamw"]["param_groups"]) == (2 if decay is None else 1)  # vectors that are not decayed
    start = snapshot(net)
    train(net, [opt], AFTER)
    train(twin, theirs, AFTER)
    assert_moves_alike(net, twin, start, bound=3e-2)


@pytest.mark.parametrize("lost", ["momentum_buffer", "exp_avg", "step"])
def test_sabotage_lost_state_is_seen(lost: str) -> None:
    net, opt = twin_of(make_net(), **SETTINGS)
    train(net, [opt], BEFORE)
    states = export_torch_state(opt)
    for entry in (*states["muon"]["state"].values(), *states["adamw"]["state"].values()):
        if lost in entry:
            entry[lost].zero_()
    twin = copy.deepcopy(net)
    theirs, start = torchs_own(twin, states), snapshot(net)
    train(net, [opt], AFTER)
    train(twin, theirs, AFTER)
    with pytest.raises(AssertionError, match="of its way off"):
        assert_moves_alike(net, twin, start, bound=3e-2)


def test_there_and_back_gives_the_same_bits() -> None:
    net, opt = twin_of(make_net(), **SETTINGS)
    train(net, [opt], BEFORE)
    twin, other = twin_of(net, **SETTINGS)
    report = load_foreign_state(other, export_torch_state(opt))
    assert report.source == "torch" and report.differences == () and {each.by for each in report.taken} == {"name"}
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        for key, value in opt.state[ours].items():
            assert torch.equal(other.state[theirs][key], value)


def test_exported_tensors_are_not_ours() -> None:
    net, opt = twin_of(make_net())
    train(net, [opt], BEFORE)
    with pytest.warns(UserWarning, match="polar_express"):
        states = export_torch_state(opt)
    assert states["muon"]["param_groups"][0]["ns_coefficients"] == (3.4445, -4.7750, 2.0315)
    before = copy.deepcopy(states)
    train(net, [opt], AFTER)
    for word in states:
        for key, entry in before[word]["state"].items():
            assert all(torch.equal(states[word]["state"][key][k], v) for k, v in entry.items())


def test_matrices_without_names() -> None:
    matrices = [p.detach().clone().requires_grad_() for p in Net().mid.parameters()]
    opt = Muon(matrices, **SETTINGS)
    states = export_torch_state(opt)
    assert "param_names" not in states["muon"]["param_groups"][0] and states["adamw"]["param_groups"] == []
    torch.optim.Muon(matrices).load_state_dict(states["muon"])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn of 'up.weight': 'spectral'"),
        ({"extra_scale_factor": 0.5}, "extra_scale_factor of 'up.weight': 0.5"),
        ({"weight_decay_mode": "cautious"}, "weight_decay_mode of 'up.weight': 'cautious'"),
        ({"overrides": {"down.weight": View(heads=2)}}, "'down.weight'.*whole 2-D matrices only"),
    ],
)
def test_what_torch_cannot_do_is_refused_by_name(settings: dict[str, Any], match: str) -> None:
    opt = Muon(make_net(), **{**SETTINGS, **settings})
    with pytest.raises(CheckpointError, match=match):
        export_torch_state(opt)
    with pytest.raises(TypeError, match="AdamW"):
        export_torch_state(torch.optim.AdamW(make_net().parameters()))  # type: ignore[arg-type]


def test_a_schedule_goes_on_from_the_rate_that_adamw_had() -> None:
    """`initial_lr` without the ratio made AdamW's rate jump by 1 / adamw_lr_ratio when a schedule was resumed."""
    net = make_net()
    opt = Muon(net, **SETTINGS)
    torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    for made, expected in zip(torchs_own(net, export_torch_state(opt)), (0.01, 0.003), strict=True):
        torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0, last_epoch=5)
        assert [group["lr"] for group in made.param_groups] == [pytest.approx(expected)] * len(made.param_groups)

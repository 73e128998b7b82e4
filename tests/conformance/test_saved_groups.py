"""Saved hyper-parameters: checked like those of the constructor, before anything is loaded."""

import copy
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import assert_same, make_net, snapshot, train
from torch import nn

from meshmuon import CheckpointError, Muon, Orthogonalizer, View

NAN = float("nan")
BAD: list[tuple[int, str, Any]] = [
    (0, "lr", -1.0),
    (0, "lr", NAN),
    (0, "lr", "0.1"),
    (0, "lr", torch.tensor([0.1, 0.2])),
    (0, "lr", torch.tensor(1)),
    (0, "weight_decay", -0.1),
    (0, "momentum", 1.0),
    (0, "momentum", None),
    (0, "nesterov", 1),
    (0, "eps", 0.0),
    (0, "eps", 1e7),
    (0, "ns_steps", 0),
    (0, "ns_steps", 2.5),
    (0, "ns_steps", 4),  # "you" has five; see the constructor below
    (0, "ns_coefficients", "quintic"),
    (0, "ns_coefficients", (9.0, 9.0, 9.0)),
    (0, "ns_coefficients", None),
    (0, "adjust_lr_fn", "arbitrary"),
    (0, "extra_scale_factor", 0.0),
    (0, "weight_decay_mode", "adam"),
    (0, "state_dtype", "int8"),
    (0, "route", "sideways"),
    (0, "view", {"heads": 0}),
    (0, "view", {"rows": 3}),
    (0, "view", {"heads": 2}),
    (1, "lr", -1.0),
    (1, "weight_decay", NAN),
    (1, "betas", (0.9, 1.0)),
    (1, "betas", 0.9),
    (1, "eps", 0.0),
    (1, "adamw_lr_ratio", -1.0),
    (1, "decay_vectors", "no"),
    (0, "maximize", True),
    (1, "maximize", True),
    (1, "amsgrad", True),
    (1, "decoupled_weight_decay", False),
]


def _values(opt: Muon) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]


@pytest.mark.parametrize(("index", "key", "value"), BAD, ids=lambda v: str(v)[:30])
def test_a_bad_saved_value_is_loaded_and_fails_at_the_next_step(index: int, key: str, value: Any) -> None:
    net = make_net()
    opt = Muon(net, ns_coefficients="you")
    train(net, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        entry.update({name: tensor + 1 for name, tensor in entry.items()})
    state["param_groups"][index][key] = value
    before, values, plan = snapshot(net, opt), copy.deepcopy(_values(opt)), opt.plan
    with pytest.raises(CheckpointError) as caught:
        opt.load_state_dict(state)
    assert f"param_groups[{index}]" in str(caught.value) and key in str(caught.value)
    assert_same(snapshot(net, opt), before)
    assert _values(opt) == values and opt.plan is plan
    state["param_groups"][index] = opt.state_dict()["param_groups"][index]  # the sabotage: the same without the value
    opt.load_state_dict(state)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(snapshot(net, opt), before)


def test_saved_steps_that_the_restarts_do_not_reach_are_refused_before_loading() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    opt = Muon([weight], orthogonalizer=Orthogonalizer(form="gram", restarts=(3,)))
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["ns_steps"] = 2
    with pytest.raises(CheckpointError, match=r"param_groups\[0\].*restarts"):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["ns_steps"] == 5


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad"])
def test_torchs_flags_that_change_nothing_are_taken_and_dropped(flag: str) -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    for group in state["param_groups"]:
        group[flag] = None if flag in ("foreach", "fused") else False
    values = copy.deepcopy(_values(opt))
    opt.load_state_dict(state)
    assert _values(opt) == values


def test_a_checkpoint_of_torchs_muon_loads_with_its_values() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 9))
    theirs = torch.optim.Muon([weight], lr=0.02, momentum=0.9, adjust_lr_fn=None)
    weight.grad = torch.randn(6, 9)
    theirs.step()
    opt = Muon([weight])
    opt.load_state_dict(theirs.state_dict())
    group = opt.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.02, 0.9, "original")
    assert group["ns_coefficients"] == (3.4445, -4.7750, 2.0315)
    assert torch.equal(opt.state[weight]["momentum_buffer"], theirs.state[weight]["momentum_buffer"])
    opt.step()


def test_a_view_in_another_spelling_is_the_same_view() -> None:
    weight = nn.Parameter(torch.ones(12, 6))
    opt = Muon([("qkv", weight)], overrides={"qkv": View(split_rows=(6, 3, 3))})
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["view"] = {"split_rows": [6, 3, 3], "heads": None}
    opt.load_state_dict(state)
    assert opt.param_groups[0]["view"] == {"split_rows": (6, 3, 3)}
    state["param_groups"][0]["view"] = {}
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['view'\].*split_rows"):
        opt.load_state_dict(state)


def test_lr_tensors_of_a_checkpoint_stay_shared_between_groups() -> None:
    net = make_net()
    opt = Muon(net)
    state = opt.state_dict()
    shared = torch.tensor(0.25)
    for group in state["param_groups"]:
        group["lr"] = shared
    opt.load_state_dict(state)
    kept = [group["lr"] for group in opt.param_groups]
    assert len({tensor.data_ptr() for tensor in (shared, *kept)}) == 3
    assert [float(tensor) for tensor in kept] == [0.25, 0.25]


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"state": {}, "param_groups": [None, None]},
        {"state": {}, "param_groups": [{}, {}]},
        {"state": {}, "param_groups": [{"params": 3}, {"params": 3}]},
        {"state": None, "param_groups": []},
    ],
    ids=str,
)
def test_what_is_no_state_dict_fails_somewhere_in_torch(state: Any) -> None:
    opt = Muon(make_net())
    with pytest.raises(CheckpointError, match="state_dict"):
        opt.load_state_dict(state)

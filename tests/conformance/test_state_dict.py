"""State dicts, copies and hooks: what is saved, loaded or copied continues with the same bits."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import INPUTS, MATRICES, Net, assert_same, make_net, snapshot, train
from torch import nn

from meshmuon import CheckpointError, Muon

EXECUTION = ("orthogonalizer", "release_grads", "max_in_flight", "workspace_bytes", "non_finite")
every_input = pytest.mark.parametrize("kwargs", INPUTS.values(), ids=INPUTS)


def _saved(opt: Muon) -> dict[str, Any]:
    """Through a file, as `weights_only=True` reads it."""
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resumed(net: Net, state: dict[str, Any], **kwargs: Any) -> tuple[Net, Muon]:
    twin = copy.deepcopy(net)
    opt = Muon(twin, **kwargs)
    opt.load_state_dict(state)
    return twin, opt


@pytest.mark.parametrize("save", [_saved, lambda opt: copy.deepcopy(opt.state_dict())], ids=["file", "deepcopy"])
@every_input
def test_resumed_run_continues_with_the_same_bits(kwargs: dict[str, Any], save: Callable[[Muon], Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    train(net, opt, range(4))
    state = save(opt)
    # Hyper-parameters come with the state; how a step runs does not.
    twin, other = _resumed(net, state, **{key: value for key, value in kwargs.items() if key in EXECUTION})
    assert_same(snapshot(twin, other), snapshot(net, opt))
    for step in range(4, 10):
        train(net, opt, [step])
        train(twin, other, [step])
        assert_same(snapshot(twin, other), snapshot(net, opt))


@pytest.mark.parametrize("lost", ["momentum_buffer", "exp_avg", "exp_avg_sq", "step"])
def test_sabotage_lost_state_is_seen(lost: str) -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(4))
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        if lost in entry:
            entry[lost].zero_()
    twin, other = _resumed(net, state)
    train(net, opt, range(4, 9))
    train(twin, other, range(4, 9))
    theirs, ours = snapshot(twin, other), snapshot(net, opt)
    for name in dict(net.named_parameters()):
        seen = not torch.equal(theirs[name], ours[name])
        assert seen == ((name in MATRICES) == (lost == "momentum_buffer")), name


@every_input
def test_state_dict_is_plain_and_deterministic(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    train(net, opt, range(2))
    first, again, read = opt.state_dict(), opt.state_dict(), _saved(opt)
    assert first["param_groups"] == again["param_groups"]
    assert read["param_groups"] == first["param_groups"]
    for key, entry in first["state"].items():
        assert all(value.data_ptr() == again["state"][key][name].data_ptr() for name, value in entry.items())
        assert_same(read["state"][key], entry)


def test_loading_does_not_share_tensors_and_leaves_the_source_alone() -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(2))
    state = opt.state_dict()
    before = snapshot(net, opt)
    twin, other = _resumed(net, state)
    train(twin, other, range(2, 5))
    assert_same(snapshot(net, opt), before)


def test_refused_state_dict_changes_nothing() -> None:
    net = make_net()
    opt = Muon(net, lr=0.01)
    train(net, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    state["state"][state["param_groups"][1]["params"][0]]["exp_avg"] = torch.zeros(3, 3)
    before = snapshot(net, opt)
    with pytest.raises(CheckpointError, match=r"'embed.weight'.*\(3, 3\)"):
        opt.load_state_dict(state)
    assert_same(snapshot(net, opt), before)
    assert opt.param_groups[0]["lr"] == 0.01
    assert not opt._optimizer_load_state_dict_pre_hooks and not opt._optimizer_load_state_dict_post_hooks


def test_older_state_dict_without_new_keys_and_with_plain_steps_loads() -> None:
    net = make_net()
    opt = Muon(net, momentum=0.9)
    train(net, opt, range(3))
    state = copy.deepcopy(opt.state_dict())
    for group in state["param_groups"]:
        for key in ("extra_scale_factor", "weight_decay_mode", "state_dtype", "view", "decay_vectors", "algorithm"):
            group.pop(key, None)
    for entry in state["state"].values():
        if "step" in entry:
            entry["step"] = int(entry["step"].item())
    twin, other = _resumed(net, state)
    train(net, opt, range(3, 8))
    train(twin, other, range(3, 8))
    assert_same(snapshot(twin, other), snapshot(net, opt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wide_momentum_of_narrow_parameters_survives_loading(dtype: torch.dtype) -> None:
    net = make_net(dtype=dtype)
    opt = Muon(net, state_dtype=torch.float32)
    train(net, opt, range(3))
    twin, other = _resumed(net, _saved(opt), state_dtype=torch.float32)
    assert other.state[twin.fc1.weight]["momentum_buffer"].dtype == torch.float32
    train(net, opt, range(3, 8))
    train(twin, other, range(3, 8))
    assert_same(snapshot(twin, other), snapshot(net, opt))


class Twins(nn.Module):
    """Matrices of one shape: nothing but the names tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


def _twins() -> Twins:
    torch.manual_seed(1)
    return Twins()


def test_named_groups_keep_names_and_load_by_name_in_another_order() -> None:
    net = _twins()
    opt = Muon(net.named_parameters())
    train(net, opt, range(3))
    state = _saved(opt)
    names = [name for name, _ in net.named_parameters()]
    assert sorted(name for group in state["param_groups"] for name in group["param_names"]) == sorted(names)
    twin = copy.deepcopy(net)
    other = Muon(list(twin.named_parameters())[::-1])
    other.load_state_dict(state)
    assert [n for g in other.param_groups for n in g["param_names"]] == [
        *(name for name in names[::-1] if "weight" in name),
        *(name for name in names[::-1] if "bias" in name),
    ]
    assert_same(snapshot(twin, other), snapshot(net, opt))
    train(net, opt, range(3, 9))
    train(twin, other, range(3, 9))
    assert_same(snapshot(twin, other), snapshot(net, opt))
    for group in state["param_groups"]:  # sabotage: without names it is by position, and position is wrong here
        del group["param_names"]
    wrong = Muon(list(twin.named_parameters())[::-1])
    wrong.load_state_dict(state)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(snapshot(twin, wrong), snapshot(net, opt))


def test_named_and_unnamed_state_dicts_load_into_each_other_by_position() -> None:
    net, twin = _twins(), _twins()
    weights = [layer.weight for layer in net.layers]
    named = Muon([(f"layers.{i}.weight", weight) for i, weight in enumerate(weights)])
    unnamed = Muon([layer.weight for layer in twin.layers])
    assert "param_names" not in unnamed.state_dict()["param_groups"][0]
    train(net, named, range(3))
    unnamed.load_state_dict(_saved(named))
    train(twin, unnamed, range(3, 5))
    fresh = Muon([(f"layers.{i}.weight", weight) for i, weight in enumerate(weights)])
    state = _saved(unnamed)
    state["param_groups"][0].pop("param_names", None)
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["param_names"] == [f"layers.{i}.weight" for i in range(3)]
    for ours, theirs in zip(weights, (layer.weight for layer in twin.layers), strict=True):
        assert_same(fresh.state[ours], unnamed.state[theirs])


@pytest.mark.parametrize(
    "method", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deep", "pickle"]
)
@every_input
def test_copies_keep_behaviour(kwargs: dict[str, Any], method: Callable[[Any], Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    train(net, opt, range(2))
    twin, other = method((net, opt))
    assert_same(snapshot(twin, other), snapshot(net, opt))
    assert repr(other) == repr(opt)
    assert {key for key in vars(other) if not key.startswith("_")} == {k for k in vars(opt) if not k.startswith("_")}
    train(net, opt, range(2, 8))
    before = snapshot(twin, other)
    train(twin, other, range(2, 8))
    with pytest.raises(AssertionError, match="differs"):  # the copy had not moved with the original
        assert_same(before, snapshot(net, opt))
    assert_same(snapshot(twin, other), snapshot(net, opt))
    other.add_param_group({"params": [("more", nn.Parameter(torch.rand(3, 3)))]})
    with pytest.raises(TypeError, match="momentun"):
        other.add_param_group({"params": [("much", nn.Parameter(torch.rand(3, 3)))], "momentun": 0.9})


def test_step_hooks() -> None:
    net = make_net()
    opt = Muon(net)
    calls: list[str] = []
    before = snapshot(net, opt)
    pre = opt.register_step_pre_hook(lambda o, args, kwargs: assert_same(snapshot(net, o), before))
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))
    opt.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    train(net, opt, range(1))
    assert calls == ["pre", "post"]
    after = snapshot(net, opt)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(after, before)
    pre.remove()

    def closure() -> torch.Tensor:
        calls.append("closure")
        return torch.tensor(2.5)

    opt.register_step_pre_hook(lambda o, args, kwargs: ((args[0], closure), {}))
    assert opt.step() == 2.5
    assert calls[2:] == ["pre", "closure", "post"]


def test_state_dict_hooks() -> None:
    net = make_net()
    opt = Muon(net)
    calls: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, state: {**state, "mine": len(calls)})
    assert opt.state_dict()["mine"] == 2
    assert calls == ["first", "pre"]


def test_load_state_dict_hooks_may_transform_the_state() -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(3))
    state = copy.deepcopy(opt.state_dict())
    twin = copy.deepcopy(net)
    other = Muon(twin)
    calls: list[str] = []

    def halved(o: Muon, given: dict[str, Any]) -> dict[str, Any]:
        calls.append("pre")
        new = {key: {name: value / 2 for name, value in entry.items()} for key, entry in given["state"].items()}
        return {**given, "state": new}

    def loaded(o: Muon) -> None:
        calls.append("post")
        half = opt.state[net.fc1.weight]["momentum_buffer"] / 2
        assert torch.equal(o.state[twin.fc1.weight]["momentum_buffer"], half)
        o.state[twin.fc2.weight]["momentum_buffer"].fill_(3)

    other.register_load_state_dict_pre_hook(halved)
    other.register_load_state_dict_pre_hook(lambda o, given: calls.append("first"), prepend=True)
    other.register_load_state_dict_post_hook(loaded)
    other.load_state_dict(state)
    assert calls == ["first", "pre", "post"]
    ours, theirs = snapshot(net, opt), snapshot(twin, other)
    for key in ours:
        is_state = " " in key
        expected = ours[key] / 2 if is_state else ours[key]
        assert torch.equal(
            theirs[key], torch.full_like(expected, 3) if key == "fc2.weight momentum_buffer" else expected
        )
    assert torch.equal(
        state["state"][0]["momentum_buffer"], ours["fc1.weight momentum_buffer"]
    )  # the source is as it was

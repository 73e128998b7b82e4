"""Models as people have them: tied, frozen, wrapped, with gradients missing."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import Oracle, assert_same, loss_of, make_net, set_grads, snapshot, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshmuon import CheckpointError, Muon


def test_tied_parameter_has_one_route_and_one_state() -> None:
    net = make_net(tied=True)
    opt, oracle = Muon(net, lr=0.01), Oracle(net, lr=0.01)
    names = [name for group in opt.param_groups for name in group["param_names"]]
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    assert len(opt.state) == len(names) == len(set(names)) == 7
    assert "embedding, tied to head.weight" in repr(opt)
    for step in range(6):
        for model in (net, oracle.net):
            model.zero_grad()
            loss_of(model, step).backward()
        opt.step()
        oracle.step()
    assert_same(snapshot(net, opt), oracle.snapshot())
    assert net.head.weight is net.embed.weight


def test_sabotage_untied_parameters_train_otherwise() -> None:
    tied, untied = make_net(tied=True), make_net(tied=True)
    untied.head.weight = nn.Parameter(tied.head.weight.detach().clone())
    for net in (tied, untied):
        opt = Muon(net, lr=0.01)
        loss_of(net, 0).backward()
        opt.step()
    assert not torch.equal(tied.embed.weight, untied.embed.weight)


def test_frozen_parameters_are_left_out() -> None:
    net = make_net()
    frozen = ("fc1.weight", "norm.weight", "embed.weight")
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    before = {name: net.get_parameter(name).detach().clone() for name in frozen}
    opt, oracle = Muon(net, lr=0.01, weight_decay=0.5), Oracle(net, lr=0.01, weight_decay=0.5)
    names = {name for group in opt.param_groups for name in group["param_names"]}
    assert names == {name for name, param in net.named_parameters() if param.requires_grad}
    assert not any(net.get_parameter(name) in opt.state for name in frozen)
    for step in range(6):
        for model in (net, oracle.net):
            model.zero_grad()
            loss_of(model, step).backward()
        opt.step()
        oracle.step()
    assert_same({name: net.get_parameter(name).detach() for name in frozen}, before)
    for name in names:
        assert torch.equal(net.get_parameter(name), oracle.net.get_parameter(name)), name


def _line_about_frozen(opt: Muon) -> str:
    return next((line for line in str(opt).splitlines() if "frozen when the optimizer was made" in line), "")


@pytest.mark.parametrize("by_name", [False, True], ids=["model", "pairs"])
def test_frozen_parameters_are_left_out_in_silence(by_name: bool) -> None:
    net = make_net()
    assert _line_about_frozen(Muon(net)) == ""
    net.embed.requires_grad_(False)
    net.norm.requires_grad_(False)
    opt = Muon(net.named_parameters() if by_name else net)
    line = _line_about_frozen(opt)
    assert "3 tensors" in line and all(name in line for name in ("embed.weight", "norm.weight", "norm.bias"))
    assert _line_about_frozen(copy.deepcopy(opt)) == line
    assert _line_about_frozen(pickle.loads(pickle.dumps(opt))) == line
    net.norm.requires_grad_(True)
    late = [(f"norm.{name}", param) for name, param in net.norm.named_parameters()]
    opt.add_param_group({"params": late, "algorithm": "adamw"})
    line = _line_about_frozen(opt)
    assert "1 tensor:" in line and "embed.weight" in line and "norm" not in line


def test_only_the_first_of_many_frozen_parameters_are_named() -> None:
    model = nn.ModuleDict({f"layer{i:02}": nn.Linear(4, 4, bias=False) for i in range(20)})
    for name, layer in model.items():
        layer.requires_grad_(name == "layer00")
    line = _line_about_frozen(Muon(model))
    assert "19 tensors" in line and "layer01.weight" in line and "layer19" not in line and len(line) < 160


def test_parameter_unfrozen_later_is_added_as_a_group() -> None:
    net = make_net()
    net.fc1.weight.requires_grad_(False)
    opt = Muon(net)
    train(net, opt, range(2))
    net.fc1.weight.requires_grad_(True)
    opt.add_param_group({"params": [("fc1.weight", net.fc1.weight)], "algorithm": "muon"})
    oracle = Oracle(net, matrices=["fc1.weight"])
    train(net, opt, range(2, 8))
    oracle.train(range(2, 8))
    assert torch.equal(net.fc1.weight, oracle.net.fc1.weight)


MISSING = ("fc2.weight", "fc1.bias", "embed.weight")


@pytest.mark.parametrize("frozen_later", [False, True], ids=["no gradient", "frozen after construction"])
def test_parameter_without_gradient_is_left_alone(frozen_later: bool) -> None:
    """No decay, no momentum, no step count; the rest moves as if it were alone."""
    net = make_net()
    kwargs: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.5}
    opt, oracle = Muon(net, **kwargs), Oracle(net, **kwargs)
    train(net, opt, range(3))
    oracle.train(range(3))
    before = snapshot(net, opt)
    for step in range(3, 8):
        for model in (net, oracle.net):
            set_grads(model, step, without=MISSING)
            for name in MISSING if frozen_later else ():
                model.get_parameter(name).requires_grad_(False)
        opt.step()
        oracle.step()
    after = snapshot(net, opt)
    assert_same(after, oracle.snapshot())
    alone = {key for key in before if key.split()[0] in MISSING}
    assert len(alone) == 2 + 4 + 4
    assert_same({key: after[key] for key in alone}, {key: before[key] for key in alone})
    for key in before.keys() - alone:
        assert not torch.equal(after[key], before[key]), key
    set_grads(net, 8, without=MISSING)  # sabotage: a zero gradient is not a missing one
    net.fc2.weight.grad = torch.zeros_like(net.fc2.weight)
    opt.step()
    assert not torch.equal(net.fc2.weight, before["fc2.weight"])


class ModuleWrapper(nn.Module):
    """The name DistributedDataParallel gives its model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _checkpointed(net: nn.Module) -> nn.Module:
    net.fc1 = checkpoint_wrapper(net.fc1)
    net.norm = checkpoint_wrapper(net.norm)
    return net


def _compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "module": (ModuleWrapper, "module.fc1.weight"),
    "DataParallel": (nn.DataParallel, "module.fc1.weight"),
    "compile": (_compiled, "_orig_mod.fc1.weight"),
    "checkpoint": (_checkpointed, "fc1._checkpoint_wrapped_module.weight"),
    "checkpoint around": (checkpoint_wrapper, "fc1.weight"),  # an outermost one takes its prefix off by itself
    "all": (
        lambda net: ModuleWrapper(_compiled(_checkpointed(net))),
        "module._orig_mod.fc1._checkpoint_wrapped_module.weight",
    ),
    "compiled around": (lambda net: _compiled(ModuleWrapper(net)), "_orig_mod.module.fc1.weight"),
}


@pytest.mark.parametrize("by_name", [False, True], ids=["model", "named_parameters"])
@pytest.mark.parametrize(("wrap", "raw"), WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_change_no_name_route_or_checkpoint(wrap: Callable[..., nn.Module], raw: str, by_name: bool) -> None:
    net, inside = make_net(), make_net()
    held = dict(inside.named_parameters())
    wrapped = wrap(inside)
    assert raw in dict(wrapped.named_parameters())
    overrides = {"fc2.*": "adamw", "*.bias": "adamw"}

    def optimizer(model: nn.Module) -> Muon:
        return Muon(list(model.named_parameters()) if by_name else model, overrides=overrides)

    plain, opt = optimizer(net), optimizer(wrapped)
    assert repr(opt) == repr(plain)
    assert [g["param_names"] for g in opt.param_groups] == [g["param_names"] for g in plain.param_groups]
    for step in range(4):
        set_grads(net, step)
        for name, param in held.items():
            param.grad = net.get_parameter(name).grad.clone()
        opt.step()
        plain.step()
    for there, back in ((opt, optimizer(net)), (plain, optimizer(wrapped))):
        back.load_state_dict(copy.deepcopy(there.state_dict()))
        for name in held:
            pair = net.get_parameter(name), held[name]
            source = pair if there is plain else pair[::-1]
            assert_same(back.state[source[1]], there.state[source[0]])
            assert any(value.any() for value in back.state[source[1]].values())


def test_checkpoint_with_raw_wrapper_names_loads_and_another_models_does_not() -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    for group in state["param_groups"]:  # as torch itself would have saved them
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    twin = copy.deepcopy(net)
    other = Muon(twin)
    other.load_state_dict(state)
    assert_same(snapshot(twin, other), snapshot(net, opt))
    train(net, opt, range(2, 8))
    train(twin, other, range(2, 8))
    assert_same(snapshot(twin, other), snapshot(net, opt))
    assert other.state_dict()["param_groups"][0]["param_names"] == ["fc1.weight", "fc2.weight"]
    state["param_groups"][0]["param_names"][0] = "module.fc9.weight"
    with pytest.raises(CheckpointError, match=r"no parameter called fc1.weight; it has fc9.weight"):
        other.load_state_dict(state)


def test_checkpoint_of_a_deeper_or_shallower_model_says_which_layers_differ() -> None:
    deep = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    shallow = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    settings = {"overrides": {"*": "muon"}, "lr": 0.02}
    one, other = Muon(deep, **settings), Muon(shallow, **settings)
    with pytest.raises(CheckpointError, match=r"the checkpoint has also 2\.weight"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 2\.weight"):
        one.load_state_dict(other.state_dict())


def test_a_state_dict_can_be_checked_without_loading_it() -> None:
    net = make_net()
    opt = Muon(net)
    train(net, opt, range(2))
    before = snapshot(net, opt)
    opt.check_state_dict(opt.state_dict())
    for wrong in (None, {}, {"state": {}, "param_groups": []}):
        with pytest.raises(CheckpointError, match="state_dict"):
            opt.check_state_dict(wrong)  # type: ignore[arg-type]
    assert_same(snapshot(net, opt), before)

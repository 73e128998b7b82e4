"""The generic checks of torch's own optimizer tests, driven by an `OptimizerInfo` for `Muon`."""

import copy
import re
from typing import Any

import pytest
import torch
from tests.conformance.error_table import TORCH_FLAGS
from tests.conformance.muon_table import (
    INPUTS,
    MATRICES,
    MUON_INFO,
    SCHEDULERS,
    Oracle,
    assert_same,
    loss_of,
    make_net,
    set_grads,
    snapshot,
    train,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, get_error_inputs_for_all_optims

from meshmuon import Muon, param_groups


@pytest.fixture
def kwargs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A table entry of its own: schedulers write into a tensor lr."""
    return copy.deepcopy(request.param)


every_input = pytest.mark.parametrize("kwargs", INPUTS.values(), ids=INPUTS, indirect=True)


def test_table_has_every_hyper_parameter_and_no_torch_flag() -> None:
    used = {key for given in INPUTS.values() for key in given}
    assert not used & set(TORCH_FLAGS)
    opt = Muon(make_net())
    in_groups = {key for group in opt.param_groups for key in group} - {
        "params",
        "param_names",
        "algorithm",
        "view",
        "route",
        "mode",
    }
    spelled = {"decay_vectors": "adamw_weight_decay", "eps": "adamw_eps"}
    assert {spelled.get(key, key) for key in in_groups} <= used


@pytest.mark.parametrize(
    "bad", MUON_INFO.optim_error_inputs_func("cpu", torch.float32), ids=lambda bad: bad.optimizer_error_input.desc
)
def test_errors(bad: Any) -> None:
    given = bad.optimizer_error_input
    params = make_net() if given.params is None else given.params
    if bad.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(bad.error_type, match=bad.error_regex):
            Muon(params, **given.kwargs)
        return
    opt = Muon(params, **given.kwargs)
    tensors = [p for group in opt.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in tensors]
    with pytest.raises(bad.error_type, match=bad.error_regex):
        opt.step()
    for param, old in zip(tensors, before, strict=True):
        assert torch.equal(param, old)
        assert all(not value.any() for value in opt.state[param].values())


@pytest.mark.parametrize("bad", get_error_inputs_for_all_optims("cpu", torch.float32), ids=str)
def test_what_every_torch_optimizer_refuses_is_refused(bad: Any) -> None:
    given = bad.optimizer_error_input
    params = make_net() if given.params is None else given.params
    # torch warns about duplicates and says it will be an error; here it is one.
    with pytest.raises((ValueError, TypeError)):
        Muon(params, **given.kwargs)


@every_input
def test_matches_reference(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt, oracle = Muon(net, **kwargs), Oracle(net, **kwargs)
    train(net, opt, range(6))
    oracle.train(range(6))
    assert_same(snapshot(net, opt), oracle.snapshot())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["default", "l2", "cautious", "no nesterov", "momentum in bfloat16", "adamw's own"])
def test_matches_reference_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    net = make_net(dtype=dtype)
    opt, oracle = Muon(net, **INPUTS[name]), Oracle(net, **INPUTS[name])
    train(net, opt, range(6))
    oracle.train(range(6))
    assert_same(snapshot(net, opt), oracle.snapshot())


@pytest.mark.parametrize(
    "other",
    [
        {"lr": 1.001e-3},
        {"weight_decay": 0.101},
        {"momentum": 0.951},
        {"nesterov": False},
        {"betas": (0.9, 0.951)},
        {"adjust_lr_fn": "original"},
        {"ns_steps": 6},
        {"adamw_weight_decay": 0.1},
        {"adamw_lr_ratio": 1.001},
    ],
    ids=str,
)
def test_sabotage_reference_with_one_other_number_differs(other: dict[str, Any]) -> None:
    net = make_net()
    opt, oracle = Muon(net), Oracle(net, **other)
    train(net, opt, range(6))
    oracle.train(range(6))
    with pytest.raises(AssertionError, match="differs"):
        assert_same(snapshot(net, opt), oracle.snapshot())


def test_mixed_dtypes_in_one_optimizer() -> None:
    net = make_net()
    net.fc2.to(torch.bfloat16)
    net.head.to(torch.float64)
    net.norm.to(torch.float16)
    opt, oracle = Muon(net), Oracle(net)
    train(net, opt, range(6))
    oracle.train(range(6))
    assert_same(snapshot(net, opt), oracle.snapshot())


def _quadratic(*, contiguous: bool) -> tuple[list[tuple[str, nn.Parameter]], Any]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(10, 5, generator=generator)
    weight = nn.Parameter(weight if contiguous else torch.randn(10, 5, 2, generator=generator)[..., 0])
    bias = torch.randn(10, generator=generator)
    bias = nn.Parameter(bias if contiguous else torch.randn(10, 2, generator=generator)[..., 0])
    x = torch.randn(5, generator=generator)
    assert weight.is_contiguous() == bias.is_contiguous() == contiguous
    return [("weight", weight), ("bias", bias)], lambda: (weight.mv(x) + bias).pow(2).sum()


def _falls(opt: Muon, loss: Any, schedulers: list[Any]) -> bool:
    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    first = closure().item()
    for _ in range(20):
        value = opt.step(closure)
        for scheduler in schedulers:
            scheduler.step(value.item()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    return closure().item() < first


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every_input
def test_goes_right_direction(kwargs: dict[str, Any], contiguous: bool) -> None:
    params, loss = _quadratic(contiguous=contiguous)
    assert _falls(Muon(params, **kwargs), loss, []) == (kwargs.get("lr") != 0.0)


@pytest.mark.parametrize("schedulers", MUON_INFO.scheduler_inputs, ids=SCHEDULERS)
@pytest.mark.parametrize("kwargs", [INPUTS[name] for name in ("default", "Tensor lr", "cautious")], indirect=True)
def test_goes_right_direction_with_lr_schedulers(kwargs: dict[str, Any], schedulers: list[Any]) -> None:
    params, loss = _quadratic(contiguous=True)
    opt = Muon(params, **kwargs)
    assert _falls(opt, loss, [make(opt) for make in schedulers])


def test_strided_parameters_match_contiguous_ones() -> None:
    (_, strided), (_, bias) = _quadratic(contiguous=False)[0]
    twins = [("weight", nn.Parameter(strided.detach().contiguous())), ("bias", nn.Parameter(bias.detach().clone()))]
    opts = Muon([("weight", strided), ("bias", bias)], lr=0.01), Muon(twins, lr=0.01)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(10, 5, generator=generator), torch.randn(10, generator=generator)]
        for opt in opts:
            for param, grad in zip((p for group in opt.param_groups for p in group["params"]), grads, strict=True):
                param.grad = grad.clone()
            opt.step()
    assert torch.equal(strided, twins[0][1]) and torch.equal(bias, twins[1][1])


@every_input
def test_step_is_noop_without_gradients(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    train(net, opt, range(2))
    opt.zero_grad()
    before = snapshot(net, opt)
    opt.step()
    assert_same(snapshot(net, opt), before)


@every_input
def test_step_is_noop_for_zero_gradients_without_decay(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt = Muon(net, **{**kwargs, "weight_decay": 0.0, "adamw_weight_decay": 0.0})
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for _ in range(3):
        set_grads(net, 0, factor=0.0)
        opt.step()
    assert_same({name: param.detach() for name, param in net.named_parameters()}, before)


def test_zero_gradients_only_decay() -> None:
    net = make_net()
    opt = Muon(net, lr=0.01, weight_decay=0.5)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    set_grads(net, 0, factor=0.0)
    opt.step()
    for name, param in net.named_parameters():
        expected = before[name] * (1 - 0.01 * 0.5) if param.ndim >= 2 else before[name]
        assert torch.equal(param, expected), name
    assert not torch.equal(net.fc1.weight, before["fc1.weight"])  # sabotage: a step that does nothing fails above
    before = net.fc1.weight.detach().clone()
    set_grads(net, 0, factor=0.0)
    Muon(net, lr=0.01, weight_decay=0.5, weight_decay_mode="cautious").step()
    assert torch.equal(net.fc1.weight, before)  # no direction, none to agree with


@every_input
def test_gradients_are_never_written(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    set_grads(net, 0)
    held = {name: (param.grad, param.grad.clone()) for name, param in net.named_parameters()}
    opt.step()
    for name, param in net.named_parameters():
        assert torch.equal(*held[name]), name
        assert param.grad is (None if kwargs.get("release_grads") else held[name][0]), name


def test_zero_grad() -> None:
    net = make_net()
    opt = Muon(net)
    set_grads(net, 0)
    opt.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in net.parameters())
    opt.zero_grad()
    assert all(param.grad is None for param in net.parameters())


def test_is_an_optimizer_with_profiler_spans() -> None:
    net = make_net()
    opt = Muon(net)
    assert isinstance(opt, torch.optim.Optimizer)
    set_grads(net, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
        opt.zero_grad()
    names = {event.name for event in profile.events()}
    assert {"Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"} <= names


@every_input
def test_state_exists_from_construction(kwargs: dict[str, Any]) -> None:
    net = make_net()
    opt = Muon(net, **kwargs)
    declared = kwargs.get("state_dtype") or torch.float32
    dtype = getattr(torch, declared) if isinstance(declared, str) else declared
    for name, param in net.named_parameters():
        state = opt.state[param]
        assert set(state) == ({"momentum_buffer"} if name in MATRICES else {"step", "exp_avg", "exp_avg_sq"})
        assert all(not value.any() and not value.requires_grad for value in state.values())
        if name in MATRICES:
            assert (state["momentum_buffer"].shape, state["momentum_buffer"].dtype) == (param.shape, dtype)
    assert len(opt.state) == len(list(net.parameters())) == len(opt.state_dict()["state"])


@every_input
def test_can_be_printed_with_routing_and_hyper_parameters(kwargs: dict[str, Any]) -> None:
    text = repr(Muon(make_net(), **kwargs))
    for name, param in make_net().named_parameters():
        route = "muon" if name in MATRICES else "adamw"
        assert re.search(rf"^{route} .*{'x'.join(map(str, param.shape))}.* {re.escape(name)} ", text, re.M), name
    assert "hidden matrix" in text and "embedding" in text and "output head" in text
    for key in ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "weight_decay_mode"):
        given = kwargs.get(key)
        shown = "" if given is None else f"{given:g}" if isinstance(given, float) else str(given)
        assert f" {key}={shown}" in text
    assert ("Defaults that differ from torch.optim.Muon" in text) == (
        "ns_coefficients" not in kwargs and "adjust_lr_fn" not in kwargs
    )


def test_edited_groups_train_like_the_model() -> None:
    net, twin = make_net(), make_net()
    opt, other = Muon(net), Muon(param_groups(twin))
    train(net, opt, range(5))
    train(twin, other, range(5))
    assert_same(snapshot(twin, other), snapshot(net, opt))
    assert loss_of(net, 0) == loss_of(twin, 0)

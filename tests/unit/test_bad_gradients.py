"""NaN and inf in a gradient under each `non_finite` policy: decided before anything is changed."""

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import Muon, NonFiniteGradientError, NonFiniteGradientWarning
from meshmuon.config import Execution
from meshmuon.exchange.agreement import Agreement
from meshmuon.exchange.groups import Groups
from meshmuon.exchange.health import Health
from meshmuon.exchange.peers import Peers
from meshmuon.exchange.report import Report
from meshmuon.exchange.status import Watched
from meshmuon.plan.build import build_plan

BAD = [float("nan"), float("inf"), float("-inf")]
NAMES = ["hidden.weight", "hidden.bias", "wide.weight", "wide.bias"]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 4, dtype=dtype)
        self.wide = nn.Linear(4, 9, dtype=dtype)


def give_gradients(model: nn.Module, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=source).to(p.dtype)


def everything(model: nn.Module, opt: Muon) -> list[Tensor]:
    """All that a step may change: parameters and state, AdamW's counters included."""
    state = [value.clone() for p in model.parameters() for value in opt.state[p].values()]
    return [p.detach().clone() for p in model.parameters()] + state


def trained(dtype: torch.dtype = torch.float32, **arguments: Any) -> tuple[Net, Muon]:
    torch.manual_seed(0)
    model = Net(dtype)
    opt = Muon(model, lr=0.1, **arguments)
    for seed in range(2):
        give_gradients(model, seed)
        opt.step()
    give_gradients(model, 2)
    return model, opt


def spoil(model: nn.Module, name: str, value: float, position: int = -1) -> None:
    grad = dict(model.named_parameters())[name].grad
    assert grad is not None
    grad.view(-1)[position] = value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", BAD)
def test_skip_changes_nothing_anywhere_warns_by_name_and_counts(name: str, value: float) -> None:
    model, opt = trained()
    spoil(model, name, value)
    before = everything(model, opt)
    with pytest.warns(NonFiniteGradientWarning, match=name) as caught:
        opt.step()
    assert all(other not in str(caught[0].message) for other in NAMES if other != name)
    assert all(map(torch.equal, everything(model, opt), before))
    assert opt.metrics()["skipped_non_finite"] == 1.0
    # The same check on a step that does happen: every tensor moves, so the comparison above can fail.
    give_gradients(model, 3)
    opt.step()
    assert not any(map(torch.equal, everything(model, opt), before))
    assert opt.metrics()["skipped_non_finite"] == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", BAD)
def test_raise_names_the_parameter_and_changes_nothing(name: str, value: float) -> None:
    model, opt = trained(non_finite="raise")
    spoil(model, name, value)
    before = everything(model, opt)
    with pytest.raises(NonFiniteGradientError, match=name):
        opt.step()
    assert all(map(torch.equal, everything(model, opt), before))
    give_gradients(model, 3)
    opt.step()
    assert not any(map(torch.equal, everything(model, opt), before))


@pytest.mark.parametrize("value", BAD)
def test_ignore_proceeds(value: float) -> None:
    model, opt = trained(non_finite="ignore")
    spoil(model, "hidden.weight", value)
    before = everything(model, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert not any(map(torch.equal, everything(model, opt), before))
    assert not model.hidden.weight.isfinite().all(), "nothing was checked, so the NaN is there"
    assert model.wide.weight.isfinite().all()
    assert opt.metrics()["skipped_non_finite"] == 0.0


def test_a_run_with_a_skipped_step_continues_as_if_that_step_had_never_been() -> None:
    model, opt = trained()
    spoil(model, "wide.weight", float("nan"))
    with pytest.warns(NonFiniteGradientWarning):
        opt.step()
    other, straight = trained()
    for owner, its in ((model, opt), (other, straight)):
        for seed in range(5, 8):
            give_gradients(owner, seed)
            its.step()
    assert all(map(torch.equal, everything(model, opt), everything(other, straight)))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("state_dtype", [None, "float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_bad_element_is_found_in_every_dtype(dtype: torch.dtype, state_dtype: str | None, value: float) -> None:
    """Also where momentum is wider than the gradient: a bound that fp16 rounds to inf would let inf pass."""
    model, opt = trained(dtype, state_dtype=state_dtype)
    spoil(model, "hidden.weight", value)
    before = everything(model, opt)
    with pytest.warns(NonFiniteGradientWarning, match="hidden.weight"):
        opt.step()
    assert all(map(torch.equal, everything(model, opt), before))


@pytest.mark.parametrize("position", range(24))
def test_one_bad_element_is_found_wherever_it_is(position: int) -> None:
    model, opt = trained()
    spoil(model, "hidden.weight", float("nan"), position)
    before = everything(model, opt)
    with pytest.warns(NonFiniteGradientWarning, match="hidden.weight"):
        opt.step()
    assert all(map(torch.equal, everything(model, opt), before))


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**16, 2.0**40])
@pytest.mark.parametrize("state_dtype", ["float16", "float32"])
def test_a_scaled_gradient_is_judged_by_its_size_without_the_scale(state_dtype: str, scale: float) -> None:
    """GradScaler's factor is taken off when a gradient is read: too large is what is too large then."""
    model, opt = trained(state_dtype=state_dtype)
    other, plain = trained(state_dtype=state_dtype)
    for p in model.parameters():
        p.grad = p.grad * scale
    opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        plain.step()
    assert all(map(torch.equal, everything(model, opt), everything(other, plain)))


def largest_usable(dtype: torch.dtype) -> float:
    """Half of what fp32 can hold: the difference of two such numbers is still finite."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max * 0.49)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_very_large_number_is_no_reason_to_skip(dtype: torch.dtype) -> None:
    model, opt = trained(dtype)
    spoil(model, "hidden.weight", largest_usable(dtype))
    before = everything(model, opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert not any(map(torch.equal, everything(model, opt), before))
    assert all(value.isfinite().all() for value in everything(model, opt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_number_momentum_cannot_take_is_treated_like_inf(dtype: torch.dtype) -> None:
    model, opt = trained(dtype)
    spoil(model, "hidden.weight", torch.finfo(dtype).max)
    before = everything(model, opt)
    with pytest.warns(NonFiniteGradientWarning, match="hidden.weight"):
        opt.step()
    assert all(map(torch.equal, everything(model, opt), before))


def test_several_bad_gradients_are_all_named() -> None:
    model, opt = trained()
    for name in ("hidden.weight", "wide.bias"):
        spoil(model, name, float("inf"))
    with pytest.warns(NonFiniteGradientWarning) as caught:
        opt.step()
    text = str(caught[0].message)
    assert "hidden.weight" in text and "wide.bias" in text and "wide.weight" not in text


def test_a_frozen_parameters_missing_gradient_is_no_reason_to_skip() -> None:
    model, opt = trained()
    model.hidden.weight.grad = None
    before, kept = everything(model, opt), copy.deepcopy(opt.state[model.hidden.weight])
    opt.step()
    after = everything(model, opt)
    assert torch.equal(after[0], before[0]) and not torch.equal(after[2], before[2])
    assert torch.equal(opt.state[model.hidden.weight]["momentum_buffer"], kept["momentum_buffer"])


def test_a_model_in_fp32_takes_no_fp64_to_its_device():
    """Some devices have none."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(each, torch.Tensor) and each.dtype == torch.float64:
                    seen.append(str(func))
            return result

    for dtype in (torch.float32, torch.float64):
        param = torch.nn.Parameter(torch.eye(4, dtype=dtype))
        opt = Muon([param])
        param.grad = torch.ones_like(param)
        with Watch():
            opt.step()
        assert bool(seen) == (dtype == torch.float64), seen


def test_a_device_of_its_own_decides_without_the_host():
    """On the meta device nothing can be read: whoever looks at the answer fails."""
    plan = build_plan([], polar={}, execution=Execution(allow_no_muon=True))
    peers = Peers(plan, Groups(), settings=list, health=Health())
    watched = [Watched("w", torch.ones(3, device="meta"), 1.0, shared=False)]
    agreement = Agreement("skip")
    with mock.patch.object(Report, "sent", lambda report: report):
        with pytest.raises(RuntimeError, match="meta"):  # the first step is decided by the host
            agreement.check(watched, peers=peers, found_inf=None, unscale=None)
        verdict = agreement.check(watched, peers=peers, found_inf=None, unscale=None)
    assert verdict.go and verdict.flag is not None and verdict.flag.device.type == "meta"


class _Event:
    """One that the host has not seen happen."""

    def __init__(self):
        self.waited = False

    def query(self):
        return False

    def synchronize(self):
        self.waited = True


@pytest.mark.parametrize(("alone", "left"), [(True, [1, 2, 3]), (False, [3])])
def test_ranks_meet_an_answer_at_the_same_step_and_one_alone_never_waits(alone, left):
    agreement = Agreement("skip")
    agreement._steps = 3
    events = {step: _Event() for step in (1, 2, 3)}
    for step, event in events.items():
        agreement._on_their_way.append(Report(step, ("p",), torch.tensor([False]), arrived=event))
    agreement._collect_due(alone=alone)
    assert [report.step for report in agreement._on_their_way] == left
    assert [step for step, event in events.items() if not event.waited] == left


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_inf_in_a_narrow_gradient_of_an_fp64_parameter_is_noticed(algorithm):
    """Its limit, of fp64, was inf among limits of fp32: and inf is not larger than inf."""
    param = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    param.grad_dtype = torch.float32
    opt = Muon([{"params": [param], "algorithm": algorithm}], allow_no_muon=True)
    param.grad = torch.full((4, 6), float("inf"), dtype=torch.float32)
    with pytest.warns(NonFiniteGradientWarning, match="inf"):
        opt.step()
    assert torch.equal(param.detach(), torch.ones(4, 6, dtype=torch.float64))
    assert not any(value.any() for value in opt.state[param].values())
    param.grad = torch.full((4, 6), 1e30, dtype=torch.float32)
    opt.step()
    assert param.isfinite().all() and (param != 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scaled_gradient_that_its_parameters_dtype_cannot_hold_is_unscaled_first(dtype):
    """65536 is inf in fp16; what is left of it without GradScaler's factor is 1."""
    pair = [nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(2)]
    grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    opts = [Muon([{"params": [param], "algorithm": "adamw"}], lr=0.1, allow_no_muon=True) for param in pair]
    for param, opt, scale in zip(pair, opts, (65536.0, None), strict=True):
        param.grad_dtype = torch.float32
        for _ in range(3):
            param.grad = grad * (scale or 1.0)
            if scale is not None:
                opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
            opt.step()
    assert torch.equal(*(param.detach() for param in pair))
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(*(opt.state[param][key] for param, opt in zip(pair, opts, strict=True)))
    assert (pair[0] != 1).all()

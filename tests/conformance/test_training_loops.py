"""What training loops do: closures, accumulation, clipping, resuming with a scheduler."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import Net, Oracle, assert_same, loss_of, make_net, set_grads, snapshot
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from meshmuon import Muon


def test_closure_runs_once_with_gradients_enabled_and_its_loss_is_returned() -> None:
    net = make_net()
    opt, oracle = Muon(net), Oracle(net)
    calls: list[tuple[bool, Tensor]] = []
    for step in range(5):

        def closure(step: int = step) -> Tensor:
            opt.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            calls.append((torch.is_grad_enabled(), loss))
            return loss

        with torch.no_grad():
            assert opt.step(closure) is calls[-1][1]
        assert not calls[-1][1].isnan() and calls[-1][0] and len(calls) == step + 1
        oracle.net.zero_grad()
        loss_of(oracle.net, step).backward()
        oracle.step()
    assert_same(snapshot(net, opt), oracle.snapshot())
    assert opt.step() is None


@pytest.mark.parametrize("lost", [False, True], ids=["right", "sabotage: the first micro-batch is lost"])
def test_accumulated_gradients_equal_their_sum(lost: bool) -> None:
    net = make_net()
    opt, oracle = Muon(net), Oracle(net)
    for step in range(6):
        opt.zero_grad()
        for part in range(2):
            (loss_of(net, 2 * step + part) / 2).backward()
            if lost and part == 0:
                opt.zero_grad()
        opt.step()
        parts = []
        for part in range(2):
            oracle.net.zero_grad()
            (loss_of(oracle.net, 2 * step + part) / 2).backward()
            parts.append([param.grad for param in oracle.net.parameters()])
        for param, first, second in zip(oracle.net.parameters(), *parts, strict=True):
            param.grad = first + second
        oracle.step()
    if lost:
        with pytest.raises(AssertionError, match="differs"):
            assert_same(snapshot(net, opt), oracle.snapshot())
    else:
        assert_same(snapshot(net, opt), oracle.snapshot())


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipped_gradients_are_what_is_used(clip: Callable[..., Any]) -> None:
    net = make_net()
    opt, oracle, unclipped = Muon(net), Oracle(net), Oracle(net)
    for step in range(5):
        for model in (net, oracle.net, unclipped.net):
            model.zero_grad()
            loss_of(model, step).backward()
        for model in (net, oracle.net):
            clip(model.parameters(), 0.05)
        for each in (opt, oracle, unclipped):
            each.step()
    assert_same(snapshot(net, opt), oracle.snapshot())
    with pytest.raises(AssertionError, match="differs"):
        assert_same(snapshot(net, opt), unclipped.snapshot())


def test_scheduler_and_optimizer_resume_together() -> None:
    net = make_net()
    opt = Muon(net, lr=0.01)
    scheduler = StepLR(opt, step_size=2, gamma=0.5)

    def run(model: Net, optimizer: Muon, schedule: StepLR, steps: range) -> None:
        for step in steps:
            set_grads(model, step)
            optimizer.step()
            schedule.step()

    run(net, opt, scheduler, range(3))
    twin = copy.deepcopy(net)
    other = Muon(twin, lr=0.7)
    resumed = StepLR(other, step_size=2, gamma=0.5)
    resumed.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(net, opt, scheduler, range(3, 9))
    run(twin, other, resumed, range(3, 9))
    assert (
        [group["lr"] for group in other.param_groups] == [group["lr"] for group in opt.param_groups] == [0.01 / 16] * 2
    )
    assert_same(snapshot(twin, other), snapshot(net, opt))

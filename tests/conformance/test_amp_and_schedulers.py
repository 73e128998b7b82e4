"""GradScaler, LR schedulers, tensor lr, closures, clipping and accumulation, against the reference."""

import warnings
from typing import Any

import pytest
import torch
from tests.conformance.muon_table import (
    CYCLE_MOMENTUM,
    INPUTS,
    MATRICES,
    SCHEDULERS,
    Net,
    Oracle,
    assert_same,
    loss_of,
    make_net,
    set_grads,
    snapshot,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshmuon import Muon

STEPS = 8


def _scaler(scale: float, **kwargs: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=scale, **kwargs)
    scaler.scale(torch.ones(()))  # makes the scale a tensor, as the first loss would
    return scaler


def _backward(net: Net, step: int, *, scaler: GradScaler | None = None, factor: float = 1.0) -> None:
    net.zero_grad()
    loss = loss_of(net, step) * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


NAMES = ("default", "l2", "no nesterov", "momentum in bfloat16", "adamw's own", "release_grads", "non_finite ignored")


@pytest.mark.parametrize("kwargs", [*(INPUTS[name] for name in NAMES), {"non_finite": "raise"}], ids=str)
def test_real_overflow_skips_lowers_the_scale_and_then_continues_as_without_scaler(kwargs: dict[str, Any]) -> None:
    net, twin = make_net(), make_net()
    opt, plain = Muon(net, **kwargs), Muon(twin, **kwargs)
    _backward(twin, 0)
    plain.step()
    _backward(net, 0)
    opt.step()
    scaler = _scaler(2.0**127)
    skipped = 0
    while True:
        _backward(net, 1, scaler=scaler, factor=64.0)
        overflow = any(not torch.isfinite(param.grad).all() for param in net.parameters())
        before, scale = snapshot(net, opt), scaler.get_scale()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scaler expects overflows: no reason to warn
            assert scaler.step(opt) is None
        scaler.update()
        if not overflow:
            break
        assert_same(snapshot(net, opt), before)
        assert scaler.get_scale() == scale / 2
        skipped += 1
        counted = {"steps": 1.0 + skipped, "skipped_non_finite": 0.0, "skipped_grad_scaler": skipped}
        assert counted.items() <= opt.metrics().items()
    assert skipped >= 2
    assert scaler.get_scale() == scale
    _backward(twin, 1, factor=64.0)
    plain.step()
    assert_same(snapshot(net, opt), snapshot(twin, plain))
    for step in range(2, 8):
        _backward(net, step, scaler=scaler)
        scaler.step(opt)
        scaler.update()
        _backward(twin, step)
        plain.step()
        assert_same(snapshot(net, opt), snapshot(twin, plain))
    assert not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")


def test_sabotage_scaled_gradients_without_the_scaler_differ() -> None:
    net, twin = make_net(), make_net()
    opt, plain = Muon(net), Muon(twin)
    for step in range(3):
        _backward(net, step, factor=2.0**10)
        opt.step()
        _backward(twin, step)
        plain.step()
    found, expected = snapshot(net, opt), snapshot(twin, plain)
    for name in ("fc1.weight momentum_buffer", "embed.weight exp_avg", "norm.weight exp_avg_sq"):
        assert not torch.equal(found[name], expected[name])


@pytest.mark.parametrize("where", ["fc1.weight", "norm.bias"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_one_overflowed_gradient_skips_everything(where: str, bad: float) -> None:
    net = make_net()
    opt = Muon(net)
    scaler = _scaler(2.0**8)
    set_grads(net, 0)
    opt.step()
    before = snapshot(net, opt)
    set_grads(net, 1)
    net.get_parameter(where).grad.view(-1)[-1] = bad
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert_same(snapshot(net, opt), before)


def test_scaler_leaves_gradients_as_they_were() -> None:
    net = make_net()
    opt = Muon(net)
    scaler = _scaler(2.0**8)
    set_grads(net, 0)
    before = {name: param.grad.clone() for name, param in net.named_parameters()}
    scaler.step(opt)
    assert_same({name: param.grad for name, param in net.named_parameters()}, before)


def test_scaler_that_is_no_power_of_two_equals_unscaled_gradients() -> None:
    net = make_net()
    opt, oracle = Muon(net), Oracle(net)
    scaler = _scaler(1000.0)
    for step in range(5):
        set_grads(net, step, factor=1000.0)
        set_grads(oracle.net, step, factor=1000.0)
        for param in oracle.net.parameters():
            param.grad.mul_(torch.tensor(1000.0).double().reciprocal().float())
        scaler.step(opt)
        scaler.update()
        oracle.step()
    found = snapshot(net, opt)
    for key, value in oracle.snapshot().items():
        if key.startswith(MATRICES):
            assert torch.equal(found[key], value), key
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("unscale_first", [True, False], ids=["right", "sabotage: clipped before unscale_"])
def test_scaler_with_unscale_and_clipping(unscale_first: bool) -> None:
    net, twin = make_net(), make_net()
    opt, plain = Muon(net), Muon(twin)
    scaler = _scaler(2.0**16)
    for step in range(6):
        _backward(net, step, scaler=scaler)
        if unscale_first:
            scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        scaler.step(opt)
        scaler.update()
        _backward(twin, step)
        assert (norm == nn.utils.clip_grad_norm_(twin.parameters(), 0.25)) == unscale_first
        assert norm > 0.25
        plain.step()
    if unscale_first:
        assert_same(snapshot(net, opt), snapshot(twin, plain))
    else:
        with pytest.raises(AssertionError, match="differs"):
            assert_same(snapshot(net, opt), snapshot(twin, plain))


def test_overflow_found_by_unscale_skips() -> None:
    net = make_net()
    opt = Muon(net)
    scaler = _scaler(2.0**127)
    _backward(net, 0, scaler=scaler, factor=2.0**20)
    before = snapshot(net, opt)
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert_same(snapshot(net, opt), before)


def test_disabled_scaler_is_none() -> None:
    net, twin = make_net(), make_net()
    opt, plain = Muon(net), Muon(twin)
    scaler = GradScaler("cpu", enabled=False)
    for step in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _backward(net, step, scaler=scaler)
            _backward(twin, step)
        scaler.step(opt)
        scaler.update()
        plain.step()
    assert_same(snapshot(net, opt), snapshot(twin, plain))


def test_scaler_step_without_any_gradient_is_a_noop() -> None:
    """As with torch's fused AdamW, e.g. beside a second optimizer that has gradients."""
    net = make_net()
    opt, torchs = Muon(net), torch.optim.AdamW(net.parameters(), fused=True)
    scaler = _scaler(2.0**8)
    before = snapshot(net, opt)
    scaler.step(torchs)
    scaler.step(opt)
    assert_same(snapshot(net, opt), before)


@pytest.mark.parametrize(("factor", "scale"), [(2.0**9, 2.0**16), (2.0**-4, 2.0**16), (2.0**3, 2.0**26)])
def test_scaler_on_float16_parameters(factor: float, scale: float) -> None:
    """Whether or not float16 can hold the unscaled gradient, or 1 / scale: torch's fused AdamW unscales in float32."""
    net = make_net(dtype=torch.float16)
    opt, oracle = Muon(net), Oracle(net)
    ours, theirs = _scaler(scale), _scaler(scale)
    for step in range(5):
        set_grads(net, step, factor=factor)
        set_grads(oracle.net, step, factor=factor)
        oracle.muon.step([param.grad.double() / scale for param in oracle.matrices.values()])
        ours.step(opt)
        oracle.adamw.step(theirs.step)
        ours.update()
        theirs.update()
    found, expected = snapshot(net, opt), oracle.snapshot()
    matrices = [key for key in expected if key.startswith(MATRICES)]
    assert_same({key: found[key] for key in matrices}, {key: expected[key] for key in matrices})
    assert_same(found, expected)


def _lrs(name: str, lr: float) -> list[tuple[float, float | None]]:
    """What the schedulers give each step, read off an optimizer of torch's."""
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.95)
    schedulers = [make(opt) for make in SCHEDULERS[name]]
    result = []
    for _ in range(STEPS):
        momentum = opt.param_groups[0]["momentum"] if name in CYCLE_MOMENTUM else None
        result.append((float(opt.param_groups[0]["lr"]), momentum))
        opt.step()
        _advance(schedulers)
    return result


def _advance(schedulers: list[Any]) -> None:
    for scheduler in schedulers:
        scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


def _scheduled(name: str, lr: float | Tensor, **kwargs: Any) -> tuple[Net, Muon]:
    net = make_net()
    opt = Muon(net, lr=lr, **kwargs)
    schedulers = [make(opt) for make in SCHEDULERS[name]]
    for step in range(STEPS):
        set_grads(net, step)
        opt.step()
        _advance(schedulers)
    return net, opt


@pytest.mark.parametrize("kwargs", [{}, {"adamw_lr_ratio": 0.3, "weight_decay": 0.5}], ids=str)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_all_groups(name: str, tensor: bool, kwargs: dict[str, Any]) -> None:
    lr = torch.tensor(0.01, dtype=torch.float64) if tensor else 0.01
    net, opt = _scheduled(name, lr, **kwargs)
    given = _lrs(name, 0.01)
    assert len({lr for lr, _ in given}) > 1
    oracle = Oracle(make_net(), lr=0.01, **kwargs)
    for step, (now, momentum) in enumerate(given):
        set_grads(oracle.net, step)
        oracle.step(lr=now, momentum=momentum)
    assert_same(snapshot(net, opt), oracle.snapshot())
    if tensor:
        assert all(isinstance(group["lr"], Tensor) for group in opt.param_groups)
    late = Oracle(make_net(), lr=0.01, **kwargs)  # sabotage: the same, one step later
    for step, (now, momentum) in enumerate([given[0], *given[:-1]]):
        set_grads(late.net, step)
        late.step(lr=now, momentum=momentum)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(snapshot(net, opt), late.snapshot())


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-dim"])
def test_float32_tensor_lr_equals_its_number_to_rounding(shape: tuple[int, ...]) -> None:
    net, opt = _scheduled("CosineAnnealingLR", torch.full(shape, 0.01))
    twin, plain = _scheduled("CosineAnnealingLR", 0.01)
    found, expected = snapshot(net, opt), snapshot(twin, plain)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=2e-6, atol=2e-7, msg=key)
    sabotaged = snapshot(*_scheduled("CosineAnnealingLR", torch.full(shape, 0.01 * (1 + 1e-3))))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(sabotaged["fc1.weight"], expected["fc1.weight"], rtol=2e-6, atol=2e-7)


def test_tensor_lr_is_read_at_each_step() -> None:
    lr = torch.tensor(0.5, dtype=torch.float64)
    net = make_net()
    opt, oracle = Muon(net, lr=lr), Oracle(net)
    for step in range(5):
        for group in opt.param_groups:
            group["lr"].fill_(0.01 * (step + 1))
        set_grads(net, step)
        set_grads(oracle.net, step)
        opt.step()
        oracle.step(lr=0.01 * (step + 1))
    assert_same(snapshot(net, opt), oracle.snapshot())


def test_lightning_is_told_that_gradients_may_be_clipped():
    """Lightning refuses to clip in mixed precision if this is true; torch's GradScaler needs it."""
    asked = "found = getattr(optimizer, '_step_supports_amp_scaling', False)"
    optimizer = Muon([torch.ones(4, 4).requires_grad_()])
    answers = {}
    lightnings = ("lightning.pytorch.plugins.precision.amp", "pytorch_lightning.x", "lightning_fabric.x")
    for name in ("torch.amp.grad_scaler", "mine", *lightnings):
        scope = {"__name__": name, "optimizer": optimizer}
        exec(asked, scope)
        answers[name] = scope["found"]
    assert list(answers.values()) == [True, True, False, False, False]
    optimizer._step_supports_amp_scaling = False  # who sets it has the last word
    assert not optimizer._step_supports_amp_scaling

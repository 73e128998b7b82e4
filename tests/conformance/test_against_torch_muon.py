"""Beside torch.optim.Muon and Keller Jordan's own update: no further from the truth than they are."""

import math

import pytest
import torch

from meshmuon import Muon, Orthogonalizer, scale_factor
from meshmuon.polar.coefficients import KELLER
from meshmuon.testing import ReferenceMuon, plain_newton_schulz

STEPS = 5
SHAPES = [(32, 32), (24, 72), (72, 24)]


def matrices(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def train(opt, params, dtype):
    for step in range(STEPS):
        for p, g in zip(params, gradients(step, dtype), strict=True):
            p.grad = g
        opt.step()


def truth(dtype, *, nesterov, rule, lr, weight_decay):
    """An fp64 run of the same iteration on the same (rounded) initial values and gradients."""
    params = [p.double() for p in matrices(dtype)]
    reference = ReferenceMuon(
        params,
        lr=lr,
        weight_decay=weight_decay,
        nesterov=nesterov,
        adjust_lr_fn=rule,
        polar=lambda u: plain_newton_schulz(u, (KELLER,) * 5),
    )
    for step in range(STEPS):
        reference.step([g.double() for g in gradients(step, dtype)])
    return params


def moved(params, dtype):
    """How far parameters moved: distances are relative to that, not to their size."""
    return torch.cat(
        [(p.detach().double() - q.double()).flatten() for p, q in zip(params, matrices(dtype), strict=True)]
    )


def bound_holds(distance, exact, dtype):
    """3e-2 of the way travelled; of the size of bf16 parameters, since rounding alone moves them by more than that."""
    size = exact.norm() if dtype == torch.float32 else torch.cat([p.flatten() for p in matrices(dtype)]).double().norm()
    return distance <= 3e-2 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_no_further_from_fp64_than_torch(dtype, nesterov, rule):
    settings = {"lr": 0.05, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": rule}
    exact = moved(truth(dtype, nesterov=nesterov, rule=rule, lr=0.05, weight_decay=0.1), dtype)

    ours = [p.requires_grad_() for p in matrices(dtype)]
    train(Muon(ours, ns_coefficients="keller", **settings), ours, dtype)
    our_distance = (moved(ours, dtype) - exact).norm()
    assert bound_holds(our_distance, exact, dtype)

    if dtype == torch.bfloat16 and not nesterov:
        return  # torch 2.13 normalises its own momentum buffer in place there: see the test of the buffer below
    theirs = [p.requires_grad_() for p in matrices(dtype)]
    train(torch.optim.Muon(theirs, **settings), theirs, dtype)
    their_distance = (moved(theirs, dtype) - exact).norm()
    assert bound_holds(their_distance, exact, dtype), "the comparison itself would be meaningless"
    assert our_distance <= their_distance


def test_a_wrong_rule_would_be_noticed():
    """The sabotage of the test above: the other lr rule is far outside the bound."""
    exact = moved(truth(torch.float32, nesterov=True, rule="original", lr=0.05, weight_decay=0.1), torch.float32)
    ours = [p.requires_grad_() for p in matrices(torch.float32)]
    train(Muon(ours, lr=0.05, ns_coefficients="keller", adjust_lr_fn="match_rms_adamw"), ours, torch.float32)
    assert ((moved(ours, torch.float32) - exact).norm() / exact.norm()).item() > 3e-2


def test_bfloat16_reproduces_torch():
    """With torch's coefficients, rule and dtype, the two agree to bf16's own noise."""
    settings = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "original"}
    ours, theirs = ([p.requires_grad_() for p in matrices(torch.float32)] for _ in range(2))
    orthogonalizer = Orthogonalizer(dtype="bfloat16", form="standard")
    train(Muon(ours, ns_coefficients="keller", orthogonalizer=orthogonalizer, **settings), ours, torch.float32)
    train(torch.optim.Muon(theirs, **settings), theirs, torch.float32)
    a, b = moved(ours, torch.float32), moved(theirs, torch.float32)
    assert ((a - b).norm() / b.norm()).item() < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_momentum_buffer_is_the_exact_average(dtype, nesterov):
    """torch 2.13 fails this for bf16 without nesterov: `.bfloat16()` is an alias there, then divided in place."""
    params = [p.requires_grad_() for p in matrices(dtype)]
    opt = Muon(params, nesterov=nesterov)
    wide = torch.promote_types(dtype, torch.float32)
    expected = [torch.zeros_like(p) for p in params]
    for step in range(STEPS):
        for p, g, e in zip(params, gradients(step, dtype), expected, strict=True):
            p.grad = g
            e.copy_(torch.lerp(e.to(wide), g.to(wide), 1 - 0.95))
        opt.step()
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(opt.state[p]["momentum_buffer"], e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral", "unit_rms_norm", "none"])
def test_equals_the_reference_bit_for_bit(dtype, nesterov, mode, rule):
    params = [p.requires_grad_() for p in matrices(dtype)]
    settings = {"lr": 0.05, "weight_decay": 0.2, "nesterov": nesterov, "weight_decay_mode": mode, "adjust_lr_fn": rule}
    opt = Muon(params, **settings)
    reference = ReferenceMuon(matrices(dtype), **settings)
    for step in range(STEPS):
        for p, g in zip(params, gradients(step, dtype), strict=True):
            p.grad = g
        opt.step()
        reference.step(gradients(step, dtype))
    for p, q, buffer in zip(params, reference.params, reference.buffers, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(opt.state[p]["momentum_buffer"], buffer)


@pytest.mark.parametrize("change", [{"lr": 0.0500001}, {"momentum": 0.9501}, {"weight_decay": 0.2001}])
def test_the_reference_notices_small_changes(change):
    settings = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.95}
    params = [p.requires_grad_() for p in matrices(torch.float32)]
    train(Muon(params, **{**settings, **change}), params, torch.float32)
    reference = ReferenceMuon(matrices(torch.float32), **settings)
    for step in range(STEPS):
        reference.step(gradients(step, torch.float32))
    assert not all(torch.equal(p, q) for p, q in zip(params, reference.params, strict=True))


def keller_step(p, g, buffer, *, lr, momentum=0.95):
    """Keller Jordan's update (https://kellerjordan.github.io/posts/muon/), re-created in fp64, with nesterov."""
    buffer.lerp_(g, 1 - momentum)
    u = plain_newton_schulz(torch.lerp(g, buffer, momentum), (KELLER,) * 5)
    p.sub_(lr * max(1, p.shape[0] / p.shape[1]) ** 0.5 * u)


@pytest.mark.parametrize(("rule", "factor"), [("original", 1.0), ("match_rms_adamw", 0.2 * math.sqrt(10))])
def test_kellers_update_on_the_ten_by_ten_layer_of_pytorchs_pull_request(rule, factor):
    """There the two were compared on one Linear(10, 10): what remained was the lr rule, and here it is exactly that.

    For a square matrix Keller's factor is 1 and Moonlight's is 0.2·sqrt(10) = 0.63. Converted, the runs agree.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(10, 10, bias=False).double()
    start = layer.weight.detach().clone()
    opt = Muon([layer.weight], lr=0.02, weight_decay=0.0, ns_coefficients="keller", adjust_lr_fn=rule)
    mine, buffer = start.clone(), torch.zeros(10, 10, dtype=torch.float64)
    for step in range(STEPS):
        x = torch.randn(32, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        layer.zero_grad()
        layer(x).pow(2).mean().backward()
        keller_step(mine, layer.weight.grad, buffer, lr=0.02 * factor)
        opt.step()
    assert scale_factor((10, 10), rule) == pytest.approx(factor)
    assert torch.allclose(layer.weight, mine, rtol=0, atol=1e-12)
    wrong = 1.0 if rule == "match_rms_adamw" else 0.2 * math.sqrt(10)
    again, buffer = start.clone(), torch.zeros(10, 10, dtype=torch.float64)
    keller_step(again, layer.weight.grad, buffer, lr=0.02 * wrong)
    assert not torch.allclose(layer.weight, again, rtol=0, atol=1e-4)

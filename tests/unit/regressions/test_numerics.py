"""Section A: numerics of the orthogonalizer. (#14, what the constructor must refuse, is test_bad_input.py.)"""

import warnings

import pytest
import torch
from tests.unit.regressions.tools import (
    DTYPES,
    direction_of,
    must_fail,
    parameter,
    randn,
    relative_error,
    singular_values,
    step,
    train,
)
from torch import Tensor, nn

from meshmuon import Muon, NonFiniteGradientWarning, Orthogonalizer, orthogonalize, polar_express, scale_factor
from meshmuon.testing import plain_newton_schulz, svd_polar

FORMS = ["standard", "gram", "svd"]
COEFFICIENTS = ["polar_express", "keller", "you"]


def check_is_average(buffer: Tensor, grads: list[Tensor], momentum: float) -> None:
    """Momentum must be the exponential moving average: in fp32 (fp64 for fp64), rounded once per step."""
    dtype = buffer.dtype
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.zeros_like(buffer)
    for g in grads:
        expected = torch.lerp(expected.to(wide), g.to(wide), 1 - momentum).to(dtype)
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_momentum_overwritten_by_the_normalisation(dtype: torch.dtype, nesterov: bool, compute: str) -> None:
    """#1: `.bfloat16()` of a bf16 buffer is the buffer itself; normalising it in place destroyed the momentum."""
    grads = [randn(7, 12, seed=s, dtype=dtype) for s in range(5)]
    orthogonalizer = Orthogonalizer(dtype=compute)
    p, opt = train(lambda ps: Muon(ps, momentum=0.9, nesterov=nesterov, orthogonalizer=orthogonalizer), grads)
    buffer = opt.state[p]["momentum_buffer"]
    check_is_average(buffer, grads, 0.9)
    assert relative_error(buffer, sum(0.1 * 0.9 ** (4 - i) * g.double() for i, g in enumerate(grads))) < 2e-2
    if dtype == torch.bfloat16 and not nesterov:
        faulty = buffer.clone()
        alias = faulty.bfloat16()
        alias.div_(alias.norm())
        must_fail(check_is_average, faulty, grads, 0.9)


EXPONENTS = [-30, -25, -20, -12, -9, 9, 12, 20, 25, 30]


def check_same_direction(found: Tensor, expected: Tensor) -> None:
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_tiny_and_huge_gradients_shrink_or_freeze_the_update(exponent: int, form: str) -> None:
    """#2 and #3: eps as a floor shrinks tiny updates; a squared 1e20 overflows, and the update is silently zero."""
    grad = randn(8, 11).double()
    orthogonalizer = Orthogonalizer(form=form)
    expected = direction_of(grad.float(), orthogonalizer=orthogonalizer)
    found = direction_of((grad * 10.0**exponent).float(), orthogonalizer=orthogonalizer)
    check_same_direction(found, expected)
    assert singular_values(found).max() < 1.35


def test_tiny_and_huge_gradients_would_be_noticed() -> None:
    """The sabotage of #2 and #3: the normalisation of other implementations fails the same check."""

    def floor_normalised(x: Tensor) -> Tensor:
        x = x / (torch.sqrt((x * x).sum()) + 1e-7)
        for a, b, c in polar_express(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    grad = randn(8, 11)
    expected = direction_of(grad)
    assert relative_error(floor_normalised(grad), expected) < 1e-4, "equal at a normal scale"
    for scale in (1e-12, 1e-25, 1e20):
        must_fail(check_same_direction, floor_normalised(grad * scale), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [-100, -60, -7, 1, 40, 100])
def test_gradients_times_a_power_of_two_change_bits_of_the_update(power: int, form: str) -> None:
    """#2 and #3: scaling by a power of two is exact, so the whole step must be, over several steps."""
    grads = [randn(8, 11, seed=s) for s in range(5)]
    make = lambda ps: Muon(ps, lr=0.1, orthogonalizer=Orthogonalizer(form=form))  # noqa: E731
    plain, _ = train(make, grads)
    scaled, _ = train(make, [g * 2.0**power for g in grads])
    assert torch.equal(plain, scaled)
    other, _ = train(make, [g * 1.5 for g in grads[:4]] + [grads[4]])
    assert not torch.equal(plain, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", ["smallest", "tiny", "largest"])
def test_gradients_at_the_edge_of_the_dtype_give_nan(edge: str, dtype: torch.dtype) -> None:
    """#3: beyond 1e±30 the update may be less exact, but is finite and bounded, and so is the momentum."""
    info = torch.finfo(dtype)
    size = {"smallest": info.smallest_normal * info.eps, "tiny": info.tiny, "largest": info.max * 0.49}[edge]
    pattern = randn(8, 11).clamp(-1.0, 1.0).double()
    grad = (pattern * size).to(dtype)
    assert grad.isfinite().all()
    direction = direction_of(grad)
    assert direction.isfinite().all() and singular_values(direction).max() < 1.35


def check_recovers(opt: Muon, p: nn.Parameter, start: Tensor, *, taken: bool) -> None:
    """What was taken has moved everything, what was skipped nothing; and the next step moves all of it, finitely."""
    buffer = opt.state[p]["momentum_buffer"]
    assert bool((p != start).all()) == taken and bool((buffer != 0).all()) == taken
    assert taken or (torch.equal(p, start) and buffer.count_nonzero() == 0)
    before = p.detach().clone()
    step(opt, [p], [randn(8, 11, seed=9)])
    assert (p != before).all() and p.isfinite().all() and opt.state[p]["momentum_buffer"].isfinite().all()


@pytest.mark.filterwarnings("ignore::meshmuon.NonFiniteGradientWarning")
@pytest.mark.parametrize("size", [1.6e38, 3.3e38])
@pytest.mark.parametrize("nesterov", [True, False])
def test_huge_gradients_that_change_sign_poison_the_momentum(nesterov: bool, size: float) -> None:
    """#3: g - buf overflows inside a lerp when both are near the largest fp32 number; every gradient is finite."""
    pattern = randn(8, 11).clamp(-1.0, 1.0)
    p = parameter(8, 11)
    opt = Muon([p], nesterov=nesterov)
    start = p.detach().clone()
    for sign in (1.0, 1.0, -1.0, 1.0):
        step(opt, [p], [pattern * (sign * size)])
    taken = size < torch.finfo(torch.float32).max / 2
    assert opt.metrics()["skipped_non_finite"] == (0.0 if taken else 4.0)
    check_recovers(opt, p, start, taken=taken)


@pytest.mark.filterwarnings("ignore::meshmuon.NonFiniteGradientWarning")
@pytest.mark.parametrize("nesterov", [True, False])
def test_large_gradients_overflow_a_narrow_momentum(nesterov: bool) -> None:
    """#3: a finite gradient must not become inf in a 16-bit buffer: that momentum would never recover."""
    p = parameter(8, 11)
    opt = Muon([p], nesterov=nesterov, state_dtype="float16")
    start = p.detach().clone()
    step(opt, [p], [randn(8, 11) * 1e8])
    assert opt.metrics()["skipped_non_finite"] == 1.0
    check_recovers(opt, p, start, taken=False)
    step(opt, [p], [randn(8, 11) * 1e4])
    assert opt.metrics()["skipped_non_finite"] == 1.0 and opt.state[p]["momentum_buffer"].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_double_gradients_overflow_in_a_narrower_computation(dtype: str) -> None:
    """#3: fp64 holds 1e40, fp32 does not: it must be scaled before it is narrowed."""
    direction = orthogonalize(randn(8, 11, dtype=torch.float64) * 1e40, dtype=dtype)
    assert direction.isfinite().all()
    assert singular_values(direction).max() < 1.35


@pytest.mark.parametrize("eps", [1e-30, 1e-7, 1.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_gradient_gives_nan(dtype: torch.dtype, form: str, eps: float) -> None:
    """#4: zero in, zero out, whatever eps is; only weight decay moves the matrix."""
    zero = torch.zeros(6, 9, dtype=dtype)
    assert torch.equal(direction_of(zero, eps=eps, orthogonalizer=Orthogonalizer(form=form)), zero)
    assert torch.equal(orthogonalize(zero, form=form), zero)
    p = parameter(6, 9)
    before = p.detach().clone()
    step(Muon([p], lr=0.5, weight_decay=0.2), [p], [torch.zeros(6, 9)])
    assert torch.equal(p, before * 0.9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_nan_element_makes_a_whole_matrix_nan(value: float) -> None:
    """#5 and #6: no check at all in five other implementations. Here the default is to check; "ignore" shows why."""
    for policy, finite in (("skip", True), ("ignore", False)):
        p = parameter(6, 9)
        opt = Muon([p], non_finite=policy)
        grad = randn(6, 9)
        grad[2, 3] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteGradientWarning)
            step(opt, [p], [grad])
        state = opt.state[p]["momentum_buffer"]
        assert bool(p.isfinite().all()) is finite and bool(state.isfinite().all()) is finite
        if not finite:
            assert p.isnan().sum() == p.numel()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8)])
def test_rank_deficient_gradients_diverge(shape: tuple[int, int], form: str, coefficients: str) -> None:
    """#7: of every rank from 0 to full: finite, bounded, nothing invented outside the gradient's own space."""
    for rank in range(min(shape) + 1):
        exact = randn(shape[0], rank, seed=1).double() @ randn(rank, shape[1], seed=2).double()
        found = direction_of(exact.float(), ns_coefficients=coefficients, orthogonalizer=Orthogonalizer(form=form))
        values = singular_values(found)
        assert found.isfinite().all() and values.max() <= 1.35
        assert (values[rank:] < 1e-3).all(), f"rank {rank} became larger"
        assert rank == 0 or (found.double() * exact).sum() > 0, "uphill"
        if form == "svd":
            assert (found.double() - svd_polar(exact)).norm() < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (1, 64)])
def test_single_rows_and_columns_go_wrong(shape: tuple[int, int], form: str) -> None:
    """#8: a vector has one singular value: the update is the vector, normalised, times that value's image, near 1."""
    grad = randn(*shape)
    found = direction_of(grad, orthogonalizer=Orthogonalizer(form=form))
    gain = float(found.norm())
    assert relative_error(found / gain, grad / grad.norm()) < 1e-5
    assert gain == pytest.approx(1.0, abs=0.13)
    if form != "svd":
        assert relative_error(found, plain_newton_schulz(grad, polar_express(5))) < 1e-5


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral", "unit_rms_norm", "none"])
def test_an_empty_matrix_divides_by_zero(shape: tuple[int, int], rule: str) -> None:
    """#9: (N, 0) raised ZeroDivisionError inside the lr rule. Empty is a no-op, alone or beside others."""
    assert scale_factor(shape, rule) == 0.0
    empty, other, alone = nn.Parameter(torch.zeros(shape)), parameter(4, 6), parameter(4, 6)
    both = Muon([empty, other], adjust_lr_fn=rule)
    single = Muon([alone], adjust_lr_fn=rule)
    for seed in range(2):
        step(both, [empty, other], [torch.zeros(shape), randn(4, 6, seed=seed)])
        step(single, [alone], [randn(4, 6, seed=seed)])
    assert torch.equal(other, alone) and both.state[empty]["momentum_buffer"].shape == shape
    assert str(both) and orthogonalize(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "unit_rms_norm"])
def test_convolutions_scaled_by_their_kernel_size(rule: str) -> None:
    """#10: the scale was taken from the kernel's height and width; it belongs to (out, in·k·k)."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 40, (2, 4), bias=False)
    flat = nn.Parameter(conv.weight.detach().reshape(40, 24).clone())
    before = flat.detach().clone()
    opts = [
        Muon(conv, lr=0.1, weight_decay=0.0, adjust_lr_fn=rule),
        Muon([flat], lr=0.1, weight_decay=0.0, adjust_lr_fn=rule),
    ]
    grad = randn(40, 3, 2, 4)
    step(opts[0], [conv.weight], [grad])
    step(opts[1], [flat], [grad.reshape(40, 24)])
    assert torch.equal(conv.weight.reshape(40, 24), flat)
    moved = (before - flat).detach()
    expected = 0.1 * scale_factor((40, 24), rule) * orthogonalize(torch.lerp(grad * 0.05, grad, 0.05).reshape(40, 24))
    by_kernel = expected * scale_factor((2, 4), rule) / scale_factor((40, 24), rule)
    assert relative_error(moved, expected) < 1e-4
    assert relative_error(moved, by_kernel) > 0.1, "the faulty scale must differ, or this shows nothing"

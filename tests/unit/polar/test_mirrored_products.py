"""Symmetric products by one triangle, as our kernels make them: what they lose, and that restarts keep it small.

The products are emulated in fp32 and rounded like a kernel's result, so this runs on any machine.
"""

import pytest
import torch

from meshmuon.polar import gram
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import can_fold, choose_restarts, folded_gram_newton_schulz, gram_newton_schulz
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.operations import REST_SCALE, TorchOperations, in_halves

M, N = 128, 512
LARGEST_SIGMA = 1.35
SETS = [("you", 5), ("keller", 5), ("keller", 8), ("polar_express", 5), ("polar_express", 6), ("polar_express", 10)]
# Spectra in which one direction is shrunk by a step while all others are stretched.
SPECTRA = [[1.0], [0.98] + [0.07] * 8, [0.6, 0.6, 0.53], [0.35] * 8]
SPECTRA += [[c, (1 - c * c) ** 0.5] for c in torch.linspace(0.72, 0.9999, 12).tolist()]


class MirroredProducts:
    def __init__(self, dtype):
        self.dtype = dtype

    def _stored(self, product):
        return (product.tril() + product.tril(-1).mT).to(self.dtype).float()

    def gram(self, x):
        return self._stored(x @ x.mT)

    def quadratic(self, r, triple):
        a, b, c = triple
        return self._stored(c * (r @ r) + b * r + a * torch.eye(r.shape[-1]))

    def symmetric_product(self, left, right):
        return self._stored(left @ right)

    def apply(self, factor, x, out=None):
        return (factor @ x).to(self.dtype).float()

    def gram_in_halves(self, x):
        wide = x @ x.mT
        return tuple(half.float() for half in in_halves(wide.tril() + wide.tril(-1).mT, self.dtype))

    def congruence(self, factor, halves):
        high, rest = halves
        product = factor @ high + self.apply(factor, rest) / REST_SCALE
        return self._stored(product.to(self.dtype).float() @ factor.mT)


class WithoutRest(MirroredProducts):
    def gram_in_halves(self, x):
        high, rest = super().gram_in_halves(x)
        return high, torch.zeros_like(rest)


class MirroredCongruence(MirroredProducts):
    def congruence(self, factor, halves):
        high, rest = halves
        return self._stored(self._stored(factor @ (high + rest / REST_SCALE)) @ factor.mT)


class MirroredEverywhere(MirroredProducts):
    def apply(self, factor, x, out=None):
        square = x.shape[-1] == x.shape[-2]
        return self._stored(factor @ x) if square else super().apply(factor, x)


def matrix(spectrum):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, M)).Q for size in (M, N))
    sigma = torch.tensor(spectrum)
    x = (left[:, : len(sigma)] * (sigma / sigma.norm())) @ right[:, : len(sigma)].mT
    x = x.bfloat16().float()
    return (x / x.norm())[None], left[:, : len(sigma)] @ right[:, : len(sigma)].mT


def largest_sigma(coefficients, steps, dtype, *, mirrored):
    schedule = resolve_schedule(coefficients, steps)
    restarts = choose_restarts(schedule, dtype, mirrored=mirrored)
    found = []
    for spectrum in SPECTRA:
        x, _ = matrix(spectrum)
        result = gram_newton_schulz(x, schedule=schedule, restarts=restarts, operations=MirroredProducts(dtype))
        found.append(float(torch.linalg.matrix_norm(result[0], 2)))
    return max(found)


def folded(x, schedule, operations=None):
    restarts = choose_restarts(schedule, torch.float16, mirrored=True)
    operations = operations or MirroredProducts(torch.float16)
    return folded_gram_newton_schulz(x, schedule=schedule, restarts=restarts, operations=operations)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("coefficients", "steps"), SETS)
def test_no_spectrum_explodes(coefficients, steps, dtype):
    assert largest_sigma(coefficients, steps, dtype, mirrored=True) <= LARGEST_SIGMA


def test_the_rule_for_plain_products_would_not_do():
    """Found on an H200: a matrix of rank one grew to 46."""
    assert largest_sigma("you", 5, torch.float16, mirrored=False) > LARGEST_SIGMA


def test_the_sets_of_the_default_are_not_made_slower():
    for coefficients in ("polar_express", "keller"):
        schedule = resolve_schedule(coefficients, 5)
        plain, mirrored = (choose_restarts(schedule, torch.float16, mirrored=m) for m in (False, True))
        assert plain == mirrored
    assert gram.choose_restarts(resolve_schedule("you", 5), torch.float16, mirrored=True) == (2,)


FOLDED_SETS = [("you", 5), ("polar_express", 5), ("polar_express", 4), ("polar_express", 3)]
SLOW_DECAY = [0.95**i for i in range(M)]
MORE_SPECTRA = [*SPECTRA, SLOW_DECAY, [1 / (i + 1) for i in range(M)], [1.0] * 64 + [1e-3] * 64, [1.0] * 127 + [1e-4]]


@pytest.mark.parametrize(("coefficients", "steps"), FOLDED_SETS)
def test_a_folded_restart_explodes_on_no_spectrum(coefficients, steps):
    schedule = resolve_schedule(coefficients, steps)
    for spectrum in MORE_SPECTRA:
        assert float(torch.linalg.matrix_norm(folded(matrix(spectrum)[0], schedule)[0], 2)) <= LARGEST_SIGMA


@pytest.mark.parametrize(("coefficients", "steps"), FOLDED_SETS)
@pytest.mark.parametrize("spectrum", [SLOW_DECAY, [1.0] * M, SLOW_DECAY[:16]], ids=["decay", "flat", "low rank"])
def test_a_folded_restart_is_as_near_to_the_exact_factor(coefficients, steps, spectrum):
    schedule = resolve_schedule(coefficients, steps)
    x, exact = matrix(spectrum)
    restarts = choose_restarts(schedule, torch.float16, mirrored=True)
    apart = gram_newton_schulz(x, schedule=schedule, restarts=restarts, operations=MirroredProducts(torch.float16))
    distances = [float((result[0] - exact).norm() / exact.norm()) for result in (folded(x, schedule), apart)]
    assert distances[0] <= distances[1] + 5e-3


@pytest.mark.parametrize(("coefficients", "steps"), FOLDED_SETS)
def test_a_folded_restart_follows_the_polynomial_on_every_spectrum(coefficients, steps):
    """As closely as a restart on x, or as the bf16 that others train with: rounding q is what low ranks suffer from."""
    schedule = resolve_schedule(coefficients, steps)
    restarts = choose_restarts(schedule, torch.float16, mirrored=True)
    for spectrum in MORE_SPECTRA:
        x, _ = matrix(spectrum)
        ideal = newton_schulz(x.double(), schedule=schedule, operations=TorchOperations())
        apart = gram_newton_schulz(x, schedule=schedule, restarts=restarts, operations=MirroredProducts(torch.float16))
        bf16 = newton_schulz(x, schedule=schedule, operations=MirroredProducts(torch.bfloat16))
        off, *others = (float((y - ideal).norm() / ideal.norm()) for y in (folded(x, schedule), apart, bf16))
        assert off <= 1.5 * max(others)


@pytest.mark.parametrize("sabotage", [WithoutRest, MirroredCongruence, MirroredEverywhere])
def test_each_precaution_of_a_folded_restart_is_needed(sabotage):
    schedule = resolve_schedule("polar_express", 5)
    x, exact = matrix(SLOW_DECAY[:16])
    good, bad = (folded(x, schedule, way(torch.float16))[0] for way in (MirroredProducts, sabotage))
    assert float((bad - exact).norm()) > 1.2 * float((good - exact).norm())


def test_what_may_be_folded():
    schedule = resolve_schedule("polar_express", 5)
    assert can_fold(schedule, (2,), torch.float16)
    assert not can_fold(schedule, (), torch.float16)
    assert not can_fold(schedule, (2, 4), torch.float16)
    assert not can_fold(schedule, (3,), torch.float16)
    assert not can_fold([(60.0, -1.0, 0.1)] * 3, (2,), torch.float16)  # would lift what halves leave above rounding
    assert not can_fold(schedule, (2,), torch.bfloat16)
    assert not can_fold(resolve_schedule("keller", 4), (2,), torch.bfloat16)
    assert not can_fold(schedule, (2,), torch.float32)

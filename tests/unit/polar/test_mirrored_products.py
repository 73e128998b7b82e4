"""Symmetric products by one triangle, as our kernels make them: what they lose, and that restarts keep it small.

The products are emulated in fp32 and rounded like a kernel's result, so this runs on any machine.
"""

import pytest
import torch

from meshmuon.polar import gram
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import choose_restarts, gram_newton_schulz

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


def largest_sigma(coefficients, steps, dtype, *, mirrored):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, M)).Q for size in (M, N))
    schedule = resolve_schedule(coefficients, steps)
    restarts = choose_restarts(schedule, dtype, mirrored=mirrored)
    found = []
    for spectrum in SPECTRA:
        sigma = torch.tensor(spectrum)
        x = (left[:, : len(sigma)] * (sigma / sigma.norm())) @ right[:, : len(sigma)].mT
        x = x.bfloat16().float()
        result = gram_newton_schulz(
            (x / x.norm())[None], schedule=schedule, restarts=restarts, operations=MirroredProducts(dtype)
        )
        found.append(float(torch.linalg.matrix_norm(result[0], 2)))
    return max(found)


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

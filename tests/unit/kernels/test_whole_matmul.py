"""Products in fp32 that are no halves of symmetric ones: right at every size, and the same bits in every batch."""

import importlib
from unittest import mock

import pytest
import torch

from meshmuon.kernels import self_check
from meshmuon.kernels import whole_tiles as tiles
from meshmuon.kernels.dispatch import Dispatch
from meshmuon.kernels.whole_matmul import whole_matmul
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.normalise import normalised
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.orthogonalize import orthogonalize_stack
from meshmuon.polar.recipe import Recipe
from meshmuon.polar.ways import Way

module = importlib.import_module("meshmuon.kernels.whole_matmul")  # not the function of that name
BOUND = 2e-6
SCHEDULE = resolve_schedule("polar_express", 5)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (48, 32, 80), (64, 32, 64), (80, 112, 144)])
def test_every_size(batch, m, k, n):
    a, b = random(batch, m, k), random(batch, k, n, seed=1)
    assert off(whole_matmul(a, b), a.double() @ b.double()) < BOUND


def test_all_that_can_be_added():
    a, b, c = random(2, 80, 48), random(2, 48, 80, seed=1), random(2, 80, 80, seed=2)
    expected = 1.5 * a.double() @ b.double() - 2.5 * c.double() + 3.0 * torch.eye(80, dtype=torch.float64)
    out = torch.full_like(c, torch.nan)
    assert whole_matmul(a, b, alpha=1.5, beta=-2.5, c=c, gamma=3.0, out=out) is out
    assert off(out, expected) < BOUND


def test_strides_of_any_kind():
    x = random(3, 48, 97)
    for left in (x[:, :, 1:], x[:, ::3, :96], x[:, :, :96].mT, x[:1, :, :96].expand(3, 48, 96)):
        assert off(whole_matmul(left, left.mT), left.double() @ left.double().mT) < BOUND
        assert (
            off(whole_matmul(left, left.mT, beta=2.0, c=(left @ left.mT).mT), 3 * left.double() @ left.double().mT)
            < BOUND
        )


class Compiled:
    """Stands for Triton and what it compiles; counts who was asked."""

    def __init__(self):
        self.compiled = 0

    def __getitem__(self, grid):
        def compile_and_launch(*_, **__):
            self.compiled += 1
            return self

        return compile_and_launch


def test_what_was_compiled_is_kept_only_once_it_has_been_compared():
    kernel, direct = Compiled(), []
    x, unaligned = torch.zeros(1, 16, 16), torch.zeros(257)[1:].view(1, 16, 16)
    with (
        mock.patch.object(tiles, "whole_kernel", kernel),
        mock.patch.object(module, "is_interpreted", return_value=False),
        mock.patch.object(module, "run", lambda *arguments: direct.append(arguments)),
        mock.patch.dict(module._compiled, clear=True),
    ):
        self_check._thread.checking = True
        try:
            whole_matmul(x, x)
            whole_matmul(x, x)
        finally:
            self_check._thread.checking = False
        assert (kernel.compiled, direct) == (2, []), "it was on trial"
        whole_matmul(unaligned, x)
        whole_matmul(x, x)
        assert (kernel.compiled, direct) == (4, []), "for rows that are not aligned other code is compiled"
        whole_matmul(x, x)
        assert (kernel.compiled, len(direct)) == (4, 1)
        whole_matmul(x, unaligned)
        whole_matmul(x, x, c=x)
        assert (kernel.compiled, len(direct)) == (6, 1), "and where something is added"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(1, 16, 16), torch.zeros(1, 16, 24)),
        (torch.zeros(1, 8, 16), torch.zeros(1, 16, 16)),
        (torch.zeros(1, 16, 16).half(), torch.zeros(1, 16, 16).half()),
    ],
)
def test_what_the_kernel_would_read_past_is_refused(a, b):
    with pytest.raises(ValueError, match=r"whole_matmul: .*Pass fp32, padded to multiples of 16"):
        whole_matmul(a, b)


def test_nothing_to_multiply():
    assert whole_matmul(random(0, 16, 16), random(0, 16, 32)).shape == (0, 16, 32)


def recipe(way):
    return Recipe(SCHEDULE, way, torch.float32, torch.float32, 1e-7, Dispatch("whole", True, "fp32"), invariant=True)


@pytest.mark.parametrize("way", [Way("standard"), Way("gram"), Way("gram", (2,))], ids=str)
def test_a_polar_factor_by_them(way):
    x = random(3, 24, 72)
    found = orthogonalize_stack(x, recipe(way))
    ideal = newton_schulz(normalised(x.double(), eps=1e-7), schedule=SCHEDULE, operations=TorchOperations())
    assert off(found, ideal) < 1e-5
    for i in range(3):
        assert torch.equal(orthogonalize_stack(x[i : i + 1], recipe(way))[0], found[i])

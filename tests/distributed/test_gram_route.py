"""The sharded-Gram route: only m×m matrices travel, and the result is that of the owner route within its tolerance."""

import pytest
import torch

from meshmuon import Orthogonalizer, orthogonalize
from meshmuon.plan.gram_route import grams_sent
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe
from meshmuon.runtime.sharded import check_wire
from tests.distributed import gram_scenarios as scenarios

KINDS = ["gaussian", "power law", "low rank", "tiny"]


def distance(got, expected, start):
    """Relative to how far the parameters went."""
    return float((got - expected).norm() / (expected - start).norm())


def start_of(name):
    return scenarios.tensor_for("parameter", name, scenarios.SHAPES[name][0], torch.float32)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_factors_are_close_to_the_owner_route(pool, ranks, kind):
    (expected, _, _, _), *_ = pool(ranks).run(scenarios.train, "owner", kind, "float32")
    answers = pool(ranks).run(scenarios.train, "gram", kind, "float32")
    for got, text, sent, planned in answers:
        assert "Gram matrices travel" in text
        assert sent == planned, "bytes as the plan says"
        for name, value in got.items():
            assert distance(value, expected[name], start_of(name)) < 2e-3, name


@pytest.mark.parametrize("kind", ["gaussian", "power law", "low rank"])
def test_half_precision_factors_are_no_worse_than_one_device(pool, kind):
    """Against the fp64 iterate: not further than the one-device Gram form in the same dtype, plus 2e-3."""
    (got, _, _, _), *_ = pool(2).run(scenarios.train, "gram", kind, "float16", 1)
    for name, (shape, _) in scenarios.SHAPES.items():
        grad = scenarios.spectrum(kind, name, 0, shape)
        rounded = grad.to(torch.bfloat16).float()
        exact = orthogonalize(rounded.double(), form="standard", dtype="float64").float()
        alone = orthogonalize(rounded, form="gram", dtype="float16")
        scale = -0.1 * 0.2 * max(shape) ** 0.5
        ours = (got[name] - start_of(name)) / scale
        bound = float((alone - exact).norm() / exact.norm()) + 2e-3
        assert float((ours - exact).norm() / exact.norm()) <= bound, name


def test_fewer_bytes_where_it_is_meant_for():
    """16×4096 on two ranks: a Gram matrix is a hundredth of the matrix."""
    recipe = choose_recipe(
        16,
        4096,
        schedule=resolve_schedule("polar_express", 5),
        orthogonalizer=Orthogonalizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        eps=1e-7,
    ).in_gram_space()
    sent = sum(grams_sent((16, 4096), [0], member, ranks=2, recipe=recipe) for member in range(2))
    assert sent < 0.01 * 2 * 16 * 4096 * 4 / 2


def test_a_matrix_cut_along_its_short_side_is_refused(pool):
    for error in pool(2).run(scenarios.refused):
        assert "'w'" in error and "short side" in error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gram_matrix_in_16_bits_is_refused_on_the_wire(dtype):
    with pytest.raises(TypeError, match="Gram matrices"):
        check_wire(torch.zeros(3, dtype=dtype))
    check_wire(torch.zeros(3))

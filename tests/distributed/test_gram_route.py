"""The sharded-Gram route: only m×m matrices travel, and the result is that of the owner route within its tolerance."""

import pytest
import torch

from meshmuon import Orthogonalizer, orthogonalize
from meshmuon.plan.gram_route import grams_sent
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe
from meshmuon.polar.sharded_gram import find_factors
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


def test_what_cannot_take_the_route_is_refused_with_the_reason(pool):
    for said in pool(2).run(scenarios.refused):
        assert len(said) == 3
        for reason, error in said.items():
            assert "'w'" in error and reason in error and "leave the route out" in error


def test_restarts_that_were_asked_for_are_taken(pool):
    for (chosen, auto), (wished, result) in pool(2).run(scenarios.wished_restarts):
        assert (chosen, wished) == ((), (1, 3))
        assert distance(result, auto, torch.ones(16, 96)) < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_factors_of_more_than_16_bits_are_found_in_fp64(dtype):
    """With float64 asked for they were iterated on in fp32, and further from exact than with float32."""
    grad = scenarios.spectrum("power law", "w", 0, (24, 200))
    recipe = choose_recipe(
        24,
        200,
        schedule=resolve_schedule("polar_express", 5),
        orthogonalizer=Orthogonalizer(dtype=dtype),
        device=torch.device("cpu"),
        dtype=torch.float32,
        eps=1e-7,
    ).in_gram_space()
    wide = grad.double()[None]
    factors, inverse = find_factors(wide @ wide.mT, recipe)
    direction = wide * inverse.double()[:, None, None]
    for factor in factors:
        direction = factor.double() @ direction
    exact = orthogonalize(grad.double(), form="standard", dtype="float64")
    assert float((direction[0] - exact).norm() / exact.norm()) < {"float32": 1e-4, "float64": 1e-6}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gram_matrix_in_16_bits_is_refused_on_the_wire(dtype):
    with pytest.raises(TypeError, match="Gram matrices"):
        check_wire(torch.zeros(3, dtype=dtype))
    check_wire(torch.zeros(3))

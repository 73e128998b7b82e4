"""Polar factors from Gram matrices that ranks add up: near the iteration in fp64, however the matrix is cut."""

import pytest
import torch

from meshmuon.config import Orthogonalizer
from meshmuon.polar import sharded_gram
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe


def power_law(m, n, condition):
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64))
    return (u * condition ** -torch.linspace(0, 1, m, dtype=torch.float64)) @ v.mT


def iterated(x, schedule):
    x = x / x.norm()
    for a, b, c in schedule:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def distance(x, *, steps, dtype, cuts):
    """How far the polar factor of a matrix in column shards is from the same iteration in fp64."""
    schedule = resolve_schedule("polar_express", steps)
    recipe = choose_recipe(
        *x.shape,
        schedule=schedule,
        orthogonalizer=Orthogonalizer(dtype=dtype),
        device=torch.device("cpu"),
        dtype=torch.float32,
        eps=1e-7,
    ).in_gram_space()
    shards = [part.float()[None] for part in x.split(cuts, dim=1)]
    total, exponent = sharded_gram.added_grams(*zip(*map(sharded_gram.local_gram, shards), strict=True))
    factors, inverse = sharded_gram.find_factors(total, recipe)
    parts = [sharded_gram.apply_factors(s, factors, inverse=inverse, exponent=exponent)[0] for s in shards]
    exact = iterated(x, schedule)
    return ((torch.cat(parts, dim=1).double() - exact).norm() / exact.norm()).item()


CUTS = [[256], [100, 0, 156], [1] * 256]


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "one rank with nothing", "a column each"])
@pytest.mark.parametrize(
    ("dtype", "steps", "within"), [("float32", 5, 2e-4), ("float16", 5, 5e-3), ("float16", 8, 2e-2)]
)
def test_near_the_exact_iteration_for_every_cut(cuts, dtype, steps, within):
    assert distance(power_law(64, 256, 1e7), steps=steps, dtype=dtype, cuts=cuts) < within


def test_one_triangle_of_a_factor_would_not_do(monkeypatch):
    """Why `find_factors` takes the mean of q and its transpose before one triangle of it travels."""
    factor = sharded_gram.factor

    def mirrored(*arguments):
        q = factor(*arguments)
        return q.tril() + q.tril(-1).mT

    monkeypatch.setattr(sharded_gram, "factor", mirrored)
    assert distance(power_law(64, 256, 1e7), steps=8, dtype="float16", cuts=[256]) > 4e-2

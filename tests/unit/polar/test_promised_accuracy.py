"""What a GPU is promised to compute, emulated: 16 bits within 0.01 of fp32, and the Gram form within 5e-3 of the other.

`python -m benchmarks.accuracy` shows it on a GPU, up to 8192 rows.
"""

from functools import cache

import pytest
import torch
from tests.unit.polar.test_mirrored_products import MirroredProducts

from meshmuon.config import Orthogonalizer
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe
from meshmuon.polar.ways import Way, choose_way, evaluate

SETS = ("polar_express", "you", "keller")
EXACTER = MirroredProducts(torch.float32)
ROUNDED = MirroredProducts(torch.float16)


def normed(x, dtype=torch.float16):
    return (x / x.norm()).to(dtype).float()[None]


@cache
def low_rank(m, n):
    """A matrix of rank m/8 whose singular values fall as they would to a thousandth, and its polar factor."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(side, m // 8, generator=generator, dtype=torch.float64)).Q for side in (m, n)
    )
    sigma = torch.arange(1, m // 8 + 1, dtype=torch.float64) ** -(torch.tensor(1e3).log() / torch.tensor(m).log())
    return (left * sigma) @ right.mT, left @ right.mT


def further_than_fp32(name, shape, way=None):
    """How much further from the polar factor the way of a Hopper GPU ends in fp16 than the polynomial in fp32."""
    x, exact = low_rank(*shape)
    schedule = resolve_schedule(name, 5)
    settings = {"schedule": schedule, "wishes": Orthogonalizer(), "compute": torch.float16}
    way = way or choose_way(*shape, **settings, symmetric=True, programs=True)
    found = evaluate(normed(x), way._replace(paired=False), schedule=schedule, operations=ROUNDED)
    ideal = evaluate(normed(x, torch.float32), Way("standard"), schedule=schedule, operations=EXACTER)
    distances = [float((y[0].double() - exact).norm() / exact.norm()) for y in (found, ideal)]
    return distances[0] - distances[1]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(256, 256), (256, 320), (256, 1024), (512, 2048)])
def test_in_fp16_low_ranks_are_as_near_as_in_fp32(shape, name):
    assert further_than_fp32(name, shape) <= 0.01


def test_so_are_the_smallest_that_fold():
    assert further_than_fp32("you", (768, 2304)) <= 0.01


def test_folded_smaller_ones_would_not_be():
    folded = Way("gram", (2,), folded=True)
    assert further_than_fp32("you", (256, 1024), folded) > 0.015
    assert further_than_fp32("you", (512, 2048), folded) > 0.01


def test_smaller_ones_would_not_be_in_fp16_and_are_in_fp32():
    assert further_than_fp32("you", (64, 256)) > 0.015
    assert further_than_fp32("you", (128, 128)) > 0.01
    for shape, dtype in (((64, 256), torch.float32), ((240, 4096), torch.float32), ((256, 256), torch.float16)):
        recipe = choose_recipe(
            *shape,
            schedule=resolve_schedule("you", 5),
            orthogonalizer=Orthogonalizer(),
            device=torch.device("cuda"),
            dtype=torch.float32,
            eps=1e-7,
            architecture="hopper",
        )
        assert recipe.dtype == dtype


def between_forms(name, shape, way=None):
    x = normed(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    schedule = resolve_schedule(name, 5)
    settings = {"schedule": schedule, "wishes": Orthogonalizer(form="gram"), "compute": torch.float16}
    way = way or choose_way(*shape, **settings, symmetric=True, programs=True)
    gram, standard = (
        evaluate(x, each._replace(paired=False), schedule=schedule, operations=ROUNDED)[0]
        for each in (way, Way("standard"))
    )
    return float((gram - standard).norm() / standard.norm())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", [(64, 64), (128, 128), (256, 256), (256, 288), (512, 512)])
def test_both_forms_agree_on_gaussians_in_fp16(shape, name):
    assert between_forms(name, shape) <= 5e-3


def test_with_one_restart_squares_would_not():
    assert between_forms("polar_express", (256, 256), Way("gram", (2,), whole=True)) > 5e-3

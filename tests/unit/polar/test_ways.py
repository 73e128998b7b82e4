"""Which way a shape takes through its polynomial, and what it costs."""

import pytest
import torch

from meshmuon.config import Orthogonalizer
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.ways import Way, choose_way, count_flops

SCHEDULE = resolve_schedule("polar_express", 5)


def choose(m, n, *, schedule=SCHEDULE, symmetric=True, programs=True, compute=torch.float16, **wishes):
    return choose_way(
        m,
        n,
        schedule=schedule,
        wishes=Orthogonalizer(**wishes),
        compute=compute,
        symmetric=symmetric,
        programs=programs,
    )


@pytest.mark.parametrize(
    ("m", "n", "way"),
    [
        (768, 768, Way("standard")),
        (768, 1280, Way("gram", (2,), whole=True)),
        (1008, 1008, Way("standard")),
        (1008, 2016, Way("gram", (2,), whole=True)),
        (1024, 2048, Way("gram", (2,), whole=True, paired=True)),
        (1264, 2048, Way("gram", (2,), whole=True, paired=True)),
        (1280, 2048, Way("gram", (2,), paired=True)),
        (512, 2048, Way("gram", (2,), whole=True)),
        (752, 3072, Way("gram", (2,), whole=True)),
        (768, 3072, Way("gram", (2,), folded=True)),
        (768, 960, Way("gram", (2, 3))),
        (1024, 1024, Way("gram", (2, 3), paired=True)),
        (1408, 2048, Way("gram", (2,), paired=True)),
        (2048, 2048, Way("gram", (2, 3), paired=True)),
        (2048, 8192, Way("gram", (2,), folded=True, paired=True)),
    ],
)
def test_where_all_products_are_one_program(m, n, way):
    assert choose(m, n) == way


@pytest.mark.parametrize(
    ("m", "n", "way"),
    [
        (704, 1024, Way("gram", (2,), whole=True)),
        (1408, 2048, Way("gram", (2,))),
        (2048, 2048, Way("standard")),
        (2048, 8192, Way("gram", (2,), folded=True)),
    ],
)
def test_where_they_are_not(m, n, way):
    assert choose(m, n, programs=False) == way


def test_nothing_is_mirrored_where_torch_multiplies():
    assert choose(704, 2048, symmetric=False, programs=False) == Way("gram", (2,))


def test_a_restart_more_only_where_the_last_two_steps_are_known():
    other = (*SCHEDULE[:4], SCHEDULE[2])  # its last two are no pair, its first two are
    assert choose(2048, 2048, schedule=other) == Way("gram", (2,), paired=True)


def test_other_coefficients_have_no_pairs():
    assert choose(1408, 2048, schedule=resolve_schedule("you", 5)) == Way("gram", (2,))
    assert choose(2048, 2048, schedule=resolve_schedule("keller", 5)) == Way("standard")


def test_what_is_asked_for_is_done():
    assert choose(2048, 2048, form="standard") == Way("standard")
    assert choose(768, 768, form="svd") == Way("svd")
    assert choose(2048, 2048, restarts=(2,)) == Way("gram", (2,), paired=True), "no restart of ours beside theirs"
    assert choose(64, 64, form="gram", programs=False) == Way("gram", (2, 3)), "cheaper than a whole product"
    assert choose(64, 64, form="gram", restarts=(2,)) == Way("gram", (2,), whole=True)


@pytest.mark.parametrize("way", [Way("gram", (2,)), Way("gram", (2, 3)), Way("gram", (2,), folded=True)])
def test_a_pair_saves_a_triangle(way):
    m, n = 1408, 2048
    saved = count_flops(m, n, way, schedule=SCHEDULE, symmetric=True) - count_flops(
        m, n, way._replace(paired=True), schedule=SCHEDULE, symmetric=True
    )
    assert saved == 2 * m**3


def test_a_whole_product_costs_what_a_triangle_saved():
    m, n = 768, 1280
    cost = {
        whole: count_flops(m, n, Way("gram", (2,), whole=whole), schedule=SCHEDULE, symmetric=True)
        for whole in (False, True)
    }
    assert cost[True] - cost[False] == m**3

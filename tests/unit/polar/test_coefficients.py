"""The coefficient sets: generated as published, safe by check, and refused when they are not."""

import math

import pytest

from meshmuon import polar_express
from meshmuon.polar import coefficients
from meshmuon.polar.coefficients import (
    _LOWER_FOR_FEW_STEPS,
    KELLER,
    YOU,
    check_schedule,
    evaluate,
    resolve_schedule,
)

# Amsel et al., arXiv 2505.16932, the list printed in the paper for l = 1e-3.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
]


def composed(schedule, x):
    for triple in schedule:
        x = evaluate(triple, x)
    return x


def largest(schedule):
    return max(composed(schedule, i * 1e-4) for i in range(1, 10501))


def test_generator_reproduces_the_published_list():
    for ours, theirs in zip(polar_express(6, safety=1.0), PUBLISHED, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def test_safety_is_an_evaluation_at_x_over_safety_on_every_step():
    plain, safe = polar_express(5, safety=1.0), polar_express(5, safety=1.05)
    for p, s in zip(plain, safe, strict=True):
        assert evaluate(s, 0.7) == pytest.approx(evaluate(p, 0.7 / 1.05), rel=1e-12)


def test_ten_steps_give_the_exact_polar_factor():
    schedule = polar_express(10)
    for sigma in (1e-3, 1e-2, 0.1, 0.5, 1.0, 1.05):
        assert composed(schedule, sigma) == pytest.approx(1.0, abs=1e-7)


def test_five_safe_steps_peak_at_1_124():
    assert largest(polar_express(5)) == pytest.approx(1.124, abs=1e-3)


@pytest.mark.parametrize("steps", range(1, 21))
@pytest.mark.parametrize("name", ["polar_express", "keller"])
def test_named_sets_are_safe_for_any_number_of_steps(name, steps):
    schedule = resolve_schedule(name, steps)
    assert len(schedule) == steps
    check_schedule(schedule)


def test_a_named_set_is_taken_without_the_check(monkeypatch):
    aol = ((4.0098, -7.0585, 2.4635),) * 5
    monkeypatch.setattr(coefficients, "YOU", aol)
    monkeypatch.setattr(coefficients, "_named", coefficients._named.__wrapped__)
    with pytest.raises(ValueError, match="unsafe"):
        resolve_schedule("you", 5)


@pytest.mark.parametrize(("steps", "lower"), _LOWER_FOR_FEW_STEPS.items())
def test_the_lower_ends_for_few_steps_are_the_smallest_safe_ones(steps, lower):
    assert largest(polar_express(steps, lower=lower)) <= 1.35
    assert largest(polar_express(steps, lower=lower * 0.9)) > 1.35


@pytest.mark.parametrize("safety", [1.0, 1.02, 1.04])
def test_polar_express_with_less_safety_is_refused(safety):
    with pytest.raises(ValueError, match="unsafe"):
        check_schedule(polar_express(5, safety=safety))


def test_a_set_that_flips_the_sign_of_a_rank_one_gradient_is_refused():
    aol = ((4.0098, -7.0585, 2.4635),)
    assert composed(aol, 1.0) < 0
    with pytest.raises(ValueError, match="flip its sign"):
        check_schedule(aol)


def test_a_diverging_set_is_refused():
    with pytest.raises(ValueError, match=r"above 1\.35"):
        check_schedule(((10.0, 10.0, 10.0),) * 5)
    with pytest.raises(ValueError, match="fp16"):
        check_schedule(((1e6, 0.0, 0.0), (1e-6, 0.0, 0.0)))


def test_one_triple_is_repeated_and_lists_are_taken_as_they_are():
    assert resolve_schedule(KELLER, 3) == (KELLER,) * 3
    assert resolve_schedule([list(triple) for triple in YOU], 5) == YOU


@pytest.mark.parametrize(
    ("coefficients", "steps", "error"),
    [
        ("quintic", 5, ValueError),
        ("you", 4, ValueError),
        (KELLER[:2], 5, ValueError),
        ([KELLER] * 4, 5, ValueError),
        ([KELLER] * 4 + [(1.0, math.nan, 0.0)], 5, ValueError),
        ([KELLER] * 4 + ["abc"], 5, ValueError),
        (None, 5, TypeError),
        (7, 5, TypeError),
    ],
)
def test_malformed_coefficients_are_refused(coefficients, steps, error):
    with pytest.raises(error, match=r"ns_coefficients|ns_steps"):
        resolve_schedule(coefficients, steps)

"""How factors for two steps at once are found (benchmarks/find_pairs.py)."""

import pytest
import torch
from benchmarks.find_pairs import noise, scaled, shifted, solve, two_steps, values

from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.pairs import find_pair

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch.func itself
SCHEDULE = resolve_schedule("polar_express", 5)
CASES = [(SCHEDULE[:2], 1.02, 392.0), (SCHEDULE[3:], 3.6, 59.1)]  # with the noise that the note in pairs.py tells


def in_numbers(steps):
    """The factors that are shipped, one after the other."""
    terms = [number for one in find_pair(steps) for number in (one.product, *one.added, one.identity)]
    return torch.tensor(terms, dtype=torch.float64)


def points(most, count=2001):
    return torch.linspace(0.0, most, count, dtype=torch.float64)


@pytest.mark.parametrize(("steps", "most", "told"), CASES)
def test_what_is_shipped_is_exact_and_as_noisy_as_it_is_said_to_be(steps, most, told):
    r, numbers = points(most), in_numbers(steps)
    assert torch.allclose(values(numbers, r)[-1], two_steps(r, steps), rtol=0.0, atol=1e-12)
    assert noise(numbers, r) == pytest.approx(told, rel=2e-3)


@pytest.mark.parametrize(("steps", "most", "told"), CASES)
def test_shifted_and_scaled_it_is_the_same_polynomial(steps, most, told):
    r, numbers = points(most), in_numbers(steps)
    other = shifted(numbers, 0.3)
    assert torch.allclose(values(other, r)[-1], values(numbers, r)[-1], rtol=0.0, atol=1e-11)
    assert noise(other, r) > noise(numbers, r), "the shift that is shipped is the best one"
    back = scaled(other, r)
    assert torch.allclose(values(back, r)[-1], values(numbers, r)[-1], rtol=0.0, atol=1e-11)
    assert all(float(x.abs().max()) == pytest.approx(1.0) for x in values(back, r)[:-1])
    assert noise(back, r) == pytest.approx(noise(other, r))


@pytest.mark.parametrize(("steps", "most", "told"), CASES)
def test_a_start_nearby_is_solved_and_one_that_is_stuck_is_not_given(steps, most, told):
    r = points(most, 48)
    wanted = two_steps(r, steps)
    scale = wanted.abs().clamp_min(0.02 * float(wanted.abs().max()))
    generator = torch.Generator().manual_seed(0)
    near = in_numbers(steps) * (1 + 1e-3 * torch.randn(18, generator=generator, dtype=torch.float64))
    found = solve(torch.stack([near, torch.zeros_like(near)]), r, wanted, scale, steps=60)
    assert len(found) == 1
    assert torch.allclose(values(found[0], r)[-1], wanted, rtol=0.0, atol=1e-8)
    assert not torch.allclose(values(near, r)[-1], wanted, rtol=0.0, atol=1e-8)

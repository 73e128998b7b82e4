"""2,000 random argument sets: the constructor takes one and the optimizer works, or it is a ValueError or TypeError.

Nothing may be found out later: an accepted optimizer is printed, stepped, saved and loaded here.
"""

import copy
import io
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.properties.constructor_calls import Call, calls, random_parameter
from torch import Tensor, nn

from meshmuon import Muon, NonFiniteGradientWarning

EXAMPLES = 2_000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are tiny: a second thread only waits, and ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_of(opt: Muon) -> Iterator[Tensor]:
    return (p for group in opt.param_groups for p in group["params"])


def take_step(opt: Muon) -> None:
    """Gradients of either sign and a size around 1: Adam in fp16 cannot divide by the square root of a 1e-8."""
    for p in tensors_of(opt):
        p.grad = torch.where(torch.rand(p.shape) < 0.5, -1.0, 1.0).mul(0.5 + torch.rand(p.shape)).to(p.dtype)
    opt.step()


def check_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, entry in expected["state"].items():
        assert entry.keys() == found["state"][key].keys()
        for name, value in entry.items():
            assert value.dtype == found["state"][key][name].dtype and torch.equal(value, found["state"][key][name])


def check_usable(opt: Muon) -> None:
    """Print, two steps, and a round trip through a file; everything stays finite, and the routes are all told."""
    assert "Parameter Group 0" in str(opt)
    take_step(opt)
    take_step(opt)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    take_step(opt)
    opt.load_state_dict(saved)
    check_same_state(opt.state_dict(), saved)
    assert all(p.isfinite().all() for p in tensors_of(opt))
    assert all(value.isfinite().all() for p in tensors_of(opt) for value in opt.state[p].values())
    assert len(opt.plan.parameters) == sum(1 for _ in tensors_of(opt))


def test_any_argument_set_is_refused_at_once_or_works() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(calls())
    def check(call: Call) -> None:
        torch.manual_seed(0)
        seen["all"] += 1
        params = call.make_params()
        try:
            opt = Muon(params, **call.arguments)
        except (ValueError, TypeError):
            seen["refused"] += 1
            return
        seen["accepted"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", NonFiniteGradientWarning)
            check_usable(opt)

    check()
    assert seen["all"] >= EXAMPLES
    assert seen["accepted"] >= 0.2 * seen["all"], seen
    assert seen["refused"] >= 0.2 * seen["all"], seen


def test_the_check_notices_an_optimizer_that_does_not_work() -> None:
    """The sabotage: NaN in a parameter, state of another dtype after a load, and a value found out at the step."""
    p = random_parameter((4, 6))
    check_usable(Muon([p]))
    with pytest.raises(AssertionError):
        check_usable(Muon([nn.Parameter(torch.full((4, 6), float("nan")))]))
    opt = Muon([p])
    narrowed = copy.deepcopy(opt.state_dict())
    narrowed["state"][0]["momentum_buffer"] = narrowed["state"][0]["momentum_buffer"].bfloat16()
    with pytest.raises(AssertionError):
        check_same_state(narrowed, opt.state_dict())
    opt.param_groups[0]["lr"] = "0.1"
    with pytest.raises(TypeError):
        check_usable(opt)

"""Groups edited after construction: whatever the plan depends on makes a new plan, the rest is read at each step."""

from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import parameter, randn, step
from torch import nn

from meshmuon import Muon, View


def trained(**arguments: Any) -> tuple[nn.Parameter, Muon]:
    p = parameter(12, 6)
    opt = Muon([("w", p)], lr=0.1, **arguments)
    step(opt, [p], [randn(12, 6)])
    return p, opt


def check_trains_as_if_built_with(edit: dict[str, Any], arguments: dict[str, Any]) -> None:
    """The next steps of the edited optimizer are those of one built with these values, from the same state."""
    p, opt = trained()
    opt.param_groups[0].update(edit)
    q = nn.Parameter(p.detach().clone())
    other = Muon([("w", q)], lr=0.1, **arguments)
    other.state[q]["momentum_buffer"].copy_(opt.state[p]["momentum_buffer"])
    for seed in (1, 2):
        step(opt, [p], [randn(12, 6, seed=seed)])
        step(other, [q], [randn(12, 6, seed=seed)])
    assert torch.equal(p, q)
    kept, expected = opt.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]
    assert kept.dtype == expected.dtype and torch.equal(kept, expected)


EDITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ns_steps": ({"ns_steps": 8}, {"ns_steps": 8}),
    "ns_coefficients": ({"ns_coefficients": "keller"}, {"ns_coefficients": "keller"}),
    "view": ({"view": {"split_rows": (8, 4)}}, {"overrides": {"w": View(split_rows=(8, 4))}}),
    "state_dtype": ({"state_dtype": "float64"}, {"state_dtype": "float64"}),
    "adjust_lr_fn": ({"adjust_lr_fn": "original"}, {"adjust_lr_fn": "original"}),
    "weight_decay_mode": ({"weight_decay_mode": "cautious"}, {"weight_decay_mode": "cautious"}),
    "momentum, read at each step": ({"momentum": 0.5}, {"momentum": 0.5}),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_value_is_not_noticed(kind: str) -> None:
    edit, arguments = EDITS[kind]
    check_trains_as_if_built_with(edit, arguments)
    with pytest.raises(AssertionError):  # the sabotage: without the edit it differs
        check_trains_as_if_built_with({}, arguments)


@pytest.mark.parametrize(("key", "word"), [("adjust_lr_fn", "original"), ("weight_decay_mode", "l2")])
def test_an_edited_word_makes_a_new_plan_that_other_ranks_do_not_have(key: str, word: str) -> None:
    """On a GPU a rank that alone makes a new plan is not followed: all would wait for each other."""
    p, opt = trained()
    before, weights = opt.plan, p.detach().clone()
    opt.param_groups[0][key] = "no such word"
    with pytest.raises(ValueError, match="no such word"):
        step(opt, [p], [randn(12, 6)])
    assert torch.equal(p, weights), "refused before anything has changed"
    opt.param_groups[0][key] = word
    step(opt, [p], [randn(12, 6)])
    assert opt.plan is before and not torch.equal(p, weights)
    opt.param_groups[0][key] = "no such word"
    opt.state.clear()  # at the same time: nothing is completed before all is checked
    with pytest.raises(ValueError, match="no such word"):
        step(opt, [p], [randn(12, 6)])
    assert not opt.state
    opt.param_groups[0][key] = word
    step(opt, [p], [randn(12, 6)])
    assert opt.state[p]["momentum_buffer"].any()


@pytest.mark.parametrize(("key", "value"), [("eps", 1e-3), ("route", "owner"), ("mode", "blockwise")])
def test_an_edited_value_of_the_plan_is_not_in_the_plan(key: str, value: Any) -> None:
    """These change no bit of an ordinary step: eps is for zero, route and mode are for many ranks."""
    _, opt = trained()
    before = opt.plan
    assert opt.plan is before, "nothing was edited"
    opt.param_groups[0][key] = value
    assert opt.plan is not before
    if key == "eps":
        assert opt.plan.buckets[0].recipe.eps == value
    else:
        assert getattr(opt.plan.parameters[0], key) == value


def test_a_view_edited_in_place_is_not_noticed() -> None:
    p, opt = trained()
    q = nn.Parameter(p.detach().clone())
    other = Muon([("w", q)], lr=0.1, overrides={"w": View(split_rows=(8, 4))})
    other.state[q]["momentum_buffer"].copy_(opt.state[p]["momentum_buffer"])
    opt.param_groups[0]["view"]["split_rows"] = (8, 4)
    step(opt, [p], [randn(12, 6, seed=1)])
    step(other, [q], [randn(12, 6, seed=1)])
    assert torch.equal(p, q)
    del opt.param_groups[0]["view"]["split_rows"]
    assert len(opt.plan.buckets) == 1


def test_edited_coefficients_are_not_kept_in_their_plain_form() -> None:
    """A list could be changed in place, or hold numbers of numpy's, which do not load again."""
    _, opt = trained(ns_steps=1, ns_coefficients=[(1.5, -0.5, 0.0)])
    opt.param_groups[0]["ns_coefficients"] = [[1.875, -1.25, 0.375]]
    assert opt.plan.buckets[0].recipe.schedule == ((1.875, -1.25, 0.375),)
    assert opt.param_groups[0]["ns_coefficients"] == ((1.875, -1.25, 0.375),)


def test_steps_are_counted_whether_they_happened_or_not() -> None:
    p, opt = trained()
    with pytest.warns(UserWarning, match="skipped"):
        step(opt, [p], [torch.full((12, 6), torch.nan)])
    step(opt, [p], [randn(12, 6)])
    counted = {"steps": 3.0, "skipped_non_finite": 1.0, "skipped_grad_scaler": 0.0}
    assert counted.items() <= opt.metrics().items()
    assert "skipped ones included" in " ".join((Muon.metrics.__doc__ or "").split())

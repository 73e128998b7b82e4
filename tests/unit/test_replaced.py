"""What happens to an optimizer when its parameters, its state or its groups are changed under it, on one process."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import randn
from torch import nn

from meshmuon import Muon, View


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))


def take_step(model: nn.Module, opt: Muon, seed: int = 0) -> None:
    for number, param in enumerate(model.parameters()):
        param.grad = randn(*param.shape, seed=10 * seed + number)
    opt.step()


def everything(model: nn.Module, opt: Muon) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        found |= {f"{name}.{key}": value.clone() for key, value in opt.state[param].items()}
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_a_thawed_parameter_is_named_once_and_trains_when_added() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    opt = Muon(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_step(model, opt)  # a gradient that nobody asked for
        opt.zero_grad()
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="frozen when the optimizer was made") as said:
        take_step(model, opt, 1)
    assert len(said) == 1 and str(said[0].message).startswith("parameter '0.weight', '0.bias': a gradient")
    before = model[0].weight.detach().clone()
    opt.add_param_group({"params": [("0.weight", model[0].weight)], "algorithm": "muon"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        take_step(model, opt, 2)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("momentum_before", [False, True])
def test_parameters_that_were_assigned_anew_are_followed_with_their_state(momentum_before: bool) -> None:
    """`load_state_dict(assign=True)`: the optimizer would go on with tensors that nobody uses any more."""
    model, other = make_model(), make_model()
    opt, straight = Muon(model), Muon(other)
    if momentum_before:
        take_step(model, opt)
        take_step(other, straight)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for seed in (1, 2):
        take_step(model, opt, seed)
        take_step(other, straight, seed)
    assert_same(everything(model, opt), everything(other, straight))
    assert len(opt.state) == len(list(model.parameters()))


def test_a_model_that_left_the_meta_device_is_followed() -> None:
    with torch.device("meta"):
        model = make_model()
    opt, other = Muon(model), make_model()
    model.to_empty(device="cpu").load_state_dict(other.state_dict())
    straight = Muon(other)
    for seed in (1, 2):
        take_step(model, opt, seed)
        take_step(other, straight, seed)
    assert_same(everything(model, opt), everything(other, straight))


def test_weights_that_stand_in_for_a_while_are_not_followed() -> None:
    """Of an average, say: they have no gradients."""
    model = make_model()
    opt = Muon(model)
    take_step(model, opt)
    ours = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros_like(ours))
    assert opt.plan.parameters
    assert any(param is ours for group in opt.param_groups for param in group["params"])
    model[0].weight = ours
    take_step(model, opt, 1)


@pytest.mark.parametrize("how", ["cleared", "one is gone", "another dict"])
def test_state_that_was_taken_away_begins_anew(how: str) -> None:
    """Before anything is written: a step that finds out in the middle would be half a step."""
    model, other = make_model(), make_model()
    opt, straight = Muon(model), Muon(other)
    take_step(model, opt)
    take_step(other, straight)
    if how == "one is gone":
        opt.state.pop(model[1].bias)
        for value in straight.state[other[1].bias].values():
            value.zero_()
    else:
        opt.state.clear() if how == "cleared" else setattr(opt, "state", type(opt.state)(dict))
        straight = Muon(other)
    take_step(model, opt, 1)
    take_step(other, straight, 1)
    assert_same(everything(model, opt), everything(other, straight))


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "an lr that is none": ({"lr": math.nan}, r"param_groups\[0\]\['lr'\]: nan"),
    "an lr below zero": ({"lr": -1.0}, r"param_groups\[0\]\['lr'\]: -1"),
    "an lr in words": ({"lr": "fast"}, r"param_groups\[0\]\['lr'\]"),
    "a tensor lr that is none": ({"lr": torch.tensor(math.nan)}, r"param_groups\[0\]\['lr'\]: nan"),
    "an infinite tensor lr": ({"lr": torch.tensor(math.inf)}, r"param_groups\[0\]\['lr'\]: inf"),
    "a tensor lr below zero": ({"lr": torch.tensor(-1.0)}, r"param_groups\[0\]\['lr'\]: -1"),
    "a whole tensor lr": ({"lr": torch.tensor(1)}, r"param_groups\[0\]\['lr'\]: a torch.int64 tensor"),
    "a complex tensor lr": ({"lr": torch.tensor(1j)}, r"param_groups\[0\]\['lr'\]: a torch.complex64 tensor"),
    "two lrs": ({"lr": torch.tensor([0.1, 0.2])}, r"param_groups\[0\]\['lr'\]: a tensor of shape \(2,\)"),
    "an infinite decay": ({"weight_decay": math.inf}, r"param_groups\[0\]\['weight_decay'\]: inf"),
    "too much momentum": ({"momentum": 1.5}, r"param_groups\[0\]\['momentum'\]: 1.5"),
    "a factor that is none": ({"extra_scale_factor": math.nan}, r"param_groups\[0\]\['extra_scale_factor'\]: nan"),
    "a switch in words": ({"nesterov": "yes"}, r"param_groups\[0\]\['nesterov'\]"),
    "a misspelt decay": ({"weight_decay_mode": "cautios"}, r"param_groups\[0\]\['weight_decay_mode'\]"),
    "a misspelt rule": ({"adjust_lr_fn": "spectrl"}, r"param_groups\[0\]\['adjust_lr_fn'\]"),
    "a view that is none": ({"view": 3}, r"param_groups\[0\]\['view'\]"),
    "an unknown algorithm": ({"algorithm": "sgd"}, r"param_groups\[0\]\['algorithm'\]"),
    "another algorithm": ({"algorithm": "adamw"}, "no 'betas'.*add_param_group"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_bad_edit_is_refused_by_name_before_anything_changes(kind: str) -> None:
    edit, text = EDITS[kind]
    model = make_model()
    opt = Muon(model)
    take_step(model, opt)
    before = everything(model, opt)
    opt.param_groups[0].update(edit)
    with pytest.raises((ValueError, TypeError), match=text):
        take_step(model, opt, 1)
    assert_same(everything(model, opt), before)


def test_groups_that_no_longer_fit_are_refused_by_name() -> None:
    model = make_model()
    opt = Muon(model)
    gone = opt.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match=r"param_groups\[0\]: 1 parameters and 2 param_names"):
        opt.step()
    opt.param_groups[0]["params"].append(gone)
    opt.param_groups.append({"params": [nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(ValueError, match=r"param_groups\[2\]: no 'algorithm'.*add_param_group"):
        opt.step()


def test_edited_values_are_saved_in_their_plain_form(tmp_path: Any) -> None:
    model = make_model()
    opt = Muon(model)
    opt.param_groups[0].update(view=View(split_rows=None), state_dtype=torch.bfloat16)
    take_step(model, opt)
    assert opt.state[model[0].weight]["momentum_buffer"].dtype == torch.bfloat16
    torch.save(opt.state_dict(), tmp_path / "saved")
    opt.load_state_dict(torch.load(tmp_path / "saved", weights_only=True))


def test_an_optimizer_made_in_inference_mode_steps_outside_it() -> None:
    model, other = make_model(), make_model()
    with torch.inference_mode():
        opt = Muon(model)
    straight = Muon(other)
    take_step(model, opt)
    take_step(other, straight)
    assert_same(everything(model, opt), everything(other, straight))


def test_a_tensor_lr_that_a_schedule_spoils_is_refused() -> None:
    model = make_model()
    opt = Muon(model, lr=torch.tensor(0.01))
    take_step(model, opt)
    before = everything(model, opt)
    lr = opt.param_groups[0]["lr"]
    lr.fill_(math.nan)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['lr'\]: nan"):
        take_step(model, opt, 1)
    assert_same(everything(model, opt), before)
    lr.fill_(0.02)
    take_step(model, opt, 1)
    assert opt.param_groups[0]["lr"] is lr, "a schedule still fills it"


@pytest.mark.parametrize("around", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta"])
@pytest.mark.parametrize("settings", [{}, {"grad_sync": "optimizer"}, {"lr": torch.tensor(0.01)}], ids=str)
def test_state_loaded_in_another_mode_steps_outside_it(around: Any, settings: dict[str, Any]) -> None:
    model, other = make_model(), make_model()
    opt, straight = Muon(model, **settings), Muon(other, **settings)
    take_step(model, opt)
    take_step(other, straight)
    saved = opt.state_dict()
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = float(state["step"])  # as some write it
    with around():
        opt.load_state_dict(saved)
    if "lr" in settings:
        opt.param_groups[0]["lr"].mul_(1.0)  # as a schedule does
    for step in (1, 2):
        take_step(model, opt, step)
        take_step(other, straight, step)
    assert_same(everything(model, opt), everything(other, straight))


class Two(nn.Module):
    """Two layers of one shape, tied or not."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))
        if tied:
            self.b.weight = self.a.weight


def moved(model: Two, opt: Muon) -> dict[str, bool]:
    """Which weights a step moves, each by as much as an optimizer of its own would move it."""
    weights = {"a": model.a.weight, "b": model.b.weight}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    expected = {}
    for name, weight in weights.items():
        weight.grad = randn(8, 8)
        alone = nn.Parameter(before[name].clone())
        alone.grad = weight.grad.clone()
        Muon([alone], lr=1e-2).step()
        expected[name] = alone.detach()
    opt.step()
    found = {name: not torch.equal(weight, before[name]) for name, weight in weights.items()}
    assert all(torch.equal(weights[name], expected[name]) for name in weights if found[name])
    return found


def test_ties_that_are_made_or_undone_are_not_replacements() -> None:
    """The one tensor stood in the groups twice, or another was lost."""
    model = Two()
    opt = Muon(model, lr=1e-2)
    model.b.weight = model.a.weight
    model.b.weight.grad = None
    assert moved(model, opt) == {"a": True, "b": True}
    model = Two(tied=True)
    opt = Muon(model, lr=1e-2)
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    assert moved(model, opt) == {"a": False, "b": True}, "as with any torch optimizer"


def test_swapped_weights_keep_their_places_in_the_groups() -> None:
    model = Two()
    opt = Muon(model, lr=1e-2)
    model.a.weight, model.b.weight = model.b.weight, model.a.weight
    assert moved(model, opt) == {"a": True, "b": True}


def test_a_replacement_that_was_added_by_hand_is_updated_once() -> None:
    model = Two()
    opt = Muon(model, lr=1e-2)
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    opt.add_param_group({"params": [("again", model.a.weight)], "algorithm": "muon", "lr": 1e-2})
    assert moved(model, opt) == {"a": True, "b": True}
    assert [group["param_names"] for group in opt.param_groups] == [["b.weight"], ["again"]]


def test_a_parameter_twice_in_edited_groups_is_refused() -> None:
    model = Two()
    opt = Muon(model)
    opt.param_groups[0]["params"][1] = model.a.weight
    with pytest.raises(ValueError, match=r"\['params'\]\[1\]: the same parameter as"):
        opt.step()


def grow(model: nn.Sequential) -> None:
    model[2] = nn.Linear(16, 30)


def resize(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(30, 16))
    model[2].bias = nn.Parameter(torch.zeros(30))


@pytest.mark.parametrize("change", [grow, resize])
def test_a_layer_that_took_another_s_place_is_not_trained_and_nobody_says_so(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    opt = Muon(model)
    x = torch.ones(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
    change(model)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="no longer in the model") as said:
        opt.step()
    assert len(said) == 1 and str(said[0].message).startswith("parameter '2.weight', '2.bias': no longer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        opt.step()


def test_a_model_that_is_gone_has_left_nothing() -> None:
    opt = Muon(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "muon" in str(opt)
        opt.step()


def drop(model: nn.Sequential, opt: Muon) -> None:
    model[2] = nn.Identity()


def share(model: nn.Sequential, opt: Muon) -> None:
    other = nn.Linear(8, 8)
    other.weight, other.bias = model[2].weight, model[2].bias
    model[2] = other


def freeze(model: nn.Sequential, opt: Muon) -> None:
    model[2] = nn.Linear(8, 8).requires_grad_(False)


def follow_the_advice(model: nn.Sequential, opt: Muon) -> None:
    model[2] = nn.Linear(8, 8)
    opt.add_param_group({"params": [("new", model[2].weight)], "algorithm": "muon"})
    opt.add_param_group({"params": [("new bias", model[2].bias)], "algorithm": "adamw"})


def grow_beside(change: Callable[..., None]) -> Callable[..., None]:
    """At the same time a layer is added, which nobody trains: that is no reason to call others lost."""

    def both(model: nn.Sequential, opt: Muon) -> None:
        change(model, opt)
        model.append(nn.Linear(8, 4))

    return both


def tie(model: nn.Sequential, opt: Muon) -> None:
    model[2].weight = model[3].weight


@pytest.mark.parametrize("change", [drop, share, freeze, follow_the_advice, grow_beside(share), grow_beside(tie)])
def test_a_layer_is_not_said_to_be_lost_where_nothing_is_left_untrained(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    opt = Muon(model)
    change(model, opt)
    model(torch.ones(2, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
        assert "muon" in str(opt)

"""What an error or a warning says: whom it names, where it points, and that its advice works."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import CheckpointError, Muon, orthogonalize, scale_factor


def matrix(rows: int = 4, cols: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, cols))


def refusal(params: Any, **arguments: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        Muon(params, **arguments)
    assert type(caught.value) in (ValueError, TypeError)
    return str(caught.value)


def adamw_state(params: Any, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    listed = list(params)
    opt = kind(listed)
    for p in listed:
        p.grad = torch.ones_like(p)
    opt.step()
    state: dict[str, Any] = opt.state_dict()
    return state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_torchs_adamw_is_called_one_with_too_few_groups(kind: Any, bias: bool) -> None:
    model = nn.Linear(6, 4, bias=bias)
    opt = Muon(model)
    with pytest.raises(CheckpointError) as caught:
        opt.load_state_dict(adamw_state(model.parameters(), kind))
    text = str(caught.value)
    assert "torch.optim.AdamW" in text and "'weight'" in text and "momentum" in text
    assert "groups" not in text, "the number of groups is not what is wrong"


def test_a_checkpoint_of_torchs_adamw_fits_where_nothing_takes_muon() -> None:
    model = nn.LayerNorm(4)
    opt = Muon(list(model.named_parameters()), allow_no_muon=True)
    opt.load_state_dict(adamw_state(model.parameters()))
    assert float(opt.state[model.weight]["step"]) == 1.0


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("adamw_eps", "eps"),
        ("adam_eps", "eps"),
        ("epsilon", "eps"),
        ("adamw_weight_decay", "weight_decay"),
        ("adamw_wd", "weight_decay"),
        ("wd", "weight_decay"),
        ("adamw_lr", "lr"),
        ("adam_lr", "lr"),
        ("learning_rate", "lr"),
        ("adamw_betas", "betas"),
    ],
)
def test_the_advice_for_a_key_of_an_adamw_group_is_refused_in_turn(key: str, meant: str) -> None:
    value: Any = (0.9, 0.95) if meant == "betas" else 0.5
    group = {"params": [matrix()], "algorithm": "adamw"}
    assert f"Did you mean {meant!r}?" in refusal([{**group, key: value}], allow_no_muon=True)
    assert Muon([{**group, meant: value}], allow_no_muon=True).param_groups[0][meant] == value


@pytest.mark.parametrize("key", ["adamw_eps", "adam_eps", "adamw_weight_decay", "adamw_lr", "adamw_betas"])
def test_a_key_of_adamw_in_a_muon_group_is_said_to_be_one(key: str) -> None:
    text = refusal([{"params": [matrix()], key: 0.5}])
    assert key in text and "muon" in text and "Did you mean" not in text


def test_epsilon_in_a_muon_group_is_its_eps() -> None:
    assert "Did you mean 'eps'?" in refusal([{"params": [matrix()], "epsilon": 1e-7}])


@pytest.mark.parametrize(
    "key", ["release_grads", "orthogonalizer", "overrides", "non_finite", "chunk_size", "none_grad"]
)
def test_an_argument_of_the_constructor_in_a_group_is_said_to_belong_there(key: str) -> None:
    text = refusal([{"params": [matrix()], key: 1}])
    assert "param_groups[0]" in text and "Muon(" in text and "Did you mean" not in text


def test_one_group_without_a_list_is_read_as_names() -> None:
    for lr in ({}, {"lr": 0.1}):
        assert "Put it in a list" in refusal({"params": [matrix()], **lr})
    assert "Put it in a list" in refusal({"params": matrix(), "lr": 0.1})
    by_name = Muon({"a": matrix(), "params": matrix()})
    assert by_name.param_groups[0]["param_names"] == ["a", "params"]


SHARED = matrix()


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ([{"params": [("a", SHARED)]}, {"params": [("b", SHARED)]}], ["'a'", "'b'", "param_groups[0]"]),
        ([{"params": [matrix(), SHARED]}, {"params": [SHARED]}], ["params.0.1", "params.1.0"]),
        ([{"params": [("a", SHARED), ("c", matrix()), ("b", SHARED)]}], ["'a'", "'b'", "param_groups[0]"]),
        ([{"params": [SHARED, matrix(), SHARED]}], ["param_groups[0]", "0", "2"]),
        ([SHARED, matrix(), SHARED], ["param_groups[0]", "0", "2"]),
        ([("a", SHARED), ("b", SHARED)], ["'a'", "'b'"]),
        ([{"params": [("a", matrix())]}, {"params": [("a", SHARED)]}], ["'a'", "param_groups[0]", "name"]),
    ],
    ids=["two groups", "unnamed", "one group", "one group, unnamed", "a list", "pairs", "one name for two"],
)
def test_only_one_of_two_places_of_a_parameter_is_named(params: Any, names: list[str]) -> None:
    text = refusal(params)
    assert all(name in text for name in names), text


@pytest.mark.parametrize(
    "bad",
    [
        {"ns_steps": 0},
        {"ns_steps": "5"},
        {"ns_coefficients": "aol"},
        {"ns_coefficients": "you", "ns_steps": 4},
        {"ns_coefficients": (9.0, 9.0, 9.0)},
        {"view": {"heads": 0}},
        {"view": {"rows": 3}},
        {"view": {"split_rows": ()}},
        {"view": 3},
    ],
    ids=str,
)
def test_an_error_in_a_group_does_not_say_in_which(bad: dict[str, Any]) -> None:
    text = refusal([{"params": [matrix()]}, {"params": [matrix()], **bad}])
    assert "param_groups[1]" in text and any(key in text for key in bad)


def test_words_of_others_that_lead_nowhere_say_so() -> None:
    for name in ("distributed_mesh", "device_mesh", "mesh"):
        text = refusal([matrix()], **{name: object()})
        assert "nothing is needed" in text.lower() and "read from the tensors" in text and "Did you mean" not in text


def test_warnings_point_into_the_library() -> None:
    p = matrix()
    opt = Muon([p])
    with pytest.warns(UserWarning, match="no optimizer state") as caught:
        opt.load_state_dict({**opt.state_dict(), "state": {}})
    assert [w.filename for w in caught] == [__file__]


def test_a_refused_checkpoint_without_state_warns_that_it_starts_afresh() -> None:
    opt = Muon([matrix()])
    state = opt.state_dict()
    state["param_groups"][0]["lr"] = -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="lr"):
            opt.load_state_dict({**state, "state": {}})


@pytest.mark.parametrize(
    ("call", "start"),
    [
        (lambda: orthogonalize(torch.eye(3), steps=0), "steps: 0"),
        (lambda: orthogonalize(torch.eye(3), steps=2.5), "steps: 2.5"),
        (lambda: orthogonalize(torch.eye(3), coefficients="x"), "coefficients: 'x'"),
        (lambda: scale_factor((2, 3, 4), "spectral"), "shape: (2, 3, 4)"),
        (lambda: scale_factor((3, -4), "spectral"), "shape: (3, -4)"),
    ],
)
def test_errors_name_the_argument_that_was_called(call, start):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert str(error.value).startswith(start)


def test_a_group_takes_a_dict_of_named_parameters():
    named = dict(torch.nn.Linear(4, 4, bias=False).named_parameters())
    assert Muon([{"params": named, "algorithm": "muon"}]).param_groups[0]["param_names"] == ["weight"]

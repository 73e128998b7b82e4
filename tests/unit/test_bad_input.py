"""Every constructor argument with a bad value: a ValueError or TypeError at construction that says its name.

The parameters themselves are in test_bad_parameters.py, NaN and inf in gradients in test_bad_gradients.py.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshmuon
from meshmuon import Muon, Orthogonalizer, View

KELLER = (3.4445, -4.7750, 2.0315)
# Shipped by two NVIDIA libraries; a rank-1 gradient comes out with its sign flipped.
AOL = (4.0098, -7.0585, 2.4635)
NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # a whole number no float can hold


def matrix(rows: int = 4, cols: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, cols))


def refusal(params: Any, **arguments: Any) -> str:
    """The message of the refusal: ValueError or TypeError, never a subclass that Python raised by accident."""
    with pytest.raises((ValueError, TypeError)) as caught:
        Muon(params, **arguments)
    assert type(caught.value) in (ValueError, TypeError)
    return str(caught.value)


def case(name: str, value: Any) -> Any:
    return pytest.param(name, value, id=f"{name}={str(value)[:40]}")


NUMBERS = [
    *(case("lr", v) for v in (-1e-3, INF, NAN, "1e-3", None, True, 1j, HUGE)),
    *(case("lr", torch.tensor(v)) for v in (-1.0, NAN, INF, [1e-3, 1e-3], [], 1j, 1, True)),
    *(case("weight_decay", v) for v in (-0.1, INF, NAN, "0.1", None, False, HUGE)),
    *(case("momentum", v) for v in (-0.1, 1.0, 1.5, INF, NAN, "0.95", None)),
    *(case("betas", v) for v in ((0.9, 1.0), (-0.1, 0.9), (0.9, NAN), (0.9, "x"), (0.9,), (0.9, 0.9, 0.9), 0.9, None)),
    *(case("eps", v) for v in (0, 0.0, -1e-8, NAN, INF, "1e-7", None, 1.5, 1e7)),
    *(case("adamw_eps", v) for v in (0.0, -1e-8, NAN, INF, "1e-8", None, 1.5, 1e8)),
    *(case("adamw_lr_ratio", v) for v in (-1.0, NAN, INF, "1", None)),
    *(case("adamw_weight_decay", v) for v in (-1.0, NAN, INF, "1")),
    *(case("extra_scale_factor", v) for v in (0.0, -1.0, NAN, INF, "1", None)),
    *(case("ns_steps", v) for v in (0, -1, 2.5, 5.0, "5", 21, 100, None, True)),
    *(case("max_in_flight", v) for v in (0, -1, 1.5, "2", None, True)),
    *(case("workspace_bytes", v) for v in (0, -1, 2.0**30, "1GB", None)),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_a_number_out_of_range_is_refused_by_the_name_of_its_argument(name: str, value: Any) -> None:
    assert name in refusal([matrix()], **{name: value})


COEFFICIENTS = [
    pytest.param(None, id="None"),
    pytest.param(5, id="a number"),
    pytest.param("aol", id="an unknown word"),
    pytest.param((), id="nothing"),
    pytest.param((3.4445, -4.775), id="two numbers"),
    pytest.param((3.4445, "x", 2.0315), id="a string inside"),
    pytest.param([KELLER] * 4, id="four triples for five steps"),
    pytest.param([KELLER] * 6, id="six triples for five steps"),
    pytest.param([(1.0, 2.0)] * 5, id="pairs"),
    pytest.param((NAN, -4.775, 2.0315), id="NaN"),
    pytest.param([(INF, 0.0, 0.0)] * 5, id="inf"),
    pytest.param((HUGE, -4.775, 2.0315), id="too large for a float"),
    pytest.param([AOL] * 5, id="aol: flips the sign of a rank-1 gradient"),
    pytest.param(AOL, id="aol, repeated"),
    pytest.param(meshmuon.polar_express(5, safety=1.0), id="Polar Express without safety: diverges"),
    pytest.param((-3.4445, 4.775, -2.0315), id="negative: uphill"),
    pytest.param((0.0, 0.0, 0.0), id="zero: nothing moves"),
    pytest.param((5.0, 5.0, 5.0), id="diverges"),
    pytest.param((2.0, 0.0, 0.0), id="never saturates"),
    pytest.param((1e300, 1.0, 1.0), id="overflows"),
]


@pytest.mark.parametrize("value", COEFFICIENTS)
def test_bad_coefficients_are_refused(value: Any) -> None:
    assert "ns_coefficients" in refusal([matrix()], ns_coefficients=value)


def test_the_coefficient_check_lets_the_good_ones_through() -> None:
    for value in ("polar_express", "keller", "you", KELLER, [KELLER] * 5, meshmuon.polar_express(5)):
        Muon([matrix()], ns_coefficients=value)


def test_a_step_count_the_word_does_not_have_is_refused() -> None:
    assert "ns_steps" in refusal([matrix()], ns_coefficients="you", ns_steps=4)


WORDS = [
    case("adjust_lr_fn", "match_rms"),
    case("adjust_lr_fn", 3),
    case("weight_decay_mode", "coupled"),
    case("weight_decay_mode", None),
    case("non_finite", "warn"),
    case("non_finite", None),
    case("state_dtype", "int8"),
    case("state_dtype", "fp32"),
    case("state_dtype", torch.int32),
    case("state_dtype", torch.complex64),
    case("state_dtype", 32),
    case("nesterov", "yes"),
    case("nesterov", 1),
    case("nesterov", None),
    case("release_grads", "no"),
    case("allow_no_muon", None),
    case("layout_invariant", "auto"),
    case("orthogonalizer", "gram"),
    case("orthogonalizer", None),
    case("orthogonalizer", {"form": "gram"}),
]


@pytest.mark.parametrize(("name", "value"), WORDS)
def test_an_unknown_word_is_refused_by_the_name_of_its_argument(name: str, value: Any) -> None:
    assert name in refusal([matrix()], **{name: value})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"form": "fast"}, "form"),
        ({"form": None}, "form"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": torch.float32}, "dtype"),
        ({"restarts": "often"}, "restarts"),
        ({"restarts": 2}, "restarts"),
        ({"restarts": (0,)}, "restarts"),
        ({"restarts": (2, 1)}, "restarts"),
        ({"restarts": (1.5,)}, "restarts"),
    ],
)
def test_an_orthogonalizer_that_cannot_be_is_refused(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        Orthogonalizer(**arguments)


def test_restarts_beyond_the_last_step_are_refused() -> None:
    assert "restarts" in refusal([matrix()], orthogonalizer=Orthogonalizer(form="gram", restarts=(5,)))


@pytest.mark.parametrize("value", [pytest.param(v, id=repr(v)) for v in (None, 5, [1], ["experts", None], "experts")])
def test_expert_keys_that_are_no_list_of_words_are_refused(value: Any) -> None:
    """A single string would be read letter by letter: every name with an "e" in it would be a stack of experts."""
    model = nn.Module()
    model.register_parameter("stack", nn.Parameter(torch.ones(2, 4, 6)))
    model.register_parameter("weight", matrix())
    assert "expert_keys" in refusal(model, expert_keys=value, overrides={"weight": "muon"})
    with pytest.raises(TypeError, match="expert_keys"):
        meshmuon.param_groups(model, expert_keys=value)


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("name", ["maximize", "foreach", "fused", "capturable", "differentiable", "amsgrad"])
def test_switches_of_torch_are_refused_by_name_with_the_reason(name: str, value: Any) -> None:
    text = refusal([matrix()], **{name: value})
    assert name in text and "not supported" in text
    assert "Adamw" not in text, "the reason must keep the spelling of AdamW"
    assert name in refusal([{"params": [matrix()], name: value}])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("warmup_step", "max_in_flight"),
        ("num_ns_steps", "ns_steps"),
        ("backend_steps", "ns_steps"),
        ("learning_rate", "lr"),
        ("clip_config", "qk_clip"),
        ("wd", "weight_decay"),
        ("adamw_betas", "betas"),
        ("adamw_lr", "adamw_lr_ratio"),
        ("weigth_decay", "weight_decay"),
        ("momentun", "momentum"),
        ("nestrov", "nesterov"),
        ("ns_step", "ns_steps"),
        ("adjust_lr_func", "adjust_lr_fn"),
        ("non_finit", "non_finite"),
        ("max_inflight", "max_in_flight"),
        ("override", "overrides"),
    ],
)
def test_an_unknown_keyword_suggests_ours(theirs: str, ours: str) -> None:
    text = refusal([matrix()], **{theirs: 1})
    assert repr(theirs) in text and f"mean {ours!r}" in text


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(()), np.zeros(2), np.zeros((2, 2))], ids=str)
@pytest.mark.parametrize("name", ["qk_clip", "grad_sync", "offload", "zzzzzz", "maximize"])
def test_an_array_as_a_keyword_of_another_version_fails_in_torch(name: str, value: Any) -> None:
    text = refusal([matrix()], **{name: value})
    assert name in text and "\n" not in text


@pytest.mark.parametrize(("name", "default"), [("qk_clip", None), ("offload", False)])
def test_a_keyword_at_its_default_is_taken_and_a_word_is_not(name: str, default: Any) -> None:
    Muon([matrix()], **{name: default})
    assert f"{name}: 'on'" in refusal([matrix()], **{name: "on"})


ARRAYS = [
    "orthogonalizer",
    "overrides",
    "expert_keys",
    "non_finite",
    "state_dtype",
    "betas",
    "ns_coefficients",
    "momentum",
]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_where_a_word_or_number_belongs_fails_in_numpy(name: str) -> None:
    assert name in refusal([("w", matrix())], **{name: np.zeros((2, 2))})


@pytest.mark.parametrize("name", ["algorithm", "route", "view", "adjust_lr_fn"])
def test_an_array_in_a_group_fails_in_numpy(name: str) -> None:
    assert name in refusal([{"params": [matrix()], name: np.zeros((2, 2))}])


def test_an_array_inside_other_choices_fails_in_numpy() -> None:
    with pytest.raises(TypeError, match="restarts"):
        Orthogonalizer(restarts=np.array([1, 2]))
    assert "'w'" in refusal([("w", matrix())], overrides={"w": np.zeros(2)})


def test_a_keyword_like_none_of_ours_lists_them_all() -> None:
    text = refusal([matrix()], zzzzzz=1)
    assert "zzzzzz" in text and "ns_steps" in text and "overrides" in text


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        pytest.param({"layer.*": "adamw"}, "layer.*", id="matches nothing"),
        pytest.param({"w*": "muon", "W": "adamw"}, "'W'", id="the second matches nothing"),
        pytest.param({"weight": "sgd"}, "weight", id="an unknown word"),
        pytest.param({"weight": None}, "weight", id="None"),
        pytest.param({"weight": 3}, "weight", id="a number"),
        pytest.param({"weight": torch.zeros(2)}, "weight", id="a tensor"),
        pytest.param({"weight": View}, "weight", id="the class"),
        pytest.param({3: "muon"}, "3", id="a key that is no pattern"),
        pytest.param("muon", "overrides", id="a word alone"),
        pytest.param(["weight"], "overrides", id="a list"),
        pytest.param(lambda name, tensor: "sgd", "weight", id="a function with an unknown word"),
        pytest.param({"bias": "muon"}, "bias", id="a vector to muon"),
        pytest.param({"weight": View(heads=3)}, "weight", id="heads that do not divide the rows"),
        pytest.param({"weight": View(heads=4, heads_on="cols")}, "weight", id="heads that do not divide the columns"),
        pytest.param({"weight": View(split_rows=(1, 2))}, "weight", id="rows that do not sum up"),
        pytest.param({"weight": View(split_cols=(6, 6))}, "weight", id="columns that do not sum up"),
        pytest.param({"weight": View(experts=True)}, "weight", id="experts of a matrix"),
    ],
)
def test_bad_overrides_are_refused_by_pattern_or_parameter(overrides: Any, name: str) -> None:
    model = nn.Linear(6, 4)
    assert name in refusal(model, overrides=overrides)
    assert name in refusal(model.named_parameters(), overrides=overrides)


def test_overrides_for_parameters_without_names_are_refused() -> None:
    assert "overrides" in refusal([matrix()], overrides={"*": "adamw"})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"split_rows": ()}, "split_rows"),
        ({"split_rows": 3}, "split_rows"),
        ({"split_rows": (1.5, 2.5)}, "split_rows"),
        ({"split_cols": (0, 4)}, "split_cols"),
        ({"split_cols": (-1, 5)}, "split_cols"),
        ({"heads": 0}, "heads"),
        ({"heads": 2.0}, "heads"),
        ({"heads": 2, "heads_on": "both"}, "heads_on"),
        ({"heads": 2, "split_rows": (1, 3)}, "heads"),
        ({"heads": 2, "heads_on": "cols", "split_cols": (1, 3)}, "heads"),
        ({"experts": 1}, "experts"),
        ({"flatten": "yes"}, "flatten"),
        ({"flatten": True, "experts": True}, "flatten"),
        ({"flatten": True, "split_cols": (1, 3)}, "flatten"),
        ({"transposed": None}, "transposed"),
        ({"rows": 3}, "rows"),
    ],
)
def test_a_view_that_cannot_be_is_refused_alone_and_in_a_group(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        View(**arguments)
    text = refusal([{"params": [matrix()], "algorithm": "muon", "view": arguments}])
    assert name in text and "view" in text


@pytest.mark.parametrize("value", [3, "heads", [("heads", 2)]])
def test_a_view_of_the_wrong_type_is_refused(value: Any) -> None:
    assert "view" in refusal([{"params": [matrix()], "algorithm": "muon", "view": value}])


def test_a_tensor_learning_rate_is_taken_where_a_number_would_be() -> None:
    lr = torch.tensor(1e-3)
    kept = Muon([matrix()], lr=lr).param_groups[0]["lr"]
    assert isinstance(kept, Tensor) and torch.equal(kept, lr)


def test_a_tensor_learning_rate_is_shared_by_groups_or_with_the_caller() -> None:
    """A scheduler that fills lr tensors group by group would multiply a shared one several times."""
    lr, own = torch.tensor(1e-3), torch.tensor(2e-3)
    groups = [{"params": [matrix()]}, {"params": [matrix()], "lr": own}, {"params": [matrix()], "lr": own}]
    opt = Muon(groups, lr=lr)
    opt.add_param_group({"params": [matrix()]})
    kept = [group["lr"] for group in opt.param_groups]
    assert len({t.data_ptr() for t in (lr, own, *kept)}) == 6
    lr.fill_(0.5), own.fill_(0.5)
    assert [round(float(t), 6) for t in kept] == [1e-3, 2e-3, 2e-3, 1e-3]
    opt.add_param_group({"params": [matrix()]})
    assert float(opt.param_groups[-1]["lr"]) == float(kept[0]), "the default is what it was at construction"


def test_a_learning_rate_that_requires_a_gradient_leaks_its_graph() -> None:
    lr = torch.tensor(1e-3, requires_grad=True) * 2
    opt = Muon([matrix()], lr=lr)
    assert not any(t.requires_grad for t in (opt.param_groups[0]["lr"], opt.defaults["lr"]))
    copy.deepcopy(opt)  # torch refuses to copy a tensor that is part of a graph
    opt.param_groups[0]["params"][0].grad = torch.ones(4, 6)
    opt.step()
    assert not opt.param_groups[0]["params"][0].grad_fn

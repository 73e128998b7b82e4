"""Every wrong thing to train: refused at construction, by the parameter's name or by what was passed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon


def matrix(rows: int = 4, cols: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols))


class Holder(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value)


def refusal(params: Any, **arguments: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        Muon(params, **arguments)
    assert type(caught.value) in (ValueError, TypeError)
    return str(caught.value)


UNTRAINABLE = {
    "complex": lambda: nn.Parameter(torch.randn(4, 6, dtype=torch.complex64)),
    "sparse": lambda: nn.Parameter(torch.randn(4, 6).to_sparse()),
    "integer": lambda: torch.ones(4, 6, dtype=torch.int64),
    "boolean": lambda: torch.ones(4, 6, dtype=torch.bool),
    "8 bit": lambda: nn.Parameter(torch.randn(4, 6).to(torch.float8_e4m3fn)),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 0, torch.qint8),
    "not a leaf": lambda: matrix() * 2,
    "lazy": lambda: nn.parameter.UninitializedParameter(),
    "None": lambda: None,
    "a number": lambda: 3.0,
}


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
@pytest.mark.parametrize("kind", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused_by_the_name_of_the_parameter(kind: str) -> None:
    make = UNTRAINABLE[kind]
    assert "odd.weight" in refusal([("odd.weight", make()), ("good.weight", matrix())])
    for algorithm in ("muon", "adamw"):
        group = {"params": [("good.weight", matrix()), ("odd.weight", make())], "algorithm": algorithm}
        assert "odd.weight" in refusal([group], allow_no_muon=True)


@pytest.mark.parametrize("kind", ["complex", "sparse", "8 bit", "lazy"])
def test_what_cannot_be_trained_is_refused_inside_a_model(kind: str) -> None:
    assert "odd" in refusal(Holder(good=matrix(), odd=UNTRAINABLE[kind]()))


def test_a_lazy_layer_is_refused_before_its_shape_is_asked_for() -> None:
    assert "last.weight" in refusal(Holder(first=nn.Linear(6, 4), last=nn.LazyLinear(4)))


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_a_parameter_with_fewer_than_two_dims_cannot_take_muon(shape: tuple[int, ...]) -> None:
    pair = ("norm.weight", nn.Parameter(torch.ones(shape)))
    assert "norm.weight" in refusal([{"params": [pair], "algorithm": "muon"}])
    assert "norm.weight" in refusal([pair, ("w", matrix())], overrides={"norm.weight": "muon"})
    text = refusal([{"params": [pair[1]]}])
    assert "param_groups[0]" in text and "algorithm" in text


THREE_DIMS = (2, 4, 6)


@pytest.mark.parametrize("source", ["model", "named pairs"])
def test_three_dims_without_a_view_are_an_error_that_names_the_two_ways_out(source: str) -> None:
    stack = nn.Parameter(torch.randn(THREE_DIMS))
    model = Holder(stack=stack, weight=matrix())
    params = model if source == "model" else list(model.named_parameters())
    text = refusal(params)
    assert "'stack'" in text and str(THREE_DIMS) in text
    assert 'overrides={"stack": View(experts=True)}' in text and 'overrides={"stack": "adamw"}' in text


def test_three_dims_in_a_group_are_an_error_that_names_the_two_ways_out_of_groups() -> None:
    """Group dicts refuse `overrides`: the ways out are the group's own keys."""
    stack = nn.Parameter(torch.randn(THREE_DIMS))
    text = refusal([{"params": [("stack", stack)], "algorithm": "muon"}])
    assert "'stack'" in text and str(THREE_DIMS) in text
    assert "view" in text.lower() and "adamw" in text.lower()
    assert "NAME" not in text, "a placeholder is left in the advice"
    assert "overrides" not in text, "overrides= is refused together with group dicts"
    text = refusal([{"params": [stack]}])
    assert "param_groups[0]" in text and 'algorithm="muon"' in text and 'algorithm="adamw"' in text


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        ({"split_rows": (1, 2)}, (4, 6)),
        ({"split_cols": (3, 4)}, (4, 6)),
        ({"heads": 3}, (4, 6)),
        ({"heads": 4, "heads_on": "cols"}, (4, 6)),
        ({"experts": True, "split_rows": (4, 6)}, (2, 4, 6)),
        ({"flatten": True, "split_rows": (5,)}, (4, 2, 3)),
        ({"transposed": True, "split_rows": (4,)}, (4, 6)),
        ({"experts": True}, (4, 6)),
    ],
)
def test_a_view_that_does_not_fit_is_refused_by_the_name_of_the_parameter(
    view: dict[str, Any], shape: tuple[int, ...]
) -> None:
    group = {"params": [("fused.weight", nn.Parameter(torch.randn(shape)))], "algorithm": "muon", "view": view}
    assert "fused.weight" in refusal([group])


SHARED = matrix()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        pytest.param([SHARED, SHARED], "param_groups[0]", id="in a list"),
        pytest.param([{"params": [SHARED, SHARED]}], "param_groups[0]", id="in one group"),
        pytest.param([{"params": [SHARED]}, {"params": [SHARED]}], "params.1.0", id="in two groups"),
        pytest.param(
            [{"params": [SHARED]}, {"params": [SHARED], "algorithm": "adamw"}], "params.1.0", id="under two algorithms"
        ),
        pytest.param([{"params": [("a", SHARED)]}, {"params": [("b", SHARED)]}], "'b'", id="named, in two groups"),
        pytest.param([("a", SHARED), ("b", SHARED)], "'b'", id="as named pairs"),
    ],
)
def test_the_same_parameter_twice_is_refused(params: Any, name: str) -> None:
    text = refusal(params)
    assert name in text and ("twice" in text or "once" in text)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda a, b: [("w", a), ("w", b)], id="named pairs"),
        pytest.param(lambda a, b: [{"params": [("w", a), ("w", b)]}], id="one group"),
        pytest.param(lambda a, b: [{"params": [a, b], "param_names": ["w", "w"]}], id="a list of names"),
        pytest.param(lambda a, b: [{"params": [("w", a)]}, {"params": [("w", b)]}], id="two groups"),
    ],
)
def test_one_name_for_two_parameters_is_refused(make: Any) -> None:
    """State is found by name when it is loaded: with one name for two, both would get the momentum of the second."""
    assert "'w'" in refusal(make(matrix(), matrix()))


def test_nothing_to_train_is_refused() -> None:
    for params in ([], (), iter(()), {}, nn.Module(), nn.Linear(6, 4).requires_grad_(False)):
        assert "params" in refusal(params)


def test_a_generator_of_bare_mixed_parameters_says_why_names_are_needed_and_what_to_write() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    with pytest.raises(TypeError, match="params") as caught:
        Muon(model.parameters())
    text = str(caught.value)
    assert "names" in text and "Muon(model" in text and "named_parameters()" in text and "(4,)" in text


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(matrix(), id="a tensor"),
        pytest.param("model", id="a string"),
        pytest.param({SHARED}, id="a set"),
        pytest.param(None, id="None"),
        pytest.param(3, id="a number"),
        pytest.param(nn.Linear, id="a class"),
        pytest.param([None], id="a list of None"),
        pytest.param(["weight"], id="a list of strings"),
        pytest.param([[matrix()]], id="a list of lists"),
        pytest.param([matrix(), {"params": [matrix()]}], id="tensors and groups"),
        pytest.param([("a", matrix()), matrix()], id="pairs and tensors"),
        pytest.param([("a", matrix(), 1)], id="triples"),
        pytest.param([(3, matrix())], id="numbers for names"),
        pytest.param([nn.Linear(6, 4)], id="a list of modules"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params: Any) -> None:
    assert "params" in refusal(params)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param({"lr": 0.1}, "params", id="no params"),
        pytest.param({"params": None}, "params", id="None"),
        pytest.param({"params": 3}, "params", id="a number"),
        pytest.param({"params": nn.Linear(6, 4)}, "params", id="a module"),
        pytest.param({"params": {SHARED}}, "param_groups[0]", id="a set"),
        pytest.param({"params": [SHARED], "param_names": []}, "names", id="too few names"),
        pytest.param({"params": [SHARED], "param_names": [3]}, "name", id="a number for a name"),
        pytest.param({"params": [(3, SHARED)]}, "name", id="a pair with a number for a name"),
        pytest.param({"params": [SHARED], "lrr": 0.1}, "'lr'", id="an unknown key"),
        pytest.param({"params": [SHARED], "num_ns_steps": 5}, "'ns_steps'", id="another optimizer's key"),
        pytest.param({"params": [SHARED], "route": "sideways"}, "route", id="an unknown route"),
        pytest.param({"params": [SHARED], "algorithm": "sgd"}, "algorithm", id="an unknown algorithm"),
        pytest.param({"params": [SHARED], "kind": "Muon"}, "kind", id="an unknown kind"),
        pytest.param({"params": [SHARED], "use_muon": 1}, "use_muon", id="a number for a switch"),
        pytest.param({"params": [SHARED], "algorithm": "muon", "use_muon": False}, "contradict", id="contradiction 1"),
        pytest.param({"params": [SHARED], "kind": "adamw", "use_muon": True}, "contradict", id="contradiction 2"),
        pytest.param({"params": [SHARED], "kind": "adamw", "algorithm": "muon"}, "contradict", id="contradiction 3"),
        pytest.param({"params": [SHARED], "algorithm": "adamw", "ns_steps": 5}, "ns_steps", id="adamw with ns_steps"),
        pytest.param({"params": [SHARED], "algorithm": "adamw", "momentum": 0.9}, "momentum", id="adamw with momentum"),
        pytest.param({"params": [SHARED], "algorithm": "adamw", "view": {}}, "view", id="adamw with a view"),
        pytest.param({"params": [SHARED], "betas": (0.9, 0.9)}, "betas", id="muon with betas"),
        pytest.param({"params": [SHARED], "lr": -1.0}, "lr", id="lr"),
        pytest.param({"params": [SHARED], "momentum": 1.0}, "momentum", id="momentum"),
        pytest.param({"params": [SHARED], "ns_steps": 0}, "ns_steps", id="ns_steps"),
        pytest.param({"params": [SHARED], "ns_coefficients": "aol"}, "ns_coefficients", id="ns_coefficients"),
        pytest.param({"params": [SHARED], "algorithm": "adamw", "eps": 0.0}, "eps", id="adamw's eps"),
    ],
)
def test_a_bad_group_is_refused_by_its_key(group: dict[str, Any], name: str) -> None:
    assert name in refusal([group], allow_no_muon=True)


def test_a_model_in_which_nothing_takes_muon_is_refused_unless_that_is_said_to_be_meant() -> None:
    text = refusal(nn.LayerNorm(4))
    assert "Muon" in text and "allow_no_muon" in text
    model = nn.LayerNorm(4)
    opt = Muon(model, lr=0.1, allow_no_muon=True)
    reference = copy.deepcopy(model)
    other = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for owner in (model, reference):
        for p in owner.parameters():
            p.grad = torch.linspace(-1.0, 1.0, 4)
    opt.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


class FlatParameter(nn.Parameter):
    """What FSDP1 calls its flat shards."""


def tagged(name: str) -> nn.Parameter:
    flat = nn.Parameter(torch.randn(24))
    setattr(flat, name, 1)
    return flat


def flat_linear() -> nn.Module:
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(module.weight.detach().flatten())
    return module


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(flat_linear(), id="an nn.Linear with a 1-D weight"),
        pytest.param(Holder(weight=FlatParameter(torch.randn(24))), id="FSDP1's FlatParameter"),
        pytest.param(Holder(weight=tagged("ds_id")), id="DeepSpeed's ds_id"),
        pytest.param(Holder(weight=tagged("_is_flat_param")), id="FSDP1's mark"),
    ],
)
def test_flat_shards_that_used_to_be_matrices_are_refused_and_fsdp2_is_named(module: nn.Module) -> None:
    model = Holder(flat=module, other=matrix())
    for allow in (False, True):
        text = refusal(model, allow_no_muon=allow)
        assert "flat.weight" in text and "fully_shard" in text


@pytest.mark.parametrize("flat", [FlatParameter(torch.randn(24)), tagged("ds_id")])
def test_flat_shards_are_refused_from_named_pairs_and_groups_too(flat: nn.Parameter) -> None:
    assert "flat.weight" in refusal([("flat.weight", flat), ("other", matrix())])
    assert "flat.weight" in refusal([{"params": [("flat.weight", flat)], "algorithm": "adamw"}], allow_no_muon=True)

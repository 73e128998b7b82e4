"""Random argument sets for `Muon`: good and bad values of every argument, and every kind of `params`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from meshmuon import Orthogonalizer, View, polar_express

KELLER = (3.4445, -4.7750, 2.0315)
NAN, INF = float("nan"), float("inf")

GOOD_ARGUMENTS: dict[str, list[Any]] = {
    "lr": [0.0, 1e-3, 0.1, 1, torch.tensor(1e-2), torch.tensor([1e-2])],
    "weight_decay": [0, 0.0, 0.1, 1.0],
    "momentum": [0.0, 0.5, 0.95, 0.9999],
    "nesterov": [True, False],
    "ns_coefficients": [
        "polar_express",
        "keller",
        KELLER,
        [KELLER] * 5,
        polar_express(5),
        polar_express(3, lower=0.01),
    ],
    "eps": [1e-30, 1e-7, 1.0],
    "ns_steps": [1, 3, 5, 10, 20],
    "adjust_lr_fn": ["original", "shape_scaling", "match_rms_adamw", "spectral", "unit_rms_norm", "none", None],
    "extra_scale_factor": [0.2, 3.0],
    "weight_decay_mode": ["decoupled", "cautious", "l2"],
    "orthogonalizer": [
        Orthogonalizer(form="standard"),
        Orthogonalizer(form="gram"),
        Orthogonalizer(form="svd"),
        Orthogonalizer(form="gram", dtype="float16"),
        Orthogonalizer(dtype="bfloat16"),
        Orthogonalizer(form="svd", dtype="float16"),
        Orthogonalizer(dtype="float64"),
        Orthogonalizer(form="gram", restarts=(2,)),
        Orthogonalizer(form="standard", restarts=(2, 4)),
    ],
    "betas": [(0.9, 0.95), [0.0, 0.0], (0.5, 0.999)],
    "adamw_eps": [1e-8, 1e-3],
    "adamw_lr_ratio": [0, 0.1, 1.0],
    "adamw_weight_decay": [None, 0.0, 0.5],
    "expert_keys": [("experts",), ["experts", "stack"], ()],
    "state_dtype": [None, "float32", "bfloat16", torch.float32, torch.float64, "float16"],
    "non_finite": ["skip", "raise", "ignore"],
    "release_grads": [True, False],
    "layout_invariant": [None, True, False],
    "max_in_flight": [1, 2, 10**9],
    "workspace_bytes": [1, 5_000, 2**30, 10**30],
    "allow_no_muon": [True],
    "qk_clip": [None],
    "grad_sync": ["none"],
    "offload": [False],
}
BAD_ARGUMENTS: dict[str, list[Any]] = {
    "lr": [-1.0, NAN, INF, "0.1", None, [0.1], torch.tensor([0.1, 0.2]), torch.tensor(-1.0), 10**400],
    "weight_decay": [-0.1, NAN, "0.1", None],
    "momentum": [1.0, -0.1, NAN, "0.9", None, 10**400],
    "nesterov": [1, None, "yes"],
    "ns_coefficients": [
        None,
        3,
        "aol",
        (1.0, 2.0),
        [KELLER] * 4,
        (4.0098, -7.0585, 2.4635),
        {},
        [None] * 5,
        (NAN,) * 3,
    ],
    "eps": [0.0, -1.0, NAN, INF, "x"],
    "ns_steps": [0, -1, 21, 2.5, "5", None, True, 10**400],
    "adjust_lr_fn": ["rms", 3, ["original"]],
    "extra_scale_factor": [0.0, -1.0, NAN, None],
    "weight_decay_mode": ["wd", None, 0],
    "orthogonalizer": ["gram", None, {}, Orthogonalizer(restarts=(19,))],
    "betas": [0.9, (0.9,), (0.9, 1.0), (NAN, 0.9), None, "ab", {0.1, 0.2}],
    "adamw_eps": [0.0, NAN, "x", None],
    "adamw_lr_ratio": [-1.0, INF, None, "1"],
    "adamw_weight_decay": [-1.0, NAN, "x"],
    "expert_keys": [None, 3, [3], "experts"],
    "state_dtype": ["int8", torch.int32, 16, "fp32"],
    "non_finite": ["warn", None, 0],
    "release_grads": [1, None],
    "layout_invariant": ["auto", 0],
    "max_in_flight": [0, -1, 2.0, None],
    "workspace_bytes": [0, -5, 1e9, "1GB"],
    "allow_no_muon": [None, 1],
    "overrides": [3, "muon", ["*"], {3: "muon"}, {"*": "sgd"}, {"*": None}, {"nothing.*": "adamw"}],
    "maximize": [True, False],
    "fused": [None],
    "num_ns_steps": [5],
    "qk_clip": [1],
    "sharded": [{}],
    "grad_sync": ["optimizer"],
}
VIEWS: list[Any] = [
    View(),
    View(split_rows=(1, 3)),
    View(split_rows=(3, 3)),
    View(split_cols=(2, 4)),
    View(split_rows=(2, 2), split_cols=(1, 5)),
    View(heads=2),
    View(heads=3, heads_on="cols"),
    View(heads=5),
    View(experts=True),
    View(experts=True, split_rows=(1, 3)),
    View(flatten=True),
    View(flatten=True, split_rows=(1, 3)),
    View(flatten=True, transposed=True),
    View(transposed=True),
]
GROUP_VALUES: dict[str, list[Any]] = {
    **{key: GOOD_ARGUMENTS[key] for key in ("lr", "weight_decay", "momentum", "eps", "ns_steps", "state_dtype")},
    "betas": [(0.9, 0.99), (0.9, 1.5)],
    "view": [view.as_dict() for view in VIEWS] + [None, 3, {"rows": 2}, {"heads": 0}],
    "initial_lr": [0.1],
    "nesterov": [True, 3],
    "lrr": [0.1],
    "route": ["gram"],
    "param_names": [["x", "y"], [1, 2], None, ["x", "x"]],
}
ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"algorithm": "muon"},
    {"use_muon": True},
    {"kind": "muon"},
    {"algorithm": "adamw"},
    {"use_muon": False},
    {"algorithm": "adamw", "kind": "muon"},
    {"algorithm": None},
    {"use_muon": 1},
]
SHAPES: list[tuple[int, ...]] = [(4, 6), (6, 4), (4, 6), (4, 4), (1, 6), (0, 6), (4,), (), (2, 4, 6), (4, 2, 3)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHARED = nn.Parameter(torch.ones(4, 6))


def random_parameter(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


PIECES: dict[str, Callable[[torch.dtype], Any]] = {
    "hidden": lambda dtype: nn.Linear(6, 4, dtype=dtype),
    "tall": lambda dtype: nn.Linear(4, 6, bias=False, dtype=dtype),
    "embed": lambda dtype: nn.Embedding(5, 4, dtype=dtype),
    "norm": lambda dtype: nn.LayerNorm(4, dtype=dtype),
    "conv": lambda dtype: nn.Conv2d(2, 4, (1, 3), dtype=dtype),
    "transposed": lambda dtype: nn.ConvTranspose1d(2, 4, 3, dtype=dtype),
    "depthwise": lambda dtype: nn.Conv1d(4, 4, 3, groups=4, dtype=dtype),
    "experts": lambda dtype: random_parameter((2, 4, 6), dtype),
    "stack": lambda dtype: random_parameter((2, 4, 6), dtype),
    "scalar": lambda dtype: random_parameter((), dtype),
    "empty": lambda dtype: random_parameter((0, 6), dtype),
    "column": lambda dtype: random_parameter((6, 1), dtype),
    "complex": lambda dtype: random_parameter((4, 6), torch.complex64),
    "lazy": lambda dtype: nn.LazyLinear(4),
    "flat": lambda dtype: flat_linear(),
}
USUAL_PIECES = ["hidden", "tall", "embed", "norm", "conv", "transposed", "depthwise", "experts", "scalar", "column"]
PATTERNS = ["*", "hidden.*", "hidden.weight", "*.weight", "stack", "experts", "norm.weight", "conv.weight", "nothing.*"]
ODD_PARAMS: list[Callable[[], Any]] = [
    lambda: None,
    lambda: "model",
    lambda: 3,
    lambda: SHARED,
    lambda: {SHARED},
    list,
    lambda: [None],
    lambda: [[SHARED]],
    lambda: [SHARED, SHARED],
    lambda: [SHARED, {"params": [SHARED]}],
    lambda: [("a", SHARED), ("a", random_parameter((4, 6)))],
    lambda: [("a", SHARED), ("b", SHARED)],
    lambda: [("a", None)],
    lambda: [(3, SHARED)],
    lambda: {"a": SHARED},
    lambda: [{"params": None}],
    lambda: [{"params": [(3, SHARED)]}],
    lambda: [{"lr": 0.1}],
    lambda: [SHARED * 2],
    lambda: nn.Module(),
    lambda: nn.Linear(6, 4).requires_grad_(False),
    lambda: nn.Linear(6, 4).parameters(),
]


def flat_linear() -> nn.Module:
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.zeros(24))
    return module


@dataclass
class Call:
    """One argument set, as plain data where it can be: hypothesis prints it when it fails."""

    arguments: dict[str, Any]
    make_params: Callable[[], Any]
    params: Any = None


def pairs_of(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def some_of(table: dict[str, list[Any]], *, most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(pairs_of(table)), max_size=most).map(dict)


def build_model(pieces: list[str], dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    for name in pieces:
        setattr(model, name, PIECES[name](dtype))
    return model


@st.composite
def model_calls(draw: Any) -> Call:
    usual = st.lists(st.sampled_from(USUAL_PIECES), min_size=1, max_size=4, unique=True)
    anything = st.lists(st.sampled_from(list(PIECES)), min_size=1, max_size=4, unique=True)
    pieces, dtype = draw(usual | usual | anything), draw(st.sampled_from(DTYPES))
    choices = st.sampled_from(["muon", "adamw", *VIEWS, "adamw", "muon", {}, 3])
    overrides = draw(st.none() | st.none() | st.dictionaries(st.sampled_from(PATTERNS), choices, max_size=2))
    if overrides and draw(st.booleans()):
        chosen = next(iter(overrides.values()))
        given_overrides: Any = lambda name, tensor: chosen if "weight" in name else None  # noqa: E731
    else:
        given_overrides = overrides
    named = draw(st.booleans())

    def make() -> Any:
        model = build_model(pieces, dtype)
        return model.named_parameters() if named else model

    arguments = {} if overrides is None else {"overrides": given_overrides}
    return Call(arguments, make, {"pieces": pieces, "dtype": dtype, "named": named, "overrides": overrides})


@st.composite
def group_calls(draw: Any) -> Call:
    dtype, named = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(st.sampled_from(SHAPES[:4]) | st.sampled_from(SHAPES), min_size=1, max_size=2))
        groups.append((shapes, {**draw(st.sampled_from(ALGORITHMS)), **draw(some_of(GROUP_VALUES, most=2))}))

    def make() -> Any:
        made = []
        for index, (shapes, values) in enumerate(groups):
            params: list[Any] = [random_parameter(shape, dtype) for shape in shapes]
            if named:
                params = [(f"group{index}.{i}", p) for i, p in enumerate(params)]
            made.append({"params": params, **copy.deepcopy(values)})
        return made

    return Call({}, make, {"groups": groups, "dtype": dtype, "named": named})


bare_shapes = st.lists(st.sampled_from([(4, 6), (6, 4), (1, 6)]), min_size=1, max_size=3)
bare_calls = bare_shapes.map(lambda shapes: Call({}, lambda: [random_parameter(s) for s in shapes], shapes))
odd_calls = st.sampled_from(range(len(ODD_PARAMS))).map(lambda index: Call({}, ODD_PARAMS[index], f"odd {index}"))


@st.composite
def calls(draw: Any) -> Call:
    call: Call = draw(st.one_of(model_calls(), model_calls(), group_calls(), bare_calls, odd_calls))
    call.arguments.update(draw(some_of(GOOD_ARGUMENTS, most=5)))
    if draw(st.sampled_from([False, False, True])):
        call.arguments.update(draw(some_of(BAD_ARGUMENTS, most=2)))
    return call

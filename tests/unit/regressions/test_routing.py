"""Section C, first half: which parameter takes which algorithm."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import Holder, must_fail, parameter, reasons, routes, step
from torch import nn

from meshmuon import Muon, View, param_groups


class Tied(nn.Module):
    def __init__(self, *, head_first: bool) -> None:
        super().__init__()
        modules = [("tok", nn.Embedding(20, 8)), ("hidden", nn.Linear(8, 8)), ("lm_head", nn.Linear(8, 20, bias=False))]
        for name, module in reversed(modules) if head_first else modules:
            self.add_module(name, module)
        self.lm_head.weight = self.tok.weight


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_embedding_takes_muon_through_its_other_name(head_first: bool) -> None:
    """#29: tied means one parameter and one algorithm, by whichever name it is found first."""
    model = Tied(head_first=head_first)
    opt = Muon(model)
    found = routes(opt)
    name = "lm_head.weight" if head_first else "tok.weight"
    assert found == {name: "adamw", "hidden.weight": "muon", "hidden.bias": "adamw"}
    assert "tied" in reasons(opt)[name]
    assert sum(p is model.tok.weight for group in opt.param_groups for p in group["params"]) == 1
    # A layer that shares the embedding's weight under a name that says nothing is tied all the same.
    shared = Holder(first=nn.Linear(8, 20, bias=False), hidden=nn.Linear(8, 8), table=nn.Embedding(20, 8))
    shared.first.weight = shared.table.weight
    assert routes(Muon(shared))["first.weight"] == "adamw"


def check_no_table_takes_muon(found: dict[str, str]) -> None:
    for name, algorithm in found.items():
        table = any(word in name for word in ("embed", "wte", "head", "output", "table", "score"))
        assert algorithm == ("adamw" if table else "muon"), name


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding by type": lambda: Holder(table=nn.Embedding(20, 8), hidden=nn.Linear(8, 8, bias=False)),
    "embedding bag": lambda: Holder(table=nn.EmbeddingBag(20, 8), hidden=nn.Linear(8, 8, bias=False)),
    "bare position table": lambda: Holder(pos_embed=parameter(20, 8), hidden=nn.Linear(8, 8, bias=False)),
    "head by name": lambda: Holder(hidden=nn.Linear(8, 8, bias=False), lm_head=nn.Linear(8, 30, bias=False)),
    "head at the top": lambda: Holder(hidden=nn.Linear(8, 8, bias=False), head=nn.Linear(8, 30, bias=False)),
    "output at the top": lambda: Holder(hidden=nn.Linear(8, 8, bias=False), output=nn.Linear(8, 30, bias=False)),
    "inside a wrapper": lambda: Holder(
        model=Holder(hidden=nn.Linear(8, 8, bias=False)), score=nn.Linear(8, 2, bias=False)
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_embeddings_and_heads_are_orthogonalized(kind: str) -> None:
    """#30: a row of these belongs to a token; orthogonalized, rare tokens move as far as frequent ones."""
    model = MODELS[kind]()
    found = routes(Muon(model))
    assert "muon" in found.values() and "adamw" in found.values()
    check_no_table_takes_muon(found)
    must_fail(check_no_table_takes_muon, dict.fromkeys(found, "muon"))
    by_name = routes(Muon((name.replace("table", "wte"), p) for name, p in model.named_parameters()))
    check_no_table_takes_muon(by_name)
    wrapped = routes(Muon(nn.DataParallel(model)))
    assert wrapped == found, "a wrapper's prefix must not change the routes"


def test_a_head_under_any_name_is_orthogonalized() -> None:
    """#30: the last nn.Linear with the embedding's shape is the head, whatever it is called."""
    model = Holder(table=nn.Embedding(20, 8), hidden=nn.Linear(8, 8, bias=False), last=nn.Linear(8, 20, bias=False))
    opt = Muon(model)
    assert routes(opt) == {"hidden.weight": "muon", "table.weight": "adamw", "last.weight": "adamw"}
    assert "head" in reasons(opt)["last.weight"]


def test_a_hidden_layer_with_the_embeddings_shape_is_taken_for_the_head() -> None:
    """#30, the other way round: with a small vocabulary every block has layers of the embedding's shape."""
    blocks = nn.ModuleList(Holder(up=nn.Linear(8, 16, bias=False), down=nn.Linear(16, 8, bias=False)) for _ in range(2))
    model = Holder(table=nn.Embedding(16, 8), blocks=blocks, last=nn.Linear(8, 16, bias=False))
    found = routes(Muon(model))
    assert {name for name, algorithm in found.items() if algorithm == "adamw"} == {"table.weight"}
    alone = Holder(table=nn.Embedding(16, 8), hidden=nn.Linear(8, 8, bias=False), last=nn.Linear(8, 16, bias=False))
    assert routes(Muon(alone))["last.weight"] == "adamw", "the sabotage: alone, it is the head"


@pytest.mark.parametrize("name", ["bias", "rel_bias", "bias_table", "attention.position_bias"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_bias_with_two_dims_is_orthogonalized(name: str, by_name: bool) -> None:
    """A table of biases has rows that mean nothing together; only its own name says so."""
    *parents, leaf = name.split(".")
    table = Holder(**{leaf: parameter(6, 8)})
    model = Holder(hidden=nn.Linear(8, 8, bias=False), **({parents[0]: table} if parents else {leaf: parameter(6, 8)}))
    opt = Muon(model.named_parameters() if by_name else model)
    assert routes(opt) == {"hidden.weight": "muon", name: "adamw"} and "bias" in reasons(opt)[name]
    assert routes(Muon(Holder(debiased=Holder(weight=parameter(6, 8)))))["debiased.weight"] == "muon"


def test_hidden_layers_with_the_word_head_in_a_parent_lose_muon() -> None:
    """#22 and #30, the other way round: excluding too much is as silent as excluding too little."""
    block = Holder(heads=Holder(q=nn.Linear(8, 8, bias=False)), output=nn.Linear(8, 8, bias=False))
    found = routes(Muon(Holder(blocks=nn.ModuleList([block, block]), embedding_proj=nn.Linear(8, 8, bias=False))))
    assert found == {
        "blocks.0.heads.q.weight": "muon",
        "blocks.0.output.weight": "muon",
        "embedding_proj.weight": "muon",
    }


def test_gains_with_two_dims_are_orthogonalized() -> None:
    """Of norms over several dims, and of weight norms."""
    found = routes(
        Muon(
            Holder(
                norm=nn.LayerNorm((4, 5)),
                new=nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False)),
                conv=nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False), dim=1),
            )
        )
    )
    assert found == {
        "norm.weight": "adamw",
        "norm.bias": "adamw",
        "new.parametrizations.weight.original0": "adamw",
        "new.parametrizations.weight.original1": "muon",
        "conv.parametrizations.weight.original0": "adamw",
        "conv.parametrizations.weight.original1": "muon",
    }


def test_hidden_layers_of_a_classifier_lose_muon() -> None:
    """The other way round: of a stack by that name only the last layer is a head; heads side by side all are."""
    layers = [
        nn.Linear(8, 8, bias=False),
        nn.ReLU(),
        nn.Linear(8, 8, bias=False),
        nn.ReLU(),
        nn.Linear(8, 3, bias=False),
    ]
    whole = nn.Sequential(OrderedDict(l=nn.Linear(8, 8), lm_head=nn.Linear(8, 9, bias=False), value=nn.Linear(9, 1)))
    assert routes(Muon(whole))["lm_head.weight"] == "adamw", "called so itself"
    tasks = nn.ModuleList([nn.Linear(8, 3, bias=False), nn.Linear(8, 2, bias=False)])
    assert routes(Muon(Holder(classifier=nn.Sequential(*layers), heads=tasks))) == {
        "classifier.0.weight": "muon",
        "classifier.2.weight": "muon",
        "classifier.4.weight": "adamw",
        "heads.0.weight": "adamw",
        "heads.1.weight": "adamw",
    }


def test_excluded_matrices_fall_to_another_learning_rate_unseen() -> None:
    """#31: 19 matrices fell to AdamW at a tenth of the rate. The rate each algorithm uses is printed."""
    model = Holder(a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False))
    opt = Muon(model, lr=0.02, adamw_lr_ratio=0.125, overrides={"b.*": "adamw"})
    lines = {
        line.split(":")[1].split(",")[0].strip(): line for line in str(opt).splitlines() if "Parameter Group" in line
    }
    assert "lr=0.02" in lines["muon"] and "adjust_lr_fn=match_rms_adamw" in lines["muon"]
    assert "lr=0.02" in lines["adamw"] and "adamw_lr_ratio=0.125" in lines["adamw"]
    opt.param_groups[1]["lr"] = 0.5
    assert "lr=0.5" in str(opt), "the print must show the rates as they are now"
    row = next(line for line in str(opt).splitlines() if " b.weight " in line)
    assert row.startswith("adamw") and "override" in row
    # And it is the rate that acts.
    before = model.b.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.param_groups[1]["weight_decay"] = 0.0
    opt.step()
    assert torch.allclose(before - model.b.weight, torch.full((8, 8), 0.5 * 0.125), rtol=1e-5)


DEPTHWISE = {
    "depthwise 1-D": (lambda: nn.Conv1d(6, 6, 3, groups=6), "adamw"),
    "depthwise 2-D": (lambda: nn.Conv2d(6, 12, 3, groups=6), "adamw"),
    "grouped": (lambda: nn.Conv2d(6, 6, 3, groups=2), "adamw"),
    "grouped, transposed": (lambda: nn.ConvTranspose2d(6, 6, 3, groups=2), "adamw"),
    "dense 1-D": (lambda: nn.Conv1d(6, 6, 3), "muon"),
    "dense 3-D": (lambda: nn.Conv3d(2, 6, 2), "muon"),
    "dense, transposed": (lambda: nn.ConvTranspose1d(6, 4, 3), "muon"),
}


@pytest.mark.parametrize("kind", DEPTHWISE)
def test_depthwise_convolutions_are_orthogonalized(kind: str) -> None:
    """#36: a depthwise filter couples no channels: its (channels, k) matrix means nothing."""
    make, expected = DEPTHWISE[kind]
    opt = Muon(Holder(conv=make(), hidden=nn.Linear(8, 8)))
    assert routes(opt)["conv.weight"] == expected
    if expected == "adamw":
        assert "grouped" in reasons(opt)["conv.weight"]


def test_parts_of_different_kinds_in_one_projection_cannot_be_excluded() -> None:
    """#36: a fused in_proj of a state-space layer holds five kinds of rows: exclude it, or say what they are."""
    model = Holder(in_proj=nn.Linear(8, 22, bias=False), hidden=nn.Linear(8, 8, bias=False))
    assert routes(Muon(model, overrides={"in_proj.*": "adamw"})) == {"hidden.weight": "muon", "in_proj.weight": "adamw"}
    opt = Muon(model, overrides={"in_proj.weight": View(split_rows=(8, 8, 3, 2, 1))})
    count = sum(len(bucket.matrices) for bucket in opt.plan.buckets)
    assert count == 6
    assert param_groups(model)[0]["algorithm"] == "muon"


class Block(nn.Module):
    """Its layers have names that mean a head at the top of a model, and nothing in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 8, bias=False)
        self.fc = nn.Linear(8, 16, bias=False)
        self.score = nn.Linear(16, 8, bias=False)


def weights(*sides: tuple[int, int]) -> list[nn.Linear]:
    return [nn.Linear(*each, bias=False) for each in sides]


NUMBERED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "blocks at the top": (lambda: nn.Sequential(Block(), Block()), set()),
    "blocks in a transformer": (
        lambda: Holder(transformer=nn.ModuleList([Block(), Block()]), lm_head=nn.Linear(8, 30, bias=False)),
        {"lm_head.weight"},
    ),
    "a stack inside a stack": (
        lambda: Holder(
            body=Block(), classifier=nn.Sequential(nn.Sequential(*weights((8, 16)), nn.ReLU()), *weights((16, 3)))
        ),
        {"classifier.1.weight"},
    ),
    "a list of layers one after the other": (
        lambda: Holder(fc=nn.ModuleList(weights((8, 16), (16, 8), (8, 3)))),
        {"fc.2.weight"},
    ),
    "several heads": (
        lambda: Holder(body=Block(), heads=nn.ModuleList(weights((8, 3), (8, 5)))),
        {"heads.0.weight", "heads.1.weight"},
    ),
    "several square heads": (
        lambda: Holder(body=Block(), heads=nn.ModuleList(weights((8, 8), (8, 8), (8, 8)))),
        {"heads.0.weight", "heads.1.weight", "heads.2.weight"},
    ),
    "as torchvision and timm call theirs": (
        lambda: Holder(
            body=Block(),
            heads=Holder(head=nn.Linear(8, 9, bias=False)),
            head=Holder(fc=nn.Linear(8, 9, bias=False)),
        ),
        {"heads.head.weight", "head.fc.weight"},
    ),
}


@pytest.mark.parametrize("kind", NUMBERED)
def test_hidden_layers_of_numbered_blocks_are_taken_for_heads(kind: str) -> None:
    make, heads = NUMBERED[kind]
    found = routes(Muon(make()))
    assert {name for name, algorithm in found.items() if algorithm == "adamw"} == heads
    assert len(found) > len(heads)


@pytest.mark.parametrize("norm", ["parametrizations.weight_norm", "weight_norm", "parametrizations.spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_parametrized_table_takes_muon(norm: str) -> None:
    """It lies in a list of its own, which is neither an embedding nor called like a head."""
    wrap = getattr(nn.utils.parametrizations if "." in norm else nn.utils, norm.rpartition(".")[2])
    model = Holder(
        table=wrap(nn.Embedding(20, 8)),
        hidden=wrap(nn.Linear(8, 8, bias=False)),
        filters=wrap(nn.Conv1d(4, 8, 3, bias=False)),
        lm_head=wrap(nn.Linear(8, 20, bias=False)),
    )
    found = routes(Muon(model))
    magnitudes = ("original0", "weight_g")
    kinds = {(n.split(".")[0], a) for n, a in found.items() if not n.endswith(magnitudes)}
    assert kinds == {("table", "adamw"), ("lm_head", "adamw"), ("hidden", "muon"), ("filters", "muon")}
    assert {a for n, a in found.items() if n.endswith(magnitudes)} <= {"adamw"}


def test_making_an_optimizer_runs_the_parametrizations() -> None:
    """A power iteration would be taken, and random numbers drawn, by looking at `module.weight`."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    Muon(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_tower_below_a_name_like_embedder_loses_muon_by_name() -> None:
    shapes = {"embedder.0.fc1.weight": (8, 16), "embedder.0.embed_tokens.weight": (20, 8), "trunk.weight": (8, 8)}
    words = ("embedding.token", "embeddings.1", "embeddings.0.table", "embed_tokens.0.base_layer")
    tables = {f"{word}.weight": (20, 8) for word in words}
    found = routes(Muon([(name, parameter(*shape)) for name, shape in (shapes | tables).items()]))
    muon = {name for name, algorithm in found.items() if algorithm == "muon"}
    assert muon == {"embedder.0.fc1.weight", "trunk.weight"}


@pytest.mark.parametrize("way_in", ["model", "groups", "overrides"])
@pytest.mark.parametrize("asked", [None, 0.5])
def test_norms_and_biases_of_two_dims_are_decayed(asked: float | None, way_in: str) -> None:
    model: Any = Holder(
        hidden=nn.Linear(4, 4, bias=False),
        norm=nn.LayerNorm((3, 4), bias=False),
        scale=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)),
        relative_bias=nn.Parameter(torch.ones(3, 4)),
        cls_token=nn.Parameter(torch.ones(1, 1, 4)),
        table=nn.Embedding(3, 4),
    )
    overrides = {"norm.*": "adamw"} if way_in == "overrides" else None
    params = param_groups(model) if way_in == "groups" else model
    opt = Muon(params, lr=0.1, weight_decay=0.5, adamw_weight_decay=asked, overrides=overrides)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(opt, model.parameters(), [torch.zeros_like(p) for p in model.parameters()])
    decayed = {n for n, p in model.named_parameters() if torch.equal(p, before[n] * (1 - 0.1 * 0.5))}
    kept = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    vectors = {"norm.weight", "scale.parametrizations.weight.original0", "relative_bias", "cls_token"}
    asked_for = asked and way_in != "groups"  # there they have a group of their own, with a weight decay of its own
    assert (decayed & vectors, kept) == ((vectors, set()) if asked_for else (set(), vectors))
    assert "table.weight" in decayed


def test_groups_to_edit_take_what_the_constructor_takes() -> None:
    model = Holder(
        gate=nn.Linear(8, 8, bias=False),
        qkv=nn.Linear(8, 24, bias=False),
        bank=nn.Parameter(torch.ones(3, 8, 8)),
    )
    overrides = {"gate.*": "adamw", "qkv.weight": View(split_rows=(8, 8, 8))}
    groups = param_groups(model, overrides=overrides, expert_keys=("bank",))
    straight = Muon(model, overrides=overrides, expert_keys=("bank",))
    edited = Muon(groups)
    assert routes(edited) == routes(straight) == {"bank": "muon", "qkv.weight": "muon", "gate.weight": "adamw"}
    views = [[p.routing.view for p in opt.plan.parameters] for opt in (edited, straight)]
    assert views[0] == views[1]
    with pytest.raises(ValueError, match="bank"):
        param_groups(model, overrides=overrides)

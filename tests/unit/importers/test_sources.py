"""The next updates after an import are those the source would have made: parameters and momentum, over 5 steps."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.unit.importers import peers
from tests.unit.importers.tools import (
    AFTER,
    BEFORE,
    MATRICES,
    Net,
    assert_moves_alike,
    make_net,
    names,
    snapshot,
    split,
    state_of,
    through_a_file,
    train,
    twin_of,
)
from torch.optim import Optimizer

from meshmuon import ImportReport, Muon, Orthogonalizer, load_foreign_state
from meshmuon.importers.read import Reader

LR, WD, MOMENTUM = 0.01, 0.1, 0.9
ADAMW = {"betas": (0.9, 0.95), "adamw_eps": 1e-8, "adamw_weight_decay": WD}
COMMON = {"lr": LR, "weight_decay": WD, "momentum": MOMENTUM, **ADAMW}
# Of the way a parameter goes in 5 steps. Torch's iteration runs in bf16; the re-creations in fp32, as ours.
FP32, BF16 = 2e-4, 3e-2


@dataclass(frozen=True)
class Case:
    """A source: how it is built (an optimizer for each part and rank), what it saves, our settings for the same."""

    word: str
    build: Callable[[Net], list[Optimizer]]
    ours: dict[str, Any]
    save: Callable[[list[Optimizer]], Any] = lambda opts: opts[0].state_dict()
    bound: float = FP32
    heavy_ball: bool = False
    names: Callable[[Net], list[str]] | None = None


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, weight_decay=WD, betas=(0.9, 0.95))


def torch_pair(net: Net) -> list[Optimizer]:
    matrices, rest = split(net)
    return [torch.optim.Muon(matrices, lr=LR, weight_decay=WD, momentum=MOMENTUM), adamw(rest)]


def torch_named(net: Net) -> list[Optimizer]:
    """Named, and in another order than ours."""
    named = list(net.named_parameters())[::-1]
    matrices = [(n, p) for n, p in named if n in MATRICES]
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=WD, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([(n, p) for n, p in named if n not in MATRICES])]


def keller(net: Net) -> list[Optimizer]:
    matrices, rest = split(net)
    return [peers.KellerMuon(matrices, LR, WD, MOMENTUM), adamw(rest)]


def keller_ranks(net: Net) -> list[Optimizer]:
    matrices, rest = split(net)
    fixed = {"lr": LR, "weight_decay": WD}
    return [
        peers.KellerMuonWithAuxAdam(
            [
                {"params": list(rest), "betas": (0.9, 0.95), "eps": 1e-8, **fixed, "use_muon": False},
                {"params": list(matrices), "momentum": MOMENTUM, **fixed, "use_muon": True},
            ],
            rank,
            3,
        )
        for rank in range(3)
    ]


def moonlight(net: Net) -> list[Optimizer]:
    return [peers.Moonlight(LR, WD, *split(net), momentum=MOMENTUM)]


def dion(adjust_lr: str | None, nesterov: bool) -> Callable[[Net], list[Optimizer]]:
    def build(net: Net) -> list[Optimizer]:
        matrices, rest = split(net)
        groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
        return [peers.Dion(groups, LR, MOMENTUM, WD, nesterov, adjust_lr)]

    return build


def motif(net: Net) -> list[Optimizer]:
    matrices, rest = split(net)
    groups = [{"params": matrices, "names": names(net)[0], "use_muon": True}, {"params": rest, "use_muon": False}]
    return [peers.Motif(groups, LR, WD, MOMENTUM)]


def nanochat_groups(net: Net) -> list[dict[str, Any]]:
    """Head before embedding, vectors, then matrices by shape: its own order, which is not the model's."""
    p = dict(net.named_parameters())
    kinds = [["head.weight"], ["embed.weight"], ["up.bias", "norm.weight", "norm.bias", "down.bias"]]
    rest = [{"params": [p[n] for n in kind], "betas": (0.9, 0.95), "eps": 1e-8, "kind": "adamw"} for kind in kinds]
    shapes = [["down.weight"], ["up.weight"], ["mid.0.weight", "mid.1.weight", "mid.2.weight"]]
    # Its lr rule scales the decay of tall matrices too, ours does not: compared without any.
    muon = {"momentum": MOMENTUM, "ns_steps": 5, "beta2": 0.95, "weight_decay": 0.0, "kind": "muon"}
    stacks = [{"params": [p[n] for n in same], **muon} for same in shapes]
    return [{"weight_decay": WD, **group, "lr": LR} for group in (*rest, *stacks)]


def nanochat_names(net: Net) -> list[str]:
    called = {id(p): n for n, p in net.named_parameters()}
    return [called[id(p)] for group in nanochat_groups(net) for p in group["params"]]


def nanochat(world: int) -> Callable[[Net], list[Optimizer]]:
    return lambda net: [
        peers.NanochatMuonAdamW(nanochat_groups(net), rank, world, normuon=False) for rank in range(world)
    ]


def nanochat_old(net: Net) -> list[Optimizer]:
    matrices, rest = split(net)
    return [*(peers.NanochatDistMuon(matrices, LR, MOMENTUM, rank, 2) for rank in range(2)), adamw(rest)]


def files(opts: list[Optimizer]) -> list[Any]:
    return [opt.state_dict() for opt in opts]


KELLERS = {"ns_coefficients": "keller", "adjust_lr_fn": "original"}
MOONLIGHTS = {"ns_coefficients": "keller", "adjust_lr_fn": "match_rms_adamw"}
DIONS = {"ns_coefficients": "you", "nesterov": False}
BF16_STEPS = {"orthogonalizer": Orthogonalizer(dtype="bfloat16", form="standard")}
CASES = {
    "torch, a pair": Case("torch", torch_pair, {**KELLERS, **BF16_STEPS}, lambda opts: tuple(files(opts)), BF16),
    "torch, named, a dict": Case(
        "torch",
        torch_named,
        {**MOONLIGHTS, **BF16_STEPS},
        lambda opts: dict(zip(("muon", "adamw"), files(opts), strict=True)),
        BF16,
    ),
    "keller": Case("keller", keller, KELLERS, files),
    "keller with Adam, 3 ranks": Case("keller", keller_ranks, KELLERS, files),
    "moonlight": Case("moonlight", moonlight, MOONLIGHTS, heavy_ball=True),
    "dion": Case("dion", dion("spectral_norm", False), {**DIONS, "adjust_lr_fn": "unit_rms_norm"}, heavy_ball=True),
    "dion, rms_norm, nesterov": Case(
        "dion",
        dion("rms_norm", True),
        {**DIONS, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"},
        heavy_ball=True,
    ),
    "motif": Case("motif", motif, MOONLIGHTS, heavy_ball=True),
    "nanochat, one rank": Case("nanochat", nanochat(1), {**KELLERS, "weight_decay": 0.0}, names=nanochat_names),
    "nanochat, 2 ranks": Case("nanochat", nanochat(2), {**KELLERS, "weight_decay": 0.0}, files, names=nanochat_names),
    "nanochat, 3 ranks": Case("nanochat", nanochat(3), {**KELLERS, "weight_decay": 0.0}, files, names=nanochat_names),
    "nanochat of the first months, AdamW whole on each rank": Case(
        "nanochat",
        nanochat_old,
        {**KELLERS, "weight_decay": 0.0},
        lambda opts: {"muon": files(opts[:2]), "adamw": [opts[2].state_dict()] * 2},
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def imported(case: Case, *, change: Callable[[Any], None] = lambda state: None) -> Callable[[], None]:
    """Train with the source, import, train on with both; returns the comparison."""
    net = make_net()
    theirs = case.build(net)
    train(net, theirs, BEFORE)
    state = copy.deepcopy(case.save(theirs))
    state = through_a_file(state)
    change(state)
    twin, opt = twin_of(net, **{**COMMON, **case.ours})
    report = load_foreign_state(opt, state, names=case.names(net) if case.names else None)
    assert report.source == case.word
    start = snapshot(net)
    train(net, theirs, AFTER)
    train(twin, [opt], AFTER)
    return lambda: assert_moves_alike(twin, net, start, bound=case.bound)


@every_case
def test_the_next_updates_are_those_of_the_source(case: Case) -> None:
    imported(case)()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.heavy_ball])
def test_sabotage_without_the_rescaling_the_updates_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_factor", lambda *_: 1.0)
    with pytest.raises(AssertionError, match="of its way off"):
        imported(CASES[name])()


@every_case
@pytest.mark.parametrize("factor", [0.0, 1.0 - MOMENTUM])
def test_sabotage_a_wrong_momentum_is_seen(case: Case, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reader._factor
    monkeypatch.setattr(Reader, "_factor", lambda self, *rest: original(self, *rest) * factor)
    with pytest.raises(AssertionError, match="of its way off"):
        imported(case)()


@every_case
def test_sabotage_lost_moments_are_seen(case: Case) -> None:
    def lose(state: Any) -> None:
        if isinstance(state, dict):
            for key in ("exp_avg", "moment1"):
                if key in state:
                    state[key].zero_()
            if "variance" in state:
                state["momentum"].zero_()
            for value in state.values():
                lose(value)
        elif isinstance(state, (list, tuple)):
            for value in state:
                lose(value)

    with pytest.raises(AssertionError, match="of its way off"):
        imported(case, change=lose)()


@pytest.mark.parametrize("name", ["moonlight", "dion", "motif"])
def test_heavy_ball_momentum_is_ours_divided_by_one_minus_momentum(name: str) -> None:
    """Exactly: in fp32, rounded once; and again after 5 more steps of both."""
    case, net = CASES[name], make_net()
    theirs = case.build(net)
    train(net, theirs, BEFORE)
    twin, opt = twin_of(net, **{**COMMON, **case.ours})
    report = load_foreign_state(opt, theirs[0].state_dict())
    key = "momentum" if name == "dion" else "momentum_buffer"
    params = dict(net.named_parameters())
    for matrix in MATRICES:
        expected = theirs[0].state[params[matrix]][key] * (1 - MOMENTUM)
        assert torch.equal(state_of(opt, twin, matrix)["momentum_buffer"], expected)
    assert {each.factor for each in report.taken if each.algorithm == "muon"} == {1 - MOMENTUM}
    train(net, theirs, AFTER)
    train(twin, [opt], AFTER)
    for matrix in MATRICES:
        expected = theirs[0].state[params[matrix]][key] * (1 - MOMENTUM)
        torch.testing.assert_close(state_of(opt, twin, matrix)["momentum_buffer"], expected, rtol=1e-5, atol=1e-6)


def test_the_first_months_of_keller_are_heavy_ball() -> None:
    """The same group keys as nanochat's first Muon, another momentum: it must be said."""
    net = make_net()
    matrices = split(net)[0]
    state = {
        "state": {i: {"momentum_buffer": torch.ones_like(p)} for i, p in enumerate(matrices)},
        "param_groups": [
            {"lr": LR, "momentum": MOMENTUM, "nesterov": True, "ns_steps": 5, "params": list(range(len(matrices)))}
        ],
    }
    opt = Muon(matrices, momentum=MOMENTUM)
    for word, expected in (("keller_2024", 1 - MOMENTUM), ("nanochat", 1.0)):
        load_foreign_state(opt, state, source=word)
        assert torch.equal(opt.state[matrices[0]]["momentum_buffer"], torch.full_like(matrices[0], expected))


def test_nanochats_second_moment_is_reported_and_its_momentum_taken() -> None:
    net = make_net()
    theirs = [peers.NanochatMuonAdamW(nanochat_groups(net), rank, 2) for rank in range(2)]
    train(net, theirs, BEFORE)
    twin, opt = twin_of(net, **{**COMMON, "weight_decay": 0.0}, **KELLERS)
    report: ImportReport = load_foreign_state(opt, files(theirs), names=nanochat_names(net))
    assert [(each.key, each.count) for each in report.left] == [("second_momentum_buffer", 3)]
    assert "NorMuon" in str(report)
    start = snapshot(net)
    train(net, theirs, [4])
    train(twin, [opt], [4])
    # The momentum of the three equal matrices: two on rank 0, one and a filler on rank 1.
    stacked = torch.cat([opt_.state[net.mid[0].weight]["momentum_buffer"] for opt_ in theirs])
    assert stacked.shape[0] == 4
    for i in range(3):
        torch.testing.assert_close(state_of(opt, twin, f"mid.{i}.weight")["momentum_buffer"], stacked[i])
    assert_moves_alike(twin, net, start, bound=FP32, only=["embed.weight", "head.weight", "norm.bias"])
    with pytest.raises(AssertionError, match=r"mid\.0\.weight"):  # NorMuon's step sizes are not ours
        assert_moves_alike(twin, net, start, bound=FP32, only=["mid.0.weight"])

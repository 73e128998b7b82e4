"""What does not fit is refused by name, before anything is changed; who saved it is told, or asked for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.importers import peers
from tests.unit.importers.test_sources import (
    CASES,
    Case,
    adamw,
    every_case,
    files,
    keller_ranks,
    nanochat_groups,
    nanochat_names,
)
from tests.unit.importers.tools import BEFORE, all_state, make_net, names, split, train, twin_of

from meshmuon import CheckpointError, Muon, load_foreign_state
from meshmuon.importers.dialects import DIALECTS


def saved_by(case: Case) -> Any:
    net = make_net()
    theirs = case.build(net)
    train(net, theirs, BEFORE)
    return copy.deepcopy(case.save(theirs))


def assert_refused(state: Any, match: str, *, source: str = "auto", given: list[str] | None = None) -> None:
    """Refused with these words, and every bit of state and every setting as before."""
    net, opt = twin_of(make_net(), lr=0.5)
    train(net, [opt], range(2))
    before, groups = all_state(net, opt), copy.deepcopy(opt.state_dict()["param_groups"])
    with pytest.raises(CheckpointError, match=match):
        load_foreign_state(opt, state, source=source, names=given)
    after = all_state(net, opt)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert opt.state_dict()["param_groups"] == groups


def dropped(state: dict[str, Any], key: Any) -> dict[str, Any]:
    del state["state"][key]
    return state


def reshaped(state: dict[str, Any], key: int, word: str) -> dict[str, Any]:
    state["state"][key][word] = torch.zeros(3, 7)
    return state


@every_case
def test_the_source_is_told_by_content(case: Case) -> None:
    """And asking for it by name is the same."""
    state = saved_by(case)
    given = case.names(make_net()) if case.names else None
    for source in ("auto", case.word):
        net, opt = twin_of(make_net())
        report = load_foreign_state(opt, state, source=source, names=given)
        assert report.source == case.word and len(report.taken) == len(list(net.parameters()))


def test_what_two_authors_wrote_alike_must_be_said() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "params": [0]}
    state = {"state": {0: {"momentum_buffer": torch.ones(4, 4)}}, "param_groups": [group]}
    assert_refused(state, r'could be of several.*source="keller_2024".*source="nanochat"')


def test_what_nobody_wrote_lists_every_source() -> None:
    sgd = torch.optim.SGD(split(make_net())[0], lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError) as error:
        load_foreign_state(twin_of(make_net())[1], sgd.state_dict())
    assert all(f'source="{word}"' in str(error.value) for word in DIALECTS)


def test_our_own_and_adamws_checkpoints_are_sent_where_they_belong() -> None:
    net, opt = twin_of(make_net())
    assert_refused(opt.state_dict(), r"meshmuon itself.*load_state_dict")
    assert_refused(adamw(net.parameters()).state_dict(), r"saved by torch.optim.AdamW.*no momentum")


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "a NoneType"),
        ([], "a list"),
        ("checkpoint.pt", "a str"),
        ({"optimizer": {"param_groups": [], "state": {}}, "model": {}}, "under 'optimizer'"),
        ({"param_groups": [{}], "state": {}}, "without params"),
        ({"param_groups": []}, "without params or state"),
        (
            {"muon": [{"param_groups": [], "state": {}}] * 2, "adamw": {"param_groups": [], "state": {}}},
            "different numb",
        ),
    ],
)
def test_what_is_no_checkpoint(state: Any, match: str) -> None:
    assert_refused(state, match)


def test_an_unknown_source_and_a_foreign_optimizer() -> None:
    net, opt = twin_of(make_net())
    with pytest.raises(ValueError, match=r'"auto", "torch", "keller"'):
        load_foreign_state(opt, {"param_groups": [], "state": {}}, source="kellr")
    with pytest.raises(TypeError, match="AdamW"):
        load_foreign_state(adamw(net.parameters()), {})  # type: ignore[arg-type]


CHANGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "missing, by order": (
        "moonlight",
        lambda s: dropped(s, 1),
        r"'mid.0.weight', 'mid.1.weight', 'mid.2.weight': 3 of",
    ),
    "missing, the only one": (
        "moonlight",
        lambda s: dropped(s, 0),
        r"nothing saved for param_groups\[0\]\['params'\]\[0\].*'up.weight': no saved state",
    ),
    "wrong shape": ("moonlight", lambda s: reshaped(s, 0, "momentum_buffer"), r"'up.weight'.*muon \(3, 7\)"),
    "wrong shape of a moment": (
        "moonlight",
        lambda s: reshaped(reshaped(s, 5, "moment1"), 5, "moment2"),
        r"'embed.weight'.*adamw \(3, 7\)",
    ),
    "wrong shape of one moment": (
        "moonlight",
        lambda s: reshaped(s, 5, "moment2"),
        r"\[5\]: moments of different shapes, \(3, 7\), \(66, 24\)",
    ),
    "no step": ("moonlight", lambda s: s["state"][5].pop("step") and s, r"\[5\]: no step"),
    "no second moment": (
        "moonlight",
        lambda s: s["state"][5].pop("moment2") is None or s,
        r"'embed.weight', 'head.weight': 2 of .* has 1",
    ),
    "not a tensor": ("moonlight", lambda s: s["state"][0].update(momentum_buffer=3) or s, "momentum_buffer is a int"),
    "state of nobody": ("moonlight", lambda s: s["state"].update({99: {}}) or s, "99 that is in no group"),
    "no momentum to rescale by": (
        "dion",
        lambda s: s["param_groups"][0].pop("mu") and s,
        "the momentum None, by which .* rescaled",
    ),
    "momentum of one": ("dion", lambda s: s["param_groups"][0].update(mu=1.0) or s, "1.0, by which .* rescaled"),
    "lion": ("dion", lambda s: s["param_groups"][1].update(algorithm="lion") or s, "'lion', which is an algorithm"),
    "missing, named": (
        "torch, named, a dict",
        lambda s: dropped(s["muon"], 2) and s,
        r"nothing saved for part 0.*\('mid.1.weight'\).*parameter 'mid.1.weight': no saved state",
    ),
    "amsgrad": ("torch, a pair", lambda s: s[1]["param_groups"][0].update(amsgrad=True) or s, "'amsgrad'.*True"),
    "one rank's file is missing": (
        "keller with Adam, 3 ranks",
        lambda s: s[:2],
        r"nothing saved for .*files of all ranks.*'mid.0.weight'",
    ),
    "files of another step": (
        "keller with Adam, 3 ranks",
        lambda s: s[1]["state"][0]["exp_avg"].add_(1) is None or s,
        "exp_avg differs between ranks",
    ),
}


@pytest.mark.parametrize(("name", "change", "match"), CHANGES.values(), ids=CHANGES)
def test_damage_is_named_and_nothing_is_loaded(name: str, change: Callable[[Any], Any], match: str) -> None:
    assert_refused(change(saved_by(CASES[name])), match)


@pytest.mark.parametrize("lost", [0, 1])
def test_nanochat_with_a_rank_missing(lost: int) -> None:
    state = saved_by(CASES["nanochat, 2 ranks"])
    del state[lost]
    assert_refused(state, "every rank", given=nanochat_names(make_net()))


def test_extra_and_renamed_and_reshaped_parameters_by_name() -> None:
    state = saved_by(CASES["torch, named, a dict"])
    state["muon"]["param_groups"][0]["param_names"][0] = "gone.weight"
    assert_refused(state, r"'gone.weight': saved at part 0.*no parameter of that name")
    state = saved_by(CASES["torch, named, a dict"])
    state["muon"]["state"][0]["momentum_buffer"] = torch.zeros(2, 2)
    assert_refused(state, r"'down.weight': saved state of shape \(2, 2\), it should have \(24, 40\)")
    state = saved_by(CASES["torch, named, a dict"])
    state["adamw"]["param_groups"][0]["param_names"][0] = "up.weight"
    assert_refused(state, r"'up.weight': saved")


def test_another_routing_is_named() -> None:
    """The other run trained the head with Muon."""
    net = make_net()
    theirs = torch.optim.Muon([(n, p) for n, p in net.named_parameters() if p.ndim == 2])
    train(net, [theirs], BEFORE)
    assert_refused(theirs.state_dict(), r"'embed.weight': saved with muon.*trains it with adamw.*overrides")


def test_equal_shapes_in_several_groups_need_names_and_wrong_order_would_swap_them() -> None:
    """Head and embedding have one shape: without names a guess would swap their moments."""
    net = make_net()
    theirs = peers.NanochatMuonAdamW(nanochat_groups(net))
    train(net, [theirs], BEFORE)
    assert_refused(theirs.state_dict(), r"'embed.weight', 'head.weight' of one shape.*names=")
    twin, opt = twin_of(net)
    load_foreign_state(opt, theirs.state_dict(), names=nanochat_names(net))
    for ours, other in ((twin.embed.weight, net.embed.weight), (twin.head.weight, net.head.weight)):
        assert torch.equal(opt.state[ours]["exp_avg"], theirs.state[other]["exp_avg"])
    assert_refused(theirs.state_dict(), "3 names for 11", given=["a", "b", "c"])


def test_keller_sorts_by_size_and_inside_a_size_order_is_kept() -> None:
    net = make_net()
    theirs = keller_ranks(net)
    train(net, theirs, BEFORE)
    listed = [p.shape for p in theirs[0].param_groups[1]["params"]]
    assert listed != [p.shape for p in split(net)[0]]
    twin, opt = twin_of(net)
    report = load_foreign_state(opt, files(theirs))
    assert {each.by for each in report.taken} == {"order"}
    for name in names(net)[0]:
        owner = next(each for each in theirs if net.get_parameter(name) in each.state)
        expected = owner.state[net.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(opt.state[twin.get_parameter(name)]["momentum_buffer"], expected)


def test_keys_may_be_names_as_distributed_checkpoints_have_them() -> None:
    net = make_net()
    theirs = torch.optim.Muon(split(net)[0])
    train(net, [theirs], BEFORE)
    saved = theirs.state_dict()
    called = names(net)[0]
    state = {called[key]: entry for key, entry in saved["state"].items()}
    groups = [{**saved["param_groups"][0], "params": called[::-1]}]
    matrices = Muon([(n, p) for n, p in zip(called, split(net)[0], strict=True)])
    report = load_foreign_state(matrices, {"state": state, "param_groups": groups})
    assert {each.by for each in report.taken} == {"name"}
    for p in split(net)[0]:
        assert torch.equal(matrices.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])


@pytest.mark.parametrize("declared", [None, torch.float32])
def test_the_declared_dtype_is_kept(declared: torch.dtype | None) -> None:
    """bf16 parameters; the source's fp32 momentum is rescaled in fp32 and rounded once, or not at all."""
    net = make_net()
    theirs = CASES["moonlight"].build(net)
    train(net, theirs, BEFORE)
    twin = copy.deepcopy(net).to(torch.bfloat16)
    opt = Muon(twin, state_dtype=declared)
    load_foreign_state(opt, theirs[0].state_dict())
    expected = theirs[0].state[net.up.weight]["momentum_buffer"] * (1 - 0.9)
    found = opt.state[twin.up.weight]["momentum_buffer"]
    assert found.dtype == (declared or torch.bfloat16) and torch.equal(found, expected.to(found.dtype))
    assert opt.state[twin.head.weight]["exp_avg"].dtype == torch.bfloat16


def test_the_checkpoint_is_left_alone_and_not_shared() -> None:
    net = make_net()
    theirs = CASES["torch, a pair"].build(net)
    train(net, theirs, BEFORE)
    before = copy.deepcopy(files(theirs))
    twin, opt = twin_of(net)
    load_foreign_state(opt, files(theirs))
    train(twin, [opt], range(2))
    for now, then in zip(files(theirs), before, strict=True):
        for key, entry in then["state"].items():
            assert all(torch.equal(now["state"][key][word], value) for word, value in entry.items())


def test_the_report_says_what_differs() -> None:
    _, opt = twin_of(make_net(), lr=0.02, momentum=0.95)
    report = load_foreign_state(opt, saved_by(CASES["torch, a pair"]))
    found = {(each.key, each.theirs, each.ours) for each in report.differences}
    assert found == {
        ("lr", 0.01, 0.02),
        ("momentum", 0.9, 0.95),
        ("ns_coefficients", "keller", "polar_express"),
        ("adjust_lr_fn", "original", "match_rms_adamw"),
        ("weight_decay", 0.1, 0.0),  # of the vectors
    }
    text = str(report)
    assert "5 parameters with Muon, 6 with AdamW" in text and "11 by order" in text and "a moving average" in text
    assert "there 0.01, here 0.02   (up.weight, mid.0.weight and 9 more)" in text
    case = CASES["moonlight"]
    same = Muon(make_net(), lr=0.01, weight_decay=0.1, momentum=0.9, adamw_weight_decay=0.1, **case.ours)
    report = load_foreign_state(same, saved_by(case))
    assert report.differences == () and "times 0.1" in str(report)

"""`grad_sync`: the optimizer averages gradients itself. Bit for bit against averages made by hand, on any ranks."""

import re

import pytest
import torch

from tests.distributed import sync_scenarios as scenarios

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}
RANKS = [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
CASES = [
    {},
    {"nesterov": False, "weight_decay_mode": "l2"},
    {"max_in_flight": 1, "weight_decay_mode": "cautious"},
    {"workspace_bytes": 1, "adjust_lr_fn": "original"},
]


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_same_bits_as_averages_on_one_process(pool, ranks, case):
    settings = {**SETTINGS, **CASES[case]}
    expected = scenarios.alone(settings, ranks)
    for got, _, _ in pool(ranks).run(scenarios.synced, settings):
        assert differing(expected, got) == []


def test_same_bits_in_bf16(pool):
    expected = scenarios.alone(SETTINGS, 2, torch.bfloat16)
    for got, _, _ in pool(2).run(scenarios.synced, SETTINGS, torch.bfloat16):
        assert differing(expected, got) == []


def test_a_contribution_that_counts_twice_is_noticed(pool):
    expected = scenarios.alone(SETTINGS, 3)
    got, _, _ = pool(3).run(scenarios.synced, SETTINGS, torch.float32, "one contribution twice")[0]
    assert {"medium", "medium.momentum_buffer"} <= set(differing(expected, got))


@pytest.mark.parametrize("settings", [SETTINGS, {**SETTINGS, "max_grad_norm": 0.5}], ids=["", "clipped"])
def test_ranks_whose_grad_scalers_have_come_apart(pool, settings):
    """After an overflow on one rank, only that one's scale goes down: each must take off its own."""
    if "max_grad_norm" in settings:
        expected, _, _ = pool(2).run(scenarios.synced, dict(settings))[0]
        overflow_at = None
    else:
        expected, overflow_at = scenarios.alone(settings, 2, skipped=1), (1, 1)
    for got in pool(2).run(scenarios.scaled, dict(settings), [1024.0, 512.0], overflow_at):
        assert differing(expected, got) == []


@pytest.mark.parametrize("bound", [0.5, 1e9])
@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_by_the_norm_of_the_averages(pool, ranks, bound):
    settings = {**SETTINGS, "max_grad_norm": bound}
    expected = scenarios.alone(settings, ranks, syncs=True)
    for got, _, _ in pool(ranks).run(scenarios.synced, settings):
        assert differing(expected, got) == []
    unclipped = scenarios.alone(SETTINGS, ranks)
    assert bool(differing(expected, unclipped)) == (bound < 1)


def test_clipping_is_torchs():
    params = scenarios.parameters(torch.float32)
    clipped = {**SETTINGS, "max_grad_norm": 0.5}
    ours = scenarios.alone(clipped, 1, steps=1, syncs=True)
    opt = scenarios.Muon(scenarios.groups_for(params), **SETTINGS)
    for name, (tensor, _) in params.items():
        tensor.grad = scenarios.average(0, name, tensor.shape, 1, torch.float32)
    torch.nn.utils.clip_grad_norm_([tensor for tensor, _ in params.values()], 0.5)
    opt.step()
    for name, value in scenarios.collected(params, opt).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def test_reduce_scatter_is_close(pool):
    expected = scenarios.alone(SETTINGS, 3)
    for got, _, _ in pool(3).run(scenarios.synced, {**SETTINGS, "grad_sync": "reduce_scatter"}):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-4)


def test_bytes_and_state_are_what_was_promised(pool):
    """(P-1)/P of the gradients go to owners and (P-1)/P of the results come back; each number of state is once."""
    ranks = 3
    answers = pool(ranks).run(scenarios.counted)
    total, muon = answers[0]["total"], answers[0]["muon"]
    assert sum(a["sent"] for a in answers) == 2 * (ranks - 1) * total * 4
    assert all(a["sent"] == a["planned"] for a in answers), "and print(opt) says so"
    assert sum(a["owned"] for a in answers) == muon + 2 * (total - muon)
    assert all(a["state"] == 0 for a in answers), "no rank keeps what it does not own"
    assert max(a["owned"] for a in answers) < 0.6 * sum(a["owned"] for a in answers)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_saved_on_some_ranks_continued_on_others(pool, before, after):
    """Gradients of the second half come from `after` ranks in both runs, so only the state can differ."""
    _, saved, _ = pool(before).run(scenarios.synced, SETTINGS, torch.float32, None, 2)[0]
    again = pool(after).run(scenarios.synced, SETTINGS, torch.float32, None, 3, saved, 2)
    params = scenarios.parameters(torch.float32)
    opt = scenarios.Muon(scenarios.groups_for(params), **SETTINGS)
    for name, (tensor, _) in params.items():
        tensor.data.copy_(saved[0][name])
    opt.load_state_dict(saved[1])
    for step in range(2, 5):
        for name, (tensor, _) in params.items():
            tensor.grad = scenarios.average(step, name, tensor.shape, after, torch.float32)
        opt.step()
    expected = scenarios.collected(params, opt)
    for got, _, _ in again:
        assert differing(expected, got) == []
    assert differing(expected, {**expected, "medium": expected["medium"] * 1.001}) == ["medium"]


def test_owners_that_change_hand_over_their_state(pool):
    expected = scenarios.change_plan_alone(3)
    for got in pool(3).run(scenarios.change_plan):
        assert differing(expected, got) == []


def test_there_may_be_nothing_to_clip(pool):
    assert pool(3).run(scenarios.nothing_to_clip) == [2.0] * 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [("ddp", "DistributedDataParallel"), ("dtensor", "'w'.*DTensor"), ("norm", "max_grad_norm.*grad_sync")],
)
def test_what_cannot_be_is_refused(pool, kind, words):
    for error in pool(2).run(scenarios.refused, kind):
        assert re.search(words, error), error

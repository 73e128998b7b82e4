"""FSDP2, HSDP, tensor parallel and their composition, with real backward passes: by replay, bit for bit."""

import pytest
import torch

from meshmuon import View
from tests.distributed import real_models

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
QUICK = ["fsdp2", "fsdp3", "fsdp4_empty", "fsdp2_shard1", "hsdp4", "tp2", "tp3", "fsdp_tp4"]


def train(pool, case, settings):
    answers = pool(real_models.CASES[case][0]).run(real_models.train, case, settings)
    losses = [answer[0] for answer in answers]
    _, placements, gradients, result = answers[0]
    return losses, placements, gradients, result


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def check(pool, case, settings):
    losses, placements, gradients, result = train(pool, case, settings)
    assert len(gradients) == real_models.STEPS
    assert all(grad.isfinite().all() and grad.any() for grads in gradients for grad in grads.values())
    assert differing(real_models.replay(case, settings, gradients), result) == []
    initial = dict(real_models.build(case).named_parameters())
    assert all(not torch.equal(param, result[name]) for name, param in initial.items()), "everything has moved"
    return losses, placements


@pytest.mark.parametrize("case", QUICK)
def test_training_is_that_of_one_process(pool, case):
    losses, placements = check(pool, case, SETTINGS)
    seen = {placement for each in placements.values() for placement in each}
    expected = {"fsdp2_shard1": "S(1)", "tp3": "S(1)", "hsdp4": "R", "fsdp_tp4": "_S(0, 2)"}.get(case, "S(0)")
    assert expected in seen, placements
    if not case.startswith("tp"):
        assert len({tuple(each) for each in losses}) > 1, "ranks see different data"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp3_bf16", "fsdp2_mixed", "hsdp_tp8"])
def test_training_is_that_of_one_process_in_more_cases(pool, case):
    check(pool, case, SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"nesterov": False, "weight_decay_mode": "cautious", "adjust_lr_fn": "original"},
        {"weight_decay_mode": "l2", "ns_coefficients": "keller", "max_in_flight": 1, "workspace_bytes": 1},
        {"overrides": {"*.attention.[qkv].weight": View(heads=3)}},
        {"release_grads": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["fsdp2", "fsdp_tp4"])
def test_training_is_that_of_one_process_with_other_settings(pool, case, changes):
    check(pool, case, SETTINGS | changes)


def test_a_replay_with_other_gradients_is_noticed(pool):
    """The sabotage: stale gradients, two ranks' rows swapped in one matrix, one number off by a bit."""
    _, _, gradients, result = train(pool, "fsdp3", SETTINGS)
    stale = [gradients[0], *gradients[:-1]]
    assert set(differing(real_models.replay("fsdp3", SETTINGS, stale), result)) >= set(gradients[0])
    name = "blocks.1.up.weight"
    swapped = [dict(grads) for grads in gradients]
    swapped[2][name] = swapped[2][name].roll(9, 0)
    wrong = differing(real_models.replay("fsdp3", SETTINGS, swapped), result)
    assert wrong == [name, f"{name}.momentum_buffer"]
    nudged = [dict(grads) for grads in gradients]
    nudged[-1][name] = nudged[-1][name].clone()
    nudged[-1][name][0, 0] = torch.nextafter(nudged[-1][name][0, 0], torch.tensor(9.0))
    assert name in differing(real_models.replay("fsdp3", SETTINGS, nudged), result)

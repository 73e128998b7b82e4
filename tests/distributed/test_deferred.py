"""Several ranks that decide as on GPUs: by a flag on the device, which the host looks at two steps later.

Tensors are on the CPU, and only the question whether answers can be read at once is answered otherwise.
"""

import re
from functools import partial
from unittest import mock

import pytest
import torch

from meshmuon.exchange import agreement
from meshmuon.exchange.report import Report
from meshmuon.testing.ranks import RankPool
from tests.distributed import fault_scenarios, plain_scenarios, sync_scenarios
from tests.distributed.fault_scenarios import TABLE
from tests.distributed.test_faults import assert_same, assert_took_place

RANKS, TIMEOUT = 3, 20
NAN = float("nan")


@pytest.fixture(scope="module")
def job():
    pool = RankPool(RANKS, timeout=TIMEOUT)
    yield pool
    pool.close()


def as_on_gpus(scenario, *arguments):
    """Runs on each rank."""
    with mock.patch.object(agreement, "_is_host", return_value=False):
        return scenario(*arguments)


def as_on_gpus_without_flag(scenario, *arguments):
    with mock.patch.object(Report, "go", return_value=torch.tensor(True)):
        return as_on_gpus(scenario, *arguments)


def run(job, script, how=as_on_gpus):
    return job.run(how, fault_scenarios.run_script, script, {})


def plain(*seeds):
    return as_on_gpus(fault_scenarios.run_plain, [{"seed": seed} for seed in seeds], {})


def test_steps_have_the_bits_of_one_process(job):
    for rank in run(job, [{"seed": seed} for seed in range(6)]):
        for record in rank["records"]:
            assert_took_place(record)
        assert_same(rank["result"], plain(*range(6)))


@pytest.mark.parametrize("name", ["a", "experts", "norm"])
def test_a_bad_number_on_one_rank_changes_nothing_anywhere_and_is_told_of_later(job, name):
    script = [{"seed": 0}, {"seed": 1, "bad": (1, name, NAN)}, {"seed": 2}, {"seed": 3}, {"seed": 4}]
    for rank in run(job, script):
        good, skipped, *later = rank["records"]
        assert_took_place(good)
        assert (skipped["error"], skipped["changed"], skipped["warnings"]) == (None, [], [])
        for record in later:
            assert_took_place(record)
        [(category, text)] = [warning for record in later for warning in record["warnings"]]
        assert category == "NonFiniteGradientWarning" and text.startswith("step 2:") and f"gradient of {name}." in text
        assert (rank["metrics"]["steps"], rank["metrics"]["skipped_non_finite"]) == (5, 1)
        assert_same(rank["result"], plain(0, 2, 3, 4))


def test_the_flag_is_what_keeps_a_bad_number_out(job):
    """The sabotage of the test before."""
    script = [{"seed": 0}, {"seed": 1, "bad": (1, "a", NAN)}]
    assert any(rank["records"][1]["changed"] for rank in run(job, script, as_on_gpus_without_flag))


def test_an_overflow_on_one_rank_changes_nothing_anywhere(job):
    script = [{"seed": seed, "overflow": 1 if seed == 1 else None} for seed in range(4)]
    for rank in run(job, script):
        assert (rank["records"][1]["error"], rank["records"][1]["changed"]) == (None, [])
        assert rank["metrics"]["skipped_grad_scaler"] == 1
        assert_same(rank["result"], plain(0, 2, 3))


@pytest.mark.parametrize("name", ["a", "norm"])
def test_a_gradient_missing_on_one_rank_is_raised_by_all_at_the_same_step(job, name):
    script = [{"seed": 0}, {"seed": 1, "missing": {2: [name]}}, *({"seed": seed} for seed in (2, 3, 4))]
    steps = set()
    for rank in run(job, script):
        good, torn, *later = rank["records"]
        assert_took_place(good)
        assert (torn["error"], torn["changed"]) == (None, [])
        [(number, told)] = [(i, record) for i, record in enumerate(later) if record["error"] is not None]
        assert told["error"] == "GradientMismatchError" and told["changed"] == []
        assert re.search(rf"^step 2: .*\b{name}\b", told["message"])
        steps.add(number)
    assert len(steps) == 1, "one that left earlier would be waited for"


@pytest.mark.parametrize(
    ("key", "value"), [("lr", 0.5), ("momentum", 0.9), ("adjust_lr_fn", "original"), ("weight_decay_mode", "l2")]
)
def test_a_setting_that_one_rank_changes_later_changes_nothing_and_ends_in_no_timeout(job, key, value):
    steps = set()
    for rank in job.run(as_on_gpus, fault_scenarios.edit_alone, key, value):
        together, *alone = rank
        assert_took_place(together)
        assert all(record["changed"] == [] and record["seconds"] < TIMEOUT for record in alone)
        errors = [(i, record["error"]) for i, record in enumerate(alone) if record["error"] is not None]
        steps.add(errors[0])
    assert len(steps) == 1 and next(iter(steps))[1] == "PlanMismatchError"


def test_without_gradients_on_any_rank_nothing_happens(job):
    nothing = {"seed": 1, "missing": {rank: list(TABLE) for rank in range(RANKS)}}
    for rank in run(job, [{"seed": 0}, nothing, {"seed": 2}]):
        assert (rank["records"][1]["error"], rank["records"][1]["changed"]) == (None, [])
        assert_same(rank["result"], plain(0, 2))


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_over_ranks_have_the_bits_of_one_process(pool, ranks):
    """Where each rank has its own gradients, and lacks some."""
    settings = {"lr": 0.02, "weight_decay": 0.2, "max_grad_norm": 1.0}
    expected = as_on_gpus(partial(sync_scenarios.alone, dict(settings), ranks, syncs=True))
    for got, *_ in pool(ranks).run(as_on_gpus, sync_scenarios.synced, dict(settings)):
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("scenario", "alone"),
    [
        (plain_scenarios.replicas, plain_scenarios.replicas_alone),
        (plain_scenarios.shards, partial(plain_scenarios.shards_alone, RANKS)),
    ],
    ids=["replicas", "shards"],
)
def test_plain_tensors_have_the_bits_of_one_process(pool, scenario, alone):
    settings = {"lr": 0.02, "weight_decay": 0.2}
    expected = as_on_gpus(alone, settings)  # with a flag lr is a tensor: another rounding
    for got, _ in pool(RANKS).run(as_on_gpus, scenario, settings):
        assert_same(got, expected)

"""A rank that dies or fails in the middle: every survivor hears of it in time, and nobody trusts what is left."""

import re

import pytest

from meshmuon.testing.ranks import RankPool
from tests.distributed import lifetime_scenarios

RANKS, TIMEOUT = 3, 10
WHEN = [
    pytest.param("before the first step", marks=pytest.mark.slow),
    "before the step",
    "during the gather",
    "after the gather",
]


@pytest.fixture(scope="module")
def lost():
    """What each rank saw when the last one was lost. A fresh job for each way to lose it, run once."""
    seen = {}

    def get(when):
        if when not in seen:
            pool = RankPool(RANKS, timeout=TIMEOUT)
            try:
                seen[when] = pool.outcomes(lifetime_scenarios.lose_a_rank, when)
            finally:
                pool.close()
        return seen[when]

    return get


def assert_broken(record):
    assert record["error"] == "BrokenOptimizerError", record
    assert "reload" in record["message"]
    assert record["seconds"] < TIMEOUT + 3


@pytest.mark.parametrize("when", WHEN)
def test_every_survivor_raises_and_refuses_from_then_on(lost, when):
    *survivors, last = lost(when)
    assert last == (False, "the process is gone")
    for ok, records in survivors:
        assert ok, records
        assert_broken(records["step"])
        # Others may not answer yet: they notice when their own wait ends.
        assert re.search(rf"no answer yet from rank [\d, ]*\b{RANKS - 1}\b", records["step"]["message"])
        for action in ("step again", "state_dict"):
            assert_broken(records[action])
            assert records[action]["changed"] == [] and records[action]["seconds"] < 1


@pytest.mark.parametrize("when", WHEN)
def test_a_new_plan_does_not_mend_a_broken_optimizer_but_a_reload_does(lost, when):
    for _, records in lost(when)[:-1]:
        assert records["state_dict after a reload"]["error"] is None
        assert_broken(records["state_dict of a new plan"])
        assert_broken(records["step of a new plan"])


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_breaks_the_optimizer_everywhere(lost):
    for ok, records in lost("an error"):
        assert ok, records
        assert_broken(records["step"])
        assert_broken(records["state_dict"])
    assert "out of memory" in lost("an error")[-1][1]["step"]["message"]

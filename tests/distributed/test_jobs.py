"""Ranks that do not all have the same: each is told, in time, and nothing is mixed or lost without a word."""

import pytest
import torch

from meshmuon.testing.ranks import RankPool
from tests.distributed import job_scenarios as scenarios

TIMEOUT = 12


@pytest.fixture(scope="module")
def job():
    pool = RankPool(3, timeout=TIMEOUT)
    yield pool
    pool.close()


@pytest.fixture
def fresh():
    """A job that the test may break."""
    pools = []

    def start(ranks):
        pools.append(RankPool(ranks, timeout=TIMEOUT / 3))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def test_members_of_different_numbers_of_groups_find_each_other(job):
    """And wait no longer than the job's own timeout; torch's default for a new group is half an hour."""
    assert job.run(scenarios.groups_of_unlike_ranks) == [(3, TIMEOUT, TIMEOUT), (3, TIMEOUT, TIMEOUT), None]


@pytest.mark.slow
def test_under_torchs_own_names_they_do_not(fresh):
    first, second, _ = fresh(3).outcomes(scenarios.groups_of_unlike_ranks, True)
    assert not first[0] and not second[0]


def test_replicas_on_some_ranks_and_shards_on_others(job):
    expected = scenarios.replicas_beside_shards_alone()
    answers = job.run(scenarios.replicas_beside_shards)
    assert [sorted(found) for found in answers] == [["plain"], ["cut", "plain"], ["cut"]]
    assert all(torch.equal(value, expected[name]) for found in answers for name, value in found.items())


def test_a_rank_that_failed_by_itself_is_named_by_the_others(fresh):
    first, second = zip(*fresh(3).run(scenarios.fail_alone, "fails"), strict=True)
    for rank, text in [*enumerate(first), (2, second[2])]:
        assert f"failed on rank {rank}, by an error of its own (MemoryError: of rank {rank})" in text
    for text in second[:2]:
        assert "rank 2 failed by an error of its own, MemoryError: of rank 2" in text
        assert "no answer" not in text


def test_what_was_answered_about_an_optimizer_that_was_thrown_away_does_not_count(fresh):
    *survivors, killed = fresh(3).outcomes(scenarios.fail_alone, "killed")
    assert not killed[0]
    for ok, (_, text) in survivors:
        assert ok and "no answer yet from rank 2" in text and "rank 2 failed" not in text, text


@pytest.mark.parametrize("kind", ["pg", "fsdp"])
def test_a_rank_that_loads_alone_is_followed(pool, kind):
    first, second = pool(2).run(scenarios.load_alone, kind)
    assert torch.equal(first, second)


def test_replicas_that_load_other_state_are_named(pool):
    for record in pool(2).run(scenarios.replicas_with_other_state):
        assert record["error"] == "PlanMismatchError"
        assert "'w': it or its state is not the same" in record["message"]


def test_replicas_of_which_one_has_lost_its_state_are_named(pool):
    for record in pool(2).run(scenarios.clear_alone, "pg"):
        assert record["error"] == "PlanMismatchError" and not record["changed"]
        assert "'w': it or its state is not the same" in record["message"]


def test_a_shard_that_has_lost_its_state_begins_anew(pool):
    for record in pool(2).run(scenarios.clear_alone, "fsdp"):
        assert record["error"] is None and record["changed"]


def test_folders_that_are_not_the_same_are_refused(pool, tmp_path):
    """Half of one checkpoint and half of another would be loaded, or saved to, without a word."""
    for (saving, loading, disks), unchanged, there, latest in pool(2).run(scenarios.other_folders, str(tmp_path)):
        for text, words in ((saving, "of-1"), (loading, "step-2"), (disks, "disk 1")):
            assert "not the same on all ranks; rank 0 has" in text and words in text
        assert unchanged
        assert there == ["step-1", "step-2"] and latest.endswith("step-2")


def test_a_disk_that_fails_on_one_rank_stops_all(pool, tmp_path):
    first, second = pool(2).run(scenarios.broken_disk, str(tmp_path / "a"))
    assert (first["error"], second["error"]) == ("CheckpointError", "OSError")
    assert "rank 1 says: stale file handle" in first["message"]


def test_saves_without_waiting_follow_each_other(job, tmp_path):
    """Two at a time met each other's collectives: an abort, or a hang."""
    assert job.run(scenarios.many_saves, str(tmp_path)) == [(6, 8)] * 3


def test_pipeline_stages_save_to_folders_of_their_own(job, tmp_path):
    for rank, (refused, extra, same, later) in enumerate(job.run(scenarios.stages, str(tmp_path))):
        assert "not the same on all ranks" in refused and "process_group" in refused
        assert (extra, same, later) == ({"stage": int(rank == 2)}, True, True)


@pytest.mark.parametrize("kind", ["alone", "shared"])
def test_an_optimizer_in_another_job(fresh, tmp_path, kind):
    """One that shares its work says that its groups are gone, and still gives its state."""
    for said, moved in fresh(2).run(scenarios.end_and_begin_again, kind, str(tmp_path / "store")):
        assert moved == (kind == "alone")
        assert ("job that has ended" in said) == (kind == "shared")


def test_a_plan_needs_no_collective_and_is_logged_once_on_rank_0(pool):
    first, second = pool(2).run(scenarios.plan_without_a_word)
    assert (first[0], second[0]) == ([("INFO", True)], [])
    assert all(text != "" and "something was sent" in text for _, text in (first, second))


def test_a_rank_that_is_lost_in_dtensors_own_collectives_is_named(fresh):
    first, second, third = fresh(3).outcomes(scenarios.lose_a_rank_while_gradients_are_laid_out)
    assert not second[0]
    for ok, text in (first, third):
        assert ok and "no answer yet from rank" in text and "error of its own" not in text, text

"""One rank is killed with SIGKILL; the job starts again from the newest checkpoint and ends as if nothing had been."""

import random

import pytest

from meshmuon.testing.ranks import RankPool
from tests.distributed import kill_scenarios

RANKS = 2


def points(count):
    """Different random places in the loop; each way of dying among them, and both ranks."""
    chance = random.Random(7)
    saves = [step for step in range(kill_scenarios.STEPS) if (step + 1) % kill_scenarios.EVERY == 0]
    every = [(rank, step, way) for rank in range(RANKS) for step in range(3, 9) for way in ("before", "after")]
    saving = [(rank, step, "saving") for rank in range(RANKS) for step in saves[1:]]
    chance.shuffle(every)
    chance.shuffle(saving)
    mixed = [point for pair in zip(saving, every, strict=False) for point in pair] + every[len(saving) :]
    return mixed[:count]


POINTS = points(10)
QUICK = POINTS[:2]


def killed(function, *arguments, death):
    """Run until the death; the survivor must not finish either."""
    pool = RankPool(RANKS, timeout=10)
    try:
        outcomes = pool.outcomes(function, *arguments, death)
    finally:
        pool.close()
    assert [ok for ok, _ in outcomes] == [False] * RANKS


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    """The hash of a run that was never killed, by function and arguments."""
    made = {}

    def get(function, *arguments):
        if (function, arguments) not in made:
            root = str(tmp_path_factory.mktemp("undisturbed"))
            made[function, arguments] = pool(RANKS).run(function, *arguments, root)[0]
        return made[function, arguments]

    return get


def resumes_at(death):
    """The last step that was saved: whichever way a rank dies at a step, that step's own save is not completed."""
    step = death[1]
    return step - step % kill_scenarios.EVERY


def check_left_behind(tmp_path, death):
    unfinished = [path for path in tmp_path.iterdir() if path.name.endswith(".unfinished")]
    assert len(unfinished) == (death[2] == "saving")


def check_real(pool, undisturbed, tmp_path, death):
    killed(kill_scenarios.real, str(tmp_path), death=death)
    check_left_behind(tmp_path, death)
    first, digest = pool(RANKS).run(kill_scenarios.real, str(tmp_path))[0]
    assert first == resumes_at(death)
    assert (0, digest) == undisturbed(kill_scenarios.real)


def check_injected(pool, undisturbed, tmp_path, death, target):
    killed(kill_scenarios.injected, "fsdp", str(tmp_path), death=death)
    check_left_behind(tmp_path, death)
    kind, ranks = target
    first, digest = pool(ranks).run(kill_scenarios.injected, kind, str(tmp_path))[0]
    assert first == resumes_at(death)
    assert (0, digest) == undisturbed(kill_scenarios.injected, "fsdp")


def test_the_same_layout_continues_with_real_gradients(pool, undisturbed, tmp_path):
    check_real(pool, undisturbed, tmp_path, QUICK[0])


def test_another_layout_continues_with_injected_gradients(pool, undisturbed, tmp_path):
    check_injected(pool, undisturbed, tmp_path, QUICK[1], ("tp", 3))


@pytest.mark.slow
@pytest.mark.parametrize("death", POINTS, ids=str)
def test_the_same_layout_continues_from_anywhere(pool, undisturbed, tmp_path, death):
    check_real(pool, undisturbed, tmp_path, death)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(POINTS)))
def test_another_layout_continues_from_anywhere(pool, undisturbed, tmp_path, number):
    targets = [("tp", 3), ("plain", 1), ("hsdp", 4), ("ddp", 2), ("grad_sync", 3)]
    check_injected(pool, undisturbed, tmp_path, POINTS[number], targets[number % len(targets)])

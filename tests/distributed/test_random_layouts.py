"""Random meshes, placements, shapes and views in one optimizer: bit for bit what one process computes."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from meshmuon.testing.ranks import RankPool
from tests.distributed import random_layouts

QUICK_EXAMPLES, SLOW_EXAMPLES, BATCH = 15, 2000, 40
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(
    max_examples=QUICK_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=CHECKS,
)
@given(job=random_layouts.jobs((2, 3, 4)))
def test_random_jobs_give_the_bits_of_one_process(pool, job):
    answers = pool(job["size"]).run(random_layouts.run_jobs, [job])
    assert random_layouts.differing(job, [answer[0] for answer in answers]) == []


def collected(count, sizes):
    """Jobs as hypothesis would try them, by world size."""
    found = {size: [] for size in sizes}

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=CHECKS,
    )
    @given(job=random_layouts.jobs(sizes))
    def collect(job):
        found[job["size"]].append(job)

    collect()
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_beside")
def test_two_thousand_random_jobs_give_the_bits_of_one_process():
    """Every mesh makes process groups, whose threads are never given back: ranks are started anew now and then."""
    found = collected(SLOW_EXAMPLES, (1, 2, 3, 4, 6, 8))
    assert sum(map(len, found.values())) >= 0.95 * SLOW_EXAMPLES
    wrong = []
    for size, jobs in found.items():
        for start in range(0, len(jobs), BATCH):
            batch = jobs[start : start + BATCH]
            pool = RankPool(size)
            try:
                answers = pool.run(random_layouts.run_jobs, batch)
            finally:
                pool.close()
            for i, job in enumerate(batch):
                different = random_layouts.differing(job, [answer[i] for answer in answers])
                if different:
                    wrong.append((different, job))
    assert wrong == [], f"{len(wrong)} jobs differ"


FIXED = {
    "size": 3,
    "params": {
        "p0": {
            "shape": (7, 33),
            "view": {},
            "mesh": {"shape": (3,), "ranks": (2, 0, 1), "axis": None},
            "placements": [("S", 0)],
            "dtype": "float32",
            "without_gradient": (),
        }
    },
    "settings": {"lr": 0.02},
}


@pytest.mark.parametrize("sabotage", [False, True])
def test_one_unscaled_shard_is_noticed(pool, sabotage):
    """On a mesh that lists its ranks in another order. With one rank's gradient off by a thousandth, all differ."""
    answers = pool(3).run(random_layouts.run_jobs, [FIXED], sabotage)
    wrong = random_layouts.differing(FIXED, [answer[0] for answer in answers])
    assert {rank for key, rank in wrong if key == "p0"} == ({0, 1, 2} if sabotage else set())


def test_ranks_outside_a_mesh_have_nothing_to_do_for_it(pool):
    """torch gives them an empty 1-D local tensor."""
    assert pool(3).run(random_layouts.run_with_outsiders, (0, 1)) == [[], [], []]

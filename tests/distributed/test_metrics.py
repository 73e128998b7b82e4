"""opt.metrics() on shards: the numbers of one process, on every rank."""

import pytest

from tests.distributed import metrics_scenarios as scenarios
from tests.distributed.scenarios import world_size

OF_THIS_RANK = ("bytes_sent", "exchanges")


def differing(found, expected):
    close = {k: pytest.approx(v, rel=1e-5, abs=1e-9) for k, v in expected.items()}
    return [k for k in found.keys() | expected.keys() if k not in OF_THIS_RANK and found.get(k) != close.get(k)]


@pytest.mark.parametrize("layout", ["fsdp3", "hsdp", "fsdp_tp_same_dim", "ep_efsdp", "replicated"])
@pytest.mark.parametrize("settings", [{}, {"share_replicas": "always"}], ids=str)
def test_shards_tell_the_same_as_one_process(pool, layout, settings):
    expected = scenarios.alone(layout)
    for found in pool(world_size(layout)).run(scenarios.on_a_mesh, layout, settings):
        assert differing(found, expected) == []
        assert found["exchanges"] > 0 or not found["bytes_sent"]


@pytest.mark.filterwarnings("ignore::meshmuon.errors.NonFiniteGradientWarning")
@pytest.mark.parametrize("layout", ["fsdp3", "fsdp_tp_same_dim"])
def test_after_a_step_that_one_rank_could_not_take(pool, layout):
    expected = scenarios.alone(layout, skipped=True)
    assert expected["skipped_non_finite"] == 1
    for found in pool(world_size(layout)).run(scenarios.on_a_mesh, layout, {}, None, True):
        assert differing(found, expected) == []


def test_numbers_of_one_rank_are_noticed(pool):
    found = pool(3).run(scenarios.on_a_mesh, "fsdp3", {}, "not added up")[0]
    assert differing(found, scenarios.alone("fsdp3"))


def test_grad_sync(pool):
    expected = scenarios.synced(3)
    for found in pool(3).run(scenarios.synced):
        assert differing(found, expected) == []
        assert found["bytes_sent"] > 0


@pytest.mark.parametrize("matrices", [True, False])
def test_exchanges_are_as_many_as_is_said(pool, matrices):
    for counted, measured, said, nothing in pool(2).run(scenarios.exchanges, matrices):
        assert counted == measured == said > 0
        assert not nothing

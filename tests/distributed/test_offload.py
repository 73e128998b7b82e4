"""Offloaded state on every route: the same bits as state on the device."""

import pytest
import torch

from tests.distributed import gram_scenarios, plain_scenarios, scenarios, sync_scenarios

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


@pytest.mark.parametrize("layout", ["fsdp3", "hsdp", "ep_efsdp", "replicated"])
def test_shards(pool, layout):
    expected = scenarios.run_plain(layout, torch.bfloat16, SETTINGS)
    settings = {**SETTINGS, "offload": True}
    got, text = pool(scenarios.world_size(layout)).run(scenarios.run_distributed, layout, torch.bfloat16, settings)[0]
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert "host memory" in text


@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 1.0, "max_in_flight": 4}], ids=str)
def test_grad_sync(pool, extra):
    settings = {**SETTINGS, **extra}
    resident = pool(3).run(sync_scenarios.synced, settings)
    streamed = pool(3).run(sync_scenarios.synced, {**settings, "offload": True})
    for here, there in zip(resident, streamed, strict=True):
        assert [name for name in here[0] if not torch.equal(here[0][name], there[0][name])] == []


def test_replicas_that_share_their_matrices(pool):
    expected = plain_scenarios.replicas_alone(SETTINGS)
    for got, _ in pool(3).run(plain_scenarios.replicas, {**SETTINGS, "offload": True}):
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_plain_shards(pool):
    expected = plain_scenarios.shards_alone(3, SETTINGS)
    got, _ = pool(3).run(plain_scenarios.shards, {**SETTINGS, "offload": True})[0]
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_the_gram_route(pool):
    assert pool(3).run(gram_scenarios.offloaded_or_not)[0] == []

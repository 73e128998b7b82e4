"""One result on every layout: parameters and momentum, bit for bit, over five steps, for every shape and view."""

import pytest
import torch

from tests.distributed import scenarios

# Pairwise over dtype, nesterov, decay mode and lr rule: each layout gets two of these, every value meets every other.
SETTINGS = [
    (torch.float32, {"nesterov": True, "weight_decay_mode": "decoupled", "adjust_lr_fn": "match_rms_adamw"}),
    (torch.bfloat16, {"nesterov": False, "weight_decay_mode": "cautious", "adjust_lr_fn": "original"}),
    (torch.bfloat16, {"nesterov": True, "weight_decay_mode": "l2", "adjust_lr_fn": "unit_rms_norm"}),
    (torch.float32, {"nesterov": False, "weight_decay_mode": "decoupled", "adjust_lr_fn": "spectral"}),
    (torch.float32, {"nesterov": True, "weight_decay_mode": "cautious", "adjust_lr_fn": "none"}),
    (torch.bfloat16, {"nesterov": False, "weight_decay_mode": "decoupled", "adjust_lr_fn": "match_rms_adamw"}),
]
QUICK = ["fsdp2", "fsdp3", "shard1_3", "hsdp", "fsdp_tp_same_dim", "fsdp_tp_other_dim", "ep_efsdp", "replicated"]


def compare(pool, layout, dtype, settings, sabotage=None):
    """Names of what differs from the same run on one process."""
    settings = {"lr": 0.02, "weight_decay": 0.2, **settings}
    expected = scenarios.run_plain(layout, dtype, settings)
    got, _ = pool(scenarios.world_size(layout)).run(scenarios.run_distributed, layout, dtype, settings, sabotage)[0]
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize("layout", QUICK)
def test_same_bits_on_every_layout(pool, layout):
    dtype, settings = SETTINGS[QUICK.index(layout) % len(SETTINGS)]
    assert compare(pool, layout, dtype, settings) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(SETTINGS)))
@pytest.mark.parametrize("layout", scenarios.LAYOUTS)
def test_same_bits_on_every_layout_and_setting(pool, layout, case):
    assert compare(pool, layout, *SETTINGS[case]) == []


@pytest.mark.parametrize("layout", ["hsdp"])
def test_replicas_that_share_the_work_get_the_same_bits(pool, layout):
    assert compare(pool, layout, torch.float32, {"share_replicas": "always"}) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp", "hsdp_tp", "ep_efsdp", "efsdp_strided"])
def test_replicas_that_share_the_work_get_the_same_bits_on_every_mesh(pool, layout):
    assert compare(pool, layout, torch.bfloat16, {"share_replicas": "always", "nesterov": False}) == []


@pytest.mark.parametrize("sabotage", ["unscaled shard", "stale buffer", "wrong owner", "swapped ranks"])
def test_a_small_mistake_is_noticed(pool, sabotage):
    assert any(name.startswith("medium") for name in compare(pool, "fsdp3", *SETTINGS[0], sabotage))


@pytest.mark.parametrize("changes", [{"max_in_flight": 1}, {"max_in_flight": 4}, {"workspace_bytes": 1}])
def test_scheduling_does_not_change_a_bit(pool, changes):
    assert compare(pool, "fsdp3", torch.float32, changes) == []


def test_the_plan_tells_layout_route_balance_and_bytes(pool):
    _, text = pool(2).run(scenarios.run_distributed, "fsdp2", torch.float32, {"lr": 0.02})[0]
    for word in ("dim 0/2 on mesh 2", "owner", "balance", "travels"):
        assert word in text, text

"""QK-clip gives the same bits on every layout, whoever has seen which logits; and ranks fail together, by name."""

import re

import pytest
import torch

from tests.distributed import qk_scenarios as scenarios
from tests.distributed.scenarios import LAYOUTS, world_size

# layout, kind, how the logits are given, the mesh axis heads are sharded along, dtype
QUICK = [
    ("fsdp2", "mha", "own", None, torch.float32),
    ("fsdp2", "gqa", "local", 0, torch.float32),
    ("fsdp3", "gqa", "own", None, torch.bfloat16),
    ("fsdp3", "grouped", "some", None, torch.float32),
    ("fsdp3", "mha", "dtensor", 0, torch.float32),
    ("shard1_3", "mla", "own", None, torch.float32),
    ("hsdp", "mla", "own", None, torch.bfloat16),
    ("fsdp_tp_same_dim", "gqa", "local", 1, torch.float32),
    ("fsdp_tp_same_dim", "mha", "dtensor", 1, torch.float32),
    ("fsdp_tp_same_dim", "fused", "own", None, torch.float32),
    ("replicated", "fused", "own", None, torch.float32),
]


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def compare(pool, layout, kind, way, axis=None, dtype=torch.float32, sabotage=None):
    """Names of what differs from the same run on one process, on any rank."""
    size = world_size(layout)
    expected, clipped = scenarios.alone(kind, scenarios.those_who_look(way, size), dtype)
    answers = pool(size).run(scenarios.on_layout, layout, kind, way, dtype, sabotage, axis)
    assert clipped > 0, "a run in which nothing is clipped shows nothing"
    if sabotage is None:
        assert {count for _, count, _ in answers} == {clipped}
    return sorted({name for got, _, _ in answers for name in differing(expected, got)})


@pytest.mark.parametrize(("layout", "kind", "way", "axis", "dtype"), QUICK)
def test_same_bits_on_every_layout(pool, layout, kind, way, axis, dtype):
    assert compare(pool, layout, kind, way, axis, dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", scenarios.KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_on_every_layout_and_kind(pool, layout, kind, dtype):
    assert compare(pool, layout, kind, "own", None, dtype) == []


@pytest.mark.parametrize(
    ("sabotage", "kind", "layers"),
    [
        ("no reduction", "mha", {"layers.0.q.weight", "layers.0.k.weight", "layers.0.q.bias"}),
        ("local rows", "gqa", {"layers.0.q.weight", "layers.0.k.weight", "layers.0.k.bias"}),
        ("k left alone", "mha", {"layers.0.k.weight"}),
        ("k left alone", "gqa", {"layers.0.k.weight", "layers.0.k.bias"}),
        ("k left alone", "mla", {"layers.0.up.weight"}),
    ],
)
def test_a_small_mistake_is_noticed(pool, sabotage, kind, layers):
    wrong = compare(pool, "fsdp3", kind, "own", sabotage=sabotage)
    assert layers <= set(wrong)
    assert "mlp.weight" not in wrong


def test_the_plan_says_what_is_clipped(pool):
    _, _, text = pool(2).run(scenarios.on_layout, "fsdp2", "gqa", "own")[0]
    assert "qk_clip: 2 layers of 6 q heads on 3 k heads (gqa)" in text and "assumed" not in text


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["own", "some"])
def test_replicas_that_have_seen_different_batches(pool, ranks, way):
    expected, _ = scenarios.alone("gqa", scenarios.those_who_look(way, ranks))
    for got, _ in pool(ranks).run(scenarios.as_replicas, "gqa", way, {}):
        assert differing(expected, got) == []
    wrong = pool(ranks).run(scenarios.as_replicas, "gqa", way, {}, "no reduction")
    assert any(differing(expected, got) for got, _ in wrong)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_averaged_by_the_optimizer(pool, ranks):
    expected, clipped = scenarios.alone("mla", range(ranks), average=scenarios.average(ranks))
    for got, count in pool(ranks).run(scenarios.as_replicas, "mla", "own", {"grad_sync": "optimizer"}):
        assert differing(expected, got) == [] and count == clipped
    wrong, _ = pool(ranks).run(scenarios.as_replicas, "mla", "own", {"grad_sync": "optimizer"}, "k left alone")[0]
    assert set(differing(expected, wrong)) == {"layers.0.up.weight", "layers.1.up.weight"}


@pytest.mark.parametrize(
    ("ranks", "kind", "way"), [(2, "mha", "local"), (3, "gqa", "local"), (3, "fused", "own"), (3, "fused", "local")]
)
def test_plain_tensor_parallel_shards(pool, ranks, kind, way):
    expected, _ = scenarios.alone(kind, range(ranks))
    for got, _ in pool(ranks).run(scenarios.as_shards, kind, way):
        assert differing(expected, got) == []
    wrong, _ = pool(ranks).run(scenarios.as_shards, kind, "own", "local rows")[0]
    assert differing(expected, wrong)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "tp"])
def test_real_models_and_the_collector(pool, wrapper):
    for odd, clipped in pool(3).run(scenarios.real_model, wrapper):
        assert odd == [] and clipped > 0


def test_pipeline_stages_have_layers_of_their_own(pool):
    answers = pool(4).run(scenarios.stages)
    for stage in (0, 1):
        expected, _ = scenarios.alone("gqa", range(2 * stage, 2 * stage + 2))
        for got, message in answers[2 * stage : 2 * stage + 2]:
            assert got and differing({name: expected[name] for name in got}, got) == []
            assert f"no layer '{1 - stage}'" in message


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("missing", "nothing for layer '1'"),
        ("unknown", "no layer '7'"),
        ("heads", r"qk_logits\['0'\]: 5 heads.*6 heads or of the 2 of this rank"),
        ("no qk_clip", "without qk_clip"),
    ],
)
def test_logits_that_do_not_fit_on_one_rank_stop_all(pool, bad, words):
    answers = pool(3).run(scenarios.refused, bad)
    for rank, (first, again) in enumerate(answers):
        assert first["changed"] == [] and first["seconds"] < 20
        if rank == 1:
            assert first["error"] == "ValueError" and re.search(words, first["message"])
        else:
            assert first["error"] == "GradientMismatchError" and "qk_logits" in first["message"]
        assert again["error"] is None and again["changed"], "and the next step is an ordinary one"


def test_ranks_that_clip_differently_are_told_so(pool):
    for record in pool(3).run(scenarios.unlike):
        assert record["error"] == "PlanMismatchError" and "threshold" in record["message"]
        assert record["changed"] == []


def test_a_skipped_step_scales_nothing_anywhere(pool):
    for record, metrics in pool(3).run(scenarios.skipped):
        assert record["changed"] == [] and record["error"] is None
        assert metrics["skipped_non_finite"] == 1 and metrics["qk_clipped_heads"] == 0


def test_one_small_reduction_is_all_that_is_sent(pool):
    for found in pool(3).run(scenarios.counted):
        extra = found[True][len(found[False]) :]
        assert found[True][: len(found[False])] == found[False]
        assert extra == [("torch.float32", 2 * scenarios.HEADS)]

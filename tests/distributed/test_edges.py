"""Edges of distributed use, each found by somebody who went there."""

import inspect

import pytest
import torch
import torch.distributed as dist

from tests.distributed import edge_scenarios, sync_scenarios

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_tensor_parallel_recipe_trains_as_one_device(pool, ranks):
    expected = edge_scenarios.one_device()
    for got in pool(ranks).run(edge_scenarios.tensor_parallel):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_empty_shards_count_steps(pool, ranks):
    for steps in pool(ranks).run(edge_scenarios.steps_on_every_rank):
        assert steps == [2.0] * len(steps) and steps, "three, of which one was skipped"


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch sorts them itself")
def test_a_group_whose_ranks_do_not_ascend(pool):
    expected = sync_scenarios.alone(SETTINGS, 2)
    for got in pool(2).run(edge_scenarios.in_descending_order, SETTINGS):
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("how", ["optimizer", "reduce_scatter"])
def test_small_gradients_in_fp16_survive_without_grad_scalers_factor(pool, how):
    for momentum, moved, finite, _ in pool(2).run(
        edge_scenarios.small_and_large_gradients, torch.float16, 1e-8, 65536, how
    ):
        assert momentum == pytest.approx(0.05 * 1e-8, rel=0.01) and moved[0] and finite


@pytest.mark.parametrize("how", ["optimizer", "reduce_scatter"])
@pytest.mark.parametrize(("dtype", "value", "skipped"), [(torch.float16, 4e4, 0), (torch.float32, 2e38, 1)])
def test_large_gradients_are_taken_where_their_sum_can_be_and_skipped_where_not(pool, how, dtype, value, skipped):
    for _, moved, finite, found in pool(2).run(edge_scenarios.small_and_large_gradients, dtype, value, 1, how):
        assert (moved, finite, found) == ([not skipped] * 2, True, skipped)


@pytest.mark.parametrize(("value", "skipped"), [(1e38, 0.0), (2e38, 1.0), (float("nan"), 1.0)])
def test_partial_sums_that_would_overflow_are_noticed_and_break_nothing(pool, value, skipped):
    for found in pool(2).run(edge_scenarios.summands, value):
        assert found == [(True, skipped), (True, skipped)]


def test_an_optimizer_that_cannot_be_pickled_says_so_at_once(pool):
    (words, seconds), other = pool(2).run(edge_scenarios.pickled_on_one_rank)
    assert "opt.state_dict()" in words and seconds < 5 and other is None


def test_a_whole_foreign_checkpoint_is_cut_like_plain_shards(pool):
    for got, expected in pool(2).run(edge_scenarios.foreign_state_of_a_plain_shard):
        assert got.any()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "first"), [(KeyboardInterrupt, "KeyboardInterrupt"), (RuntimeError, "Broken")])
def test_a_step_that_was_interrupted_is_not_saved(pool, kind, first):
    """Half of it may be done. Who then saves on Ctrl-C would save that."""
    for raised in pool(2).run(edge_scenarios.interrupted, kind):
        assert raised[0].startswith(first)
        assert raised[1:] == ["BrokenOptimizerError"] * 2


def test_a_parameter_taken_out_of_its_group_takes_its_momentum_along(pool):
    for momenta in pool(2).run(edge_scenarios.one_removed):
        assert momenta == [0.25, 0.5]

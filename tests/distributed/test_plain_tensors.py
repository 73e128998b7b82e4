"""Plain tensors on several ranks: DDP replicas that share the work, tensor-parallel shards; bit for bit, by replay."""

import re

import pytest
import torch

from meshmuon import orthogonalize
from tests.distributed import plain_scenarios

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}
RANKS = [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize("ranks", RANKS)
def test_replicas_that_share_the_matrices_get_the_bits_of_one_process(pool, ranks):
    expected = plain_scenarios.replicas_alone(SETTINGS)
    for got, text in pool(ranks).run(plain_scenarios.replicas, SETTINGS):
        assert differing(expected, got) == []
        assert "shared" in text


def test_replicas_with_gradients_of_their_own_are_noticed(pool):
    expected = plain_scenarios.replicas_alone(SETTINGS)
    got = [answer[0] for answer in pool(3).run(plain_scenarios.replicas, SETTINGS, "local gradient")]
    assert any("medium" in differing(expected, each) for each in got)


@pytest.mark.parametrize("how", [plain_scenarios.unlike_in_process_group, plain_scenarios.unlike_in_grad_sync])
def test_tensors_that_are_no_replicas_are_noticed_before_anything_changes(pool, how):
    for error, unchanged in pool(3).run(how):
        assert error.startswith("PlanMismatchError") and "'own'" in error and "'same'" not in error
        assert unchanged


def test_every_matrix_is_computed_by_one_replica(pool):
    answers = pool(3).run(plain_scenarios.count_owned, {})
    assert sum(here for here, _ in answers) == answers[0][1]
    assert max(here for here, _ in answers) < answers[0][1]


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_tensor_parallel_shards_get_the_bits_of_one_process(pool, ranks):
    expected = plain_scenarios.shards_alone(ranks, SETTINGS)
    for got, _ in pool(ranks).run(plain_scenarios.shards, SETTINGS):
        assert differing(expected, got) == []


@pytest.mark.parametrize("rule", ["original", "spectral", "unit_rms_norm"])
def test_the_lr_rule_sees_the_global_shape(pool, rule):
    settings = {**SETTINGS, "adjust_lr_fn": rule}
    expected = plain_scenarios.shards_alone(2, settings)
    assert differing(expected, pool(2).run(plain_scenarios.shards, settings)[0][0]) == []
    wrong = pool(2).run(plain_scenarios.shards, settings, "scale")[0][0]
    pool(2).run(plain_scenarios.see_right)
    assert {"row", "tall"} <= set(differing(expected, wrong)), "the sabotage must be seen"


@pytest.mark.parametrize(("sabotage", "name"), [("wrong order", "row"), ("parts forgotten", "fused")])
def test_shards_in_other_places_are_noticed(pool, sabotage, name):
    expected = plain_scenarios.shards_alone(3, SETTINGS)
    got, _ = pool(3).run(plain_scenarios.shards, SETTINGS, sabotage)[0]
    assert name in differing(expected, got)


@pytest.mark.parametrize("ranks", [2, 3])
def test_real_ddp(pool, ranks):
    for differences, text in pool(ranks).run(plain_scenarios.real_ddp):
        assert differences == []
        assert "shared by" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no group", "weight.*no group"),
        ("foreign group", "weight.*(without this one|not a group of this rank)"),
        ("dim", "weight.*dim 2"),
        ("parts", "weight.*parts"),
        ("sizes", "weight"),
        ("name", "elsewhere"),
        ("marked", "weight.*tensor_model_parallel.*megatron_shards"),
    ],
)
def test_wrong_declarations_are_refused_by_name(pool, kind, words):
    for rank, (error, unchanged) in enumerate(pool(3).run(plain_scenarios.bad, kind)):
        if kind == "foreign group" and rank != 0:
            continue  # ranks 1 and 2 are members of it
        assert re.search(words, error), error
        assert unchanged


def test_blockwise_is_the_same_as_blocks_of_their_own_and_says_so(pool):
    for difference, text in pool(3).run(plain_scenarios.blockwise, {}):
        assert difference < 1e-6
        assert "different algorithm" in text and "blockwise" in text


@pytest.mark.parametrize("kind", ["dtensor", "rows", "columns"])
def test_orthogonalize_gives_cut_matrices_the_bits_of_whole_ones(pool, kind):
    for got, full in pool(3).run(plain_scenarios.orthogonalized, kind):
        assert torch.equal(got, orthogonalize(full))
        assert not torch.equal(got, orthogonalize(full + 1e-3)), "another matrix has another polar factor"


def test_orthogonalize_with_different_arguments_is_noticed(pool):
    assert set(pool(3).run(plain_scenarios.orthogonalized_otherwise)) == {"PlanMismatchError"}

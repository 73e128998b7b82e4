"""What happens to an optimizer of several ranks between its steps: replaced tensors, lost state, copies, edits."""

import pytest
import torch

from tests.distributed import lifetime_scenarios as scenarios


def differing(expected, got):
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.mark.parametrize("kind", ["ddp", "sync", "fsdp"])
def test_two_optimizers_stepped_in_another_order_on_a_rank_are_told_apart(pool, kind):
    """Of equal shapes and settings: each would have taken the other's matrices, and nothing would have been said."""
    for record in pool(2).run(scenarios.in_another_order, kind, False):
        assert record["error"] is None and len(record["changed"]) == 6
    for record in pool(2).run(scenarios.in_another_order, kind, True):
        assert record["error"] == "PlanMismatchError" and record["changed"] == []
        assert "generator.0" in record["message"] and "discriminator.0" in record["message"]


@pytest.mark.parametrize("kind", ["ddp", "sync", "fsdp"])
def test_assigned_parameters_are_followed_with_their_state(pool, kind):
    expected = pool(2).run(scenarios.assigned, kind, False)[0]
    for got in pool(2).run(scenarios.assigned, kind, True):
        assert differing(expected, got) == []


@pytest.mark.parametrize("kind", ["ddp", "sync", "fsdp"])
def test_state_that_was_taken_away_begins_anew(pool, kind):
    expected = pool(2).run(scenarios.cleared, kind, "another")[0]
    for got in pool(2).run(scenarios.cleared, kind, "cleared"):
        assert differing(expected, got) == []
    assert "1.weight" in differing(expected, pool(2).run(scenarios.cleared, kind, "")[0])


@pytest.mark.parametrize("way", ["to adamw", "to muon"])
def test_a_parameter_that_changes_its_algorithm_begins_anew(pool, way):
    expected = pool(2).run(scenarios.another_algorithm, "plain", way)[0]
    for got in pool(2).run(scenarios.another_algorithm, "sync", way):
        assert differing(expected, got) == []


@pytest.mark.parametrize("kind", ["ddp", "sync", "fsdp"])
def test_an_optimizer_that_is_broken_is_not_copied(pool, kind):
    """The copy would have gone on with parameters of which half were updated."""
    for failed, copied, saved in pool(2).run(scenarios.copy_of_a_broken_one, kind):
        assert failed == copied["error"] == saved["error"] == "BrokenOptimizerError"
        assert "reload" in copied["message"]


@pytest.mark.parametrize("way", ["state_dict", "metrics", "copy", "and back"])
def test_a_plan_made_anew_on_one_rank_is_noticed_before_state_is_put_together(pool, way):
    """Ranks in different collectives: the process would have been aborted."""
    expected = pool(2).run(scenarios.assigned, "sync", False)[0].keys()
    answers = pool(2).run(scenarios.save_after_an_edit_on_one_rank, way)
    for record, _ in answers:
        assert record["error"] == (None if way == "and back" else "PlanMismatchError")
    (_, first), (_, second) = answers
    assert first.keys() == expected and differing(first, second) == [], "and goes on"


def test_state_that_one_rank_alone_has_loaded_is_not_mixed_with_that_of_others(pool):
    """Under grad_sync each rank takes of it what it owns: the others' part would have begun anew, without a word."""
    expected = pool(2).run(scenarios.loaded, "all")[0]
    assert expected[0]["error"] is None and expected[0]["changed"]
    for record, got, again in pool(2).run(scenarios.loaded, "one"):
        assert record["error"] == "PlanMismatchError" and not record["changed"]
        assert "'1.weight'" in record["message"] and "load the same state on each" in record["message"]
        assert differing(expected[1], got) == [], "once the other has loaded it too"
        assert again == "PlanMismatchError"
    assert "1.weight" in differing(expected[1], pool(2).run(scenarios.loaded, "none")[0][1])


def test_state_that_is_on_the_host_stays_where_it_is(pool):
    """On a GPU a second copy would not have been in pinned memory."""
    for first, second in pool(2).run(scenarios.offloaded_twice):
        assert first == second

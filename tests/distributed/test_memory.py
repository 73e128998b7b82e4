"""A step takes no more memory than it was given."""

import pytest

from tests.distributed import memory

BUDGET = 1_200_000


@pytest.mark.parametrize("max_in_flight", [2, 4, 8])
def test_peak_memory_stays_within_the_workspace(pool, max_in_flight):
    for peak, buckets in pool(2).run(memory.peak_of_a_step, max_in_flight, BUDGET):
        assert buckets > 1, "the budget must be what cuts the work"
        assert 0 < peak <= BUDGET


def test_a_larger_workspace_is_used(pool):
    """The sabotage: with no bound the same step takes more, so the counter counts and the bound binds."""
    for peak, buckets in pool(2).run(memory.peak_of_a_step, 2, 2**30):
        assert buckets == 1
        assert peak > BUDGET


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_released_gradients_are_gone_when_their_bucket_is_under_way(pool, max_in_flight):
    """The peak falls by the gradients of the first bucket at least: read, and let go before it is orthogonalized."""
    for kept, released, first in pool(2).run(memory.peaks_with_gradients, max_in_flight):
        assert first > 0
        assert released <= kept - first

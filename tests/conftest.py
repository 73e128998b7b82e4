"""One pool of ranks per world size, for the whole run."""

import pytest

from meshmuon.testing.ranks import RankPool

_POOLS = {}


@pytest.fixture(scope="session")
def pool():
    def get(size):
        if size not in _POOLS:
            _POOLS[size] = RankPool(size)
        return _POOLS[size]

    yield get
    _close()


@pytest.fixture
def nobody_beside():
    """Idle ranks of earlier tests have hundreds of threads of gloo, each of which wakes a hundred times a second."""
    _close()


def _close():
    for each in _POOLS.values():
        each.close()
    _POOLS.clear()

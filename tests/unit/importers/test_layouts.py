"""Whole foreign state in sharded parameters: the same bits as on one device. Three ranks, which divide nothing here."""

from collections.abc import Iterator

import pytest
import torch
from tests.unit.importers import scenarios

from meshmuon.testing import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return scenarios.on_one_device()


@pytest.mark.parametrize("where", scenarios.PLACES)
def test_sharded_parameters_take_their_parts(ranks: RankPool, expected: dict[str, torch.Tensor], where: str) -> None:
    for found in ranks.run(scenarios.sharded, where):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_sabotage_without_the_import_every_parameter_differs(
    ranks: RankPool, expected: dict[str, torch.Tensor]
) -> None:
    for found in ranks.run(scenarios.not_loaded):
        assert not any(torch.equal(found[name], value) for name, value in expected.items())


def test_owners_take_their_parts_under_grad_sync(ranks: RankPool) -> None:
    whole = scenarios.loaded("none")
    for found in ranks.run(scenarios.loaded, "optimizer"):
        assert set(found) == set(whole)
        for key, entry in whole.items():
            assert all(torch.equal(found[key][word], value) for word, value in entry.items())


def test_state_of_another_layout_is_refused_by_name(ranks: RankPool) -> None:
    for message in ranks.run(scenarios.otherwise_laid_out):
        assert "nothing was loaded" in message and "'blocks.0.weight'" in message and "full_tensor()" in message

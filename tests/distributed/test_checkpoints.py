"""Saved on one layout, continued on another, bit for bit: torch.distributed.checkpoint on every pair of layouts.

What an uninterrupted run comes to does not depend on the layout, so one hash is right for every pair.
"""

import pytest
import torch

from tests.distributed import checkpoint_scenarios as scenarios

CELLS = scenarios.CELLS
# Every kind with more than one rank is a source and a target here; single ranks, and all pairs, are slow.
QUICK = [("plain", 1), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("fsdp_tp", 4), ("ddp", 3), ("grad_sync", 3)]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Saves a cell when it is first asked for: (folder, hash of the uninterrupted run)."""
    made = {}

    def get(cell):
        if cell not in made:
            kind, ranks = cell
            folder = str(tmp_path_factory.mktemp(f"{kind}{ranks}") / "checkpoint")
            made[cell] = (folder, pool(ranks).run(scenarios.save, kind, folder)[0])
        return made[cell]

    return get


def check(pool, saved, target, sources):
    kind, ranks = target
    folders, hashes = zip(*(saved(source) for source in sources), strict=True)
    assert len(set(hashes)) == 1, "uninterrupted runs agree"
    got = pool(ranks).run(scenarios.resume_all, kind, list(folders))[0]
    assert [source for source, found in zip(sources, got, strict=True) if found != hashes[0]] == []


@pytest.mark.parametrize("target", QUICK, ids=str)
def test_save_here_continue_there(pool, saved, target):
    check(pool, saved, target, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("target", CELLS, ids=str)
def test_save_anywhere_continue_anywhere(pool, saved, target):
    check(pool, saved, target, CELLS)


@pytest.mark.parametrize("sabotage", ["no load", "zero momentum", "weights times 1.001"])
def test_a_wrong_resume_is_noticed(pool, saved, sabotage):
    folder, expected = saved(("fsdp", 3))
    got = pool(2).run(scenarios.resume, "tp", folder, torch.float32, None, sabotage)[0]
    assert got != expected


@pytest.mark.parametrize("source", [("fsdp", 3), ("grad_sync", 3)], ids=str)
def test_saving_while_training_goes_on(pool, saved, source, tmp_path):
    """The steps taken meanwhile do not get into the checkpoint."""
    kind, ranks = source
    folder = str(tmp_path / "checkpoint")
    assert pool(ranks).run(scenarios.save, kind, folder, torch.float32, None, True)[0] == saved(source)[1]
    assert pool(2).run(scenarios.resume_whole, "tp", folder)[0] == saved(source)[1]


def test_what_one_rank_cannot_load_nobody_loads(pool, tmp_path):
    folder = str(tmp_path / "checkpoint")
    pool(3).run(scenarios.save, "fsdp", folder, torch.float32, None, True)
    answers = pool(3).run(scenarios.refuse, "fsdp", folder)
    assert all(unchanged for _, unchanged in answers)
    assert "elsewhere: no folder" in answers[1][0]
    assert all("rank 1 says" in answers[rank][0] for rank in (0, 2))


def test_whole_tensors_are_cut_and_others_refused_by_name(pool, saved):
    digest, refused, unchanged = pool(3).run(scenarios.load_plain_into_shards, "")[0]
    assert digest == saved(("fsdp", 3))[1]
    assert "full_tensor" in refused and "experts_up" in refused and unchanged


def test_fp32_momentum_of_bf16_parameters_comes_back_as_fp32(pool, tmp_path):
    """The digest holds dtypes too."""
    settings = {"state_dtype": torch.float32}
    folder = str(tmp_path / "checkpoint")
    expected = pool(3).run(scenarios.save, "fsdp", folder, torch.bfloat16, settings)[0]
    for kind, ranks in (("tp", 2), ("plain", 1), ("grad_sync", 2)):
        assert pool(ranks).run(scenarios.resume, kind, folder, torch.bfloat16, settings)[0] == expected, kind


def test_offloaded_on_one_side_only(pool, saved, tmp_path):
    folder = str(tmp_path / "checkpoint")
    expected = saved(("fsdp", 3))[1]
    assert pool(3).run(scenarios.save, "fsdp", folder, torch.float32, {"offload": True})[0] == expected
    assert pool(2).run(scenarios.resume, "tp", folder)[0] == expected
    assert pool(2).run(scenarios.resume, "tp", saved(("fsdp", 3))[0], torch.float32, {"offload": True})[0] == expected


def test_one_file_of_whole_tensors(pool, saved, tmp_path):
    expected = saved(("fsdp", 3))[1]
    folder = str(tmp_path / "whole")
    assert pool(3).run(scenarios.whole_file, "fsdp", folder, True)[0] == expected
    assert pool(2).run(scenarios.whole_file, "fsdp", folder, False)[0] == expected

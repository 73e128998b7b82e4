"""`meshmuon train --parallel`: the same curve on any layout, and a run that goes on on another one."""

import json
import subprocess
import sys

import pytest

from meshmuon.cli.parallel import start_parallel

from .train_scenarios import STEPS, command, losses

MODES = ["ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]
# [Note: one batch on any number of processes]: rounding of sums in another order, amplified over a few steps.
BOUND = 1e-3


@pytest.fixture(scope="module")
def alone():
    return {name: losses("none", name) for name in ("muon", "adamw")}


def distance(ours, theirs):
    assert ours.keys() >= {("step", step) for step in range(1, STEPS + 1)}
    return max(abs(ours[key] - theirs[key]) for key in ours.keys() & theirs.keys() if key[0] != "sample")


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_draw_the_curve_of_one(pool, alone, mode):
    for name, expected in alone.items():
        ranks = pool(2).run(losses, mode, name)
        assert ranks[0] == ranks[1]
        assert ranks[0].keys() == expected.keys()
        assert distance(ranks[0], expected) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_four_processes_draw_the_curve_of_one(pool, alone, mode):
    for name, expected in alone.items():
        ranks = pool(4).run(losses, mode, name)
        assert all(rank == ranks[0] for rank in ranks)
        assert distance(ranks[0], expected) < BOUND


def test_the_bound_would_notice_another_batch_or_optimizer(alone):
    assert distance(alone["muon"], alone["adamw"]) > 10 * BOUND


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ("fsdp", "none", "muon"),
        ("none", "fsdp+tp", "adamw"),
        *(
            pytest.param(first, second, name, marks=pytest.mark.slow)
            for first, second in (("none", "fsdp+tp"), ("tp", "hsdp"), ("ddp", "tp"), ("fsdp+tp", "ddp"))
            for name in ("muon", "adamw")
        ),
    ],
)
def test_a_run_goes_on_on_another_layout(pool, alone, tmp_path, first, second, name):
    def go(mode, stop_after):
        if mode == "none":
            return losses(mode, name, str(tmp_path), stop_after)
        return pool(2).run(losses, mode, name, str(tmp_path), stop_after)[0]

    before = go(first, 5)
    assert max(step for kind, step in before if kind == "step") == 5
    after = go(second, None)
    assert min(step for kind, step in after if kind == "step") == 6
    assert distance({**before, **after}, alone[name]) < BOUND


def test_without_torchrun_and_with_odd_numbers_the_message_says_what_to_start(pool, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2 -m meshmuon train --parallel fsdp"):
        start_parallel("fsdp", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes, and no --parallel"):
        start_parallel("none", "cpu")


def test_the_command_speaks_and_writes_once(pool, tmp_path):
    (tmp_path / "text").write_text("a line of a small corpus\n" * 4000)
    folder = tmp_path / "run"
    first, second = pool(2).run(
        command, ["--parallel", "fsdp", "--corpus", str(tmp_path / "text"), "--out", str(folder)]
    )
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert "fsdp on 2 processes" in first[1] and "Validation loss: meshmuon.Muon" in first[1]
    assert second[1] == ""
    kinds = [json.loads(line)["kind"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [kinds.count(kind) for kind in ("started", "step", "finished")] == [2, 2 * STEPS, 2]
    assert (folder / "curve.png").exists()
    odd = pool(2).run(command, ["--parallel", "tp", "--optimizers", "torch-muon", "--out", str(tmp_path / "no")])
    assert odd[0][0] == 2 and "trains on one process only" in odd[0][1]
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_torchrun_trains_and_one_process_goes_on(tmp_path):
    (tmp_path / "text").write_text("a line of a small corpus\n" * 4000)
    folder = tmp_path / "run"
    command = ["-m", "meshmuon", "train", "--device", "cpu", "-v"]
    options = ["--optimizers", "adamw", "--steps", "1", "--corpus", str(tmp_path / "text"), "--out", str(folder)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start([*torchrun, *command, "--parallel", "ddp", *options])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ddp on 2 processes") == 1, "one process speaks"
    assert {path.name for path in folder.iterdir()} >= {"log.jsonl", "summary.json", "curve.png", "config.json"}
    # As if it had been killed after its last checkpoint.
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(lines[:-1]))
    again = start([*command, "--resume", str(folder)])
    assert again.returncode == 0, again.stderr
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["resumed_at"] for r in records if r["kind"] == "started"] == [0, 1]
    assert records[-1]["last_loss"] == pytest.approx(json.loads(lines[-1])["last_loss"], abs=1e-5)


def start(arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=300)

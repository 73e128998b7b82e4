"""Experiments: which runs they are made of, what is kept of them, and the same start for every optimizer."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmuon.cli import experiments
from meshmuon.cli.corpus import load_corpus
from meshmuon.cli.experiments import FINAL_SEEDS, GRIDS, SWEEP_SEEDS, runs_of
from meshmuon.cli.outcomes import Outcome, Results, best_rates, check_same_start, load_results
from meshmuon.cli.records import Stepped
from meshmuon.cli.settings import GPTConfig, OptimizerConfig, OptimizerName, TrainConfig, config_from
from meshmuon.cli.sweep import main, results_table
from meshmuon.cli.training import train

MODEL = GPTConfig(width=32, layers=1, heads=2, context=32)


def config(name: OptimizerName = "muon", lr: float = 4e-3, seed: int = 0, **changes: Any) -> TrainConfig:
    optimizer = OptimizerConfig(name=name, lr=lr)
    base = TrainConfig(model=MODEL, optimizer=optimizer, steps=6, batch=4, validate_every=3, validation_windows=4)
    return replace(base, seed=seed, **changes)


def outcome(name: OptimizerName, lr: float, seed: int, loss: float, stopped: str | None = None) -> Outcome:
    curve = ((0, 5.5, 0.0), (6, loss, 1.5))
    return Outcome(
        config=config(name, lr, seed),
        weights_sha256=f"weights of {seed}",
        curve=curve,
        optimizer_share=0.25,
        tokens_per_second=1e4,
        stopped=stopped,
    )


def swept(*, muon: list[float], adamw: list[float]) -> Results:
    outcomes = [
        outcome(name, 1e-3 * 2**place, seed, loss + 0.01 * seed)
        for name, losses in (("muon", muon), ("adamw", adamw))
        for place, loss in enumerate(losses)
        for seed in (0, 1, 2)
    ]
    return Results(facts={"experiment": "sweep"}, outcomes=outcomes)


def test_a_sweep_is_the_grid_for_both_optimizers_on_every_seed() -> None:
    runs = runs_of("sweep", "tiny", device="cpu")
    found = {(run.optimizer.name, run.optimizer.lr, run.seed) for run in runs}
    assert found == {(name, lr, seed) for name in ("muon", "adamw") for lr in GRIDS["tiny"] for seed in SWEEP_SEEDS}
    assert len(found) == len(runs)


def test_final_runs_take_the_rates_given_and_other_seeds_than_the_sweep() -> None:
    assert not set(SWEEP_SEEDS) & set(FINAL_SEEDS)
    rates: dict[OptimizerName, float] = {"muon": 0.5, "adamw": 0.25}
    final = {(r.optimizer.name, r.optimizer.lr, r.seed) for r in runs_of("final", "tiny", device="cpu", rates=rates)}
    assert final == {(name, rates[name], seed) for name in rates for seed in FINAL_SEEDS}
    four = runs_of("four-curves", "tiny", device="cpu", rates=rates)
    assert {(r.optimizer.name, r.optimizer.lr) for r in four} == {
        ("muon", 0.5),
        ("torch-muon", 0.5),
        ("reference", 0.5),
        ("adamw", 0.25),
    }
    rules = runs_of("lr-rules", "tiny", device="cpu", rates=rates, seeds=1)
    assert sorted((r.optimizer.name, r.optimizer.adjust_lr_fn, r.optimizer.lr) for r in rules) == [
        ("adamw", "match_rms_adamw", 0.25),
        ("muon", "match_rms_adamw", 0.25),
        ("muon", "match_rms_adamw", 0.5),
        ("muon", "none", 0.25),
        ("muon", "original", 0.25),
    ]
    with pytest.raises(ValueError, match="experiment: found 'fnal'"):
        runs_of("fnal", "tiny", device="cpu")  # type: ignore[arg-type]


def test_a_config_survives_json() -> None:
    before = config("torch-muon", 0.3, 7)
    assert config_from(json.loads(json.dumps(before.as_dict()))) == before


def test_results_survive_the_file_and_a_stranger_is_refused(tmp_path: Path) -> None:
    results = Results(facts={"experiment": "sweep"}, outcomes=[outcome("muon", 1e-3, 0, 2.0)])
    results.save(tmp_path / "deep" / "r.json")
    assert load_results(tmp_path / "deep" / "r.json") == results
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(ValueError, match=f"{name}: no results"):
            load_results(tmp_path / name)


def test_best_rates_are_means_over_seeds_and_must_lie_inside_the_grid(tmp_path: Path) -> None:
    results = swept(muon=[3.0, 2.0, 1.0, 2.0], adamw=[3.0, 1.5, 2.0, 4.0])
    results.save(tmp_path / "sweep.json")
    assert best_rates(tmp_path / "sweep.json") == {"muon": 4e-3, "adamw": 2e-3}
    best = results.best("muon")
    assert best.mean == pytest.approx(1.01) and best.spread == pytest.approx(0.01)
    assert "best of meshmuon.Muon: lr 0.004, 1.0100 ± 0.0100; inside the grid" in results_table(results)
    swept(muon=[3.0, 2.0, 1.0, 2.0], adamw=[1.0, 1.5, 2.0, 4.0]).save(tmp_path / "edge.json")
    with pytest.raises(ValueError, match=r"best learning rate of adamw, 0\.001, lies at the edge"):
        best_rates(tmp_path / "edge.json")


def test_a_seed_that_diverged_is_never_the_best() -> None:
    results = swept(muon=[3.0, 2.0, 1.0, 2.0], adamw=[3.0, 2.0, 1.0, 2.0])
    results.outcomes.append(outcome("muon", 4e-3, 3, 0.5, stopped="the loss is nan"))
    assert results.best("muon").lr == pytest.approx(2e-3)
    assert results.best("adamw").lr == pytest.approx(4e-3)
    assert "diverged (1 of 4)" in results_table(results)


def test_runs_that_began_with_other_weights_are_noticed() -> None:
    same = [outcome("muon", 1e-3, 0, 2.0), outcome("adamw", 1e-3, 0, 2.0), outcome("adamw", 1e-3, 1, 2.0)]
    check_same_start(same)
    with pytest.raises(AssertionError, match="seed 1"):
        check_same_start([*same, replace(outcome("muon", 1e-3, 1, 2.0), weights_sha256="others")])


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    torch.set_num_threads(1)
    corpus = load_corpus(window=33)
    names: tuple[OptimizerName, ...] = ("muon", "torch-muon", "reference", "adamw")
    return {n: [r.loss for r in train(config(n), corpus) if isinstance(r, Stepped)] for n in names}


def test_every_optimizer_begins_with_the_same_weights_and_batch(losses: dict[str, list[float]]) -> None:
    assert len({values[0] for values in losses.values()}) == 1
    assert len({values[1] for values in losses.values()}) > 1


def test_our_muon_is_the_references_and_close_to_torchs(losses: dict[str, list[float]]) -> None:
    def distance(name: str) -> float:
        return max(abs(a - b) for a, b in zip(losses["muon"], losses[name], strict=True))

    # fp64 products against fp32 ones; torch's coefficients are others and computed in bf16.
    assert distance("reference") < 1e-4
    assert 1e-4 < distance("torch-muon") < 0.05
    assert distance("adamw") > distance("torch-muon")


def test_an_experiment_goes_on_where_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "preset", lambda size, name, device: config(name, device=device))
    (tmp_path / "text").write_text("a line of a small corpus\n" * 800)
    out = tmp_path / "final.json"
    common = ["--experiment", "final", "--size", "tiny", "--device", "cpu", "--steps", "1", "--seeds", "1"]
    command = [*common, "--corpus", str(tmp_path / "text"), "--out", str(out)]
    assert main([*command, "--jobs", "2"]) == 0
    results = load_results(out)
    assert {run.config.optimizer.name for run in results.outcomes} == {"muon", "adamw"}
    assert all(math.isfinite(run.loss) and run.curve[-1][0] == 1 for run in results.outcomes)
    results.outcomes.pop()
    results.save(out)
    kept = results.outcomes[0]
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("to go") == 1
    assert load_results(out).outcomes[0] == kept and len(load_results(out).outcomes) == 2
    (tmp_path / "text").write_text("another corpus altogether\n" * 800)
    assert main(command) == 2
    assert "holds results with corpus" in capsys.readouterr().err


def test_experiments_need_torch_alone() -> None:
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('typer', 'rich', 'matplotlib'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import meshmuon.cli.runner\n"
        "from meshmuon.cli.sweep import main; main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--jobs" in done.stdout, done.stderr

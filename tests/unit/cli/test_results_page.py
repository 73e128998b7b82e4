"""docs/results.md: numbers by hand from results made by hand."""

from pathlib import Path

import pytest
from benchmarks.results import FOLDER, draw, page

from meshmuon.cli.outcomes import Outcome, Results, best_rates, load_results
from meshmuon.cli.settings import SIZES, OptimizerConfig, SizeName, TrainConfig, preset

CORPUS = {"source": "a corpus", "sha256": "0123456789abcdef"}


def results(name: str, losses: dict[tuple[str, str, float], list[float]], jobs: int = 1) -> Results:
    facts = {"experiment": name, "size": "tiny", "corpus": CORPUS, "machine": "a machine", "torch": "2", "jobs": jobs}
    outcomes = []
    for (optimizer, rule, lr), ends in losses.items():
        chosen = OptimizerConfig(name=optimizer, lr=lr, adjust_lr_fn=rule)  # type: ignore[arg-type]
        for seed, loss in enumerate(ends):
            base = preset("tiny")
            config = TrainConfig(model=base.model, optimizer=chosen, steps=200, batch=16, seed=seed)
            curve = ((0, 5.0, 0.0), (100, loss + 1, 10.0), (200, loss, 20.0))
            numbers = {"optimizer_share": 0.25, "tokens_per_second": 20480.0}
            outcomes.append(Outcome(config=config, weights_sha256="w", curve=curve, **numbers))  # type: ignore[arg-type]
    return Results(facts={**facts, "date": "2026-01-01"}, outcomes=outcomes)


def test_every_experiment_has_its_section(tmp_path: Path) -> None:
    folder, rule = tmp_path / "results", "match_rms_adamw"
    both = {("muon", rule, 2e-3): [2.0, 2.2], ("adamw", rule, 1e-3): [2.5, 2.7]}
    grid = {**both, **{(n, rule, lr): [3.0, 3.0] for n in ("muon", "adamw") for lr in (5e-4, 4e-3)}}
    four = {**both, ("torch-muon", rule, 2e-3): [2.0, 2.3], ("reference", rule, 2e-3): [2.001, 2.2]}
    reused = {("muon", word, 1e-3): [2.4, 2.6] for word in ("none", "original", rule)}
    for name, losses in (("sweep", grid), ("final", both), ("four-curves", four), ("lr-rules", {**both, **reused})):
        results(name, losses).save(folder / f"{name}-tiny.json")
    text = page(folder)
    assert "a machine, torch 2, 2026-01-01; a corpus, sha256 0123456789ab." in text
    assert "| 0.002 | **2.1000 ± 0.1414** |  |" in text
    assert "needed 150 steps for the loss that torch.optim.AdamW had after 200 (75%), 15.0 s instead of 20.0 s" in text
    assert "| meshmuon.Muon | 0.002 | 2.1000 ± 0.1414 | 20.0 | 25% | 20,480 |" in text
    assert "differ by at most 1.0e-03 on any seed" in text
    assert '| `"none"` | 0.001 | 2.5000 ± 0.1414 | +0.4000 |' in text
    for path in folder.glob("*.json"):
        draw(path)
    assert {path.stem for path in folder.glob("*.png")} == {"sweep-tiny", "final-tiny", "four-curves-tiny"}


def test_seconds_of_runs_beside_each_other_are_not_told(tmp_path: Path) -> None:
    both = {("muon", "match_rms_adamw", 2e-3): [2.0, 2.2], ("adamw", "match_rms_adamw", 1e-3): [2.5, 2.7]}
    results("final", both, jobs=6).save(tmp_path / "final-tiny.json")
    text = page(tmp_path)
    assert "had the final loss of torch.optim.AdamW after 75% of its 200 steps" in text
    assert "| seconds |" not in text and " s instead" not in text
    assert "6 runs at a time" in text


@pytest.mark.parametrize("size", SIZES)
def test_default_rates_are_the_best_of_the_sweep_of_that_size(size: SizeName) -> None:
    path = FOLDER / f"sweep-{size}.json"
    assert best_rates(path) == SIZES[size].lr
    assert {(o.config.steps, o.config.batch) for o in load_results(path).outcomes} == {
        (SIZES[size].steps, SIZES[size].batch)
    }

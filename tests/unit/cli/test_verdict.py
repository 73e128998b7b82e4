"""The verdict: numbers that can be checked by hand, and honest whoever wins."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshmuon.cli.figures import draw_curves, draw_sweep
from meshmuon.cli.outcomes import Outcome, Results
from meshmuon.cli.settings import GPTConfig, OptimizerConfig, OptimizerName, TrainConfig
from meshmuon.cli.verdict import races, reached, summary, verdict


def outcome(
    name: OptimizerName, *losses: float, seed: int = 0, pace: float = 1.0, stopped: str | None = None
) -> Outcome:
    optimizer = OptimizerConfig(name=name, lr=1e-3)
    config = TrainConfig(model=GPTConfig(), optimizer=optimizer, steps=100, batch=4, seed=seed)
    curve = tuple((100 * i, loss, 999.0) for i, loss in enumerate(losses))  # by the clock: a busy machine
    return Outcome(
        config=config,
        weights_sha256="same",
        curve=curve,
        optimizer_share=0.1,
        tokens_per_second=10 * 4 * 128 / pace,
        stopped=stopped,
    )


def test_a_loss_is_reached_between_two_measurements() -> None:
    curve = ((0, 5.0, 0.0), (100, 3.0, 10.0), (200, 2.0, 30.0))
    assert reached(curve, 2.5) == 150.0
    assert reached(curve, 3.0) == 100.0
    assert reached(curve, 5.5) == 0.0
    assert reached(curve, 1.9) is None


def test_a_winner_is_told_in_steps_and_seconds() -> None:
    outcomes = [outcome("muon", 5.0, 3.0, 2.0, pace=1.2), outcome("adamw", 5.0, 4.0, 3.0)]
    (race,) = races(outcomes, "muon", "adamw")
    assert (race.steps, race.baseline_steps) == (100.0, 200)
    assert (race.seconds, race.baseline_seconds) == (pytest.approx(12.0), pytest.approx(20.0))
    text = " ".join(verdict(outcomes))
    assert "needed 100 steps for the loss that torch.optim.AdamW had after 200 (50%)" in text
    assert "12.0 s instead of 20.0 s" in text and "One seed" in text


def test_fewer_steps_but_more_seconds_is_said() -> None:
    text = " ".join(verdict([outcome("muon", 5.0, 3.0, 2.0, pace=3.0), outcome("adamw", 5.0, 4.0, 3.0)]))
    assert "but 30.0 s instead of 20.0 s: its steps cost more than they saved" in text


def test_equal_seconds_are_called_equal() -> None:
    text = " ".join(verdict([outcome("muon", 5.0, 3.0, 2.0, pace=2.0), outcome("adamw", 5.0, 4.0, 3.0)]))
    assert "(50%), and as long, 20.0 s, by the median step" in text


def test_a_loser_is_called_one() -> None:
    outcomes = [outcome("muon", 5.0, 4.0, 3.5), outcome("adamw", 5.0, 4.0, 3.0)]
    text = " ".join(verdict(outcomes))
    assert "did NOT reach the final loss of torch.optim.AdamW in as many steps: AdamW wins here." in text
    assert summary(outcomes)["races"][0]["steps"] is None


def test_seeds_give_a_spread_and_a_small_difference_is_a_draw() -> None:
    def pairs(*ends: tuple[float, float]) -> list[Outcome]:
        muon = [outcome("muon", 5.0, end[0], seed=seed) for seed, end in enumerate(ends)]
        return muon + [outcome("adamw", 5.0, end[1], seed=seed) for seed, end in enumerate(ends)]

    clear = verdict(pairs((2.0, 3.0), (2.1, 3.1), (1.9, 2.9)))
    assert "meshmuon.Muon 2.000 ± 0.100, torch.optim.AdamW 3.000 ± 0.100" in clear[0]
    assert not any("draw" in line for line in clear)
    close = verdict(pairs((2.0, 2.2), (2.1, 1.9), (1.9, 2.0)))
    assert any("in 1 of 3 seeds in as many steps: AdamW wins there." in line for line in close)
    assert "call it a draw" in close[-1]


def test_a_run_that_diverged_is_named_and_not_raced() -> None:
    outcomes = [outcome("muon", 5.0, 2.0, stopped="the loss is nan"), outcome("adamw", 5.0, 3.0)]
    assert verdict(outcomes) == ["meshmuon.Muon, seed 0, did not finish: the loss is nan."]
    assert summary(outcomes)["runs"][0]["loss"] is None


def test_figures_are_drawn(tmp_path: Path) -> None:
    outcomes = [
        outcome(name, 5.0, 3.0, end + 0.1 * seed, seed=seed)
        for name, end in (("muon", 2.0), ("adamw", 2.5))
        for seed in (0, 1)
    ]
    draw_curves(outcomes, tmp_path / "curve.png", title="A test", seconds=True)
    other = [replace(o, config=replace(o.config, optimizer=replace(o.config.optimizer, lr=2e-3))) for o in outcomes]
    draw_sweep(Results(facts={}, outcomes=outcomes + other), tmp_path / "sweep.png", title="A test")
    for name in ("curve.png", "sweep.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError):
        outcome("mun", 1.0)  # type: ignore[arg-type]


def test_a_loss_that_has_risen_is_said_and_noise_is_not() -> None:
    risen = verdict([outcome("muon", 5.0, 2.0, 2.2), outcome("adamw", 5.0, 3.0, 2.9)])
    assert any("meshmuon.Muon, seed 0: the loss was lowest after 100 steps (2.000)" in line for line in risen)
    steady = verdict([outcome("muon", 5.0, 2.0, 2.01), outcome("adamw", 5.0, 3.0, 2.9)])
    assert not any("lowest" in line for line in steady)

"""The named experiments behind docs/results.md: which runs each is made of.

Grids and seeds are fixed here before anything is run.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from meshmuon.cli.settings import OptimizerName, SizeName, TrainConfig, default_lr, preset
from meshmuon.errors import message, one_of

if TYPE_CHECKING:  # it imports torch
    from meshmuon.config import LRRule

Experiment = Literal["sweep", "final", "four-curves", "lr-rules"]

# Learning rates are chosen on other seeds than the ones they are judged by.
SWEEP_SEEDS = (0, 1, 2)
FINAL_SEEDS = (10, 11, 12)

# The same grid for both optimizers, wide enough to have the best of each inside, not at an edge.
GRIDS: dict[SizeName, tuple[float, ...]] = {
    "tiny": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "small": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "base": (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
COMPARED: tuple[Literal["muon", "adamw"], ...] = ("muon", "adamw")
FOUR: tuple[OptimizerName, ...] = ("muon", "torch-muon", "reference", "adamw")
REUSED_RULES: tuple[Literal["none", "original", "match_rms_adamw"], ...] = ("none", "original", "match_rms_adamw")

Rates = dict[OptimizerName, float]

DESCRIPTIONS: dict[Experiment, str] = {
    "sweep": "Muon and AdamW over a grid of learning rates",
    "final": "Muon and AdamW, each at its best learning rate of the sweep, on other seeds",
    "four-curves": "our Muon, torch.optim.Muon, the reference and AdamW on the same seeds and data",
    "lr-rules": "Muon at AdamW's best learning rate, under three rules of scaling",
}


def runs_of(
    experiment: Experiment,
    size: SizeName,
    *,
    device: str,
    rates: Rates | None = None,
    steps: int | None = None,
    seeds: int = 3,
) -> list[TrainConfig]:
    """Spell an experiment out.

    Args:
        experiment: Its name.
        size: The size of model.
        device: Where to train, as torch names it.
        rates: Best learning rate of "muon" and "adamw"; by default those of the size.
        steps: Optimizer steps; by default those of the size.
        seeds: How many of the seeds, at most three.

    Returns:
        One config for each run.
    """
    if experiment not in get_args(Experiment):
        known = one_of(get_args(Experiment))
        raise ValueError(message("experiment", found=f"found {experiment!r}", do=f"Give {known}."))
    best = rates or {name: default_lr(size, name) for name in COMPARED}

    def run(name: OptimizerName, lr: float, seed: int, rule: "LRRule" = "match_rms_adamw") -> TrainConfig:
        config = preset(size, name, device=device)
        optimizer = replace(config.optimizer, lr=lr, adjust_lr_fn=rule)
        return replace(config, seed=seed, steps=steps or config.steps, optimizer=optimizer)

    if experiment == "sweep":
        return [run(name, lr, seed) for seed in SWEEP_SEEDS[:seeds] for name in COMPARED for lr in GRIDS[size]]
    if experiment == "lr-rules":
        reused = [run("muon", best["adamw"], seed, rule) for seed in FINAL_SEEDS[:seeds] for rule in REUSED_RULES]
        tuned = [run(name, best[name], seed) for seed in FINAL_SEEDS[:seeds] for name in COMPARED]
        return list(dict.fromkeys(reused + tuned))  # once, where both optimizers have the same best rate
    names = FOUR if experiment == "four-curves" else COMPARED
    return [run(name, best["adamw" if name == "adamw" else "muon"], s) for name in names for s in FINAL_SEEDS[:seeds]]

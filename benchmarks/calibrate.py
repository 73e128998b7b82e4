"""Compare the planner's constants for one H200 with measurements, and fit them.

Measured numbers belong into the two tables below; what this prints belongs into `_H200` in plan/hardware.py.

python -m benchmarks.calibrate
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from meshmuon import Orthogonalizer, plan_for
from meshmuon.bench.workloads import GPU
from meshmuon.plan.calibration import Calibration, Sample, fit, polar_work
from meshmuon.plan.hardware import known_hardware
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe


@dataclass(frozen=True)
class Measured:
    """A time of `orthogonalize`, products by torch."""

    batch: int
    m: int
    n: int
    form: Literal["standard", "gram"]
    ms: float

    @property
    def name(self) -> str:
        return f"{self.batch}×{self.m}×{self.n} {self.form}"


# One H200, torch 2.11.0+cu130, 2026-11-15, before any kernel of our own (NOTES.md).
POLAR = [
    Measured(16, 768, 768, "standard", 1.24),
    Measured(16, 768, 768, "gram", 0.79),
    Measured(16, 768, 3072, "standard", 1.74),
    Measured(16, 768, 3072, "gram", 1.47),
    Measured(8, 2048, 2048, "standard", 3.67),
    Measured(8, 2048, 2048, "gram", 4.37),
    Measured(8, 2048, 8192, "standard", 11.7),
    Measured(8, 2048, 8192, "gram", 8.8),
    Measured(4, 4096, 4096, "standard", 16.8),
    Measured(4, 4096, 4096, "gram", 16.7),
]
# Whole steps of Muon on one H200, ms: medians of `python -m benchmarks.bench_step` (results/h200-step.json), launched
# or as a graph, whichever was faster: the device is what is predicted. Fitted on two, tried on the others; but the rate
# of symmetric products at 1408 in plan/calibration.py is that of moe.
STEPS: dict[str, float] = {
    name: min(row["optimizers"][way]["ms"] for way in ("meshmuon.Muon", "meshmuon.Muon (CUDA graph)"))
    for name, row in json.loads(Path(__file__).with_name("results").joinpath("h200-step.json").read_text())[
        "results"
    ].items()
    if name in GPU
}
FITTED_ON = ("gpt2-124m", "llama-8b/4")


def polar_samples() -> Iterator[tuple[str, Sample]]:
    for row in POLAR:
        recipe = choose_recipe(
            row.m,
            row.n,
            schedule=resolve_schedule("polar_express", 5),
            orthogonalizer=Orthogonalizer(form=row.form, kernels="torch"),
            device=torch.device("meta"),
            dtype=torch.float32,
            eps=1e-7,
        )
        yield row.name, Sample(polar_work(recipe, row.m, row.n, batch=row.batch), row.ms * 1e-3)


def step_samples() -> Iterator[tuple[str, Sample]]:
    for name, ms in STEPS.items():
        shapes = {f"w{i}": shape for i, shape in enumerate(GPU[name])}
        route = plan_for(shapes, {"gpu": 1}, {"gpu": "replicate"}, "h200").route()
        yield name, Sample(route.work, ms * 1e-3)


def table(samples: Sequence[tuple[str, Sample]], calibration: Calibration) -> list[str]:
    lines = ["| what | measured ms | predicted ms | ratio |", "|---|---|---|---|"]
    for name, sample in samples:
        predicted = calibration.seconds(sample.work)
        ratio = predicted / sample.seconds
        lines.append(f"| {name} | {sample.seconds * 1e3:.2f} | {predicted * 1e3:.2f} | {ratio:.2f} |")
    return lines


def main() -> None:
    now = known_hardware("h200").calibration
    polar, steps = list(polar_samples()), list(step_samples())
    print("With the constants of plan/hardware.py:\n" + "\n".join(table(polar + steps, now)))
    print(f"\nFitted to all of it: {fit([sample for _, sample in polar + steps], now)}")
    if steps:
        known = [sample for name, sample in steps if name in FITTED_ON]
        fitted = fit(known, now)
        print(f"\nFitted to {' and '.join(FITTED_ON)}: {fitted}\n" + "\n".join(table(steps, fitted)))


if __name__ == "__main__":
    main()

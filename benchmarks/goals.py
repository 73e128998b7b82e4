"""What this package wants to be on an H200, measured and judged: every goal beside what was found, in one table.

python -m benchmarks.goals FOLDER [--parts steps products ...] [--judge]

Each part is a command of this folder that leaves a record in FOLDER; a part that fails does not stop the others. The
table comes last, over all records that are there, so parts may be measured one after the other. `--judge` measures
nothing. Ends with 1 if a goal is missed or was not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmuon.bench.steps import OURS


@dataclass(frozen=True, slots=True)
class Goal:
    """One number, and how large it may or has to be; without a bound it is only reported.

    Attributes:
        what: In words.
        find: Takes it from the record of its part; raises KeyError or ValueError if it is not there.
        most: What it may be.
        least: What it has to be.
    """

    what: str
    find: Callable[[Any], float]
    most: float | None = None
    least: float | None = None

    def asked(self) -> str:
        if self.most is not None:
            return f"<= {self.most:g}"
        return "shown" if self.least is None else f">= {self.least:g}"

    def is_met(self, found: float) -> bool:
        return (self.most is None or found <= self.most) and (self.least is None or found >= self.least)


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured by one command.

    Attributes:
        command: Behind `python -m`; the record's path comes last.
        record: Name of its file.
        goals: Of its numbers.
    """

    command: tuple[str, ...]
    record: str
    goals: tuple[Goal, ...]


def _step_goals(workload: str, *, floor: float, torch: float) -> tuple[Goal, ...]:
    def ms(record: Any, optimizer: str = OURS) -> float:
        return record["results"][workload]["optimizers"][optimizer]["ms"]

    def extra(record: Any) -> float:
        return record["results"][workload]["optimizers"][OURS]["extra GB"]

    return (
        Goal(f"{workload}: step, x floor", lambda r: ms(r) / r["results"][workload]["floor ms"], most=floor),
        Goal(f"{workload}: torch.optim.Muon / ours", lambda r: ms(r, "torch.optim.Muon") / ms(r), least=torch),
        Goal(f"{workload}: extra memory, GB", extra, most=1.1),
    )


def _product_goal(side: int) -> Goal:
    def ratio(record: Any) -> float:
        row = record["results"][f"1x{side}x{side}"]
        return row["cuBLAS ms"] / row["ms"]

    return Goal(f"X·Xᵀ of {side}x{side}: cuBLAS / ours", ratio, least=1.23 if side <= 2048 else 1.48)


def _worst(rows: list[dict[str, Any]], number: Callable[[dict[str, Any]], float]) -> float:
    numbers = [number(row) for row in rows]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)  # ValueError if there are none


def _five_steps(record: Any, *inputs: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["set"].endswith(" 5") and row["input"].startswith(inputs)]


_REAL_INPUTS = ("gaussian", "power law", "low rank")
_ACCURACY = (
    Goal(
        "default dtype, five steps: further from exact than fp32",
        lambda r: _worst(_five_steps(r, *_REAL_INPUTS), lambda row: row["default"] - row["fp32"]),
        most=0.01,
    ),
    Goal("largest sigma of all", lambda r: _worst(r["rows"], lambda row: row["sigma"]), most=1.35),
    Goal(
        "Gram - standard form, five steps, fp32",
        lambda r: _worst(_five_steps(r, *_REAL_INPUTS, "rank 1"), lambda row: row["gram - standard (fp32)"]),
        most=5e-3,
    ),
    Goal(
        "Gram - standard form, five steps, fp16, Gaussian",
        lambda r: _worst(_five_steps(r, "gaussian"), lambda row: row["gram - standard (fp16)"]),
        most=5e-3,
    ),
    Goal("largest side", lambda r: _worst(r["rows"], lambda row: float(row["shape"].split("x")[0])), least=8192),
)


def _invariance_goal(workload: str) -> Goal:
    def price(record: Any) -> float:
        rows = record["results"][workload]
        return 100 * (
            rows["layout_invariant"]["ms"] / min(rows[name]["ms"] for name in ("default", "default again")) - 1
        )

    return Goal(f"{workload}: layout_invariant=True costs, %", price, most=5)


_PASSES = 16
_TOKENS = 32768 * _PASSES


def _training_goal(size: str, *, most: float | None, equal_weights: bool = False) -> Goal:
    which = "training step with equal weights" if equal_weights else "training step"

    def overhead(record: Any) -> float:
        row = record["results"][f"{size}, {_TOKENS} tokens"]
        return 100 * (row[OURS][f"{which} ms"] / row["AdamW (fused)"][f"{which} ms"] - 1)

    return Goal(f"{which} of {size}, {_TOKENS} tokens: over fused AdamW's, %", overhead, most=most)


def _count(name: str) -> Callable[[Any], float]:
    return lambda record: float(record[name])


_STEPS = (
    *_step_goals("gpt2-124m", floor=1.5, torch=12),
    *_step_goals("llama-1b", floor=1.25, torch=2.3),
    *_step_goals("llama-8b/4", floor=1.25, torch=2),
    *_step_goals("moe 4x64", floor=1.25, torch=3),
)
_WORKLOADS = ("gpt2-124m", "llama-1b", "llama-8b/4", "moe 4x64")
_SIDES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
_TRAINING = ("benchmarks.bench_training", "--tokens", "32768", "--accumulate", str(_PASSES), "--json")
PARTS = {
    "steps": Part(("benchmarks.bench_step", "--repeats", "4", "--json"), "step.json", _STEPS),
    "first": Part(
        ("benchmarks.first_step", "--json"),
        "first-step.json",
        (Goal("llama-1b: first step, empty cache, s", lambda r: r["results"]["empty cache"]["first s"], most=10),),
    ),
    "products": Part(("benchmarks.bench_products", "--json"), "products.json", tuple(map(_product_goal, _SIDES))),
    "accuracy": Part(("benchmarks.accuracy", "--json"), "accuracy.json", _ACCURACY),
    "options": Part(("benchmarks.options", "--json"), "options.json", tuple(map(_invariance_goal, _WORKLOADS))),
    "training": Part(
        _TRAINING,
        "training.json",
        (
            _training_goal("0.5b", most=2.5),
            _training_goal("0.5b", most=None, equal_weights=True),
            _training_goal("124m", most=None),
        ),
    ),
    "tests": Part(
        ("pytest", "-m", "gpu", "tests/gpu", "--junitxml"),
        "tests.xml",
        (
            Goal("tests on the GPU that passed", _count("passed"), least=1),
            Goal("tests on the GPU that failed or were skipped", _count("others"), most=0),
        ),
    ),
}


def read(path: Path) -> Any:
    """A record: JSON as the benchmarks write it, or what pytest counted."""
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    counts = {name: int(number) for name, number in ElementTree.parse(path).getroot()[0].items() if number.isdigit()}
    others = sum(counts[name] for name in ("errors", "failures", "skipped"))
    return {"passed": counts["tests"] - others, "others": others}


def judge(folder: Path, part: Part) -> list[tuple[Goal, float | None]]:
    """What was found of each goal; None: nothing."""
    try:
        record = read(folder / part.record)
    except (OSError, ValueError, LookupError, ElementTree.ParseError):
        return [(goal, None) for goal in part.goals]
    return [(goal, _found(goal, record)) for goal in part.goals]


def _found(goal: Goal, record: Any) -> float | None:
    try:
        return goal.find(record)
    except (LookupError, ValueError, TypeError, ZeroDivisionError):
        return None


def table(judged: list[tuple[Goal, float | None]]) -> str:
    width = max(len(goal.what) for goal, _ in judged)
    lines = [f"{'goal':{width}s} {'asked':>9s} {'found':>9s}"]
    for goal, found in judged:
        verdict = "not measured" if found is None else "" if goal.is_met(found) else "MISSED"
        number = "" if found is None else f"{found:.4g}"
        lines.append(f"{goal.what:{width}s} {goal.asked():>9s} {number:>9s}  {verdict}".rstrip())
    met = sum(found is not None and goal.is_met(found) for goal, found in judged)
    return "\n".join([*lines, f"{met} of {len(judged)} goals met"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where records are")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure; all")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    arguments = parser.parse_args(argv)
    if not arguments.judge:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        for name in arguments.parts:
            part = PARTS[name]
            (arguments.folder / part.record).unlink(missing_ok=True)  # an old one is no result of this run
            print(f"\n== {name}: python -m {' '.join(part.command)}", flush=True)
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", *part.command, str(arguments.folder / part.record)], check=False)
            print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    judged = [pair for part in PARTS.values() for pair in judge(arguments.folder, part)]
    print("\n" + table(judged))
    return 0 if all(found is not None and goal.is_met(found) for goal, found in judged) else 1


if __name__ == "__main__":
    sys.exit(main())

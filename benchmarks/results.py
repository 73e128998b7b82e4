"""docs/results.md and its figures, from the JSON files of the experiments in docs/results.

python -m benchmarks.results [--folder docs/results]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from meshmuon.cli.experiments import COMPARED, DESCRIPTIONS, REUSED_RULES
from meshmuon.cli.figures import draw_curves, draw_sweep
from meshmuon.cli.outcomes import Outcome, Results, Setting, load_results, table
from meshmuon.cli.settings import LABELS, SIZES
from meshmuon.cli.verdict import races, verdict

FOLDER = Path(__file__).parent.parent / "docs" / "results"

INTRODUCTION = """\
# Muon beside AdamW: what was measured

Made by `make results` from the JSON files in [results](results). Each number is a mean ± standard deviation over seeds
of the validation loss in nats per byte, lower is better. Runs that are compared begin with the same weights (their
sha256 is checked), see the same batches under the same schedule (linear warmup, cosine to 10 %), and decay weights
alike: 0.1 on matrices, embedding and head, none on norms. AdamW is torch's fused one with betas (0.9, 0.95). Learning
rates are chosen by a sweep on seeds 0, 1, 2 (seed 0 alone where a number has no ±) and judged on seeds 10, 11, 12.

To run an experiment again: `python -m meshmuon.cli.sweep --experiment NAME --size SIZE` (torch alone is enough), or
`meshmuon train --experiment NAME`. `make train` is one comparison on your own machine.
"""


def sweep_section(results: Results) -> list[str]:
    """The grid as a table, best rates bold."""
    rates = sorted({setting.lr for setting in results.settings()})
    cells = {(setting.optimizer, setting.lr): setting for setting in results.settings()}
    rows = []
    for lr in rates:
        shown = []
        for name in COMPARED:
            setting = cells.get((name, lr))
            best = setting is not None and results.best(name).lr == lr
            shown.append("" if setting is None else f"**{setting}**" if best else str(setting))
        rows.append([f"{lr:g}", *shown])
    edges = [LABELS[name] for name in COMPARED if not results.brackets(name)]
    inside = f"The best of {' and '.join(edges)} lies at the edge of the grid." if edges else ""
    lines = [table(["lr", *(LABELS[name] for name in COMPARED)], rows, style="markdown")]
    return [*lines, *([inside] if inside else [])]


def final_section(results: Results) -> list[str]:
    """Both at their best rate: the verdict, and a row per optimizer."""
    timed = results.facts["jobs"] == 1
    found = races(results.outcomes, "muon", "adamw")
    words = verdict(results.outcomes)
    if not timed:  # runs beside each other tell nothing about seconds
        reached = [race.steps for race in found if race.steps is not None]
        words = [line for line in words if " needed " not in line]
        if found and len(reached) == len(found):
            share = sum(reached) / len(reached) / found[0].baseline_steps
            ours = f"{LABELS['muon']} had the final loss of {LABELS['adamw']}"
            words.insert(1, f"{ours} after {share:.0%} of its {found[0].baseline_steps} steps.")
    return [" ".join(words), _settings_table(results, timed=timed)]


def four_section(results: Results) -> list[str]:
    """Four optimizers: a row each."""
    lines = [_settings_table(results, timed=False)]
    if {"muon", "reference"} <= {outcome.config.optimizer.name for outcome in results.outcomes}:
        gap = max(abs(a.loss - b.loss) for a, b in _pairs(results, "muon", "reference"))
        note = "Ours and the reference do the same arithmetic in fp32 and in fp64: their final losses differ by at most"
        lines.append(f"{note} {gap:.1e} on any seed.")
    return lines


def rules_section(results: Results) -> list[str]:
    """What it costs to reuse AdamW's learning rate under each rule."""
    adamw = results.best("adamw")
    muons = [setting for setting in results.settings() if setting.optimizer == "muon"]
    tuned = min(muons, key=lambda setting: setting.mean)
    rows = []
    for rule in REUSED_RULES:
        setting = next(s for s in muons if s.rule == rule and s.lr == adamw.lr)
        rows.append([f'`"{rule}"`', f"{setting.lr:g}", str(setting), _cost(setting, tuned)])
    rows.append([f'`"{tuned.rule}"`, lr of its own', f"{tuned.lr:g}", str(tuned), _cost(tuned, tuned)])
    rows.append([LABELS["adamw"], f"{adamw.lr:g}", str(adamw), _cost(adamw, tuned)])
    header = ("`adjust_lr_fn`", "lr", "validation loss", "above the best Muon")
    return [table(header, rows, style="markdown")]


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "final": final_section,
    "sweep": sweep_section,
    "four-curves": four_section,
    "lr-rules": rules_section,
}


DRAWN = ("final", "sweep", "four-curves")


def draw(path: Path) -> None:
    """The figure of an experiment, beside its JSON file."""
    results = load_results(path)
    name, figure = results.facts["experiment"], path.with_suffix(".png")
    if name == "sweep":
        draw_sweep(results, figure, title=_title(results))
    elif name in DRAWN:
        timed = name == "final" and results.facts["jobs"] == 1
        draw_curves(results.outcomes, figure, title=_title(results), seconds=timed)


def page(folder: Path) -> str:
    """All experiments that have results, by size."""
    blocks = [INTRODUCTION.rstrip()]
    for size, facts in SIZES.items():
        files = {name: folder / f"{name}-{size}.json" for name in SECTIONS}
        present = {name: path for name, path in files.items() if path.exists()}
        if present:
            model, config = facts.model, load_results(next(iter(present.values()))).outcomes[0].config
            batch = f"{config.steps} steps of {config.batch} windows of {model.context} bytes"
            shape = f"{model.layers} layers of width {model.width}"
            blocks.append(f"## {size}: {facts.parameters} parameters\n\n{shape}; {batch}.")
        for name, path in present.items():
            results = load_results(path)
            about = f"### {name}\n\n{DESCRIPTIONS[name][0].upper()}{DESCRIPTIONS[name][1:]}. {_where(results)}"  # type: ignore[index]
            figure = [f"![{path.stem}]({folder.name}/{path.stem}.png)"] if name in DRAWN else []
            blocks += [about, *SECTIONS[name](results), *figure]
    return "\n\n".join(blocks) + "\n"


def _settings_table(results: Results, *, timed: bool) -> str:
    header = ["optimizer", "lr", "validation loss", *(["seconds", "optimizer's share", "tokens/s"] if timed else [])]
    rows = []
    for setting in sorted(results.settings(), key=lambda setting: setting.mean):
        row = [LABELS[setting.optimizer], f"{setting.lr:g}", str(setting)]  # type: ignore[index]
        if timed:
            outcomes = setting.outcomes
            row.append(f"{_mean([o.seconds for o in outcomes]):.1f}")
            row.append(f"{_mean([o.optimizer_share for o in outcomes]):.0%}")
            row.append(f"{_mean([o.tokens_per_second for o in outcomes]):,.0f}")
        rows.append(row)
    return table(header, rows, style="markdown")


def _pairs(results: Results, first: str, second: str) -> list[tuple[Outcome, Outcome]]:
    """Their runs by seed."""
    runs = {(o.config.optimizer.name, o.config.seed): o for o in results.outcomes}
    seeds = sorted({seed for _, seed in runs})
    return [(runs[first, s], runs[second, s]) for s in seeds if (first, s) in runs and (second, s) in runs]


def _cost(setting: Setting, best: Setting) -> str:
    return "" if setting is best else f"{setting.mean - best.mean:+.4f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _where(results: Results) -> str:
    facts = results.facts
    beside = f", {facts['jobs']} runs at a time" if facts["jobs"] > 1 else ""
    learned = f"{facts['corpus']['source']}, sha256 {facts['corpus']['sha256'][:12]}"
    return f"{facts['machine']}, torch {facts['torch']}{beside}, {facts['date']}; {learned}."


def _title(results: Results) -> str:
    size = results.facts["size"]
    return f"Byte-level GPT, {SIZES[size].parameters} parameters, {results.facts['machine']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for file in sorted(options.folder.glob("*.json")):
        draw(file)
    text = page(options.folder)
    (options.folder.parent / "results.md").write_text(text, encoding="utf-8")
    print(text)

"""Figures of `meshmuon train` and docs/results.md. matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshmuon.cli.outcomes import Outcome, Results
from meshmuon.cli.settings import LABELS, OptimizerName

# Colours that stay apart for colour-blind readers (Okabe and Ito); dashes keep curves apart that lie on each other.
_STYLES: dict[OptimizerName, dict[str, Any]] = {
    "muon": {"color": "#0072B2", "linestyle": "-"},
    "adamw": {"color": "#D55E00", "linestyle": "-"},
    "torch-muon": {"color": "#009E73", "linestyle": "--"},
    "reference": {"color": "black", "linestyle": ":"},
}
LOSS_LABEL = "validation loss (nats per byte)"


def draw_curves(outcomes: Sequence[Outcome], path: Path, *, title: str, seconds: bool) -> None:
    """Draw validation losses: a line through the means, and a band from the lowest to the highest seed.

    Args:
        outcomes: Runs of any optimizers; those that stopped early are left out.
        path: Where to write the PNG.
        title: What was trained.
        seconds: Whether to draw them over seconds of training, too.
    """
    labels = ["step", *(["seconds of training, by the median step"] if seconds else [])]
    figure, panels = _figure(len(labels))
    for panel, label in zip(panels, labels, strict=True):
        for name in _STYLES:
            runs = [o for o in outcomes if o.config.optimizer.name == name and o.stopped is None]
            if not runs:
                continue
            points = list(zip(*(run.curve for run in runs), strict=True))  # of each validation, one point per seed
            pace = 1.0 if label == "step" else sum(run.step_seconds for run in runs) / len(runs)
            across = [seeds[0][0] * pace for seeds in points]
            losses = [[point[1] for point in seeds] for seeds in points]
            means = [sum(seeds) / len(seeds) for seeds in losses]
            panel.plot(across, means, label=f"{LABELS[name]}: {means[-1]:.3f}", **_STYLES[name])
            if len(runs) > 1:
                low, high = [min(seeds) for seeds in losses], [max(seeds) for seeds in losses]
                panel.fill_between(across, low, high, color=_STYLES[name]["color"], alpha=0.2, linewidth=0)
        panel.set(xlabel=label, ylabel=LOSS_LABEL)
        _zoom(panel, outcomes)
        panel.legend(title=f"mean of {_seeds(outcomes)}, at the end")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_sweep(results: Results, path: Path, *, title: str) -> None:
    """Draw the final loss over the learning rate, with each seed as a dot.

    Args:
        results: Of a sweep.
        path: Where to write the PNG.
        title: What was trained.
    """
    figure, (panel,) = _figure(1)
    best = min(setting.mean for setting in results.settings())
    for name in ("muon", "adamw"):
        settings = [s for s in results.settings() if s.optimizer == name and s.mean < float("inf")]
        label = f"{LABELS[name]}: best at {results.best(name).lr:g}"
        panel.plot([s.lr for s in settings], [s.mean for s in settings], label=label, **_STYLES[name])
        dots = [(s.lr, o.loss) for s in settings for o in s.outcomes]
        panel.scatter(*zip(*dots, strict=True), s=12, color=_STYLES[name]["color"])
    panel.set(xscale="log", xlabel="peak learning rate", ylabel=LOSS_LABEL, ylim=(best - 0.05, best + 1.0))
    rates = sorted({setting.lr for setting in results.settings()})
    panel.set_xticks(rates, [f"{lr:g}" for lr in rates])
    panel.minorticks_off()
    panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * panels, 4.6), layout="constrained")  # no pyplot: its global state may open windows
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def _zoom(panel: Any, outcomes: Sequence[Outcome]) -> None:
    """Show where curves differ: not the cliff of the first steps."""
    ends = [outcome.loss for outcome in outcomes if outcome.stopped is None]
    starts = [outcome.curve[0][1] for outcome in outcomes if outcome.stopped is None]
    if ends:
        bottom, top = min(ends), max(starts)
        panel.set_ylim(bottom - 0.05 * (top - bottom), max(ends) + 0.45 * (top - max(ends)))


def _seeds(outcomes: Sequence[Outcome]) -> str:
    count = len({outcome.config.seed for outcome in outcomes})
    return "one seed" if count == 1 else f"{count} seeds"

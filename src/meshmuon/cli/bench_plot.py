"""The bar chart of `meshmuon bench --plot`."""

from pathlib import Path
from typing import Any

Times = dict[str, dict[str, float]]  # workload → what → ms


def step_times(record: dict[str, Any]) -> Times:
    """Read steps out of a record.

    Args:
        record: What `bench` measured, on a CPU or a GPU.

    Returns:
        Workload → optimizer → ms.
    """
    rows = {name: row.get("optimizers", row) for name, row in record.get("results", {}).items() if name != "ceilings"}
    return {name: {each: numbers["ms"] for each, numbers in row.items()} for name, row in rows.items()}


def polar_times(record: dict[str, Any]) -> Times:
    """Read polar factors out of a record.

    Args:
        record: What `bench` measured.

    Returns:
        Stack → who → ms, and the floor.
    """
    rows = {name: row for name, row in record.get("polar", {}).items() if name != "ceilings"}
    return {
        name: {each: row[each]["ms"] for each in ("meshmuon", "torch.optim.Muon")} | {"floor": row["floor ms"]}
        for name, row in rows.items()
    }


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a bar for each time, in groups, on a logarithmic axis.

    Args:
        record: What `bench` measured.
        path: Where to write the PNG.
    """
    from matplotlib.figure import Figure

    charts = {"optimizer step": step_times(record), "polar factors": polar_times(record)}
    charts = {title: times for title, times in charts.items() if times}
    figure = Figure(figsize=(10, 4.5 * len(charts)), layout="constrained")  # no pyplot: its state may open windows
    figure.suptitle(f"{record['hardware']}, torch {record['torch']}, {record['date']}")
    for axes, (title, times) in zip(figure.subplots(len(charts), squeeze=False).flat, charts.items(), strict=True):
        who = list(dict.fromkeys(name for row in times.values() for name in row))
        width = 0.8 / len(who)
        for number, name in enumerate(who):
            places = [place + (number - (len(who) - 1) / 2) * width for place in range(len(times))]
            axes.bar(places, [row.get(name, 0.0) for row in times.values()], width, label=name)
        names = [name.split(",")[0].split(":")[0] for name in times]
        axes.set_xticks(range(len(times)), names, rotation=20 if len(times) > 4 else 0)
        axes.set(title=title, ylabel="ms", yscale="log")
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, format="png")

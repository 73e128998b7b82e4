"""The table a user pastes into an issue: every parameter's route and reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshmuon.layout.names import starred
from meshmuon.layout.records import ParameterRecord
from meshmuon.plan.bucket import Plan
from meshmuon.plan.summary import summarise
from meshmuon.plan.words import human

_HEADER = ("route", "tensors", "params", "share", "shape", "layout", "parameters", "reason")
_RIGHT = {"tensors", "params", "share"}
_LONGEST_NAME = 48


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters that differ only in the numbers inside their names.

    Attributes:
        pattern: Their name, with a star for each number.
        parameters: Their records.
    """

    pattern: str
    parameters: tuple[ParameterRecord, ...]

    @property
    def numel(self) -> int:
        """How many numbers they hold."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def name(self) -> str:
        """The name of a single one, the pattern of several."""
        return self.parameters[0].name if len(self.parameters) == 1 else self.pattern

    @property
    def shape(self) -> str:
        """Their shape, in words."""
        return "x".join(map(str, self.parameters[0].shape)) or "scalar"

    @property
    def reason(self) -> str:
        """Why they take their algorithm, and how they are seen as matrices."""
        routing = self.parameters[0].routing
        view = routing.view.describe() if routing.algorithm == "muon" else ""
        return f"{routing.reason}; {view}" if view and view not in routing.reason else routing.reason


def describe_plan(plan: Plan) -> str:
    """Put a plan into words.

    Args:
        plan: The plan.

    Returns:
        A table of routes with reasons, and the costs of a step, as plain text.
    """
    total = sum(parameter.numel for parameter in plan.parameters)
    rows = rows_of(plan.parameters)
    shown = _shortened([row.name for row in rows])
    table = _table([_cells(row, name, total) for row, name in zip(rows, shown, strict=True)])
    lines = [*table, "", *summarise(plan, total)]
    return "\n".join(lines)


def rows_of(parameters: Sequence[ParameterRecord]) -> list[Row]:
    """Put parameters together that differ only in the numbers inside their names.

    Args:
        parameters: Their records.

    Returns:
        Rows of the table, those of Muon first.
    """
    grouped: dict[tuple[object, ...], list[ParameterRecord]] = {}
    for parameter in parameters:
        routing = parameter.routing
        key = (routing.algorithm, starred(parameter.name), parameter.shape, routing.reason, routing.view)
        grouped.setdefault(key, []).append(parameter)
    rows = [Row(str(key[1]), tuple(members)) for key, members in grouped.items()]
    return sorted(rows, key=lambda row: row.parameters[0].routing.algorithm, reverse=True)


def _shortened(names: Sequence[str]) -> list[str]:
    """Leave out the middle of long names, unless two of them would look the same."""
    half = _LONGEST_NAME // 2
    short = [name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}...{name[2 - half :]}" for name in names]
    seen = Counter(dict(zip(names, short, strict=True)).values())
    return [name if seen[shown] > 1 else shown for name, shown in zip(names, short, strict=True)]


def _cells(row: Row, name: str, total: int) -> tuple[str, ...]:
    first = row.parameters[0]
    return (
        first.routing.algorithm,
        str(len(row.parameters)),
        human(row.numel),
        f"{row.numel / total:.1%}" if total else "-",
        row.shape,
        _layout(first),
        name,
        row.reason,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [_HEADER, *rows]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(_HEADER))]
    lines = []
    for cells in table:
        padded = [
            cell.rjust(width) if title in _RIGHT else cell.ljust(width)
            for cell, width, title in zip(cells, widths, _HEADER, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _layout(parameter: ParameterRecord) -> str:
    if parameter.layout is None:
        return f"local {parameter.device.type}"
    mesh = "x".join(map(str, parameter.layout.mesh_shape))
    return f"{cuts_of(parameter)} on mesh {mesh}"


def cuts_of(parameter: ParameterRecord) -> str:
    """Say how a parameter is cut on its mesh.

    Args:
        parameter: Its record.

    Returns:
        Such as `dim 0/8 dim 1/2`; `whole` without a mesh, `replicated` if nothing is cut.
    """
    layout = parameter.layout
    if layout is None:
        return "whole"
    cuts = [f"dim {dim}/{cut.parts}" for dim, several in enumerate(layout.cuts) for cut in several if cut.parts > 1]
    return " ".join(cuts) or "replicated"

"""The table a user pastes into an issue: every parameter's route and reason, and what a step will cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshmuon.errors import some
from meshmuon.kernels.tables import VECTOR
from meshmuon.layout.heads import attention_layers
from meshmuon.layout.names import starred
from meshmuon.layout.records import Matrix, ParameterRecord
from meshmuon.plan.assign import balance
from meshmuon.plan.bucket import Bucket, Plan, bytes_sent
from meshmuon.plan.route import Route
from meshmuon.plan.sent import contributions_sent

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
    lines = [*table, "", *_summary(plan, total)]
    return "\n".join(lines)


def human(number: float, *, unit: str = "") -> str:
    """Write a count the way people read it.

    Args:
        number: The count.
        unit: What is counted, e.g. "B" or "FLOP".

    Returns:
        Such as `84.9 M`.
    """
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or letter == "T":
            digits = f"{number:.0f}" if letter == "" else f"{number:.1f}"
            return f"{digits} {letter}{unit}".rstrip()
        number /= 1000
    raise AssertionError("unreachable")


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


def _summary(plan: Plan, total: int) -> list[str]:
    muon = sum(p.numel for p in plan.parameters if p.routing.algorithm == "muon")
    lines = [
        f"muon: {human(muon)} parameters; adamw: {human(total - muon)} parameters; "
        "every trainable parameter is routed exactly once",
        *_travel(plan),
        *_repeated(plan),
        *_blockwise(plan),
        *_clipped(plan),
    ]
    if plan.buckets:
        flops = sum(plan.computed_here(bucket) * bucket.cost for bucket in plan.buckets)
        matrices = sum(plan.computed_here(bucket) for bucket in plan.buckets)
        widest = max(bucket.bytes for bucket in plan.buckets)
        where = "" if plan.ranks == 1 else " on this rank"
        lines.append(
            f"orthogonalization{where}: {matrices} matrices, {human(flops, unit='FLOP')} a step in {len(plan.buckets)} "
            f"batches; workspace up to {human(widest, unit='B')}"
        )
    lines += [*_recipes(plan.buckets), *_landing(plan), *_invariance(plan)]
    budget = plan.execution.workspace_bytes
    for bucket in plan.buckets:
        if (needs := bucket.bytes) > budget:
            lines.append(
                f"{bucket.matrices[0].name}: needs {human(needs, unit='B')} of workspace alone, "
                f"more than workspace_bytes={budget}"
            )
    return lines


def _landing(plan: Plan) -> list[str]:
    """How many matrices may take their steps inside the launch that computes them. See [Note: landing]."""
    if plan.execution.syncs or not any(bucket.recipe.program for bucket in plan.buckets):
        return []
    inside = sum(matrix.count for b in plan.buckets if b.may_land for matrix in b.matrices if _may_land(matrix))
    total = sum(matrix.count for b in plan.buckets for matrix in b.matrices)
    others = "; the others in a launch of their own" if inside < total else ""
    return [f"updates: {inside} of {total} where they are computed (fp32, rows side by side){others}"]


def _may_land(matrix: Matrix) -> bool:
    """As far as a plan can know: whether rows lie side by side, a table sees (`TensorTable.can_be_landed_on`)."""
    even = matrix.block.shape[1] % VECTOR == 0 and matrix.wide_shape[1] % VECTOR == 0
    return even and matrix.parameter.dtype == torch.float32


def _invariance(plan: Plan) -> list[str]:
    """Whether the bits of a matrix depend on its batch: on a GPU that is a choice."""
    there = [bucket for bucket in plan.buckets if bucket.device.type != "cpu"]
    kept = sum(len(bucket.matrices) for bucket in there if bucket.recipe.invariant)
    total = sum(len(bucket.matrices) for bucket in there)
    if not there:
        return []
    if kept == total:
        return ["bits on the GPU: a matrix has the same in every batch"]
    return [f"bits on the GPU: {kept} of {total} have the same in every batch; all of them with layout_invariant=True"]


def _travel(plan: Plan) -> list[str]:
    """What leaves this rank, team by team."""
    teams: dict[tuple[int, ...], list[Bucket]] = {flat.team: [] for flat in plan.flat if len(flat.team) > 1}
    for bucket in plan.buckets:
        if bucket.route is not Route.LOCAL:
            teams.setdefault(bucket.team, []).append(bucket)
    if not teams:
        return ["nothing travels: every matrix is whole where it is computed"]
    return [_of_team(plan, team, buckets) for team, buckets in teams.items()]


def _of_team(plan: Plan, team: tuple[int, ...], buckets: list[Bucket]) -> str:
    """What this rank sends to one team."""
    exchanges = 2 * (len(buckets) + sum(flat.team == team for flat in plan.flat)) if len(team) > 1 else 0
    sent = sum(bytes_sent(bucket, plan.rank) for bucket in buckets)
    if plan.execution.syncs:
        sent += contributions_sent(plan, team)
    costs = f"{human(sent, unit='B')} sent by this rank a step in {exchanges} all-to-alls"
    if not buckets:
        return f"AdamW's parameters shared by {len(team)} ranks: gradients travel to owners, results back; {costs}"
    loads = [bucket.cost for bucket in buckets for _ in bucket.matrices]
    owners = [owner for bucket in buckets for owner in bucket.owners]
    cut = sum(len(bucket.matrices) for bucket in buckets if bucket.route is Route.SHARDED)
    stay = f" ({cut} stay where they are: only their Gram matrices travel, not to the last bit)" if cut else ""
    return (
        f"{len(owners)} matrices shared by {len(team)} ranks: each travels to one owner and back{stay}, {costs}; "
        f"owner balance {balance(loads, owners, len(team)):.2f} (largest load / mean)"
    )


def _repeated(plan: Plan) -> list[str]:
    """What several ranks compute alike, and why."""
    muon = [p for p in plan.parameters if p.routing.algorithm == "muon"]
    lines = []
    if plan.ranks > 1 and any(p.layout is None for p in muon):
        lines.append(f"plain tensors: repeated on every one of {plan.ranks} ranks; gradients assumed averaged")
    copies = {
        math.prod(p.layout.mesh_shape[axis] for axis in p.layout.replica_axes)
        for p in muon
        if p.layout is not None and p.layout.replica_axes
    }
    shared = any(matrix.share and len(matrix.share.copies) > 1 for b in plan.buckets for matrix in b.matrices)
    reason = "shared where that saves time" if shared else "sharing the work would take longer, or was not asked for"
    lines += [f"replicated mesh axes: {count} replicas; {reason}" for count in sorted(copies)]
    return lines


def _blockwise(plan: Plan) -> list[str]:
    names = [p.name for p in plan.parameters if p.mode == "blockwise" and p.layout is not None]
    if not names:
        return []
    return [
        f"NOT Muon but a different algorithm, mode='blockwise': each rank orthogonalizes its own block of {some(names)}"
    ]


def _clipped(plan: Plan) -> list[str]:
    clip = plan.execution.qk_clip
    if clip is None:
        return []
    layers = attention_layers(plan.parameters, clip, may_lack=True)
    if not layers:
        return ["qk_clip: no attention layer here"]
    heads = sorted({f"{layer.q_heads} q heads on {layer.k_heads} k heads" for layer in layers})
    known = all(layer.team for layer in layers)
    where = "" if known or plan.ranks == 1 else "; logits assumed the same on every rank, like the tensors"
    return [
        f"qk_clip: {len(layers)} layers of {' or '.join(heads)} ({clip.kind}), {clip.head_dim} rows each: logits above "
        f"{clip.threshold:g} that step(qk_logits=) tells of are scaled back to it{where}"
    ]


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


def _recipes(buckets: Sequence[Bucket]) -> list[str]:
    """How each shape is computed, and why by these kernels. A line for shapes that are alike in both."""
    shapes: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.wide_shape):
        alike = shapes.setdefault((bucket.recipe.describe(), bucket.recipe.kernels.reason), [])
        if bucket.wide_shape not in alike:
            alike.append(bucket.wide_shape)
    return [
        f"  {some((f'{short}x{long}' for short, long in alike), limit=8)}: {recipe} ({reason})"
        for (recipe, reason), alike in shapes.items()
    ]

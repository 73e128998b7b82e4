"""What a step will cost, in sentences: the lines below the table of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshmuon.errors import some
from meshmuon.kernels.tables import VECTOR
from meshmuon.layout.heads import attention_layers
from meshmuon.layout.records import Matrix
from meshmuon.plan.assign import balance
from meshmuon.plan.bucket import Bucket, Plan, bytes_sent
from meshmuon.plan.route import Route
from meshmuon.plan.sent import contributions_sent
from meshmuon.plan.words import human


def summarise(plan: Plan, total: int) -> list[str]:
    """Say what a step of a plan does and costs.

    Args:
        plan: The plan.
        total: How many numbers are trained.

    Returns:
        Lines of plain text.
    """
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
        flops = sum(plan.computed_here(bucket) * bucket.flops for bucket in plan.buckets)
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

"""A job that need not exist: parameters on a mesh, and the real plan as each kind of its ranks would make it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from meshmuon.config import Execution, Sharing
from meshmuon.kernels.configs import Architecture
from meshmuon.layout.matrices import sent_to_an_owner
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.records import ParameterRecord, Routing
from meshmuon.layout.shard_layout import ShardLayout, held, length
from meshmuon.plan.bucket import Plan
from meshmuon.plan.build import PolarSettings, build_plan
from meshmuon.plan.calibration import ADAMW_BYTES, STEP_BYTES, Work
from meshmuon.plan.forecast import BucketCost, Stage, can_reduce, gathered, reduced, stages_of
from meshmuon.plan.hardware import Hardware
from meshmuon.plan.outlook import RouteForecast, RouteWord, Spread
from meshmuon.plan.placement import Mesh
from meshmuon.plan.route import Route
from meshmuon.plan.traffic import Pieces

Plans: TypeAlias = "list[tuple[Plan, list[int]]]"


class Job:
    """Parameters on a mesh, as any of its ranks would see them.

    Args:
        mesh: The mesh.
        groups: The optimizer's groups, with (name, tensor) pairs; only shapes and dtypes are read.
        execution: The bounds and choices of the run.
        polar: How polar factors are computed.
        device: What recipes are chosen for.
        architecture: Of a GPU that is elsewhere; None: look at the device.
        routings: Name → how it was routed, where that is known.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: Sequence[Mapping[str, Any]],
        *,
        execution: Execution,
        polar: PolarSettings,
        device: torch.device,
        architecture: Architecture | None,
        routings: Mapping[str, Routing],
    ) -> None:
        self.mesh = mesh
        self._device, self._architecture = device, architecture
        self._routings = routings
        self._execution = execution
        self._polar = polar
        self._ranks = tuple(range(mesh.ranks))
        grid = ShardLayout((), mesh.sizes, self._ranks, ())
        self._places = [grid.coordinates(rank) for rank in self._ranks]
        self._records = [
            self._record(name, tensor, MatrixView.of(group.get("view")), group["algorithm"], (index, position))
            for index, group in enumerate(groups)
            for position, (name, tensor) in enumerate(group["params"])
        ]
        self._pieces = Pieces()
        self._made: list[Plans] = []  # kept: what is known of pieces goes by the identity of teams
        self._muon = [record for record in self._records if record.routing.algorithm == "muon"]

    def _record(
        self, name: str, tensor: Any, view: MatrixView, algorithm: Any, number: tuple[int, int]
    ) -> ParameterRecord:
        shape = tuple(tensor.shape)
        layout = self.mesh.layout(name, shape, view, self._ranks)
        known = self._routings.get(name, Routing(name, algorithm, "its group says so"))
        routing = dataclasses.replace(known, algorithm=algorithm, view=view)
        return ParameterRecord(
            routing,
            *number,
            shape=shape,
            dtype=tensor.dtype,
            device=self._device,
            local_shape=shape,
            layout=layout,
            architecture=self._architecture,
        )

    def records(self, rank: int, *, only_owners: bool = False) -> list[ParameterRecord]:
        """Give the parameters as a rank sees them.

        Args:
            rank: The rank.
            only_owners: Whether whatever is cut must go to an owner.

        Returns:
            Their records.
        """
        here = (dataclasses.replace(record, local_shape=_local_shape(record, rank)) for record in self._records)
        if not only_owners:
            return list(here)
        return [sent_to_an_owner(record, rank=rank) for record in here]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(record.numel for record in self._records)

    @property
    def matrices(self) -> int:
        """How many there are, each counted once."""
        return sum(
            block.count for record in self._muon for block in record.routing.view.blocks(record.name, record.shape)
        )

    @property
    def recipes(self) -> tuple[str, ...]:
        """How polar factors are computed, in words; known once routes are."""
        buckets = (bucket for plans in self._made for plan, _ in plans for bucket in plan.buckets)
        return tuple(sorted({bucket.recipe.describe() for bucket in buckets}))

    @property
    def first_plan(self) -> Plan:
        """The plan that `Muon` makes on rank 0; known once routes are."""
        return self._made[0][0][0]

    def local_bytes(self, algorithm: str) -> int:
        """Count the parameters of the rank that holds most of them: the first, by the rule of torch.chunk."""
        chosen = (record for record in self._records if record.routing.algorithm == algorithm)
        return sum(math.prod(_local_shape(record, 0)) * record.dtype.itemsize for record in chosen)

    def kinds_of_ranks(self) -> list[list[int]]:
        """Put ranks together whose plans differ in ranks only: they hold as many experts of each stack."""
        stacks = {
            (record.shape[dim], layout.cuts[dim])
            for record in self._muon
            if (layout := record.layout) is not None
            for dim in record.routing.view.lead_dims(len(record.shape))
            if layout.cuts[dim]
        }
        ordered = sorted(stacks, key=str)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places):
            counts = (length(held(size, cuts, tuple(place[cut.axis] for cut in cuts))) for size, cuts in ordered)
            found.setdefault(tuple(counts), []).append(rank)
        return list(found.values())

    def plans(self, share_replicas: Sharing, *, only_owners: bool = False) -> Plans:
        """Make the plan of one rank of each kind, each with the ranks it stands for.

        Args:
            share_replicas: Whether replicas share their matrices.
            only_owners: Whether whatever is cut must go to an owner.

        Returns:
            The plans.
        """
        execution = dataclasses.replace(self._execution, share_replicas=share_replicas)
        # Plain DDP names a process group in order to share: there, replicas share whatever it costs.
        asked = share_replicas != "never" and not any(any(_layout(record).cuts) for record in self._muon)
        made = []
        for ranks in self.kinds_of_ranks():
            plan = build_plan(
                self.records(ranks[0], only_owners=only_owners),
                polar={record.group: self._polar for record in self._muon},
                execution=execution,
                split_replicas=asked,
                rank=ranks[0],
                ranks=self.mesh.ranks,
            )
            made.append((plan, ranks))
        self._made.append(made)
        return made

    def routes(self, machine: Hardware) -> list[RouteForecast]:
        """Forecast every route there is.

        Args:
            machine: On what.

        Returns:
            The route that `Muon` takes first, then the others.
        """
        auto = self.plans(self._execution.share_replicas)
        replicas = any(_layout(record).replica_axes for record in self._muon)
        beyond = any(bucket.route not in (Route.LOCAL, Route.OWNED) for plan, _ in auto for bucket in plan.buckets)
        never = self.plans("never", only_owners=True) if replicas or beyond else auto
        alone: RouteWord = "owner" if any(bucket.team for plan, _ in never for bucket in plan.buckets) else "local"
        made: dict[RouteWord, Plans] = {alone: never}
        if replicas:
            made["split"] = self.plans("always", only_owners=True)
        chosen = next((word for word, plans in made.items() if _ways(plans) == _ways(auto)), None)
        if chosen is None:
            chosen, made["mixed"] = "mixed", auto
        found = {word: self._forecast(word, plans, machine) for word, plans in made.items()}
        if any(can_reduce(plan, self._pieces) for plan, _ in never):
            found["gram"] = self._forecast("gram", never, machine, reduced)
        if alone == "owner":
            found["gather"] = self._forecast("gather", never, machine, gathered)
        return [found.pop(chosen), *found.values()]

    def _forecast(
        self,
        word: RouteWord,
        plans: Plans,
        machine: Hardware,
        cost: BucketCost | None = None,
    ) -> RouteForecast:
        flops = [0.0] * self.mesh.ranks
        loads = [0.0] * self.mesh.ranks
        sent = [0.0] * self.mesh.ranks
        in_flight = self._execution.max_in_flight
        kinds = [(stages_of(plan, machine, self._pieces, cost), ranks) for plan, ranks in plans]
        for stages, ranks in kinds:
            for stage in stages:
                for rank, member in self._members(stage, ranks):
                    flops[rank] += stage.flops[member]
                    loads[rank] += stage.loads[member]
                    sent[rank] += stage.sent[member]
        elementwise = Work(bytes=(STEP_BYTES * self.local_bytes("muon") + ADAMW_BYTES * self.local_bytes("adamw")) / 4)
        slowest = max((stages for stages, _ in kinds), key=lambda s: sum(stage.seconds(in_flight) for stage in s))
        return RouteForecast(
            route=word,
            device=sum(stage.seconds(in_flight) for stage in slowest),
            compute=sum(stage.compute for stage in slowest),
            exchange=sum(stage.exchange for stage in slowest),
            elementwise=machine.calibration.seconds(elementwise),
            host=sum(stage.host for stage in slowest),
            exchanges=sum(stage.exchanges for stage in slowest),
            work=sum((stage.work for stage in slowest), elementwise),
            flops=Spread(tuple(flops)),
            loads=Spread(tuple(loads)),
            bytes_sent=Spread(tuple(sent)),
            workspace=max(_workspace(plan) for plan, _ in plans),
        )

    def _members(self, stage: Stage, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """Ranks of a kind, each with the member of a stage's team that stands where it does."""
        if len(stage.team) == 1:
            return [(rank, 0) for rank in ranks]
        first, last = self._places[stage.team[0]], self._places[stage.team[-1]]
        axes = [axis for axis in range(len(first)) if first[axis] != last[axis]]
        found = []
        for rank in ranks:
            place, member = self._places[rank], 0
            for axis in axes:
                member = member * self.mesh.sizes[axis] + place[axis]
            found.append((rank, member))
        return found


def _layout(record: ParameterRecord) -> ShardLayout:
    assert record.layout is not None
    return record.layout


def _local_shape(record: ParameterRecord, rank: int) -> tuple[int, ...]:
    return tuple(map(length, _layout(record).region(rank)))


def _ways(plans: Plans) -> list[tuple[Route, int]]:
    """The route of each matrix, and how many replicas take part."""
    return [
        (bucket.route, 0 if matrix.share is None else len(matrix.share.copies))
        for plan, _ in plans
        for bucket in plan.buckets
        for matrix in bucket.matrices
    ]


def _workspace(plan: Plan) -> int:
    """The most that buckets in flight together take, as the pipeline bounds it."""
    sizes = [bucket.bytes for bucket in plan.buckets]
    window = plan.execution.max_in_flight
    together = max((sum(sizes[i : i + window]) for i in range(len(sizes))), default=0)
    return min(together, max([plan.execution.workspace_bytes, *sizes]))

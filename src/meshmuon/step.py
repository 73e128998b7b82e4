"""One step: each bucket's journey from gradients to parameters, and AdamW for the rest. Start reading at `_update`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshmuon.plan.bucket import Bucket
from meshmuon.plan.route import Route
from meshmuon.polar.orthogonalize import orthogonalize_onto
from meshmuon.preparation import Ready
from meshmuon.runtime import pipeline
from meshmuon.runtime.graphs import Signals, StepGraphs, fixed_settings
from meshmuon.runtime.local_tensors import LocalTensors
from meshmuon.runtime.offload import Load, ResidentState, StreamedState
from meshmuon.runtime.owned_state import OwnedState
from meshmuon.runtime.sharded import sharded_directions
from meshmuon.runtime.spans import span
from meshmuon.runtime.synced import SyncedStep
from meshmuon.update.adamw import AdamWRule, update_adamw_
from meshmuon.update.apply import ApplyRule
from meshmuon.update.fused import BucketUpdates
from meshmuon.update.momentum import MomentumRule
from meshmuon.update.tensors import with_buffers


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is going to happen. Made anew for each.

    Attributes:
        ready: The plan, and what carries it out.
        tensors: What this rank holds.
        param_groups: The optimizer's groups.
        unscale: GradScaler's factor, or None.
        proceed: A device flag, multiplied into every write; None means go.
        offloaded: Whether state lives in host memory.
    """

    ready: Ready
    tensors: LocalTensors
    param_groups: Sequence[Mapping[str, Any]]
    unscale: Tensor | None
    proceed: Tensor | None
    offloaded: bool = False

    def take(self) -> None:
        """Send every bucket on its journey, wave by wave; then update what is not a matrix."""
        plan, run = self.ready.plan, self.ready.plan.execution
        access = StreamedState(self.tensors.loads(plan)) if self.offloaded else ResidentState()
        try:
            for wave in plan.waves:
                journeys = [pipeline.Journey(self._update(b, access), b.bytes_in_flight) for b in wave]
                pipeline.run(journeys, max_in_flight=run.max_in_flight, workspace_bytes=run.workspace_bytes)
            self._update_elementwise(access)
        finally:  # also when a rank was lost in between: memory must not be given away while it is being copied
            access.finish()
            if self.offloaded:
                self.ready.updates.forget_tensors()

    def _update(self, bucket: Bucket, access: ResidentState) -> Iterator[None]:
        """One bucket's journey. Each yield lets another bucket compute while ours is on the wire."""
        exchange, updates = self.ready.exchange, self.ready.updates
        bucket = self.tensors.present(bucket)
        matrices = self.tensors.matrices(bucket, places=exchange.places(bucket))
        if not matrices:
            return
        group = self.param_groups[bucket.group]
        before = MomentumRule.of(group, unscale=self.unscale, proceed=self.proceed)
        after = ApplyRule.of(group, proceed=self.proceed)
        inputs = torch.empty(exchange.buffer_size(bucket), dtype=bucket.recipe.input_dtype, device=bucket.device)
        momentum = Load(bucket.number, bucket.device, [item.buffer for item in matrices])
        with span("momentum", bucket), access.on_device(momentum) as buffers:
            matrices = with_buffers(matrices, buffers)
            squares = updates.momentum(bucket, matrices, inputs, before, after)
        if self.ready.plan.execution.release_grads:
            matrices = self.tensors.release_gradients(matrices)
        if bucket.route is Route.SHARDED:  # only Gram matrices travel
            contributions, rank = self.ready.contributions, self.ready.plan.rank
            found = yield from sharded_directions(bucket, matrices, inputs, contributions, rank=rank)
            with span("apply", bucket):
                updates.apply(bucket, matrices, found, after)
            return
        with span("gather", bucket):
            gathered = exchange.gather(bucket, inputs)  # a local bucket is already there
        if gathered.in_flight:
            yield
        stack = [gathered.wait()]
        del gathered, inputs  # what has arrived is in the stack: memory is bounded by letting go as early as possible
        with span("polar", bucket):
            landing = updates.landing(bucket, after)
            directions = orthogonalize_onto(landing, stack, bucket.recipe, partials=squares)
        if directions is None:  # the parameters have taken their steps where these were computed
            return
        with span("scatter", bucket):
            scattered = exchange.scatter(bucket, directions)  # the same table, inverted
        if scattered.in_flight:
            yield
        with span("apply", bucket):
            updates.apply(bucket, matrices, scattered.wait(), after)

    def _update_elementwise(self, access: ResidentState) -> None:
        """AdamW for everything that is not a hidden matrix."""
        plan = self.ready.plan
        for part in self.tensors.elementwise(plan, in_parts=self.offloaded):
            group = self.param_groups[part.group]
            rule = AdamWRule.of(group, decays=part.decays, unscale=self.unscale, proceed=self.proceed)
            if plan.execution.cuda_graph:
                device = part.tensors[0].param.device
                rule = dataclasses.replace(rule, lr=self.ready.updates.adamw_lr(part.group, device, rule.lr))
            with span("adamw"), access.on_device(part.load) as moments:
                update_adamw_(part.with_moments(moments), rule)

    def take_synced(self, owned: OwnedState, present: Mapping[tuple[int, int], bool]) -> None:
        """The same under `grad_sync`: gradients become averages on their way to the owners.

        Args:
            owned: The state this rank has.
            present: Whether a parameter has a gradient on any rank, by its group and position.
        """
        contributions = self.ready.contributions
        owned.catch_up(contributions.together)
        access = StreamedState(owned.loads()) if self.offloaded else ResidentState()
        step = SyncedStep(
            plan=self.ready.plan,
            param_groups=self.param_groups,
            exchange=self.ready.exchange,
            contributions=contributions,
            owned=owned,
            access=access,
            present=present,
            unscale=self.unscale,
            proceed=self.proceed,
        )
        try:
            step.take()
        finally:
            access.finish()

    def take_by_graph(self, graphs: StepGraphs) -> None:
        """The same through a CUDA graph, which is captured once the same addresses have come back.

        Args:
            graphs: The graphs of this optimizer.
        """
        plan = self.ready.plan

        def launch(updates: BucketUpdates, signals: Signals) -> None:
            ready = dataclasses.replace(self.ready, updates=updates)
            dataclasses.replace(self, ready=ready, proceed=signals.proceed, unscale=signals.unscale).take()

        graphs.run(
            plan,
            (self.tensors.whereabouts(plan), fixed_settings(self.param_groups)),
            signals=Signals(self.proceed, self.unscale),
            eager=self.take,
            prepare=self._prepare,
            launch=launch,
        )

    def _prepare(self, updates: BucketUpdates, *, tables: bool) -> bool:
        """Bring what a graph reads up to date: live numbers, and tables of addresses if it has none yet."""
        plan = self.ready.plan
        updates.refresh(self.param_groups, plan)
        for bucket in map(self.tensors.present, plan.buckets if tables else ()):
            matrices = self.tensors.matrices(bucket, places=self.ready.exchange.places(bucket))
            after = ApplyRule.of(self.param_groups[bucket.group], proceed=self.proceed)
            if matrices and not updates.prepare(bucket, matrices, after):
                return False
        return True

"""Before a step: the plan for the tensors as they are now, and what carries it out. Made anew when they change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshmuon.config import Execution
from meshmuon.errors import message, some, warn_user
from meshmuon.exchange.contributions import Contributions
from meshmuon.exchange.exchange import Exchange
from meshmuon.exchange.groups import Groups, global_rank, world_size
from meshmuon.exchange.health import Health
from meshmuon.exchange.peers import Peers
from meshmuon.groups import group_records, recheck_groups_, replace_parameter_
from meshmuon.layout.homes import Homes
from meshmuon.layout.mesh import mesh_groups
from meshmuon.layout.plain import PlainLayouts
from meshmuon.layout.records import Routing
from meshmuon.plan.bucket import Plan
from meshmuon.plan.build import PolarSettings, build_plan
from meshmuon.plan.describe_groups import exact_values
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.runtime.checksums import checksums, sums_of_state
from meshmuon.runtime.graphs import refuse_ungraphable
from meshmuon.runtime.owned_state import OwnedState
from meshmuon.runtime.qk_clip import HeadClip
from meshmuon.runtime.snapshot import Snapshot
from meshmuon.runtime.watch import GradientWatch
from meshmuon.state import complete_state_, lacks_state
from meshmuon.update.fused import BucketUpdates

Groupings = list[dict[str, Any]]
State = dict[Tensor, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """The plan of a step, and what carries it out.

    Attributes:
        plan: All decisions.
        exchange: Moves the plan's buckets. Process groups are made when they are first needed.
        peers: The ranks to agree with.
        contributions: Averages gradients, where the optimizer does that.
        watch: Looks at gradients.
        updates: Does the element-wise work of the plan's buckets.
        heads: Scales attention heads whose logits are too large.
        owned: The state this rank owns under `grad_sync`; None elsewhere: every rank has the state of what it holds.
    """

    plan: Plan
    exchange: Exchange
    peers: Peers
    contributions: Contributions
    watch: GradientWatch
    updates: BucketUpdates
    heads: HeadClip
    owned: OwnedState | None = None

    @contextmanager
    def whole_state_in(self, state: State) -> Iterator[None]:
        """Put the state that ranks own together for a while. Every rank must ask; nothing to do where each has its own.

        Args:
            state: The optimizer's state; filled, and emptied again.

        Raises:
            BrokenOptimizerError: If a step ended in the middle: the state may be half of one step, half of another's.
        """
        self.peers.refuse_if_broken()
        if self.owned is None:
            yield
            return
        with self.peers.together():
            self.peers.gather_round()
            self.owned.catch_up(self.contributions.together)
            state.update(self.owned.whole(self.contributions.together))
            try:
                yield
            finally:
                leave_empty_(state)


def leave_empty_(state: State) -> None:
    """Drop what a parameter's state holds but keep the entry.

    Of a state without entries torch.distributed.checkpoint thinks that no step was taken, and takes one.

    Args:
        state: The optimizer's state; written.
    """
    for param in state:
        state[param] = {}


class Preparation:
    """Keeps an optimizer ready for the tensors it has.

    Args:
        execution: The bounds and choices of the run.
        routings: How parameters were routed, by name.
        homes: The modules that hold the parameters, as far as they are known.
        layouts: Where plain tensors lie.
        on_host: Whether state lives in host memory.
    """

    def __init__(
        self,
        execution: Execution,
        routings: Mapping[str, Routing],
        homes: Homes,
        layouts: PlainLayouts,
        *,
        on_host: bool = False,
    ) -> None:
        self._execution = execution
        self._routings = routings
        self._homes = homes
        self._layouts = layouts
        self.on_host = on_host
        self._health = Health()
        self._snapshot = Snapshot.of([])
        self._ready: Ready | None = None
        self._state_is_new = False  # loaded or lost since: the plan is made anew, and peers are told

    def ready(self, param_groups: Groupings, state: State) -> Ready:
        """Give what a step needs: what it was, unless tensors were replaced, moved or cast since, or a setting changed.

        Args:
            param_groups: The optimizer's groups; parameters the model has replaced are replaced here too.
            state: Its state; completed for every parameter.

        Returns:
            The plan for the tensors as they are, and what carries it out.
        """
        for old, new, keeps_state in self._homes.follow():
            before = state.pop(old, None)
            if keeps_state and before is not None:  # else momentum starts anew: the old one lies otherwise
                state[new] = before
                if self._ready is not None and self._ready.owned is not None:
                    self._ready.owned.replace_parameter(old, new)
            replace_parameter_(param_groups, old, new)
        self._tell_of_thawed(param_groups)
        self._tell_of_left(param_groups)
        self._notice_lost_state(param_groups, state)
        if self._ready is None or self._state_is_new or not self._snapshot.holds_for(param_groups):
            # Together, once nothing can fail any more.
            self._ready, self._snapshot = self._made_anew(param_groups, state), Snapshot.of(param_groups)
            self._state_is_new = False
        elif not self._snapshot.is_as_checked(param_groups):
            # No new plan: all ranks would have to make one, and on a GPU those that edited nothing would not know.
            recheck_groups_(param_groups, orthogonalizer=self._execution.orthogonalizer)
            self._snapshot = Snapshot.of(param_groups)
        return self._ready

    def _notice_lost_state(self, param_groups: Groupings, state: State) -> None:
        """See to parameters whose state somebody has taken away: it begins anew."""
        if self._ready is None:
            return
        if self._ready.owned is None:
            # Peers are told, because replicas must have lost theirs too.
            self._state_is_new = self._state_is_new or lacks_state(state, param_groups)
        elif gone := [param for group in param_groups for param in group["params"] if param not in state]:
            self._ready.owned.forget(gone)
            state.update({param: {} for param in gone})

    def _made_anew(self, param_groups: Groupings, state: State) -> Ready:
        """A plan, what carries it out, and state for every parameter."""
        recheck_groups_(param_groups, orthogonalizer=self._execution.orthogonalizer)
        plan = self._plan(param_groups)
        if self._execution.cuda_graph:
            refuse_ungraphable(plan)
        ready = self._connected(plan, param_groups, state)
        if ready.owned is None:
            complete_state_(state, param_groups, on_host=self.on_host)
        else:
            if self._state_is_new:
                ready.owned.loaded = sums_of_state(state)
            ready.owned.take(state)  # what was loaded, if anything; kept where it is owned, and nowhere else
            state.clear()
            state.update({param: {} for group in param_groups for param in group["params"]})
        return ready

    def _tell_of_thawed(self, param_groups: Groupings) -> None:
        """Warn of parameters that were frozen when they were routed, and that this optimizer does not train."""
        if thawed := self._homes.thawed():
            ours = {id(param) for group in param_groups for param in group["params"]}
            lost = [name for name, tensor in thawed.items() if id(tensor) not in ours]
            found = "a gradient, but frozen when the optimizer was made: this optimizer does not train it"
            add = 'opt.add_param_group({"params": [(name, parameter)], "algorithm": "muon" or "adamw"})'
            if lost:
                warn_user(message(f"parameter {some(map(repr, lost), limit=3)}", found=found, do=f"Write {add}"))

    def _tell_of_left(self, param_groups: Groupings) -> None:
        """Warn of parameters that are no part of the model any more: what took their place is not trained."""
        if left := self._homes.left(param for group in param_groups for param in group["params"]):
            found = "no longer in the model: its layer was replaced or resized, and what is there now is not trained"
            do = "Make the optimizer when the model is complete, or add what is new with opt.add_param_group"
            warn_user(message(f"parameter {some(map(repr, left), limit=3)}", found=found, do=do))

    def move_state(self, param_groups: Groupings, state: State, *, on_host: bool) -> None:
        """Bring all state to host memory or back; done when this returns.

        Args:
            param_groups: The optimizer's groups.
            state: Its state; written.
            on_host: Where to.
        """
        ready = self.ready(param_groups, state)
        if ready.owned is None:
            complete_state_(state, param_groups, on_host=on_host)
        else:
            ready.owned.move(on_host=on_host)
        self.on_host = on_host
        ready.updates.forget_tensors()

    def state_was_loaded(self) -> None:
        """Begin afresh: whatever a lost rank left half done has been replaced."""
        if self._health.broken is not None:
            self._health.broken = None
            self._ready = None  # nobody may be there to be told of a new plan
        self._state_is_new = True

    def _plan(self, param_groups: Groupings) -> Plan:
        polar = {
            index: PolarSettings(resolve_schedule(group["ns_coefficients"], group["ns_steps"]), group["eps"])
            for index, group in enumerate(param_groups)
            if group["algorithm"] == "muon"
        }
        records = group_records(param_groups, self._routings, self._layouts)
        self._layouts.check_all_found(record.name for record in records)
        return build_plan(
            records,
            polar=polar,
            execution=self._execution,
            split_replicas=self._layouts.splits_replicas,
            rank=global_rank(),
            ranks=world_size(),
        )

    def _connected(self, plan: Plan, param_groups: Groupings, state: State) -> Ready:
        before = self._ready
        groups = Groups()
        groups.know(self._layouts.groups())
        for group in param_groups:
            for param in group["params"]:
                groups.know(mesh_groups(param))

        owned_before = None if before is None or self._state_is_new else before.owned
        syncs = self._execution.syncs
        owned = OwnedState(plan, param_groups, before=owned_before, on_host=self.on_host) if syncs else None
        peers = Peers(
            plan,
            groups,
            settings=lambda: [exact_values(group) for group in param_groups],
            health=self._health,
            checksums=lambda: checksums(param_groups, sums_of_state(state) if owned is None else owned.loaded, plan),
            before=None if before is None else before.peers,
        )
        return Ready(
            plan=plan,
            exchange=Exchange(groups, rank=plan.rank),
            peers=peers,
            contributions=Contributions(groups, in_rank_order=self._execution.grad_sync != "reduce_scatter"),
            watch=GradientWatch(plan, param_groups),
            updates=BucketUpdates(),
            heads=HeadClip(plan, peers.largest),
            owned=owned,
        )

"""The launches of a whole step as one CUDA graph: the host does almost nothing any more.

A graph repeats launches with the addresses and numbers they had. Addresses are part of the key it is kept under; lr,
weight decay and momentum are read from device memory that is rewritten before each replay; the decision whether the
step happens, and GradScaler's factor, are copied to where the graph reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshmuon.errors import message, warn_user
from meshmuon.plan.bucket import Plan
from meshmuon.plan.route import Route
from meshmuon.update.fused import BucketUpdates

_MOST_GRAPHS = 4  # each keeps its workspace; gradients that are allocated anew take turns between few addresses
_SEEN_BEFORE = 2  # addresses that come once may never come again
_TRIED_AGAIN = 1000  # steps after which something that no graph could hold is tried again
_MOST_SEEN = 64  # and need not be remembered for ever


class Prepare(Protocol):
    """Brings the updates of a graph up to date."""

    def __call__(self, updates: BucketUpdates, *, tables: bool) -> bool:
        """Rewrite live numbers, and make tables if asked to; tell whether a graph can hold the step."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a step is told by the device.

    Attributes:
        proceed: Whether it happens; None means go.
        unscale: What gradients are multiplied with when read; None: nothing.
    """

    proceed: Tensor | None
    unscale: Tensor | None

    def kept(self) -> Signals:
        """Give copies that a graph may read at each replay."""
        return Signals(*(None if each is None else each.clone() for each in (self.proceed, self.unscale)))

    def tell(self, other: Signals) -> None:
        """Write these values where a graph reads them; it has the same ones."""
        for value, place in ((self.proceed, other.proceed), (self.unscale, other.unscale)):
            if value is not None and place is not None:
                place.copy_(value)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Which of them there are."""
        return (self.proceed is not None, self.unscale is not None)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    updates: BucketUpdates
    signals: Signals


class StepGraphs:
    """Graphs of the steps of one optimizer, by what they depend on."""

    def __init__(self) -> None:
        self._captured: dict[Hashable, _Captured] = {}
        self._seen: Counter[Hashable] = Counter()
        self._plan: Plan | None = None

    def run(
        self,
        plan: Plan,
        key: Hashable,
        *,
        signals: Signals,
        eager: Callable[[], None],
        prepare: Prepare,
        launch: Callable[[BucketUpdates, Signals], None],
    ) -> None:
        """Take a step: by a graph that was captured for this key, or eagerly until a key has come back.

        Args:
            plan: What is launched; the graphs of an earlier one are let go.
            key: Everything else the launches depend on, besides live numbers.
            signals: What the device tells this step.
            eager: Takes the step without a graph.
            prepare: Brings live numbers up to date, and tables if asked to, outside of any graph.
            launch: Takes the step with prepared updates; captured.
        """
        if plan is not self._plan:
            self._plan = plan
            self._captured.clear()
            self._seen.clear()
        key = (key, signals.kind)
        if key not in self._captured and not (self._is_due(key) and self._captures(key, signals, prepare, launch)):
            eager()
            return
        captured = self._captured[key]
        prepare(captured.updates, tables=False)
        signals.tell(captured.signals)
        captured.graph.replay()

    def _is_due(self, key: Hashable) -> bool:
        """Whether a key has come often enough, and there is room for one more graph."""
        if len(self._captured) >= _MOST_GRAPHS:
            return False
        if key not in self._seen and len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] > _SEEN_BEFORE

    def _captures(
        self, key: Hashable, signals: Signals, prepare: Prepare, launch: Callable[[BucketUpdates, Signals], None]
    ) -> bool:
        """Capture the graph of a key, if one can hold its step."""
        updates, kept = BucketUpdates(), signals.kept()
        if not prepare(updates, tables=True):
            self._seen[key] = -_TRIED_AGAIN
            return False
        assert self._plan is not None
        try:
            graph = _recorded(lambda: launch(updates, kept), _devices(self._plan).pop())
        except torch.OutOfMemoryError:  # a graph needs memory of its own
            do = f"{_TRIED_AGAIN} steps run without one, then it is tried again; a smaller workspace_bytes would help"
            warn_user(message("cuda_graph", found="not enough memory to capture a step", do=do))
            self._seen[key] = -_TRIED_AGAIN
            return False
        self._captured[key] = _Captured(graph, updates, kept)
        return True


def _recorded(launch: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are watched: by default what another one asks of CUDA, such as memory for a data
        # loader to pin, would break the capture, or that thread.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
    return graph


def _devices(plan: Plan) -> set[torch.device]:
    return {bucket.device for bucket in plan.buckets} | {record.device for record in plan.elementwise}


# Read from device memory at each replay; all other settings are baked into the launches.
# AdamW has no momentum, but schedulers that cycle it write it into every group.
_LIVE = {"muon": ("lr", "momentum", "weight_decay"), "adamw": ("lr", "momentum")}
_NO_SETTINGS = ("params", "param_names")


def fixed_settings(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Put into words what a graph depends on.

    Args:
        param_groups: The optimizer's groups.

    Returns:
        Every hyper-parameter that is not live.
    """
    words = []
    for group in param_groups:
        live = _LIVE[group["algorithm"]]
        lr = group["lr"]  # one that is a tensor on the device is read where it lies
        words.append(f"{bool(group['weight_decay'])} {lr.data_ptr() if isinstance(lr, Tensor) else ''}")
        words += [f"{key}={value!r}" for key, value in group.items() if key not in live and key not in _NO_SETTINGS]
    return " ".join(words)


def refuse_ungraphable(plan: Plan) -> None:
    """Refuse a plan whose step no graph can hold.

    Args:
        plan: The plan.

    Raises:
        ValueError: Says why.
    """
    if len(_devices(plan)) > 1:
        found = f"parameters on {', '.join(sorted(map(str, _devices(plan))))}"
        raise ValueError(message("cuda_graph", found=found, do="Leave it out: a graph holds the work of one GPU"))
    odd = next((b for b in plan.buckets if b.route is not Route.LOCAL or not b.recipe.fused), None)
    if odd is not None:
        why = (
            "travels between ranks"
            if odd.route is not Route.LOCAL
            else f"takes torch's path ({odd.recipe.kernels.reason})"
        )
        found = f"{odd.matrices[0].name!r} {why}"
        raise ValueError(message("cuda_graph", found=found, do="Leave it out: only fused local work can be captured"))

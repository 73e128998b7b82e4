"""The launches of a whole step as one CUDA graph: the host does almost nothing any more.

A graph repeats launches with the addresses and numbers they had. Addresses are part of the key it is kept under; lr,
weight decay and momentum are read from device memory that is rewritten before each replay; the decision whether the
step happens is copied to where the graph reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshmuon.errors import message
from meshmuon.plan.bucket import Plan
from meshmuon.plan.route import Route
from meshmuon.update.fused import BucketUpdates

_MOST_GRAPHS = 4  # each keeps its workspace; gradients that are allocated anew take turns between few addresses
_SEEN_BEFORE = 2  # addresses that come once may never come again


class Prepare(Protocol):
    """Brings the updates of a graph up to date."""

    def __call__(self, updates: BucketUpdates, *, tables: bool) -> None:
        """Rewrite live numbers, and make tables if asked to."""


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    updates: BucketUpdates
    flag: Tensor | None


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
        flag: Tensor | None,
        eager: Callable[[Tensor | None], None],
        prepare: Prepare,
        launch: Callable[[BucketUpdates, Tensor | None], None],
    ) -> None:
        """Take a step: by a graph that was captured for this key, or eagerly until a key has come back.

        Args:
            plan: What is launched; the graphs of an earlier one are let go.
            key: Everything else the launches depend on, besides live numbers.
            flag: The device flag of this step.
            eager: Takes the step without a graph.
            prepare: Brings live numbers up to date, and tables if asked to, outside of any graph.
            launch: Takes the step with prepared updates; captured.
        """
        if plan is not self._plan:
            self._plan = plan
            self._captured.clear()
            self._seen.clear()
        captured = self._captured.get(key)
        if captured is None:
            self._seen[key] += 1
            if self._seen[key] <= _SEEN_BEFORE or len(self._captured) >= _MOST_GRAPHS:
                eager(flag)
                return
            captured = self._captured[key] = self._capture(flag, prepare, launch)
        else:
            prepare(captured.updates, tables=False)
        if captured.flag is not None and flag is not None:
            captured.flag.copy_(flag)
        captured.graph.replay()

    def _capture(
        self,
        flag: Tensor | None,
        prepare: Prepare,
        launch: Callable[[BucketUpdates, Tensor | None], None],
    ) -> _Captured:
        updates = BucketUpdates()
        static = None if flag is None else flag.clone()
        prepare(updates, tables=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(updates, static)
        return _Captured(graph, updates, static)


# Read from device memory at each replay; all other settings are baked into the launches.
_LIVE = {"muon": ("lr", "momentum", "weight_decay"), "adamw": ("lr",)}
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
    odd = next((b for b in plan.buckets if b.route is not Route.LOCAL or not b.recipe.fused), None)
    if odd is not None:
        why = (
            "travels between ranks"
            if odd.route is not Route.LOCAL
            else f"takes torch's path ({odd.recipe.kernels.reason})"
        )
        found = f"{odd.matrices[0].name!r} {why}"
        raise ValueError(message("cuda_graph", found=found, do="Leave it out: only fused local work can be captured"))

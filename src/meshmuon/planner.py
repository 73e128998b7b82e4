"""What a run of any size will cost: the plan that `Muon` would make, without processes or tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshmuon.config import Execution
from meshmuon.errors import message
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.names import normalise_names
from meshmuon.plan.build import PolarSettings
from meshmuon.plan.hardware import Hardware, known_hardware
from meshmuon.plan.job import Job
from meshmuon.plan.models import known_model
from meshmuon.plan.outlook import Forecast
from meshmuon.plan.placement import Mesh, Rule
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.routing import Overrides, route_params

_ELSEWHERE = torch.device("meta")  # not a CPU; what kind of GPU it is, the hardware says


def plan_for(
    model: nn.Module | Mapping[str, Any] | str,
    mesh: Mapping[str, int],
    placements: Mapping[str, Rule],
    hardware: str | Hardware = "h200",
    *,
    network: str = "infiniband",
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    ns_coefficients: Any = "polar_express",
    ns_steps: int = 5,
    dtype: torch.dtype = torch.float32,
    overrides: Overrides = None,
    expert_keys: Sequence[str] = ("experts",),
    device: torch.device | None = None,
) -> Forecast:
    """Predict what an optimizer step costs on a job of any size. Nothing is started, sent or allocated.

    The plan is the real one, made for one rank of each kind; bytes and operations are counted from it. Times are
    predictions of a simple model, see docs/planning.md.

    Args:
        model: A model (on the meta device if you like), name → shape or (shape, view), or the name of a known model:
            "gpt2", "llama-3-8b", "llama-3-70b", "qwen2-0.5b", "mixtral" or "kimi-k2".
        mesh: Axis → size, the outermost first, e.g. {"dp": 64, "tp": 8}.
        placements: Axis → what it does to each parameter: "shard0", "shard1", ... (FSDP), "replicate" (DDP, HSDP),
            "tensor" (Megatron's column and row rules, by name), "experts" (stacks of experts along their first dim), or
            a dict of name patterns → one of these, the first match counts.
        hardware: "h100", "h200", "b200", or a description.
        network: "infiniband" or "ethernet", between nodes.
        execution: The bounds and choices of the run.
        ns_coefficients: As in `Muon`.
        ns_steps: As in `Muon`.
        dtype: Of parameters that are given as shapes.
        overrides: As in `Muon`.
        expert_keys: As in `Muon`.
        device: What recipes are chosen for; None: the hardware named, whatever the machine that plans has.

    Returns:
        The forecast; print it.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a name is not known, or the mesh, the placements and the parameters do not fit each other.
    """
    machine = known_hardware(hardware, network)
    polar = PolarSettings(resolve_schedule(ns_coefficients, ns_steps), 1e-7)
    routed = route_params(_parameters(model, dtype), expert_keys=expert_keys, overrides=_views(model, overrides))
    job = Job(
        Mesh.of(mesh, placements),
        routed.groups,
        execution=execution,
        polar=polar,
        device=_ELSEWHERE if device is None else device,
        architecture=machine.architecture if device is None else None,
        routings=routed.routings,
    )
    routes = job.routes(machine)
    muon, adamw = job.local_bytes("muon"), job.local_bytes("adamw")
    return Forecast(
        model=model if isinstance(model, str) else type(model).__name__,
        layout=", ".join(f"{axis} {size}: {_in_words(placements[axis])}" for axis, size in mesh.items()),
        ranks=job.mesh.ranks,
        hardware=machine,
        parameters=job.parameters,
        matrices=job.matrices,
        parameter_bytes=muon + adamw,
        state_bytes=muon + 2 * adamw,
        recipes=job.recipes,
        chosen=routes[0].route,
        routes=tuple(routes),
        plan=job.first_plan,
    )


def _in_words(rule: Rule) -> str:
    return rule if isinstance(rule, str) else " / ".join(f"{pattern} {word}" for pattern, word in rule.items())


def _parameters(model: Any, dtype: torch.dtype) -> Any:
    if isinstance(model, nn.Module):
        return model
    shapes = known_model(model) if isinstance(model, str) else model
    if not isinstance(shapes, Mapping) or not shapes:
        do = "Pass a model, a dict of name → shape, or the name of a known model"
        raise TypeError(message("model", found=f"a {type(model).__name__}", do=do))
    found = []
    for name, value in shapes.items():
        shape = value[0] if len(value) == 2 and not isinstance(value[0], int) else value
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise TypeError(message(f"model[{name!r}]", found=repr(value), do="Give a shape, or (shape, view)"))
        found.append((name, nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))))
    return found


def _views(model: Any, overrides: Overrides) -> Overrides:
    """The user's overrides, and the views that stand beside shapes."""
    if not isinstance(model, Mapping):
        return overrides
    views = {
        name: MatrixView.of(value[1])
        for name, value in zip(normalise_names(model), model.values(), strict=True)
        if len(value) == 2 and not isinstance(value[0], int)
    }
    if not views:
        return overrides
    if overrides is not None:
        found = "given together with views beside shapes"
        raise ValueError(message("overrides", found=found, do="Say it in one of the two places"))
    return lambda name, tensor: views.get(name)

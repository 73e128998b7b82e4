"""Bucket, Plan and build_plan: what is computed together, decided once from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshmuon.config import Execution
from meshmuon.errors import message
from meshmuon.layout.records import Matrix, ParameterRecord, matrices_of
from meshmuon.plan.route import Route
from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.orthogonalize import Recipe, choose_recipe


@dataclass(frozen=True, slots=True)
class PolarSettings:
    """What a group says about the orthogonalization of its matrices."""

    schedule: Schedule
    eps: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices of one group, shape, dtype and device, which are orthogonalized in one batch."""

    number: int
    group: int
    matrices: tuple[Matrix, ...]
    wide_shape: tuple[int, int]
    device: torch.device
    recipe: Recipe
    route: Route = Route.LOCAL

    @property
    def count(self) -> int:
        """How many matrices it stacks."""
        return sum(matrix.count for matrix in self.matrices)

    @property
    def flops(self) -> float:
        """Operations of its orthogonalization."""
        return self.count * self.recipe.flops(*self.wide_shape)

    @property
    def workspace_bytes(self) -> int:
        """Memory its orthogonalization takes at most."""
        return self.count * self.recipe.workspace_bytes(*self.wide_shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of an optimizer: which parameter takes which algorithm, and what is computed together."""

    parameters: tuple[ParameterRecord, ...]
    buckets: tuple[Bucket, ...]
    elementwise: tuple[ParameterRecord, ...]
    execution: Execution
    ranks: int = 1

    def __str__(self) -> str:
        from meshmuon.plan.describe import describe_plan

        return describe_plan(self)

    def describe(self) -> str:
        """Give the table a user can paste into an issue."""
        return str(self)


def build_plan(
    parameters: Sequence[ParameterRecord],
    *,
    polar: Mapping[int, PolarSettings],
    execution: Execution,
    ranks: int = 1,
) -> Plan:
    """Decide what is computed together.

    Args:
        parameters: Every parameter, in the order of the groups.
        polar: For each Muon group, its coefficients and eps.
        execution: The bounds and choices of the run.
        ranks: Number of processes that hold the same plain tensors.

    Returns:
        The plan: pure data, the same for the same arguments.

    Raises:
        ValueError: If a view does not fit its parameter, or nothing takes Muon.
    """
    muon = [parameter for parameter in parameters if parameter.routing.algorithm == "muon"]
    if not muon and not execution.allow_no_muon:
        found = f"none of {len(parameters)} parameters takes Muon"
        do = "Look at the reasons with allow_no_muon=True and print(opt), or change them with overrides="
        raise ValueError(message("params", found=found, do=do))
    elementwise = tuple(parameter for parameter in parameters if parameter.routing.algorithm == "adamw")
    alike: dict[tuple[object, ...], list[Matrix]] = {}
    for parameter in muon:
        for matrix in matrices_of(parameter):
            key = (parameter.group, matrix.wide_shape, parameter.dtype, parameter.device)
            alike.setdefault(key, []).append(matrix)
    buckets: list[Bucket] = []
    for matrices in alike.values():
        buckets.extend(_fill_buckets(matrices, len(buckets), polar=polar, execution=execution))
    return Plan(tuple(parameters), tuple(buckets), elementwise, execution, ranks)


def _fill_buckets(
    matrices: Sequence[Matrix], first_number: int, *, polar: Mapping[int, PolarSettings], execution: Execution
) -> list[Bucket]:
    """Cut matrices that are alike into buckets that fit the workspace; a larger single one stands alone."""
    parameter = matrices[0].parameter
    settings = polar[parameter.group]
    m, n = matrices[0].wide_shape
    recipe = choose_recipe(
        m,
        n,
        schedule=settings.schedule,
        orthogonalizer=execution.orthogonalizer,
        device=parameter.device,
        dtype=parameter.dtype,
        eps=settings.eps,
    )
    budget = execution.workspace_bytes // execution.max_in_flight
    limit = max(1, budget // recipe.workspace_bytes(m, n))
    if execution.layout_invariant and parameter.device.type != "cpu":
        limit = 1  # GPU libraries choose kernels by batch size: the same bits in every batch means no batch
    filled: list[list[Matrix]] = []
    room = 0
    for matrix in matrices:
        if matrix.count > room or not filled:
            filled.append([])
            room = limit
        filled[-1].append(matrix)
        room -= matrix.count
    return [
        Bucket(first_number + i, parameter.group, tuple(content), (m, n), parameter.device, recipe)
        for i, content in enumerate(filled)
    ]

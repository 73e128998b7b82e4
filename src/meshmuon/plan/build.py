"""build_plan: what is computed together and by whom, decided once from records alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshmuon.config import Execution
from meshmuon.errors import message, some
from meshmuon.layout.matrices import copies_of, matrices_of
from meshmuon.layout.records import Matrix, ParameterRecord, Share
from meshmuon.plan.assign import assign_owners
from meshmuon.plan.bucket import Bucket, Plan, workspace_bytes
from meshmuon.plan.cost import sharing_pays
from meshmuon.plan.flat import flat_buckets
from meshmuon.plan.gram_route import choose_route
from meshmuon.plan.route import Route
from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.recipe import Recipe, choose_recipe


@dataclass(frozen=True, slots=True)
class PolarSettings:
    """What a group says about the orthogonalization of its matrices."""

    schedule: Schedule
    eps: float


def build_plan(
    parameters: Sequence[ParameterRecord],
    *,
    polar: Mapping[int, PolarSettings],
    execution: Execution,
    split_replicas: bool = False,
    rank: int = 0,
    ranks: int = 1,
) -> Plan:
    """Decide what is computed together, and by whom.

    Args:
        parameters: Every parameter, in the order of the groups.
        polar: For each Muon group, its coefficients and eps.
        execution: The bounds and choices of the run.
        split_replicas: Whether ranks were said to hold the same whole matrices in order to share them.
        rank: This process's global rank.
        ranks: Number of processes in the job.

    Returns:
        The plan: pure data, the same for the same arguments.

    Raises:
        ValueError: If a view does not fit its parameter, or nothing takes Muon.
    """
    muon = [parameter for parameter in parameters if parameter.routing.algorithm == "muon"]
    if not muon and not execution.allow_no_muon:
        reasons = Counter(parameter.routing.reason for parameter in parameters)
        why = some(f"{count} x {reason}" for reason, count in reasons.most_common())
        found = f"none of {len(parameters)} parameters takes Muon ({why})"
        do = "Change that with overrides=, or train with AdamW alone: allow_no_muon=True"
        raise ValueError(message("params", found=found, do=do))
    elementwise = tuple(parameter for parameter in parameters if parameter.routing.algorithm == "adamw")
    every = [_Found.of(parameter, rank=rank) for parameter in muon]
    shares = _worth_sharing(every, polar=polar, execution=execution, asked=split_replicas)
    matrices = [matrix for one, share in zip(every, shares, strict=True) for matrix in one.shared(share, rank=rank)]
    kinds = _Kinds()
    recipes = {kinds.of(one): _recipe(one, polar=polar, execution=execution) for one, *_ in _alike(matrices, kinds)}
    shared = any(matrix.share is not None for matrix in matrices)
    local = [
        bucket
        for alike in _alike((m for m in matrices if m.share is None), kinds)
        for bucket in _local_buckets(alike, recipes[kinds.of(alike[0])], execution, beside_others=shared)
    ]
    owned = [_owned_buckets(team, recipes, execution, kinds) for team in _teams(matrices, kinds)]
    budget = execution.workspace_bytes // execution.max_in_flight
    flat = flat_buckets(elementwise, most_bytes=budget) if execution.syncs else ()
    return Plan(tuple(parameters), _waves(owned, local, execution), elementwise, execution, flat, rank, ranks)


def _waves(
    owned: Sequence[Sequence[Bucket]], local: Sequence[Bucket], execution: Execution
) -> tuple[tuple[Bucket, ...], ...]:
    """One wave for each team, in the order of the teams' ranks.

    [Note: waves] The members of a team must begin and end its collectives in one order. A rank that interleaved buckets
    of two teams would do so otherwise than a member of only one of them. Teams in ascending order cannot wait for each
    other in a circle. Local buckets wait for nothing, and where they stand does not change the order of the others:
    they fill the wait for the first gathers, of which as many are begun before them as leave them workspace.
    """
    first, *others = owned or [[]]
    largest = max((bucket.bytes for bucket in local), default=0)
    begun = execution.max_in_flight - 1
    while begun and sum(bucket.bytes for bucket in first[:begun]) + largest > execution.workspace_bytes:
        begun -= 1
    waves = [[*first[:begun], *local, *first[begun:]], *others]
    numbers = itertools.count()
    return tuple(tuple(dataclasses.replace(bucket, number=next(numbers)) for bucket in wave) for wave in waves)


@dataclass(frozen=True, slots=True)
class _Found:
    """The matrices of a parameter as this rank sees them, and the replicas of what it holds."""

    parameter: ParameterRecord
    matrices: tuple[Matrix, ...]
    copies: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameter: ParameterRecord, *, rank: int) -> _Found:
        return cls(parameter, matrices_of(parameter, rank=rank), copies_of(parameter, rank=rank))

    def shared(self, share: bool, *, rank: int) -> Sequence[Matrix]:
        """The matrices, shared by all replicas or not."""
        if not share:
            return self.matrices
        split = matrices_of(self.parameter, rank=rank, split_replicas=True)
        return [
            dataclasses.replace(m, share=dataclasses.replace(m.share, copies=self.copies)) for m in split if m.share
        ]


def _worth_sharing(
    found: Sequence[_Found], *, polar: Mapping[int, PolarSettings], execution: Execution, asked: bool
) -> list[bool]:
    """Whether replicas share the matrices of each parameter: where that was asked for, or pays."""
    # Counted among parameters that the same ranks hold in the same way, so that all of them count the same.
    counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for one in found:
        counts[one.copies] += sum(matrix.count for matrix in one.matrices)

    def pays(one: _Found, matrix: Matrix) -> bool:
        recipe = _recipe(matrix, polar=polar, execution=execution)
        shared = dataclasses.replace(matrix, share=Share((0, matrix.shape[0]), (0, matrix.shape[1]), one.copies))
        if workspace_bytes(shared, recipe) > execution.workspace_bytes:
            return False  # an owner sends the result to every replica at once
        each = counts[one.copies] / len(one.copies[0])
        return sharing_pays(recipe, matrix.wide_shape, copies=len(one.copies), each=each, device=one.parameter.device)

    def decide(one: _Found) -> bool:
        if execution.syncs:
            return True  # even one process takes this way
        if len(one.copies) == 1 or execution.share_replicas == "never" or one.parameter.mode == "blockwise":
            return False
        return execution.share_replicas == "always" or asked or all(pays(one, matrix) for matrix in one.matrices)

    return [decide(one) for one in found]


class _Kinds:
    """Numbers for what matrices of one bucket have in common.

    To hash a team of thousands takes longer than everything else about a matrix: done once for each parameter. The
    matrices must outlive this, since parameters are known by identity.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._known: dict[tuple[int, tuple[int, int]], int] = {}
        self._teams: dict[int, tuple[int, ...]] = {}
        self._same: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, matrix: Matrix) -> int:
        """Give the number of a matrix's kind."""
        key = (id(matrix.parameter), matrix.wide_shape)
        if key not in self._known:
            p = matrix.parameter
            kind = (p.group, matrix.wide_shape, p.dtype, p.device, p.route, self.team(matrix))
            self._known[key] = self._numbers.setdefault(kind, len(self._numbers))
        return self._known[key]

    def team(self, matrix: Matrix) -> tuple[int, ...]:
        """Give the team of a matrix, the same object for the same ranks; empty if it is not shared."""
        if matrix.share is None:
            return ()
        key = id(matrix.parameter)
        if key not in self._teams:
            team = matrix.share.team
            self._teams[key] = self._same.setdefault(team, team)
        return self._teams[key]


def _alike(matrices: Iterable[Matrix], kinds: _Kinds) -> list[list[Matrix]]:
    found: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        found.setdefault(kinds.of(matrix), []).append(matrix)
    return list(found.values())


def _teams(matrices: Iterable[Matrix], kinds: _Kinds) -> list[list[Matrix]]:
    """Shared matrices by team, in the order of the teams' ranks: the same order on every rank."""
    found: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        if matrix.share is not None:
            found.setdefault(id(kinds.team(matrix)), []).append(matrix)
    return sorted(found.values(), key=lambda team: kinds.team(team[0]))


def _recipe(matrix: Matrix, *, polar: Mapping[int, PolarSettings], execution: Execution) -> Recipe:
    parameter = matrix.parameter
    settings = polar[parameter.group]
    return choose_recipe(
        *matrix.wide_shape,
        schedule=settings.schedule,
        orthogonalizer=execution.orthogonalizer,
        device=parameter.device,
        dtype=parameter.dtype,
        eps=settings.eps,
        invariant=execution.layout_invariant,
        architecture=parameter.architecture,
    )


def _at_once(matrix: Matrix, recipe: Recipe, execution: Execution, *, in_flight: int) -> int:
    """How many matrices one rank may orthogonalize together within the workspace; a larger single one stands alone."""
    if recipe.invariant and not recipe.fused:
        return 1  # torch's sums and products on a GPU depend on the batch: the same bits in every batch means no batch
    budget = execution.workspace_bytes // in_flight
    return max(1, budget // workspace_bytes(matrix, recipe))


def _local_buckets(
    matrices: Sequence[Matrix], recipe: Recipe, execution: Execution, *, beside_others: bool
) -> list[Bucket]:
    """A local bucket never waits: without others under way it may take the whole workspace.

    Buckets are of nearly equal size: a small last one would leave most of a GPU idle. On a CPU, of even size: then its
    threads, which are mostly an even number too, have the same to do.
    """
    first = matrices[0]
    limit = _at_once(first, recipe, execution, in_flight=execution.max_in_flight if beside_others else 1)
    limit = min(limit, recipe.batch(*first.wide_shape, first.parameter.device) or limit)
    total = max(1, sum(matrix.count for matrix in matrices))
    equal = math.ceil(total / math.ceil(total / limit))
    if first.parameter.device.type == "cpu":
        equal = min(limit, equal + equal % 2)
    filled = min((_filled(matrices, most) for most in sorted({equal, limit})), key=len)  # stacks may not fit equal ones
    parameter = first.parameter
    return [
        Bucket(0, parameter.group, tuple(content), first.wide_shape, parameter.device, recipe) for content in filled
    ]


def _filled(matrices: Sequence[Matrix], most: int) -> list[list[Matrix]]:
    """Put matrices together, in their order, at most so many; larger stacks are cut."""
    filled: list[list[Matrix]] = []
    room = 0
    for matrix in matrices:
        for block in matrix.block.cut(most):
            part = dataclasses.replace(matrix, block=block)
            if part.count > room or not filled:
                filled.append([])
                room = most
            filled[-1].append(part)
            room -= part.count
    return filled


def _owned_buckets(
    matrices: Sequence[Matrix], recipes: Mapping[int, Recipe], execution: Execution, kinds: _Kinds
) -> list[Bucket]:
    """Give each matrix of a team an owner, then cut alike ones so that every owner gets what fits its workspace."""
    team = kinds.team(matrices[0])
    by_kind = _alike(matrices, kinds)
    cost_of = {kinds.of(one): recipes[kinds.of(one)].cost(*one.wide_shape) for one, *_ in by_kind}
    costs = [cost_of[kinds.of(matrix)] for matrix in matrices]
    owner_of = dict(zip(map(id, matrices), assign_owners(costs, len(team)), strict=True))
    buckets = []
    for alike in by_kind:
        recipe = recipes[kinds.of(alike[0])]
        route = choose_route(alike[0], recipe, execution)
        if route is Route.SHARDED:
            recipe = recipe.in_gram_space(execution.orthogonalizer.restarts)
        limit = _at_once(alike[0], recipe, execution, in_flight=execution.max_in_flight)
        rounds: dict[int, list[Matrix]] = {}
        taken = [0] * len(team)
        for matrix in alike:
            owner = owner_of[id(matrix)]
            rounds.setdefault(taken[owner] // limit, []).append(matrix)
            taken[owner] += 1
        for content in rounds.values():
            parameter = content[0].parameter
            buckets.append(
                Bucket(
                    number=0,
                    group=parameter.group,
                    matrices=tuple(content),
                    wide_shape=content[0].wide_shape,
                    device=parameter.device,
                    recipe=recipe,
                    route=route,
                    team=team,
                    owners=tuple(owner_of[id(matrix)] for matrix in content),
                )
            )
    return buckets

"""What the buckets of a plan cost, by team: operations, bytes and seconds, for the plan's route and for others."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshmuon.layout.records import Matrix
from meshmuon.plan.bucket import Bucket, Plan, bytes_sent
from meshmuon.plan.calibration import Work, entry_bytes, polar_work, products
from meshmuon.plan.hardware import Hardware
from meshmuon.plan.route import Route
from meshmuon.plan.timing import Team, all_to_all, host_seconds, ring
from meshmuon.plan.traffic import Pieces, traffic_of
from meshmuon.polar.gram import choose_restarts, split_at

# Element-wise calls that momentum and update make for each matrix of which a rank holds anything; in kernels of ours,
# for each bucket.
_CALLS = 8


def _elementwise_calls(bucket: Bucket) -> int:
    return _CALLS * (1 if bucket.recipe.fused else len(bucket.matrices))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one team does in a step.

    Attributes:
        team: Global ranks; one of them if nothing travels.
        matrices: How many it orthogonalizes, or has a part in.
        batches: In how many buckets.
        exchanges: How many collectives.
        work: What the device does that is slowest in each bucket, added up.
        compute: Seconds of that.
        exchange: Seconds on the wire.
        host: Seconds that Python takes to launch it, where it takes most.
        flops: By member.
        loads: The same by the time they take, as operations in 16 bits.
        sent: Bytes, by member.
    """

    team: tuple[int, ...]
    matrices: int
    batches: int
    exchanges: int
    work: Work
    compute: float
    exchange: float
    host: float
    flops: tuple[float, ...]
    loads: tuple[float, ...]
    sent: tuple[float, ...]

    def seconds(self, max_in_flight: int) -> float:
        """Predict the stage: while one bucket computes another travels, except for the first or last of them."""
        if max_in_flight == 1:
            return self.compute + self.exchange
        longer, shorter = max(self.compute, self.exchange), min(self.compute, self.exchange)
        return longer + shorter / max(1, self.batches)


BucketCost = Callable[[Bucket, Hardware, Pieces], Stage]


def stages_of(plan: Plan, hardware: Hardware, pieces: Pieces, cost: BucketCost | None = None) -> list[Stage]:
    """Say what a step costs, team by team.

    Args:
        plan: Of one rank.
        hardware: On what.
        pieces: Of the plan.
        cost: What an owned bucket costs; None: on the plan's own route.

    Returns:
        A stage for each team this rank is in, and one for what it does alone.
    """
    found: dict[tuple[int, ...], list[Stage]] = {}
    for bucket in plan.buckets:
        if bucket.route is Route.LOCAL:
            found.setdefault((plan.rank,), []).append(_local(bucket, plan, hardware))
        else:
            found.setdefault(bucket.team, []).append((cost or _as_planned)(bucket, hardware, pieces))
    return [_together(stages) for stages in found.values()]


def _as_planned(bucket: Bucket, hardware: Hardware, pieces: Pieces) -> Stage:
    if bucket.route is Route.OWNED:
        return owned(bucket, hardware, pieces)
    sent = tuple(bytes_sent(bucket, rank) for rank in bucket.team)  # few ranks take that route
    return dataclasses.replace(_gram(bucket, hardware, pieces), sent=sent)


def _together(stages: Sequence[Stage]) -> Stage:
    return Stage(
        team=stages[0].team,
        matrices=sum(stage.matrices for stage in stages),
        batches=sum(stage.batches for stage in stages),
        exchanges=sum(stage.exchanges for stage in stages),
        work=_sum(stage.work for stage in stages),
        compute=math.fsum(stage.compute for stage in stages),
        exchange=math.fsum(stage.exchange for stage in stages),
        host=math.fsum(stage.host for stage in stages),
        flops=_by_member(stage.flops for stage in stages),
        loads=_by_member(stage.loads for stage in stages),
        sent=_by_member(stage.sent for stage in stages),
    )


def _by_member(each: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*each, strict=True)))


def _sum(works: Iterable[Work]) -> Work:
    total = Work()
    for work in works:
        total += work
    return total


def _local(bucket: Bucket, plan: Plan, hardware: Hardware) -> Stage:
    count = bucket.computed_by(None)
    work = polar_work(bucket.recipe, *bucket.wide_shape, batch=count)
    host = host_seconds(calls=work.calls + _elementwise_calls(bucket), team=Team(1, 1))
    seconds = hardware.calibration.seconds(work)
    flops, loads = (count * bucket.flops,), (count * bucket.cost,)
    return Stage((plan.rank,), count, 1, 0, work, seconds, 0.0, host, flops, loads, (0,))


def owned(bucket: Bucket, hardware: Hardware, pieces: Pieces) -> Stage:
    """Cost a bucket on the owner's route, alone or between replicas.

    Args:
        bucket: The bucket.
        hardware: On what.
        pieces: Of its plan.

    Returns:
        Its stage.
    """
    traffic = traffic_of(bucket, pieces)
    team = Team.of(bucket.team, hardware)
    counts, flops, cost = Counter(bucket.owners), bucket.flops, bucket.cost
    most = max(counts.values())
    m, n = bucket.wide_shape
    copied = 2 * most * m * n * (bucket.recipe.input_dtype.itemsize + bucket.recipe.dtype.itemsize)
    work = polar_work(bucket.recipe, m, n, batch=most) + Work(bytes=copied)
    ways = ((traffic.gathered_from, traffic.gathered_to), (traffic.scattered_from, traffic.scattered_to))
    wire = [
        all_to_all(hardware, team, busiest=max(map(max, way)), peers=peers - 1)
        for way, peers in zip(ways, traffic.peers, strict=True)
    ]
    calls = work.calls + _elementwise_calls(bucket)
    return Stage(
        team=bucket.team,
        matrices=len(bucket.matrices),
        batches=1,
        exchanges=2,
        work=work,
        compute=hardware.calibration.seconds(work),
        exchange=math.fsum(wire),
        host=host_seconds(calls=calls, pieces=traffic.pieces, exchanges=2, team=team),
        flops=tuple(counts[member] * flops for member in range(len(bucket.team))),
        loads=tuple(counts[member] * cost for member in range(len(bucket.team))),
        sent=tuple(traffic.sent),
    )


def gathered(bucket: Bucket, hardware: Hardware, pieces: Pieces) -> Stage:
    """Cost a bucket that is gathered whole on every rank and computed by all: the reference to do better than.

    Args:
        bucket: The bucket.
        hardware: On what.
        pieces: Of its plan.

    Returns:
        Its stage.
    """
    team, size, count = Team.of(bucket.team, hardware), len(bucket.team), len(bucket.matrices)
    m, n = bucket.wide_shape
    itemsize = bucket.recipe.input_dtype.itemsize
    work = polar_work(bucket.recipe, m, n, batch=count) + Work(bytes=2.0 * count * m * n * itemsize)
    held = pieces.held(bucket.matrices, bucket.team)
    calls = work.calls + count + _elementwise_calls(bucket)
    return Stage(
        team=bucket.team,
        matrices=count,
        batches=1,
        exchanges=1,
        work=work,
        compute=hardware.calibration.seconds(work),
        exchange=ring(hardware, team, total=count * m * n * itemsize, calls=1),
        host=host_seconds(calls=calls, exchanges=1, team=team),
        flops=(count * bucket.flops,) * size,
        loads=(count * bucket.cost,) * size,
        sent=tuple((size - 1) * numbers * itemsize for numbers in held),
    )


def can_reduce(plan: Plan, pieces: Pieces) -> bool:
    """Tell whether any matrix of a plan can take the Gram route.

    Args:
        plan: The plan.
        pieces: Of the plan.

    Returns:
        True if one of its matrices is shared and cut along its long side only.
    """
    shared = (bucket for bucket in plan.buckets if bucket.team)
    return any(_cut_lengthwise(alike[0]) for bucket in shared for alike in pieces.alike(bucket.matrices, bucket.team))


def _cut_lengthwise(matrix: Matrix) -> bool:
    """Whether ranks hold parts of the long side, and all of the short one: `is_cut_along_the_long_side`, by one rank.

    Others of a large job are cut like it. A square counts as wide.
    """
    assert matrix.share is not None
    rows, cols = matrix.piece(matrix.share.copies[0][0]).shape
    short, long = matrix.wide_shape
    whole, part = (cols, rows) if matrix.tall else (rows, cols)
    return len(matrix.share.copies) == 1 and whole == short and part < long


def reduced(bucket: Bucket, hardware: Hardware, pieces: Pieces) -> Stage:
    """Cost a bucket on the Gram route, by formula: one round, packed triangles.

    Every rank forms its part of the Gram matrix, the sum goes to owners in fp32, two factors come back in the dtype of
    the products and are applied to what each rank holds. Matrices that cannot take it go to their owners whole.

    Args:
        bucket: The bucket.
        hardware: On what.
        pieces: Of its plan.

    Returns:
        Its stage.
    """
    alike = pieces.alike(bucket.matrices, bucket.team)
    takes = {id(matrix) for several in alike if _cut_lengthwise(several[0]) for matrix in several}
    parts = [
        (cost, [matrix for matrix in bucket.matrices if (id(matrix) in takes) is (cost is _gram)])
        for cost in (owned, _gram)
    ]
    stages = [cost(_of(bucket, matrices), hardware, pieces) for cost, matrices in parts if matrices]
    return dataclasses.replace(_together(stages), batches=1)


def _of(bucket: Bucket, matrices: Sequence[Matrix]) -> Bucket:
    """A bucket of some of its matrices, with owners in turn."""
    owners = tuple(number % len(bucket.team) for number in range(len(matrices)))
    return dataclasses.replace(bucket, matrices=tuple(matrices), owners=owners)


def _gram(bucket: Bucket, hardware: Hardware, pieces: Pieces) -> Stage:
    team, size, count = Team.of(bucket.team, hardware), len(bucket.team), len(bucket.matrices)
    recipe, (m, n) = bucket.recipe, bucket.wide_shape
    planned = bucket.route is Route.SHARDED  # else it is asked what this route would cost
    restarts = recipe.restarts if planned else choose_restarts(recipe.schedule, recipe.dtype)
    segments = split_at(recipe.schedule, restarts)
    ours = recipe.kernels.products == "triton"
    triangle_cost = 1.0 if ours else 2.0
    factors = len(segments)
    restart = 4.0 * m**3 * (factors - 1)  # in Gram space
    small = sum(4 * len(segment) - 3 for segment in segments) * triangle_cost * m**3 + restart
    shares = Counter(bucket.owners)
    held = pieces.held(bucket.matrices, bucket.team)
    thin = (2.0 * factors + triangle_cost) * m  # for each number held: the Gram matrix, and factors applied
    flops = tuple(thin * held[member] + shares[member] * small for member in range(size))
    dense = max(flops)
    if ours:
        dense = max(2.0 * factors * m * held[member] + shares[member] * restart for member in range(size))
    triangle = m * (m + 1) // 2
    wire = [count * triangle * 4.0, 1.0 * factors * count * triangle * recipe.dtype.itemsize]
    calls = 3 + polar_work(recipe, m, n, batch=1).calls
    passes = Work(bytes=max(held) * entry_bytes(recipe) + count * m * m * 8.0, calls=calls)
    work = products(m, dense=dense * recipe.slowness, symmetric=max(flops) - dense) + passes
    return Stage(
        team=bucket.team,
        matrices=count,
        batches=1,
        exchanges=2,
        work=work,
        compute=hardware.calibration.seconds(work),
        exchange=math.fsum(ring(hardware, team, total=total, calls=1) for total in wire),
        host=host_seconds(calls=calls + 2 * count + _elementwise_calls(bucket), exchanges=2, team=team),
        flops=flops,
        loads=tuple(recipe.slowness * each for each in flops),
        sent=(sum(wire) * (size - 1) / size,) * size,
    )

"""The plan: owners spread fairly, alike matrices together, the same on every rank, within the workspace."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmuon.config import Execution, Orthogonalizer
from meshmuon.layout.matrices import sent_to_an_owner
from meshmuon.layout.matrix_view import WHOLE, MatrixView
from meshmuon.layout.records import ParameterRecord, Routing
from meshmuon.layout.shard_layout import Cut, ShardLayout, length
from meshmuon.plan.assign import assign_owners, balance
from meshmuon.plan.bucket import bytes_sent
from meshmuon.plan.build import PolarSettings, build_plan
from meshmuon.plan.fingerprint import digest, fingerprint
from meshmuon.plan.route import Route
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.runtime import pipeline

CPU = torch.device("cpu")
POLAR = {group: PolarSettings(resolve_schedule("polar_express", 5), 1e-7) for group in range(4)}


class Mesh:
    """Places parameters of a made-up job: shard[dim] = axes that cut it."""

    def __init__(self, shape, ranks=None):
        self.shape = tuple(shape)
        self.ranks = tuple(range(math.prod(shape))) if ranks is None else tuple(ranks)

    def layout(self, shape, cuts):
        """cuts: (dim, axis) or (dim, axis, factor), in the order of axes."""
        dims = [[] for _ in shape]
        for dim, axis, *factor in cuts:
            dims[dim].append(Cut(axis, self.shape[axis], *factor))
        return ShardLayout(tuple(shape), self.shape, self.ranks, tuple(map(tuple, dims)))


def parameter(name, shape, layout=None, *, rank=0, view=WHOLE, algorithm="muon", group=0, dtype=torch.float32, **more):
    inside = layout is not None and rank in layout.ranks
    local = tuple(map(length, layout.region(rank))) if inside else tuple(shape)
    return ParameterRecord(
        routing=Routing(name, algorithm, "a test says so", view),
        group=group,
        position=0,
        shape=tuple(shape),
        dtype=dtype,
        device=more.pop("device", CPU),
        local_shape=local,
        layout=layout,
        **more,
    )


def plan_for(make, rank, ranks, **execution):
    return build_plan(make(rank), polar=POLAR, execution=Execution(**execution), rank=rank, ranks=ranks)


def owned(plan):
    return [bucket for bucket in plan.buckets if bucket.route is Route.OWNED]


# ---------------------------------------------------------------- owners

COSTS = st.lists(st.one_of(st.just(0.0), st.integers(1, 10**6).map(float), st.floats(1.0, 1e15)), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(COSTS, st.integers(1, 12))
def test_every_matrix_gets_one_owner_and_nobody_gets_far_too_much(costs, members):
    owners = assign_owners(costs, members)
    assert owners == assign_owners(list(costs), members), "the same again"
    assert len(owners) == len(costs)
    assert all(0 <= owner < members for owner in owners)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == m) for m in range(members)]
    descending = sorted(costs, reverse=True)
    # No assignment does better than the mean, the costliest, or two of the members+1 costliest on one member.
    two = sum(descending[members - 1 : members + 1]) if len(costs) > members else 0.0
    at_least = max([sum(costs) / members, two, *costs]) if costs else 0.0
    # Graham 1969: 4/3 - 1/(3m) of the optimum. The optimum is at least `at_least`, so LPT can exceed 4/3 of it only
    # where the bound itself is loose: then the last matrix placed is at most a third of the optimum.
    assert max(loads) <= at_least + (descending[members] if len(costs) > members else 0.0) + 1e-6 * at_least


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 4))
def test_longest_first_is_within_four_thirds_of_the_optimum(costs, members):
    best = brute_force(tuple(costs), members)
    owners = assign_owners([float(c) for c in costs], members)
    worst = max(sum(c for c, o in zip(costs, owners, strict=True) if o == m) for m in range(members))
    assert worst <= (4 / 3 - 1 / (3 * members)) * best + 1e-9


def brute_force(costs, members):
    """The least possible largest load: exact, for small lists."""
    reachable = {(0,) * members}
    for cost in costs:
        reachable = {
            tuple(sorted((*loads[:m], loads[m] + cost, *loads[m + 1 :]))) for loads in reachable for m in range(members)
        }
    return min(max(loads) for loads in reachable)


def test_ties_go_by_position():
    assert assign_owners([1.0] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert assign_owners([1.0, 5.0, 1.0, 5.0], 2) == [0, 0, 1, 1]
    assert assign_owners([], 4) == []


def test_balance_is_the_largest_load_over_the_mean():
    assert balance([1.0, 1.0, 2.0], [0, 0, 1], 2) == 1.0
    assert balance([3.0, 1.0], [0, 1], 2) == 1.5
    assert balance([4.0], [0], 4) == 4.0
    assert balance([], [], 4) == 1.0


def llama_3_8b():
    """The 224 matrices of its 32 layers."""
    d, kv, f = 4096, 1024, 14336
    for layer in range(32):
        yield from ((f"layers.{layer}.{n}", s) for n, s in [("q", (d, d)), ("o", (d, d)), ("k", (kv, d))])
        yield from ((f"layers.{layer}.{n}", s) for n, s in [("v", (kv, d)), ("gate", (f, d)), ("up", (f, d))])
        yield (f"layers.{layer}.down", (d, f))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_llama_3_8b_is_balanced_to_ten_percent(size, device):
    mesh = Mesh([size])
    target = torch.device(device)

    def make(rank):
        return [parameter(n, s, mesh.layout(s, [(0, 0)]), rank=rank, device=target) for n, s in llama_3_8b()]

    plan = plan_for(make, 0, size)
    assert sum(len(bucket.matrices) for bucket in plan.buckets) == 224
    costs = [bucket.cost for bucket in owned(plan) for _ in bucket.matrices]
    owners = [owner for bucket in owned(plan) for owner in bucket.owners]
    assert max(costs) <= sum(costs) / size, "one matrix does not exceed the mean, or nothing could be balanced"
    assert balance(costs, owners, size) <= 1.10
    careless = [i * size // len(costs) for i in range(len(costs))]
    assert balance(costs, careless, size) > 1.10, "equal numbers of matrices are not equal loads"


# ---------------------------------------------------------------- buckets


def mixed_job(rank):
    """Two meshes, two dtypes, two groups, two devices, views, experts and a plain tensor."""
    flat, grid = Mesh([4]), Mesh([2, 2])
    experts, qkv = MatrixView(experts=True), MatrixView(split_rows=(6, 3, 3))
    rows = [
        ("a", (8, 12), flat, [(0, 0)], {}),
        ("b", (12, 8), flat, [(1, 0)], {}),
        ("c", (8, 12), flat, [(0, 0)], {"dtype": torch.bfloat16}),
        ("d", (8, 12), flat, [(0, 0)], {"group": 1}),
        ("e", (8, 12), grid, [(0, 1)], {}),
        ("f", (8, 12), grid, [(0, 0), (1, 1)], {}),
        ("g", (8, 12), flat, [(0, 0)], {"device": torch.device("meta")}),
        ("h", (12, 8), flat, [(0, 0)], {"view": qkv}),
        ("experts", (5, 8, 12), flat, [(0, 0)], {"view": experts}),
        ("cut_experts", (4, 8, 12), grid, [(0, 0), (2, 1)], {"view": experts}),
        ("empty", (0, 12), flat, [(0, 0)], {}),
        ("norm", (12,), flat, [(0, 0)], {"algorithm": "adamw", "group": 2}),
        ("a2", (8, 12), flat, [(0, 0)], {}),
    ]
    made = [parameter(n, s, mesh.layout(s, cuts), rank=rank, **more) for n, s, mesh, cuts, more in rows]
    return [*made, parameter("plain", (8, 12), rank=rank)]


def keys_of(bucket):
    return {
        (m.parameter.group, m.wide_shape, m.parameter.dtype, m.parameter.device, m.share.team if m.share else ())
        for m in bucket.matrices
    }


@pytest.mark.parametrize("workspace_bytes", [1, 20_000, 2**30])
def test_buckets_hold_alike_matrices_only_and_every_matrix_once(workspace_bytes):
    for rank in range(4):
        plan = plan_for(mixed_job, rank, 4, workspace_bytes=workspace_bytes)
        assert [bucket.number for bucket in plan.buckets] == list(range(len(plan.buckets)))
        for bucket in plan.buckets:
            assert keys_of(bucket) == {
                (bucket.group, bucket.wide_shape, bucket.matrices[0].parameter.dtype, bucket.device, bucket.team)
            }
            assert len(bucket.owners) == (len(bucket.matrices) if bucket.route is Route.OWNED else 0)
        placed = [(m.name, m.block, m.share) for bucket in plan.buckets for m in bucket.matrices]
        assert len(placed) == len(set(placed))
        held = {}
        for bucket in plan.buckets:
            for m in bucket.matrices:
                held[m.name] = held.get(m.name, 0) + m.count * math.prod(m.block.shape)
        expected = {p.name: math.prod(p.local_shape) for p in plan.parameters if p.routing.algorithm == "muon"}
        assert held == {name: size for name, size in expected.items() if size}
        assert [p.name for p in plan.elementwise] == ["norm"]


def test_alike_matrices_do_share_a_bucket():
    plan = plan_for(mixed_job, 0, 4)
    buckets = [sorted(m.name for m in bucket.matrices) for bucket in plan.buckets]
    assert ["a", "a2", "b", "f"] in buckets, "tall and wide, cut along rows, columns or both: one team, one shape"
    assert ["experts", "plain"] in buckets, "whole ones, wherever they come from"


def agreed(bucket):
    """What the members of a team must see alike: what travels, in which order, to whom, computed how."""
    return (
        bucket.group,
        [(m.name, m.share, m.shape, m.tall) for m in bucket.matrices],
        bucket.owners,
        bucket.wide_shape,
        bucket.recipe,
    )


@pytest.mark.parametrize(
    "execution", [{}, {"workspace_bytes": 1}, {"workspace_bytes": 20_000, "max_in_flight": 1}, {"max_in_flight": 4}]
)
def test_members_of_a_team_have_the_same_plan(execution):
    plans = [plan_for(mixed_job, rank, 4, **execution) for rank in range(4)]
    by_team = {}
    for plan in plans:
        for team in {bucket.team for bucket in owned(plan)}:
            assert plan.rank in team
            by_team.setdefault(team, []).append([agreed(b) for b in owned(plan) if b.team == team])
    assert set(by_team) >= {(0, 1, 2, 3), (0, 1), (2, 3)}
    for team, seen in by_team.items():
        assert len(seen) == len(team)
        assert all(one == seen[0] for one in seen)
    for plan in plans:
        assert plan == plan_for(mixed_job, plan.rank, 4, **execution), "the same again"


def test_the_comparison_of_plans_can_fail():
    """The sabotage: another order of parameters gives another plan."""
    one = plan_for(mixed_job, 0, 4)
    other = plan_for(lambda rank: mixed_job(rank)[::-1], 1, 4)
    team = (0, 1, 2, 3)
    seen = [[agreed(b) for b in owned(plan) if b.team == team] for plan in (one, other)]
    assert seen[0] != seen[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 200_000))
def test_owners_get_what_fits_their_workspace(shapes, workspace_bytes):
    mesh = Mesh([3])

    def make(rank):
        return [parameter(f"p{i}", s, mesh.layout(s, [(0, 0)]), rank=rank) for i, s in enumerate(shapes)]

    plan = plan_for(make, 0, 3, workspace_bytes=workspace_bytes, max_in_flight=2)
    for bucket in owned(plan):
        each = bucket.recipe.workspace_bytes(*bucket.wide_shape)
        most = max(bucket.computed_by(member) for member in range(3))
        assert most == 1 or most * each * 2 <= workspace_bytes
    one_by_one = all(len(set(b.owners)) == len(b.owners) for b in owned(plan))
    assert one_by_one or workspace_bytes > 1


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((16, 32, 48), MatrixView(experts=True)),
        ((16 * 32, 48), MatrixView(heads=16)),
        ((48, 16 * 32), MatrixView(heads=16, heads_on="cols", transposed=True)),
        ((2, 8, 32, 48), MatrixView(experts=True)),
        ((2, 8 * 32, 48), MatrixView(experts=True, heads=8)),
    ],
    ids=["experts", "heads", "heads on cols", "experts of two dims", "heads of experts"],
)
def test_local_buckets_fit_the_workspace_too(shape, view):
    """A stack of experts may be larger than the workspace though one expert is not: it must be cut."""
    shape = shape[::-1] if view.transposed else shape
    whole = parameter("stack", shape, view=view)
    each = plan_for(lambda rank: [whole], 0, 1).buckets[0].recipe.workspace_bytes(32, 48)
    plan = plan_for(lambda rank: [whole], 0, 1, workspace_bytes=8 * each, max_in_flight=2)
    assert sum(plan.computed_here(bucket) for bucket in plan.buckets) == 16
    full = torch.arange(math.prod(shape)).view(shape)
    seen = [m.block.select(full).flatten() for bucket in plan.buckets for m in bucket.matrices]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(math.prod(shape))), "every number once"
    for bucket in plan.buckets:
        assert plan.computed_here(bucket) * each <= 8 * each, "a local bucket is alone: it may take all of it"


@pytest.mark.parametrize(
    ("device", "count", "cut"),
    [
        ("meta", 24, [12, 12]),
        ("meta", 25, [9, 9, 7]),
        ("meta", 12, [12]),
        ("meta", 1, [1]),
        ("cpu", 24, [12, 12]),
        ("cpu", 25, [10, 10, 5]),
        ("cpu", 11, [11]),
    ],
)
def test_local_buckets_are_of_nearly_equal_size(device, count, cut):
    """Not 12, 12 and 1: a GPU would be idle in the last. On a CPU an even number for its threads."""
    alike = [parameter(f"p{i}", (32, 48), device=torch.device(device)) for i in range(count)]
    each = plan_for(lambda rank: alike[:1], 0, 1).buckets[0].bytes
    plan = plan_for(lambda rank: alike, 0, 1, workspace_bytes=12 * each)
    assert [len(bucket.matrices) for bucket in plan.buckets] == cut


@pytest.mark.parametrize(
    ("stacks", "each", "cut"), [(5, 6, [12, 12, 6]), (3, 4, [12]), (1, 25, [10, 10, 5]), (2, 9, [9, 9])]
)
def test_stacks_are_not_spread_over_more_buckets_to_make_them_even(stacks, each, cut):
    alike = [parameter(f"p{i}", (each, 32, 48), view=MatrixView(experts=True)) for i in range(stacks)]
    one = plan_for(lambda rank: [parameter("p", (1, 32, 48), view=MatrixView(experts=True))], 0, 1).buckets[0].bytes
    plan = plan_for(lambda rank: alike, 0, 1, workspace_bytes=12 * one)
    assert [sum(matrix.count for matrix in bucket.matrices) for bucket in plan.buckets] == cut


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])
def test_as_many_buckets_as_may_be_in_flight_fit_the_workspace_together(max_in_flight, sharded):
    mesh = Mesh([2])
    where = mesh.layout((32, 48), [(0, 0)]) if sharded else None

    def make(rank):
        return [parameter(f"p{i}", (32, 48), where, rank=rank) for i in range(24)]

    each = plan_for(make, 0, 2, workspace_bytes=1).buckets[0].bytes
    plan = plan_for(make, 0, 2, workspace_bytes=12 * each, max_in_flight=max_in_flight)
    most = [max(bucket.computed_by(member) for member in (range(2) if sharded else [None])) for bucket in plan.buckets]
    share = max_in_flight if sharded else 1  # local buckets never wait, so no two of them are under way
    assert max(most) == 12 // share, "a share of the workspace for each, and all of that share is used"
    together = plan.buckets[:share]
    assert sum(bucket.bytes for bucket in together) <= 12 * each


def test_a_matrix_larger_than_the_workspace_stands_alone_and_the_plan_says_so():
    mesh = Mesh([2])

    def make(rank):
        return [parameter(f"p{i}", (64, 64), mesh.layout((64, 64), [(0, 0)]), rank=rank) for i in range(4)]

    plan = plan_for(make, 0, 2, workspace_bytes=1)
    assert all(bucket.computed_by(member) <= 1 for bucket in plan.buckets for member in range(2))
    assert "more than workspace_bytes=1" in str(plan)


# ---------------------------------------------------------------- waves


def test_a_wave_is_one_team_in_ascending_order_with_local_work_in_the_first():
    for rank in range(4):
        plan = plan_for(mixed_job, rank, 4, workspace_bytes=1)
        teams = [sorted({bucket.team for bucket in wave if bucket.team}) for wave in plan.waves]
        assert all(len(found) == 1 for found in teams)
        order = [found[0] for found in teams]
        assert order == sorted(order) and len(set(order)) == len(order)
        assert all(b.route is Route.OWNED for wave in plan.waves[1:] for b in wave)


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_gathers_are_begun_before_local_work_and_leave_it_workspace(max_in_flight):
    plan = plan_for(mixed_job, 0, 4, max_in_flight=max_in_flight)
    routes = [bucket.route for bucket in plan.waves[0]]
    assert routes[0] is Route.OWNED and Route.LOCAL in routes
    begun = routes.index(Route.LOCAL)
    assert 1 <= begun < max_in_flight
    last = len(routes) - routes[::-1].index(Route.LOCAL)
    assert set(routes[begun:last]) == {Route.LOCAL}, "local work in one run"


@pytest.mark.parametrize("workspace_bytes", [1, 20_000, 60_000, 150_000])
def test_what_is_begun_before_local_work_fits_beside_it(workspace_bytes):
    plan = plan_for(mixed_job, 0, 4, workspace_bytes=workspace_bytes, max_in_flight=4)
    wave = plan.waves[0]
    begun = [bucket.route for bucket in wave].index(Route.LOCAL)
    largest = max(bucket.bytes for bucket in wave if bucket.route is Route.LOCAL)
    assert begun == 0 or sum(bucket.bytes for bucket in wave[:begun]) + largest <= workspace_bytes


def collectives(plan):
    """What a rank launches during a step, in order: the pipeline of `Muon.step` with journeys that only take notes."""
    notes = []

    def journey(bucket):
        if bucket.route is Route.OWNED:
            what = (bucket.team, tuple(m.name for m in bucket.matrices))
            notes.append(("gather", *what))
            yield
            notes.append(("scatter", *what))
            yield

    execution = plan.execution
    for wave in plan.waves:
        journeys = (pipeline.Journey(journey(bucket), bucket.bytes_in_flight) for bucket in wave)
        pipeline.run(journeys, max_in_flight=execution.max_in_flight, workspace_bytes=execution.workspace_bytes)
    return notes


def check_one_order(make, ranks, **execution):
    """Every member of a team launches its collectives in one order: anything else hangs, or mixes them up."""
    by_team = {}
    for rank in range(ranks):
        notes = collectives(plan_for(make, rank, ranks, **execution))
        for team in {note[1] for note in notes}:
            by_team.setdefault(team, {})[rank] = [note for note in notes if note[1] == team]
    for team, seen in by_team.items():
        assert sorted(seen) == list(team)
        assert all(notes == seen[team[0]] for notes in seen.values()), seen


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("workspace_bytes", [1, 100_000, 300_000, 2**30])
def test_members_of_a_team_launch_collectives_in_one_order(max_in_flight, workspace_bytes):
    check_one_order(mixed_job, 4, max_in_flight=max_in_flight, workspace_bytes=workspace_bytes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 9),
    expert=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    workspace_bytes=st.integers(1, 300_000),
    max_in_flight=st.integers(1, 4),
)
def test_experts_that_some_ranks_have_more_of_do_not_change_the_order(
    count, expert, shapes, workspace_bytes, max_in_flight
):
    """Local work differs between ranks: 5 experts on 4 ranks are 2, 2, 1 and 0. What travels must not depend on it."""
    mesh = Mesh([4])
    experts = (count, *expert)

    def make(rank):
        where = mesh.layout(experts, [(0, 0)])
        stack = parameter("experts", experts, where, rank=rank, view=MatrixView(experts=True))
        return [stack, *(parameter(f"p{i}", s, mesh.layout(s, [(0, 0)]), rank=rank) for i, s in enumerate(shapes))]

    check_one_order(make, 4, workspace_bytes=workspace_bytes, max_in_flight=max_in_flight)


def test_local_work_alone_is_one_wave():
    plan = plan_for(lambda rank: [parameter("a", (4, 6)), parameter("b", (5, 6))], 0, 1)
    assert [len(wave) for wave in plan.waves] == [2]


def test_nothing_to_orthogonalize_gives_no_bucket():
    """A pipeline stage without matrices, and a rank whose shard of the experts is empty."""
    norm = parameter("norm", (4,), algorithm="adamw")
    assert plan_for(lambda rank: [norm], 0, 2, allow_no_muon=True).buckets == ()
    mesh, view = Mesh([4]), MatrixView(experts=True)
    experts = parameter("experts", (2, 4, 6), mesh.layout((2, 4, 6), [(0, 0)]), rank=3, view=view)
    assert plan_for(lambda rank: [experts], 3, 4).buckets == ()


# ---------------------------------------------------------------- what is hashed


def lines_of(**changes):
    mesh = Mesh([4])
    shape = changes.pop("shape", (8, 12))
    cuts = changes.pop("cuts", [(0, 0)])
    names = changes.pop("names", ("a", "b"))
    settings = {0: changes.pop("settings", "lr=0.1"), 1: "lr=0.2"}
    rank = changes.pop("rank", 0)
    records = [parameter(name, shape, mesh.layout(shape, cuts), rank=rank, **changes) for name in names]
    return digest(fingerprint(records, settings=settings, execution=Execution()))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_ranks_that_will_do_the_same_have_the_same_digest(rank):
    assert lines_of(rank=rank) == lines_of(rank=0)
    assert len(lines_of()) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"names": ("b", "a")},
        {"names": ("a",)},
        {"names": ("a", "c")},
        {"shape": (8, 16)},
        {"dtype": torch.bfloat16},
        {"cuts": [(1, 0)]},
        {"cuts": [(0, 0, 2)]},
        {"cuts": []},
        {"view": MatrixView(split_rows=(4, 4))},
        {"view": MatrixView(heads=2)},
        {"algorithm": "adamw"},
        {"settings": "lr=0.2"},
        {"group": 1},
    ],
    ids=str,
)
def test_ranks_that_would_do_something_else_have_another_digest(change):
    assert lines_of(**change) != lines_of()


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_are_those_of_the_formula(size):
    """2·itemsize·W·(P-1)/P² for each rank, when every rank owns as much as the others."""
    mesh = Mesh([size])

    def make(rank):
        return [parameter(f"p{i}", (32, 48), mesh.layout((32, 48), [(0, 0)]), rank=rank) for i in range(2 * size)]

    weights = 2 * size * 32 * 48
    for rank in range(size):
        plan = plan_for(make, rank, size)
        sent = sum(bytes_sent(bucket, rank) for bucket in owned(plan))
        assert sent == 2 * 4 * weights * (size - 1) // size**2


def test_half_precision_halves_the_wire():
    mesh = Mesh([4])

    def make(rank):
        return [parameter(f"p{i}", (32, 48), mesh.layout((32, 48), [(0, 0)]), rank=rank) for i in range(4)]

    def sent(dtype):
        plan = plan_for(make, 0, 4, orthogonalizer=Orthogonalizer(dtype=dtype))
        return sum(bytes_sent(bucket, 0) for bucket in owned(plan))

    assert sent("bfloat16") * 2 == sent("float32") == sent("float16") * 2


def test_records_of_a_plan_are_data():
    plan = plan_for(mixed_job, 0, 4)
    assert dataclasses.replace(plan) == plan
    assert hash(plan.buckets[0].recipe) is not None
    assert not any(isinstance(value, torch.Tensor) for value in dataclasses.asdict(plan)["parameters"][0].values())


@pytest.mark.parametrize(("sent", "route"), [(False, Route.SHARDED), (True, Route.OWNED)])
def test_what_must_reach_an_owner_never_stays_where_it_is(sent, route):
    """`orthogonalize` of a shard on a GPU: the Gram route would not have the bits of one device."""
    mesh = Mesh((2,))
    gpu = torch.device("cuda", 0)
    layout = mesh.layout((1024, 65536), [(1, 0)])
    record = parameter("x", (1024, 65536), layout, device=gpu, architecture="hopper")
    record = sent_to_an_owner(record, rank=0) if sent else record
    (bucket,) = plan_for(lambda rank: [record], 0, 2).buckets
    assert bucket.route is route


def test_what_is_whole_needs_no_owner():
    record = parameter("x", (4, 16, 32), Mesh((2,)).layout((4, 16, 32), [(0, 0)]), view=MatrixView(experts=True))
    assert sent_to_an_owner(record, rank=0) is record

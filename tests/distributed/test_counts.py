"""Counted, not believed: collectives, polar factors, bytes and the order of a step."""

import itertools
import math

import pytest

from tests.distributed import counting

RESULTS = {}


@pytest.fixture
def counted(pool):
    """One step of a job, counted on every rank; run once."""

    def get(name):
        if name not in RESULTS:
            size = math.prod(counting.JOBS[name][0])
            RESULTS[name] = pool(size).run(counting.count, name)
        return RESULTS[name]

    return get


def launches(rank):
    return [event for event in rank["events"] if event[0] == "launch"]


def owned(rank):
    return [bucket for bucket in rank["buckets"] if bucket["owned"]]


def polar_by_bucket(rank):
    """Bucket → how many matrices this rank orthogonalized: each polar stands between a bucket's wait and scatter."""
    found = {}
    for before, after in itertools.pairwise(rank["events"]):
        if before[0] == "polar":
            assert after[:2] == ("begin", "scatter")
            found[after[2]] = found.get(after[2], 0) + before[2]
    return found


def check_collectives(rank):
    expected = sorted((bucket["number"], way) for bucket in owned(rank) for way in ("gather", "scatter"))
    assert sorted((event[2], event[1]) for event in launches(rank)) == expected
    waits = [event for event in rank["events"] if event[0] == "wait"]
    assert sorted((event[2], event[1]) for event in waits) == expected, "whatever is begun is waited for"
    by_torch = sum(number for op, number in rank["calls"].items() if "alltoall" in op)
    assert by_torch == 2 * len(owned(rank)), rank["calls"]
    others = {op: number for op, number in rank["calls"].items() if "alltoall" not in op}
    assert list(others.values()) == [1] and "allreduce" in next(iter(others)), f"one small reduction besides: {others}"


@pytest.mark.parametrize("name", counting.JOBS)
def test_two_all_to_alls_for_each_owned_bucket_and_none_for_local_ones(counted, name):
    for rank in counted(name):
        check_collectives(rank)


def check_polar(ranks):
    teams = {bucket["team"] for rank in ranks for bucket in owned(rank)}
    for team in teams:
        members = [ranks[rank] for rank in team]
        numbers = [[bucket["number"] for bucket in owned(member) if bucket["team"] == team] for member in members]
        for same in zip(*numbers, strict=True):
            counts = [polar_by_bucket(member).get(number, 0) for member, number in zip(members, same, strict=True)]
            bucket = next(b for b in members[0]["buckets"] if b["number"] == same[0])
            assert sum(counts) == bucket["matrices"]
    for rank in ranks:
        for bucket in rank["buckets"]:
            if not bucket["owned"]:
                assert polar_by_bucket(rank)[bucket["number"]] == bucket["matrices"]


@pytest.mark.parametrize("name", counting.JOBS)
def test_every_owned_matrix_is_orthogonalized_once_in_its_team(counted, name):
    check_polar(counted(name))


def total_polar(ranks):
    return sum(event[2] for rank in ranks for event in rank["events"] if event[0] == "polar")


def test_once_in_the_whole_job_unless_the_plan_says_otherwise(counted):
    assert total_polar(counted("even")) == 6
    assert total_polar(counted("fsdp x tp")) == 5
    # Four sharded matrices and six experts, the latter whole on one rank of each of the two replicas, which share them.
    assert total_polar(counted("hsdp, shared")) == 4 + 6
    repeated = counted("hsdp, repeated")
    assert total_polar(repeated) == 2 * (4 + 6)
    assert "replica" in repeated[0]["text"], "what is repeated is named"
    # A parameter that lies whole on every rank is computed on every rank.
    assert total_polar(counted("mixed")) == 3 + 3 + 4 + 7 + 3 + 3 * 1


def sent_by(rank):
    return sum(event[3] for event in launches(rank))


@pytest.mark.parametrize(("name", "itemsize"), [("even", 4), ("even, one by one", 4), ("even in bf16", 2)])
def test_bytes_are_those_of_the_formula(counted, name, itemsize):
    """2·itemsize·W·(P-1)/P² for each rank: equal matrices, evenly cut and owned."""
    weights, ranks = 6 * 24 * 36, 3
    expected = 2 * itemsize * weights * (ranks - 1) / ranks**2
    assert [sent_by(rank) for rank in counted(name)] == [expected] * ranks


@pytest.mark.parametrize("name", ["mixed", "fsdp x tp", "hsdp, repeated"])
def test_bytes_of_a_team_are_what_its_matrices_need(counted, name):
    """Every number travels to its owner and back, except what the owner holds itself: nothing is padded."""
    ranks = counted(name)
    total = sum(sent_by(rank) for rank in ranks)
    needed = sum(2 * 4 * b["numbers"] / len(b["team"]) for rank in ranks for b in owned(rank))
    assert 0 < total < needed, "less than everything: owners keep their own pieces"
    size = len(owned(ranks[0])[0]["team"])
    if name != "mixed":  # evenly cut
        assert total == pytest.approx(needed * (size - 1) / size, rel=0.02)


def test_shared_replicas_gather_within_a_replica_and_scatter_to_all(counted):
    """Four equal matrices on 2 x 2 ranks: each owner gets half of one, and gives away three quarters of two copies."""
    one = 24 * 36 * 4
    for rank in counted("hsdp, shared"):
        sharded = {bucket["number"] for bucket in owned(rank) if len(bucket["team"]) == 4}
        gathered = sum(event[3] for event in launches(rank) if event[1] == "gather" and event[2] in sharded)
        scattered = sum(event[3] for event in launches(rank) if event[1] == "scatter" and event[2] in sharded)
        assert gathered == one / 2
        assert scattered == 2 * one - one / 2


def test_nothing_travels_when_everything_is_local(counted):
    for rank in counted("local only"):
        assert launches(rank) == []
        assert "nothing travels" in rank["text"]


# ---------------------------------------------------------------- order


def check_order(rank):
    """Experts, whole on their ranks and shaped like no other matrix, beside sharded matrices."""
    events = rank["events"]
    local = [i for i, event in enumerate(events) if event[0] == "polar" and event[1] == (10, 14)]
    first_gather = next(i for i, event in enumerate(events) if event[:2] == ("launch", "gather"))
    first_wait = next(i for i, event in enumerate(events) if event[0] == "wait")
    assert local and first_gather < local[0], "a gather is on the wire before any local work"
    assert local[-1] < first_wait, "local work comes before anything is waited for"


def test_first_gathers_are_launched_before_any_local_work_which_fills_the_wait(counted):
    for rank in counted("experts beside"):
        assert len(owned(rank)) >= 2 and len(owned(rank)) < len(rank["buckets"])
        check_order(rank)


def overlaps(rank):
    """Whether the second gather is launched before the first is waited for."""
    steps = [event[:3] for event in rank["events"] if event[0] in ("launch", "wait")]
    first, second = [event for event in steps if event[:2] == ("launch", "gather")][:2]
    return steps.index(second) < steps.index(("wait", "gather", first[2]))


def test_buckets_overlap_where_the_workspace_allows_it(counted):
    assert all(overlaps(rank) for rank in counted("experts beside"))
    assert not any(overlaps(rank) for rank in counted("even, one by one"))


@pytest.mark.parametrize("name", counting.JOBS)
def test_members_of_a_team_meet_in_one_order(counted, name):
    ranks = counted(name)
    for team in {bucket["team"] for rank in ranks for bucket in owned(rank)}:
        orders = []
        for member in team:
            rank = ranks[member]
            numbers = [bucket["number"] for bucket in owned(rank) if bucket["team"] == team]
            orders.append([(event[1], numbers.index(event[2])) for event in launches(rank) if event[2] in numbers])
        assert all(order == orders[0] for order in orders)


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_beside")  # ranks of earlier tests may have made it
def test_process_groups_are_made_once(pool):
    """Two of three axes cut a matrix: none of the mesh's own groups is the team. Sockets are not made twice for it."""
    assert pool(8).run(counting.count_new_groups) == [[1, 0, 0]] * 8


# ---------------------------------------------------------------- the checks can fail


def moved(events, found, to):
    rest = [event for event in events if event is not found]
    return [*rest[:to], found, *rest[to:]]


def test_a_collective_too_many_or_too_few_is_noticed(counted):
    rank = counted("mixed")[0]
    last = launches(rank)[-1]
    for events in ([e for e in rank["events"] if e is not last], [*rank["events"], last]):
        with pytest.raises(AssertionError):
            check_collectives(rank | {"events": events})


def test_a_matrix_computed_twice_or_never_is_noticed(counted):
    ranks = counted("even")
    number, polar = next((i, e) for i, e in enumerate(ranks[1]["events"]) if e[0] == "polar")
    for count in (polar[2] + 1, polar[2] - 1):
        events = list(ranks[1]["events"])
        events[number] = (*polar[:2], count)
        with pytest.raises(AssertionError):
            check_polar([ranks[0], ranks[1] | {"events": events}, ranks[2]])


def test_local_work_out_of_place_is_noticed(counted):
    rank = counted("experts beside")[0]
    local = next(event for event in rank["events"] if event[0] == "polar" and event[1] == (10, 14))
    for place in (0, len(rank["events"]) - 1):
        with pytest.raises(AssertionError):
            check_order(rank | {"events": moved(rank["events"], local, place)})

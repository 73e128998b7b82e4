"""Nothing hangs, nothing is half done: what one rank does wrong, every rank hears of before anything is changed."""

import re

import pytest
import torch

from meshmuon.testing.ranks import RankPool
from tests.distributed import fault_scenarios, lifetime_scenarios
from tests.distributed.fault_scenarios import TABLE

RANKS, TIMEOUT = 3, 10
KEYS = {"adamw": ["", " step", " exp_avg", " exp_avg_sq"]}
EVERYTHING = [name + key for name, (_, view) in TABLE.items() for key in KEYS.get(str(view), ["", " momentum_buffer"])]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def pools():
    made = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def job(pools):
    """Three ranks that give up after ten seconds; new ones after a test that left them at odds."""
    if not pools:
        pools.append(RankPool(RANKS, timeout=TIMEOUT))
    yield pools[0]
    if not healthy(pools[0]):
        pools.pop().close()


def healthy(pool):
    try:
        return all(answer == (True, 6) for answer in pool.outcomes(fault_scenarios.add_up))
    except OSError:
        return False


def assert_took_place(record):
    """The control of every `changed == []` here: a step that happens changes every tensor on every rank."""
    assert (record["error"], record["changed"]) == (None, EVERYTHING), record["message"]


def assert_refused(record, error, *words):
    assert record["error"] == error, record
    assert record["changed"] == []
    assert record["seconds"] < TIMEOUT, "it was a timeout that ended it"
    for word in words:
        assert re.search(word, record["message"]), (word, record["message"])


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    different = [k for k in expected if not torch.equal(*(torch.nan_to_num(r[k], nan=1e9) for r in (result, expected)))]
    assert different == []


def run(job, script, **settings):
    return job.run(fault_scenarios.run_script, script, settings)


# Gradients that are missing


@pytest.mark.parametrize(("name", "ranks"), [("a", [1]), ("qkv", [1, 2]), ("experts", [0]), ("norm", [2])])
def test_a_gradient_missing_on_some_ranks_is_refused_everywhere(job, name, ranks):
    script = [{"seed": 0}, {"seed": 1, "missing": {rank: [name] for rank in ranks}}, {"seed": 2}]
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 2}], {})
    for rank in run(job, script):
        good, torn, next_one = rank["records"]
        assert_took_place(good)
        named = f"ranks {', '.join(map(str, ranks))} for {name},"
        assert_refused(torn, "GradientMismatchError", named)
        assert_took_place(next_one)
        assert_same(rank["result"], expected)


def test_a_gradient_missing_at_the_first_step(job):
    expected = fault_scenarios.run_plain([{"seed": 1}], {})
    for rank in run(job, [{"seed": 0, "missing": {0: ["c", "norm"]}}, {"seed": 1}]):
        assert_refused(rank["records"][0], "GradientMismatchError", "ranks 0 for c, norm")
        assert_same(rank["result"], expected)


def test_a_rank_without_any_gradient(job):
    for rank in run(job, [{"seed": 0}, {"seed": 1, "missing": {2: list(TABLE)}}, {"seed": 2}]):
        assert_refused(rank["records"][1], "GradientMismatchError", "ranks 2 for a, b, c, qkv, experts and 2 more")
        assert_took_place(rank["records"][2])


@pytest.mark.parametrize("names", [["a"], ["c", "experts"], ["qkv", "norm"], list(TABLE)])
def test_a_gradient_missing_everywhere_leaves_that_parameter_alone(job, names):
    script = [{"seed": 0}, {"seed": 1, "missing": dict.fromkeys(range(RANKS), names)}, {"seed": 2}]
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 1, "missing": names}, {"seed": 2}], {})
    for rank in run(job, script):
        changed = [key for key in EVERYTHING if key.split()[0] not in names]
        assert (rank["records"][1]["error"], rank["records"][1]["changed"]) == (None, changed)
        assert_same(rank["result"], expected)


# NaN and inf


BAD = [("a", NAN), ("qkv", INF), ("experts", -INF), ("norm", NAN), ("embedding", INF)]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_number_on_one_rank_is_skipped_by_all(job, name, value):
    script = [{"seed": 0}, {"seed": 1, "bad": (1, name, value)}, {"seed": 2}]
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 2}], {})
    for rank in run(job, script):
        skipped = rank["records"][1]
        assert (skipped["error"], skipped["changed"]) == (None, [])
        [(category, text)] = skipped["warnings"]
        assert category == "NonFiniteGradientWarning" and f"gradient of {name}." in text
        assert (rank["metrics"]["steps"], rank["metrics"]["skipped_non_finite"]) == (3, 1)
        assert_took_place(rank["records"][2])
        assert_same(rank["result"], expected)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_number_on_one_rank_is_raised_by_all(job, name, value):
    script = [{"seed": 0}, {"seed": 1, "bad": (2, name, value)}, {"seed": 2}]
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 2}], {})
    for rank in run(job, script, non_finite="raise"):
        assert_refused(rank["records"][1], "NonFiniteGradientError", rf"gradient of {name}\.")
        assert_took_place(rank["records"][2])
        assert_same(rank["result"], expected)


@pytest.mark.parametrize(("name", "index"), [("a", 32), ("experts", 40), ("norm", 13)])
def test_a_bad_number_is_ignored_if_asked(job, name, index):
    """`index` is where rank 1's shard begins."""
    script = [{"seed": 0}, {"seed": 1, "bad": (1, name, NAN)}]
    expected = fault_scenarios.run_plain(
        [{"seed": 0}, {"seed": 1, "bad": (index, name, NAN)}], {"non_finite": "ignore"}
    )
    assert expected[name].isnan().any()
    for rank in run(job, script, non_finite="ignore"):
        assert [record["error"] for record in rank["records"]] == [None, None]
        assert [record["warnings"] for record in rank["records"]] == [[], []]
        assert_same(rank["result"], expected)


@pytest.mark.parametrize("name", ["a", "norm"])
def test_a_missing_gradient_counts_under_every_policy(job, name):
    script = [{"seed": 0, "missing": {1: [name]}, "bad": (0, "b", NAN)}]
    for policy in ("skip", "raise", "ignore"):
        for rank in run(job, script, non_finite=policy):
            assert_refused(rank["records"][0], "GradientMismatchError", f"ranks 1 for {name}")


# GradScaler


def test_an_overflow_on_one_rank_is_skipped_by_all(job):
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 2}], {})
    script = [{"seed": 0, "overflow": None}, {"seed": 1, "overflow": 1}, {"seed": 2, "overflow": None}]
    for rank in run(job, script):
        good, skipped, next_one = rank["records"]
        assert_took_place(good)
        assert (skipped["error"], skipped["changed"], skipped["warnings"]) == (None, [], [])
        assert_took_place(next_one)
        assert rank["metrics"]["skipped_grad_scaler"] == 1
        assert_same(rank["result"], expected)


def test_a_real_grad_scaler(job):
    expected = fault_scenarios.run_plain([{"seed": 0}, {"seed": 2}], {})
    for rank in job.run(fault_scenarios.run_scaler, {}):
        assert_took_place(rank["records"][0])
        assert (rank["records"][1]["error"], rank["records"][1]["changed"]) == (None, [])
        assert_took_place(rank["records"][2])
        assert (rank["metrics"]["skipped_grad_scaler"], rank["scale"]) == (1, 8.0)
        assert_same(rank["result"], expected)


# Ranks that were built differently


DIFFERENT = {
    "order": "^parameter '[ab]'",
    "shape": "^parameter 'c'",
    "dtype": "^parameter 'b'",
    "number": "^parameter 'b'",
    "number at the end": "^parameter 'embedding'",
    "view": "^parameter 'qkv'",
    "algorithm": "^parameter 'c'",
    "placements": "^parameter 'a'",
    "frozen": "^parameter 'b'",
    "lr": "^parameter 'a'.* lr=",
    "lr in the last digits": "^parameter 'a'.* lr=",
    "lr tensor": "^parameter 'a'.* lr=",
    "ns_steps": "^parameter 'a'.* ns_steps=",
    "momentum": "^parameter 'a'.* momentum=",
    "betas": "^parameter 'norm'.* betas=",
    "state_dtype": "^parameter 'a'.* state_dtype=",
    "orthogonalizer": "orthogonalizer|svd",
    "non_finite": "non_finite",
    "workspace_bytes": "workspace_bytes|bucket",
    "max_in_flight": "max_in_flight",
}


def test_ranks_that_are_alike_take_the_steps(job):
    for records in job.run(fault_scenarios.build_differently, None):
        for record in records:
            assert_took_place(record)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_were_built_differently_are_told_so(job, kind):
    for records in job.run(fault_scenarios.build_differently, kind):
        for record in records:
            assert_refused(record, "PlanMismatchError", DIFFERENT[kind], r"ranks that differ: 1\b")


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.5), ("ns_steps", 4), ("momentum", 0.9)],
)
def test_a_setting_that_one_rank_changes_later(job, key, value):
    for together, alone, together_again in job.run(fault_scenarios.change_later, key, value):
        assert_took_place(together)
        assert_refused(alone, "PlanMismatchError", key, r"\b1\b")
        assert_took_place(together_again)


# Placements


def test_a_partial_parameter_is_refused_at_construction(job):
    for record in job.run(fault_scenarios.partial_parameter):
        assert_refused(record, "ValueError", "^parameter 'odd'.*P")


@pytest.mark.parametrize("kind", ["shard last", "partial", "replicate"])
def test_gradients_that_lie_otherwise_are_laid_out_like_their_parameters(job, kind):
    """As tensor parallelism alone leaves them."""
    expected = job.run(fault_scenarios.misplaced_gradients, None)
    for got, wanted in zip(job.run(fault_scenarios.misplaced_gradients, kind), expected, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("trouble", ["nan", "inf", "sparse"])
def test_a_bad_gradient_of_what_a_rank_shares_with_nobody_stops_all(job, trouble):
    for rank, (good, bad, next_one) in enumerate(job.run(fault_scenarios.bad_beside, trouble)):
        assert good["error"] is None and "a" in good["changed"] and "own" in good["changed"]
        assert bad["changed"] == [] and bad["seconds"] < TIMEOUT
        if trouble == "sparse":
            assert bad["error"] == ("TypeError" if rank == 1 else "GradientMismatchError")
        else:
            assert bad["error"] is None
            assert re.search(r"\bown\b" if rank == 1 else "other ranks hold", bad["warnings"][0][1])
        assert next_one["error"] is None and "a" in next_one["changed"]


def test_a_gradient_that_lies_otherwise_on_one_rank_is_refused_by_all(job):
    for good, misplaced, next_one in job.run(fault_scenarios.misplaced_gradient, "partial", [1]):
        assert_took_place(good)
        assert misplaced["error"] is not None
        assert_refused(misplaced, misplaced["error"], r"\ba\b|'a'")
        assert_took_place(next_one)


def test_ranks_of_two_meshes_agree_though_one_is_only_in_one_of_them(job):
    for rank, (first, torn, third, bad, last) in enumerate(job.run(fault_scenarios.two_meshes)):
        for good in (first, third, last):
            assert good["error"] is None and "a" in good["changed"], (rank, good)
        assert_refused(torn, "GradientMismatchError", r"\bc\b|other ranks hold")
        assert (bad["error"], bad["changed"]) == (None, [])
        assert [category for category, _ in bad["warnings"]] == ["NonFiniteGradientWarning"]


# Parameters that are replaced


@pytest.mark.parametrize("how", ["accelerate", "directly", "swapped"])
def test_replaced_parameters_get_a_new_plan_and_new_state(job, how):
    expected = lifetime_scenarios.replace_plain(how)
    for rank in job.run(lifetime_scenarios.replace_parameters, how):
        assert rank["states"] == len(TABLE)
        assert rank["momentum"] == "(Shard(dim=0),)"
        assert f"dim 0/{RANKS} on mesh {RANKS}" in rank["plan"]
        if how == "accelerate":  # a plan of placeholders is refused, and does no harm
            assert_refused(rank["between"], "ValueError", "^parameter 'a'")
        assert_same(rank["result"], expected)


def test_fully_shard_after_the_optimizer_was_made(job):
    assert job.run(lifetime_scenarios.shard_after_construction, True) == [[]] * RANKS


def test_fully_shard_after_the_optimizer_was_made_and_nobody_told_it(job):
    """Either right, or an error: never an optimizer that silently trains tensors nobody uses any more."""
    for ok, answer in job.outcomes(lifetime_scenarios.shard_after_construction, False):
        assert answer == [] if ok else re.search("replaced|no longer|stale", answer)


def test_a_rank_that_makes_a_new_plan_alone_is_followed(job):
    """It compared the numbers of replicas while the others told how their gradients were."""
    first, *others = job.run(lifetime_scenarios.replan_alone)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)

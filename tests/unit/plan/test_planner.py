"""The planner says what a job will do without running it: the same bytes and loads as real plans, on every rank."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import Muon, Orthogonalizer, View, plan_for
from meshmuon.config import Execution
from meshmuon.kernels.dispatch import choose_kernels
from meshmuon.layout.matrices import is_cut_along_the_long_side
from meshmuon.layout.shard_layout import ShardLayout
from meshmuon.plan import job
from meshmuon.plan.assign import assign_owners
from meshmuon.plan.bucket import bytes_sent
from meshmuon.plan.calibration import SHORT_SIDES, Calibration, Sample, Work, fit
from meshmuon.plan.hardware import known_hardware
from meshmuon.plan.models import MODELS, known_model
from meshmuon.plan.route import Route
from meshmuon.plan.words import human
from meshmuon.polar.recipe import Recipe

CPU = torch.device("cpu")
TORCH = Execution(orthogonalizer=Orthogonalizer(kernels="torch"))
R, S = Replicate(), Shard


def SS(dim, factor):
    return _StridedShard(dim, split_factor=factor)


# Sizes that do not divide, a stack of experts, and things that AdamW takes.
BLOCK = {
    "self_attn.q_proj.weight": (20, 13),
    "self_attn.o_proj.weight": (13, 20),
    "mlp.gate_proj.weight": (37, 13),
    "mlp.up_proj.weight": (37, 13),
    "mlp.down_proj.weight": (13, 37),
    "norm.weight": (13,),
}
SHAPES = {f"layers.{i}.{name}": shape for i in range(3) for name, shape in BLOCK.items()}
EXPERTS = {
    f"layers.{i}.experts.{name}": shape for i in range(2) for name, shape in (("up", (7, 9, 13)), ("down", (7, 13, 9)))
}

COLUMN, ROW = ("q_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def tensor_parallel(name, on_rows, on_columns, otherwise):
    if any(word in name for word in COLUMN):
        return on_rows
    return on_columns if any(word in name for word in ROW) else otherwise


# name → (shapes, mesh, rules for the planner, what torch does to each parameter, settings)
LAYOUTS = {
    "fsdp": (SHAPES, {"dp": 4}, {"dp": "shard0"}, lambda name: [S(0)], {}),
    "fsdp, one by one": (SHAPES, {"dp": 3}, {"dp": "shard0"}, lambda name: [S(0)], {"workspace_bytes": 1}),
    "more ranks than matrices": (SHAPES, {"dp": 24}, {"dp": "shard0"}, lambda name: [S(0)], {}),
    "tp": (SHAPES, {"tp": 3}, {"tp": "tensor"}, lambda name: [tensor_parallel(name, S(0), S(1), R)], {}),
    "fsdp x tp": (
        SHAPES,
        {"dp": 3, "tp": 2},
        {"dp": "shard0", "tp": "tensor"},
        lambda name: tensor_parallel(name, [SS(0, 2), S(0)], [S(0), S(1)], [S(0), R]),
        {"share_replicas": "never"},
    ),
    "hsdp, repeated": (
        SHAPES | EXPERTS,
        {"r": 2, "s": 3},
        {"r": "replicate", "s": {"*experts*": "shard1", "*": "shard0"}},
        lambda name: [R, S(1) if "experts" in name else S(0)],
        {"share_replicas": "never"},
    ),
    "hsdp, shared": (
        SHAPES | EXPERTS,
        {"r": 2, "s": 3},
        {"r": "replicate", "s": {"*experts*": "shard1", "*": "shard0"}},
        lambda name: [R, S(1) if "experts" in name else S(0)],
        {"share_replicas": "always"},
    ),
    "ep": (
        SHAPES | EXPERTS,
        {"ep": 4},
        {"ep": {"*experts*": "experts", "*": "shard0"}},
        lambda name: [S(0)],
        {},
    ),
    "ep x efsdp": (
        SHAPES | EXPERTS,
        {"efsdp": 3, "ep": 2},
        {"efsdp": {"*experts*": "shard1", "*": "shard0"}, "ep": {"*experts*": "experts", "*": "shard0"}},
        lambda name: [S(1), S(0)] if "experts" in name else [S(0), S(0)],
        {},
    ),
    "ep under efsdp on the same dim": (
        SHAPES | EXPERTS,
        {"efsdp": 2, "ep": 2},
        {"efsdp": "shard0", "ep": {"*experts*": "experts", "*": "replicate"}},
        lambda name: [SS(0, 2), S(0)] if "experts" in name else [S(0), R],
        {"share_replicas": "never"},
    ),
}


@contextlib.contextmanager
def pretended_job(rank, ranks):
    """A process that takes itself for one of many: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(full, mesh, placements):
    piece = full
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(piece, mesh.size(axis), with_padding=False, contiguous=False)
            piece = pieces[mesh.get_local_rank(axis)]
    return DTensor.from_local(piece.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def real_plan(layout, rank):
    """The plan of a real optimizer over DTensors that torch has cut."""
    shapes, sizes, _, placements, settings = LAYOUTS[layout]
    # torch caches by mesh, and meshes of two jobs in one process are equal unless their axes have other names.
    mesh = init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(f"{axis} of {layout} {rank}" for axis in sizes)
    )
    params = [(name, nn.Parameter(shard(torch.zeros(shape), mesh, placements(name)))) for name, shape in shapes.items()]
    return Muon(params, **settings).plan


def forecast(layout, **more):
    shapes, mesh, rules, _, settings = LAYOUTS[layout]
    return plan_for(shapes, mesh, rules, execution=Execution(**settings), device=CPU, **more)


def sent_by(plan):
    return sum(bytes_sent(bucket, plan.rank) for bucket in plan.buckets if bucket.route is Route.OWNED)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_operations_and_collectives_are_those_of_real_plans_on_every_rank(layout):
    said = forecast(layout).route()
    ranks = math.prod(LAYOUTS[layout][1].values())
    exchanges = []
    for rank in range(ranks):
        with pretended_job(rank, ranks):
            plan = real_plan(layout, rank)
        assert said.bytes_sent.each[rank] == sent_by(plan)
        assert said.flops.each[rank] == sum(plan.computed_here(bucket) * bucket.flops for bucket in plan.buckets)
        exchanges.append(2 * sum(bucket.route is Route.OWNED for bucket in plan.buckets))
        assert said.workspace >= max(bucket.bytes for bucket in plan.buckets)
    assert said.exchanges in exchanges
    assert sum(said.bytes_sent.each) > 0


def test_the_comparison_can_fail():
    """The sabotage: another rule for one axis is another job."""
    shapes, mesh, _, _, _ = LAYOUTS["fsdp"]
    other = plan_for(shapes, mesh, {"dp": "shard1"}, device=CPU).route()
    assert other.bytes_sent.each != forecast("fsdp").route().bytes_sent.each


def test_whole_experts_do_not_travel_and_uneven_ones_unbalance():
    said = plan_for(EXPERTS, {"ep": 4}, {"ep": "experts"}, device=CPU)
    assert said.chosen == "local" and {route.route for route in said.routes} == {"local"}
    assert set(said.route().bytes_sent.each) == {0}
    # 7 experts on 4 ranks are 2, 2, 2 and 1.
    assert said.route().loads.balance == pytest.approx(2 / (7 / 4))
    assert said.matrices == 4 * 7


def test_replicated_models_are_shared_and_the_bytes_are_those_of_a_real_plan():
    """DDP: `process_group=` asks for sharing, so every direction goes to everybody."""
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
    said = plan_for(shapes, {"dp": 3}, {"dp": "replicate"}, device=CPU)
    assert said.chosen == "split"
    for rank in range(3):
        with pretended_job(rank, 3):
            params = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
            plan = Muon(params, process_group=dist.group.WORLD).plan
        assert said.route("split").bytes_sent.each[rank] == sent_by(plan)
    assert said.route("local").bytes_sent.max == 0
    assert said.route("local").flops.mean == pytest.approx(3 * said.route("split").flops.mean)


# ---------------------------------------------------------------- models and shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124439808),
        ("llama-3-8b", 8.030261248),
        ("llama-3-70b", 70.553706496),
        ("qwen2-0.5b", 0.494032768),
        ("mixtral", 46.702792704),
    ],
)
def test_known_models_have_the_published_number_of_parameters(name, billions):
    assert sum(map(math.prod, known_model(name).values())) == round(billions * 1e9)


def test_kimi_k2_has_69120_expert_matrices_and_a_trillion_parameters():
    shapes = known_model("kimi-k2")
    assert sum(shape[0] for name, shape in shapes.items() if ".experts." in name) == 69120
    assert sum(map(math.prod, shapes.values())) == pytest.approx(1.026e12, rel=1e-3)


def test_a_module_on_meta_gives_what_its_shapes_give():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(13, 37, bias=False), nn.LayerNorm(37), nn.Linear(37, 13, bias=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    mine, other = (plan_for(what, {"dp": 4}, {"dp": "shard0"}) for what in (model, shapes))
    assert mine.routes == other.routes
    assert (mine.parameters, mine.matrices) == (2 * 13 * 37 + 2 * 37, 2)


def test_views_beside_shapes():
    whole = plan_for({"qkv": (48, 16)}, {"dp": 2}, {"dp": "shard0"})
    split = plan_for({"qkv": ((48, 16), View(split_rows=(16, 16, 16)))}, {"dp": 2}, {"dp": "shard0"})
    plain = plan_for({"qkv": ((48, 16), {"split_rows": (16, 16, 16)})}, {"dp": 2}, {"dp": "shard0"})
    wrapped = plan_for({"module._orig_mod.qkv": ((48, 16), View(split_rows=(16, 16, 16)))}, {"dp": 2}, {"dp": "shard0"})
    assert (whole.matrices, split.matrices, wrapped.matrices) == (1, 3, 3)
    assert plain.routes == split.routes


# ---------------------------------------------------------------- routes


def test_formulas_of_the_other_routes():
    """An all-gather moves every matrix; Gram matrices and factors are (4 + 2·2)·m²/2 bytes, (P-1)/P of each."""
    m, n, size, count = 256, 2048, 4, 8
    shapes = {f"w{i}": (m, n) for i in range(count)}
    said = plan_for(shapes, {"tp": size}, {"tp": "shard1"}, execution=TORCH)
    triangle = m * (m + 1) // 2
    assert said.route("gather").bytes_sent.each == ((size - 1) * count * m * n // size * 2,) * size
    assert said.route("gather").flops.mean == pytest.approx(size * said.route("owner").flops.mean)
    gram = said.route("gram")
    assert gram.bytes_sent.max == pytest.approx(count * triangle * (4 + 2 * 2) * (size - 1) / size)
    # 5 steps with a restart: 14 products of m×m, 2 more for the restart in Gram space; 3 thin ones on each rank's part.
    assert gram.flops.mean == pytest.approx(count / size * (16 * 2 * m**3 + 6 * m * m * n))
    assert gram.bytes_sent.max < said.route("owner").bytes_sent.max, "P < n/m"


@pytest.mark.parametrize("restarts", ["auto", (), (1, 2, 3, 4)])
def test_the_gram_route_is_forecast_with_the_restarts_it_takes(restarts):
    shapes = {f"layers.{i}.w.weight": (1024, 65536) for i in range(2)}
    execution = Execution(orthogonalizer=Orthogonalizer(restarts=restarts))
    said = plan_for(shapes, {"dp": 2}, {"dp": "shard1"}, execution=execution)
    assert {bucket.route for bucket in said.plan.buckets} == {Route.SHARDED}
    if restarts != "auto":
        assert {bucket.recipe.restarts for bucket in said.plan.buckets} == {restarts}
    factors = len(said.plan.buckets[0].recipe.restarts) + 1
    m, n, triangle = 1024, 65536, 1024 * 1025 // 2
    chosen = said.route(said.chosen)
    assert chosen.bytes_sent.max == pytest.approx(2 * triangle * (4 + 2 * factors) / 2, rel=1e-3)
    assert chosen.flops.mean >= (2 * factors + 1) * m * m * n, "each factor is applied, to one matrix for each rank"


@pytest.fixture(params=[True, False], ids=["with Triton", "without Triton"])
def installed(request, monkeypatch):
    choose_kernels.cache_clear()  # it remembers, and would not look again
    monkeypatch.setattr("meshmuon.kernels.dispatch.has_triton", lambda: request.param)
    yield
    choose_kernels.cache_clear()


@pytest.mark.usefixtures("installed")
def test_products_are_those_of_the_target_whatever_this_machine_has():
    m, n, size, count = 768, 6144, 4, 8
    shapes = {f"w{i}": (m, n) for i in range(count)}
    hopper, blackwell = (plan_for(shapes, {"tp": size}, {"tp": "shard1"}, gpu) for gpu in ("h200", "b200"))
    assert "cluster program" in str(hopper.recipes)
    assert "program" not in str(blackwell.recipes) and "triton" not in str(blackwell.recipes)
    # Symmetric products at half: 5m²n + 18m³.
    assert hopper.route("gram").flops.mean == pytest.approx(count / size * (18 * m**3 + 5 * m * m * n))
    # With a folded restart: a Gram matrix and one product with x, and 22 instead of 14 m³.
    assert hopper.route("owner").flops.mean == pytest.approx(count / size * (22 * m**3 + 3 * m * m * n))
    one = plan_for({"w": (256, 1024)}, {"tp": size}, {"tp": "shard1"})
    assert "cluster program" in str(one.recipes), "as on the GPU"
    small = plan_for({"w": (128, 1024)}, {"tp": size}, {"tp": "shard1"})
    assert "float32 triton kernels" in str(small.recipes), "as on the GPU"
    assert small.route("owner").bytes_sent.max == one.route("owner").bytes_sent.max, "half the numbers, in fp32"


def test_fp32_takes_longer_on_every_route_and_in_the_balance_of_owners():
    shapes = {f"small.{i}": (128, 4096) for i in range(8)}
    fp16 = Execution(orthogonalizer=Orthogonalizer(dtype="float16"))
    auto, half = (plan_for(shapes, {"tp": 4}, {"tp": "shard1"}, execution=how) for how in (Execution(), fp16))
    for route in ("owner", "gram"):
        assert sum(auto.route(route).work.flops) > 10 * sum(half.route(route).work.flops), route
        assert sum(auto.route(route).loads.each) > 10 * sum(auto.route(route).flops.each), route
    each = auto.plan.buckets[0].recipe.flops(128, 4096)
    assert sum(auto.route("owner").flops.each) == 8 * each, "but they are no more operations"
    assert f"{human(8 * each / 4, unit='FLOP')} a step" in str(auto.plan)
    mixed = {f"large.{i}": (2048, 2048) for i in range(3)} | {f"small.{i}": (192, 2048) for i in range(96)}
    (team,) = {bucket.team for bucket in plan_for(mixed, {"tp": 4}, {"tp": "shard1"}).plan.buckets}
    load = dict.fromkeys(team, 0.0)
    for bucket in plan_for(mixed, {"tp": 4}, {"tp": "shard1"}).plan.buckets:
        for owner in bucket.owners:
            load[team[owner]] += bucket.cost
    assert max(load.values()) < 1.1 * sum(load.values()) / 4


def test_the_plan_says_of_each_shape_how_it_is_computed_and_why():
    def said(shapes, gpu):
        plan = plan_for(shapes, {"gpu": 1}, {"gpu": "replicate"}, gpu).plan
        return [line.strip() for line in str(plan).splitlines() if line.startswith("  ")]

    shapes = {"q": (1024, 1024), "k": (1024, 1024), "up": (4096, 1024), "small": (512, 128), "large": (16384, 16384)}
    assert said(shapes, "h200") == [
        "128x512: gram float32 triton kernels (fp32, short side below 256)",
        "1024x1024: gram restart 2,3 float16 paired program (symmetric results cost half)",
        "1024x4096: gram folded 2 float16 paired program (symmetric results cost half)",
        "16384x16384: standard float16 triton kernels (symmetric results cost half)",
    ]
    assert said(shapes, "b200") == [
        "128x512: gram float32 (our kernels are not measured on blackwell)",
        "1024x1024, 16384x16384: standard float16 (our kernels are not measured on blackwell)",
        "1024x4096: gram restart 2 float16 (our kernels are not measured on blackwell)",
    ]
    (many,) = said({f"w{i}": (16 * i, 1024) for i in range(1, 12)}, "b200")
    assert many.startswith("16x1024, 32x1024, ") and "128x1024 and 3 more: gram" in many


def test_the_plan_says_which_updates_are_taken_where_they_are_computed():
    def said(shapes, ranks=1, gpu="h200"):
        plan = plan_for(shapes, {"fsdp": ranks}, {"fsdp": "shard0"}, gpu).plan
        found = [line for line in str(plan).splitlines() if line.startswith("updates:")]
        return found[0] if found else None

    even, odd = {"a": (768, 3072), "b": (3072, 768)}, {"c": (768, 772), "d": (772, 768)}
    assert said(even) == "updates: 2 of 2 where they are computed (fp32, rows side by side)"
    assert said({**even, **odd}) == (
        "updates: 2 of 4 where they are computed (fp32, rows side by side); the others in a launch of their own"
    )
    assert said({"layers.experts.w": ((64, 768, 1024), View(experts=True))}).startswith("updates: 64 of 64")
    assert said(even, 2).startswith("updates: 0 of 2"), "others compute some of them"
    assert said(even, gpu="b200") is None, "no programs there"


def test_gram_needs_the_long_side_cut():
    assert {r.route for r in plan_for({"w": (64, 512)}, {"tp": 4}, {"tp": "shard0"}).routes} == {"owner", "gather"}


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((64, 512), {"tp": 4}, {"tp": "shard1"}),
        ((512, 64), {"tp": 4}, {"tp": "shard0"}),
        ((64, 64), {"tp": 4}, {"tp": "shard0"}),
        ((64, 64), {"tp": 4}, {"tp": "shard1"}),
        ((64, 512), {"dp": 2, "tp": 4}, {"dp": "replicate", "tp": "shard1"}),
    ],
)
def test_gram_is_forecast_where_the_optimizer_can_take_it(shape, mesh, placements):
    said = plan_for({"w": shape}, mesh, placements)
    matrices = [matrix for bucket in said.plan.buckets for matrix in bucket.matrices]
    can = all(map(is_cut_along_the_long_side, matrices))
    assert ("gram" in {forecast.route for forecast in said.routes}) == can


@pytest.mark.parametrize("ranks", [8, 64])
def test_more_ranks_compute_less_each_and_are_balanced(ranks):
    said = plan_for("llama-3-8b", {"dp": ranks}, {"dp": "shard0"})
    assert said.chosen == "owner" and said.matrices == 224
    assert said.route().loads.balance <= 1.10
    assert said.route("gather").ms > 4 * said.route().ms
    assert said.route().ms <= said.route().serial_ms
    assert "Muon takes owner" in str(said)


def test_state_and_fit_in_memory():
    small, large = (plan_for("llama-3-70b", {"dp": n}, {"dp": "shard0"}, "h100") for n in (8, 512))
    assert not small.fits and large.fits
    assert "more than 80.0 GB" in str(small)
    embeddings = 2 * 128256 * 8192
    vectors = (2 * 80 + 1) * 8192
    assert small.state_bytes == pytest.approx(4 * (70.553706496e9 + embeddings + vectors) / 8, rel=1e-6)


def test_faster_hardware_and_networks_are_faster():
    def ms(*hardware):
        said = plan_for("llama-3-8b", {"dp": 64}, {"dp": "shard0"}, hardware[0], network=hardware[1], execution=TORCH)
        return said.route().device_ms

    assert ms("b200", "infiniband") < ms("h200", "infiniband") < ms("h200", "ethernet")


# ---------------------------------------------------------------- thousands of ranks: operations counted, not seconds


@pytest.fixture
def calls(monkeypatch):
    """Counts what would grow as ranks times matrices if it were done carelessly."""
    counted = {"region": 0, "recipe flops": 0, "plans": 0, "owners": 0}

    def count(key, function):
        def wrapper(*arguments, **more):
            counted[key] += 1
            return function(*arguments, **more)

        return wrapper

    monkeypatch.setattr(ShardLayout, "region", count("region", ShardLayout.region))
    monkeypatch.setattr(Recipe, "flops", count("recipe flops", Recipe.flops))
    monkeypatch.setattr(job, "build_plan", count("plans", job.build_plan))
    return counted


def test_llama_70b_on_4096_ranks(calls):
    said = plan_for("llama-3-70b", {"dp": 512, "tp": 8}, {"dp": "shard0", "tp": "tensor"})
    assert (said.ranks, said.matrices, len(said.route().bytes_sent.each)) == (4096, 560, 4096)
    # Five ways to be cut, each asked once for each rank, and a few times for each of 723 parameters.
    assert calls["region"] < 5 * 4096 + 8 * 723
    assert calls["plans"] == 1 and calls["recipe flops"] < 5000
    whole = 2 * 2 * sum(math.prod(s) for n, s in known_model("llama-3-70b").items() if "proj" in n)
    assert sum(said.route().bytes_sent.each) == pytest.approx(whole, rel=1e-3), "everything once there, once back"


def test_kimi_k2_on_4096_ranks(calls):
    rules = {"efsdp": {"*.experts.*": "shard1", "*": "shard0"}, "ep": {"*.experts.*": "experts", "*": "shard0"}}
    said = plan_for("kimi-k2", {"efsdp": 64, "ep": 64}, rules)
    assert (said.ranks, said.matrices) == (4096, 69120 + 61 * 5 + 60 * 4 + 3)
    assert calls["region"] < 10 * 4096 + 8 * 975 and calls["plans"] == 1


def test_69120_matrices_of_one_team_of_4096(calls):
    rules = {"dp": {"*.experts.*": "shard1", "*": "shard0"}}
    said = plan_for({n: s for n, s in known_model("kimi-k2").items() if ".experts." in n}, {"dp": 4096}, rules)
    assert said.matrices == 69120 and calls["region"] < 4 * 4096
    assert said.route().loads.balance == pytest.approx(17 / (69120 / 4096))


def test_owners_are_found_in_time_that_grows_with_the_logarithm_of_ranks():
    """As many costs as the largest job has: done with a heap, not by looking at every rank for every matrix."""
    owners = assign_owners([1.0] * 69120, 4096)
    assert max(map(owners.count, range(0, 4096, 512))) == 17


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "llama-4"}, [*MODELS, "llama-4"]),
        ({"model": 7}, ["model", "int"]),
        ({"model": {}}, ["model", "shape"]),
        ({"model": {"w": ("a", 3)}}, ["'w'", "shape"]),
        ({"hardware": "tpu"}, ["tpu", "h100", "h200", "b200"]),
        ({"network": "pigeons"}, ["pigeons", "infiniband", "ethernet"]),
        ({"mesh": {"dp": 0}}, ["mesh['dp']", "0"]),
        ({"mesh": {"dp": 2.0}}, ["mesh['dp']", "2.0"]),
        ({"mesh": {}}, ["mesh"]),
        ({"mesh": {"dp": 2, "tp": 2}}, ["placements", "dp", "tp"]),
        ({"placements": {"dp": "sharded"}}, ["sharded", "shard0", "replicate", "tensor", "experts"]),
        ({"placements": {"dp": {"*": "sharded"}}}, ["sharded", "shard0"]),
        ({"placements": {"dp": "shard2"}}, ["'w'", "dim 2", "(4, 6)"]),
        ({"model": {"w": ((4, 6), View(split_rows=(4, 4)))}}, ["'w'", "split_rows"]),
        ({"model": {"bias": (4,)}}, ["none of 1 parameters takes Muon"]),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name_with_what_is_known(change, words):
    arguments = {"model": {"w": (4, 6)}, "mesh": {"dp": 2}, "placements": {"dp": "shard0"}, **change}
    with pytest.raises((ValueError, TypeError)) as caught:
        plan_for(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_route_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match='"owner" or "gather"'):
        plan_for({"w": (4, 6)}, {"dp": 2}, {"dp": "shard0"}).route("split")


# ---------------------------------------------------------------- constants


def truth():
    return Calibration(rates=(5e14, 4e14, 3e14, 2e14), bandwidth=3e12, launch=9e-6)


def test_fit_finds_the_constants_that_made_the_measurements():
    start = known_hardware("h200").calibration
    works = [Work(tuple(1e12 * (i == j) for j in range(len(SHORT_SIDES))), 1e6, 3.0) for i in range(len(SHORT_SIDES))]
    works += [Work(bytes=1e9), Work(calls=50.0), Work((1e11,) * 4, 1e8, 10.0)]
    samples = [Sample(work, truth().seconds(work)) for work in works]
    found = fit(samples, start, trust=1e-9)
    assert found.rates == pytest.approx(truth().rates, rel=1e-4)
    assert (found.bandwidth, found.launch) == pytest.approx((truth().bandwidth, truth().launch), rel=1e-4)


def test_fit_leaves_alone_what_the_measurements_do_not_tell():
    start = known_hardware("h200").calibration
    found = fit([Sample(Work(bytes=1e9), 2 * start.seconds(Work(bytes=1e9)))], start, trust=1e-6)
    assert found.rates == pytest.approx(start.rates) and found.launch == pytest.approx(start.launch)
    assert found.bandwidth == pytest.approx(start.bandwidth / 2, rel=1e-3)


def test_two_workloads_predict_two_others():
    """The use it is made for: constants fitted on some steps, tried on others of the same device."""
    workloads = {
        "gpt2": ((768, 768), (3072, 768), (768, 3072)),
        "llama-1b": ((2048, 2048), (512, 2048), (8192, 2048)),
        "llama-8b": ((4096, 4096), (1024, 4096), (14336, 4096)),
        "moe": ((1408, 2048), (2048, 1408)),
    }
    works = {
        name: plan_for({f"w{i}": s for i, s in enumerate(shapes * 8)}, {"gpu": 1}, {"gpu": "replicate"}).route().work
        for name, shapes in workloads.items()
    }
    device = Calibration(rates=(5.8e14, 5.6e14, 5.2e14, 5e14), bandwidth=3.4e12, launch=9e-6)
    start = known_hardware("h200").calibration
    fitted = fit([Sample(works[name], device.seconds(works[name])) for name in ("gpt2", "llama-8b")], start)
    for name in ("llama-1b", "moe"):
        assert fitted.seconds(works[name]) == pytest.approx(device.seconds(works[name]), rel=0.2)
        assert start.seconds(works[name]) != pytest.approx(device.seconds(works[name]), rel=0.1), "there was need"


def test_symmetric_kernels_or_other_dtypes_change_the_plan_only_through_the_recipe():
    half = plan_for("gpt2", {"dp": 4}, {"dp": "shard0"})
    single = plan_for(
        "gpt2",
        {"dp": 4},
        {"dp": "shard0"},
        execution=Execution(orthogonalizer=Orthogonalizer(form="standard", dtype="float32")),
    )
    standard = plan_for(
        "gpt2", {"dp": 4}, {"dp": "shard0"}, execution=Execution(orthogonalizer=Orthogonalizer(form="standard"))
    )
    assert single.route().bytes_sent.each == tuple(2 * sent for sent in standard.route().bytes_sent.each)
    assert half.route().flops.mean < standard.route().flops.mean

"""Programs of products: the forms, written down. Run here by plain torch; on a GPU in tests/gpu/test_clusters.py."""

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from meshmuon.config import Orthogonalizer
from meshmuon.kernels import clusters
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.polar import cost
from meshmuon.polar import orthogonalize as entry
from meshmuon.polar import program as module
from meshmuon.polar import recipe as recipes
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.operations import TorchOperations, in_halves
from meshmuon.polar.program import write_program
from meshmuon.polar.ways import Way, evaluate

SCHEDULE = resolve_schedule("polar_express", 5)
WAYS = [
    (5, Way("standard")),
    (4, Way("standard")),
    (1, Way("standard")),
    (5, Way("gram", ())),
    (5, Way("gram", (2,))),
    (5, Way("gram", (2,), whole=True)),
    (5, Way("gram", (2, 4))),
    (5, Way("gram", (), paired=True)),
    (5, Way("gram", (2,), paired=True)),
    (5, Way("gram", (2,), whole=True, paired=True)),
    (5, Way("gram", (2, 3), paired=True)),
    (4, Way("gram", (2,), paired=True)),
    (5, Way("gram", (2,), folded=True)),
    (5, Way("gram", (2,), folded=True, paired=True)),
    (2, Way("gram", (1,), folded=True)),
]


class Plain(TorchOperations):
    """The operations as a program has them: one product each, the halves' rest rounded like everything else."""

    def gram(self, x):
        return completed(torch.bmm(x, x.mT))

    def quadratic(self, gram, triple):
        a, b, c = triple
        return completed(summed(torch.bmm(gram, gram.mT), [gram], c, (b,), a))

    def symmetric_product(self, left, right):
        return completed(torch.bmm(left, right.mT))

    def gram_in_halves(self, x):
        return in_halves(torch.bmm(x, x.mT), torch.float32)

    def congruence(self, factor, halves):
        high, rest = halves
        product = summed(torch.bmm(factor, high), [torch.bmm(factor, rest)], 1.0, (1.0 / REST_SCALE,), 0.0)
        return completed(torch.bmm(product, factor.mT))

    def combined(self, left, right, added, wanted):
        return [completed(summed(torch.bmm(left, right.mT), added, *terms)) for terms in wanted]


def summed(product, added, alpha, factors, gamma):
    """What is made of a product, and of what is added to it, in the order of the kernel."""
    total = alpha * product + gamma * torch.eye(*product.shape[1:])
    for term, factor in zip(added, factors, strict=True):
        total = total + factor * term
    return total


def completed(triangle):
    """A symmetric matrix of which the lower triangle is there, and anything above it."""
    below = torch.ones(triangle.shape[1:], dtype=torch.bool).tril()
    return torch.where(below, triangle, triangle.mT)


def results_of(product, stacks):
    """What a product writes where."""
    a = completed(stacks[product.a]) if product.half_a else stacks[product.a]
    b = completed(stacks[product.b]) if product.half_b else stacks[product.b]
    done = torch.bmm(a, b.mT if product.mirrored else b)
    added = [completed(stacks[number]) if product.mirrored else stacks[number] for number in product.added]
    found = {product.d: summed(done, added, product.alpha, (product.beta, product.delta)[: len(added)], product.gamma)}
    if product.in_halves:
        assert product.second[1:] == (REST_SCALE, 0.0, 0.0, 0.0)
        found = dict(zip(product.results, in_halves(found[product.d], torch.float32), strict=True))
    elif product.second is not None:
        d, alpha, beta, delta, gamma = product.second
        found[d] = summed(done, added, alpha, (beta, delta)[: len(added)], gamma)
    return found


def by_torch(program, x):
    """Run a program on stacks that begin as garbage."""
    batch, m, n = x.shape
    stacks = [torch.full((batch, m, m if side == "m" else n), float("nan")) for side in program.columns]
    stacks[0].copy_(x)
    for product in program.products:
        assert not set(product.results) & set(product.operands), "tiles read what others write"
        for number, result in results_of(product, stacks).items():
            stacks[number].copy_(result)
            if product.half_d:  # what is above the diagonal is nobody's
                above = torch.ones(result.shape[1:], dtype=torch.bool).triu(1)
                stacks[number][:, above] = float("nan")
    return stacks[program.result]


def by_form(schedule, way, x):
    return evaluate(x, way, schedule=schedule, operations=Plain(), pairs=Plain())


def matrices():
    x = torch.randn(2, 32, 80, generator=torch.Generator().manual_seed(0))
    return x / x.norm(dim=(1, 2), keepdim=True)


@pytest.mark.parametrize(("steps", "way"), WAYS)
def test_a_program_is_the_form_written_down(steps, way):
    schedule = resolve_schedule("polar_express", steps)
    program = write_program(schedule, way)
    x = matrices()
    got = by_torch(program, x)
    assert torch.equal(got, by_form(schedule, way, x))
    for i in range(len(program.products)):  # every product counts
        fewer = replace(program, products=program.products[:i] + program.products[i + 1 :])
        assert not torch.equal(by_torch(fewer, x), got)


@pytest.mark.parametrize(("steps", "way"), WAYS)
def test_no_more_memory_than_the_values_that_are_needed_at_a_time(steps, way):
    program = write_program(resolve_schedule("polar_express", steps), way)
    assert program.columns.count("n") <= 2
    assert program.columns.count("m") <= {"standard": 2, "gram": 5 if way.folded else 4}[way.form]
    small, large = program.columns.count("m"), program.columns.count("n")
    assert program.held(10, 30) == small * 100 + large * 300


@pytest.mark.parametrize(("steps", "way"), WAYS)
def test_a_stack_is_used_again_only_when_nobody_reads_it_any_more(steps, way):
    """What stands in a stack when a product reads it is the value that was meant."""
    schedule = resolve_schedule("polar_express", steps)
    program = write_program(schedule, way)

    def unplaced(writer, result):
        return module.Program(tuple(writer._products), (), result)

    with mock.patch.object(module._Writer, "finish", unplaced):
        values = write_program.__wrapped__(schedule, way)
    holds = {0: 0}
    for meant, product in zip(values.products, program.products, strict=True):
        for stack, value in zip((*product.operands, *product.added), (*meant.operands, *meant.added), strict=True):
            assert holds[stack] == value
        assert not set(product.results) & set(product.operands), "tiles read what others write"
        assert len(set(product.results)) == len(product.results)
        holds.update(zip(product.results, meant.results, strict=True))
    assert holds[program.result] == values.result


ODD = (SCHEDULE[0], SCHEDULE[1], SCHEDULE[3], SCHEDULE[4])  # two pairs, and nothing else


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        *((resolve_schedule("polar_express", steps), way) for steps, way in WAYS),
        (ODD, Way("gram", (2,), paired=True)),
        (ODD, Way("gram", (2,), folded=True, paired=True)),
        (ODD, Way("gram", (2,), whole=True, paired=True)),
    ],
)
def test_its_products_are_the_operations_that_are_counted(schedule, way):
    m, n = 512, 2048
    program = write_program(schedule, way)
    sizes = [m if side == "m" else n for side in program.columns]
    symmetric = whole = 0
    for product in program.products:
        inner = sizes[product.a]
        if product.mirrored:
            symmetric += m * m * inner
        else:
            whole += 2 * m * sizes[product.d] * inner
    recipe = replace(choose(m, n), schedule=schedule, way=way, program=program)
    assert recipe.flops(m, n) == symmetric + whole
    assert recipe.whole_flops(m, n) == whole


@pytest.mark.parametrize(("steps", "way"), WAYS)
def test_the_kernel_can_do_all_of_it(steps, way):
    program = write_program(resolve_schedule("polar_express", steps), way)
    stacks = [torch.empty(1, 256, 256 if side == "m" else 512, dtype=torch.float16) for side in program.columns]
    for product in program.products:
        clusters._described(product, stacks, after=0, last=False)
    last = program.products[-1]
    assert not last.mirrored and not last.added and last.d == program.result, "so that it can land"


def test_a_program_that_is_too_long_for_a_launch_is_none():
    assert write_program(resolve_schedule("polar_express", 13), Way("standard")) is not None
    assert write_program(resolve_schedule("polar_express", 14), Way("standard")) is None


def choose(m, n, *, steps=5, invariant=None, **wishes):
    return recipes.choose_recipe(
        m,
        n,
        schedule=resolve_schedule("polar_express", steps),
        orthogonalizer=Orthogonalizer(**wishes),
        device=torch.device("meta"),
        dtype=torch.float32,
        eps=1e-7,
        invariant=invariant,
        architecture="hopper",
    )


@pytest.mark.parametrize(
    ("m", "n"), [(768, 768), (768, 3072), (1024, 1024), (1408, 2048), (2048, 8192), (4096, 14336), (8192, 8192)]
)
def test_on_hopper_matrices_go_through_all_products_in_one_launch_and_keep_their_bits(m, n):
    recipe = choose(m, n)
    assert recipe.program is not None
    assert recipe.invariant, "without being asked to"
    assert recipe.describe().endswith("float16 paired program" if m >= 1024 else "float16 cluster program")
    assert recipe.workspace_bytes(m, n) == 2 * recipe.program.held(m, n)
    assert copy.deepcopy(recipe).program.products == recipe.program.products


def test_larger_ones_and_longer_programs_do_not():
    assert choose(8208, 8208).program is None
    assert choose(8208, 8208).invariant and choose(4096, 4096, steps=20).invariant, "one at a time costs nothing there"
    assert choose(768, 768, steps=20).program is None
    assert not choose(768, 768, steps=20).invariant
    assert choose(768, 768, form="svd").program is None
    assert choose(768, 768).in_gram_space().program is None


def test_small_ones_are_torchs_unless_all_products_are_one_launch(monkeypatch):
    in_fp16 = partial(choose, dtype="float16")  # asked for: they are in fp32 else
    assert in_fp16(24, 896).program is not None and in_fp16(24, 896).invariant
    too_long = in_fp16(128, 512, steps=20)
    assert (too_long.program, too_long.kernels.products, too_long.fused) == (None, "torch", True)
    assert too_long.kernels.reason == "short side below 256" and choose(256, 512, steps=20).kernels.products == "triton"
    monkeypatch.setattr(recipes, "is_available", lambda *_, **__: False)
    assert in_fp16(128, 512).kernels == too_long.kernels, "what could not be compiled"


def test_small_ones_are_in_fp32_by_products_that_keep_their_bits():
    small, large = choose(240, 1024), choose(256, 1024)
    assert (small.dtype, small.input_dtype, large.dtype, large.input_dtype) == (
        torch.float32,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    assert (small.kernels.products, small.fused, small.invariant) == ("whole", True, True)
    assert small.describe() == "gram float32 triton kernels" and small.restarts == ()
    assert small.flops(240, 1024) == cost.gram_flops(240, 1024, schedule=small.schedule, restarts=())
    assert small.cost(240, 1024) > 10 * small.flops(240, 1024) and large.cost(256, 1024) == large.flops(256, 1024)
    assert not choose(240, 1024, form="svd").invariant
    other = choose(240, 1024, kernels="torch")
    assert (other.dtype, other.kernels.products, other.fused) == (torch.float32, "torch", False)
    asked, forced = choose(240, 1024, kernels="triton"), choose(240, 1024, dtype="float32")
    assert asked.kernels.products == forced.kernels.products == "whole"
    assert choose(256, 1024, dtype="float32").kernels.reason == "products in torch.float32"
    with pytest.raises(ValueError, match=r"products in torch\.float32"):
        choose(256, 1024, dtype="float32", kernels="triton")


def test_parameters_in_fp64_are_torchs_whatever_they_are_computed_in():
    """Kernels read what arrives in fp32, where 1e60 is infinite."""
    settings = {"schedule": resolve_schedule("polar_express", 5), "device": torch.device("cuda"), "eps": 1e-7}
    for shape in ((64, 256), (512, 512)):
        for wanted in ("auto", "float32", "float16"):
            recipe = recipes.choose_recipe(
                *shape,
                **settings,
                orthogonalizer=Orthogonalizer(dtype=wanted),
                dtype=torch.float64,
                architecture="hopper",
            )
            assert (recipe.kernels.products, recipe.fused, recipe.input_dtype) == ("torch", False, torch.float64)


def test_a_restart_more_costs_no_program():
    """With one restart more than their 13 steps need, squares in bf16 would not fit into a launch."""
    assert choose(1024, 1024, steps=13, dtype="bfloat16").program is not None
    assert choose(1024, 1024, steps=13, dtype="bfloat16").invariant


@pytest.mark.parametrize("steps", [12, 14, 16])
def test_without_a_program_the_way_is_one_without(steps):
    recipe = choose(1024, 1024, steps=steps)
    assert recipe.program is None
    assert not recipe.way.paired
    schedule = resolve_schedule("polar_express", steps)
    costs = [cost.standard_flops(1024, 1024, steps=steps, symmetric=True)]
    costs.append(cost.gram_flops(1024, 1024, schedule=schedule, restarts=recipe.restarts or (2,), symmetric=True))
    assert recipe.flops(1024, 1024) <= min(costs) + 1024**3


def test_a_cut_matrix_has_no_pairs():
    for shape in ((768, 1280), (1408, 2048)):
        plain = choose(*shape).in_gram_space()
        assert plain.way == Way("gram", plain.restarts)


def test_what_cannot_run_while_a_graph_is_captured_goes_product_by_product(monkeypatch):
    asked = []

    def evaluate(start, way, **how):
        asked.append((way, how))
        return start[0]

    monkeypatch.setattr(entry, "can_run", lambda *_: False)
    monkeypatch.setattr(entry, "evaluate", evaluate)
    for shape in ((768, 1280), (1408, 2048)):
        recipe = choose(*shape)
        entry._iterate([torch.zeros(1, 16, 16)], recipe)
        way, how = asked[-1]
        assert way == recipe.way
        assert "pairs" not in how, "no kernel but ours does two steps at once"


def test_without_the_kernel_there_is_no_program(monkeypatch):
    assert choose(768, 768, invariant=False).invariant, "nothing else can come of a program"
    monkeypatch.setattr(recipes, "is_available", lambda *_, **__: False)
    assert choose(768, 768).program is None
    assert not choose(768, 768).invariant
    assert choose(2048, 2048).invariant, "by cuBLAS, one at a time"
    assert not clusters.is_available(torch.device("cpu"), torch.float16)


def test_memory_with_sides_that_need_padding():
    recipe = choose(760, 1000)
    assert recipe.workspace_bytes(760, 1000) == 2 * recipe.program.held(768, 1008) + 2 * 768 * 1008


class Stand:
    """A launch that remembers, and computes by plain torch."""

    def __init__(self, made):
        self.made = made

    def __call__(self, products, stacks, written=None, lands=0):
        self.made.append((len(products), None if written is None else written.tolist()))

        def launch():
            for product in products:
                for number, result in results_of(product, stacks).items():
                    stacks[number].copy_(result)

        return launch


def test_all_products_are_one_launch(monkeypatch):
    made = []
    monkeypatch.setattr(module, "ClusterLaunch", Stand(made))
    monkeypatch.setattr(module.clusters, "can_run", lambda *_, **__: True)
    schedule = resolve_schedule("polar_express", 5)
    program = copy.deepcopy(write_program(schedule, Way("standard")))  # knows nothing yet
    x = matrices()
    assert module.can_run(program, x)
    got = module.run_program(program, [x.clone()])
    assert made == [(15, [0, 0, 0])]
    assert torch.equal(got, by_form(schedule, Way("standard"), x))


def test_what_cannot_run_now_is_asked_again_until_it_has_run(monkeypatch):
    answers = [False, True, True]
    monkeypatch.setattr(module, "ClusterLaunch", Stand([]))
    monkeypatch.setattr(module.clusters, "can_run", lambda *_, **__: answers.pop(0))
    program = copy.deepcopy(write_program(resolve_schedule("polar_express", 5), Way("standard")))
    x = matrices()
    assert not module.can_run(program, x)
    assert module.can_run(program, x)
    assert module.can_run(program, x), "asked again: nothing was prepared yet"
    module.run_program(program, [x.clone()])
    assert module.can_run(program, x), "known by now"


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch):
    asked = []
    monkeypatch.setattr(clusters, "why_impossible", lambda *_: "")
    monkeypatch.setattr(clusters, "is_available", lambda *_: asked.append(1) or True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    results = (clusters.Result(768, 768, True),)
    assert not clusters.can_run(torch.device("cuda", 0), torch.float16, batch=3, results=results)
    assert not asked

"""Programs of products: the forms, written down. Run here by plain torch; on a GPU in tests/gpu/test_clusters.py."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshmuon.config import Orthogonalizer
from meshmuon.kernels import clusters
from meshmuon.kernels.symmetric_matmul import REST_SCALE
from meshmuon.polar import program as module
from meshmuon.polar import recipe as recipes
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import folded_gram_newton_schulz, gram_newton_schulz
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.operations import TorchOperations, in_halves
from meshmuon.polar.program import write_program

FORMS = [
    ("standard", 5, (), False),
    ("standard", 4, (), False),
    ("standard", 1, (), False),
    ("gram", 5, (), False),
    ("gram", 5, (2,), False),
    ("gram", 5, (2, 4), False),
    ("gram", 5, (2,), True),
    ("gram", 2, (1,), True),
]


class Plain(TorchOperations):
    """The six operations as a program has them: one product each, the halves' rest rounded like everything else."""

    def quadratic(self, gram, triple):
        a, b, c = triple
        return torch.baddbmm(gram, gram, gram.mT, beta=b, alpha=c).add_(a * torch.eye(gram.shape[-1]))

    def symmetric_product(self, left, right):
        return torch.bmm(left, right.mT)

    def gram_in_halves(self, x):
        return in_halves(torch.bmm(x, x.mT), torch.float32)

    def congruence(self, factor, halves):
        high, rest = halves
        product = torch.baddbmm(torch.bmm(factor, rest), factor, high, beta=1.0 / REST_SCALE)
        return torch.bmm(product, factor.mT)


def by_torch(program, x):
    """Run a program on stacks that begin as garbage."""
    batch, m, n = x.shape
    stacks = [torch.full((batch, m, m if side == "m" else n), float("nan")) for side in program.columns]
    stacks[0].copy_(x)
    if program.halves is not None:
        for number, half in zip(program.halves, in_halves(torch.bmm(x, x.mT), torch.float32), strict=True):
            stacks[number].copy_(half)
    for product in program.products:
        a, b = stacks[product.a], stacks[product.b]
        b = b.mT if product.mirrored else b
        if product.c is None:
            result = torch.bmm(a, b)
        else:
            result = torch.baddbmm(stacks[product.c], a, b, beta=product.beta, alpha=product.alpha)
        result.add_(product.gamma * torch.eye(*result.shape[1:]))
        assert product.d not in (product.a, product.b), "tiles read what others write"
        stacks[product.d].copy_(result)
    return stacks[program.result]


def by_form(form, schedule, restarts, folded, x):
    if form == "standard":
        return newton_schulz(x, schedule=schedule, operations=Plain())
    iterate = folded_gram_newton_schulz if folded else gram_newton_schulz
    return iterate(x, schedule=schedule, restarts=restarts, operations=Plain())


def matrices():
    x = torch.randn(2, 32, 80, generator=torch.Generator().manual_seed(0))
    return x / x.norm(dim=(1, 2), keepdim=True)


@pytest.mark.parametrize(("form", "steps", "restarts", "folded"), FORMS)
def test_a_program_is_the_form_written_down(form, steps, restarts, folded):
    schedule = resolve_schedule("polar_express", steps)
    program = write_program(form, schedule, restarts, folded=folded)
    x = matrices()
    got = by_torch(program, x)
    assert torch.equal(got, by_form(form, schedule, restarts, folded, x))
    for i in range(len(program.products)):  # every product counts
        fewer = replace(program, products=program.products[:i] + program.products[i + 1 :])
        assert not torch.equal(by_torch(fewer, x), got)


@pytest.mark.parametrize(("form", "steps", "restarts", "folded"), FORMS)
def test_no_more_memory_than_the_values_that_are_needed_at_a_time(form, steps, restarts, folded):
    program = write_program(form, resolve_schedule("polar_express", steps), restarts, folded=folded)
    assert program.columns.count("n") <= 2
    assert program.columns.count("m") <= {"standard": 2, "gram": 5 if folded else 4}[form]
    small, large = program.columns.count("m"), program.columns.count("n")
    assert program.held(10, 30) == small * 100 + large * 300


@pytest.mark.parametrize(("form", "steps", "restarts", "folded"), FORMS)
def test_a_stack_is_used_again_only_when_nobody_reads_it_any_more(form, steps, restarts, folded):
    """What stands in a stack when a product reads it is the value that was meant."""
    schedule = resolve_schedule("polar_express", steps)
    program = write_program(form, schedule, restarts, folded=folded)

    def unplaced(writer, result):
        return module.Program(tuple(writer._products), (), result, writer._halves)

    with mock.patch.object(module._Writer, "finish", unplaced):
        values = write_program.__wrapped__(form, schedule, restarts, folded=folded)
    holds = dict(zip([0, *(program.halves or ())], [0, *(values.halves or ())], strict=True))
    for meant, product in zip(values.products, program.products, strict=True):
        for name in ("a", "b", "c"):
            stack = getattr(product, name)
            assert stack is None or holds[stack] == getattr(meant, name)
        assert product.d not in (product.a, product.b, product.c)
        holds[product.d] = meant.d
    assert holds[program.result] == values.result


def test_a_program_that_is_too_long_for_a_launch_is_none():
    assert write_program("standard", resolve_schedule("polar_express", 16), (), folded=False) is not None
    assert write_program("standard", resolve_schedule("polar_express", 17), (), folded=False) is None


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


@pytest.mark.parametrize(("m", "n"), [(768, 768), (768, 3072), (1408, 2048), (2048, 8192)])
def test_on_hopper_matrices_go_through_all_products_in_one_launch_and_keep_their_bits(m, n):
    recipe = choose(m, n)
    assert recipe.program is not None
    assert recipe.invariant, "without being asked to"
    assert recipe.describe().endswith("float16 cluster program")
    assert recipe.workspace_bytes(m, n) == 2 * recipe.program.held(m, n)
    assert copy.deepcopy(recipe).program.products == recipe.program.products


def test_larger_ones_and_longer_programs_do_not():
    assert choose(4096, 4096).program is None
    assert choose(4096, 4096).invariant
    assert choose(768, 768, steps=20).program is None
    assert not choose(768, 768, steps=20).invariant
    assert choose(768, 768, form="svd").program is None
    assert choose(768, 768).in_gram_space().program is None


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

    def __call__(self, products, stacks, written=None):
        self.made.append((len(products), None if written is None else written.tolist()))

        def launch():
            for product in products:
                b = stacks[product.b].mT if product.mirrored else stacks[product.b]
                c = stacks[product.d].zero_() if product.c is None else stacks[product.c]
                result = torch.baddbmm(c, stacks[product.a], b, beta=product.beta, alpha=product.alpha)
                stacks[product.d].copy_(result.add_(product.gamma * torch.eye(*result.shape[1:])))

        return launch


def test_all_products_are_one_launch(monkeypatch):
    made = []
    monkeypatch.setattr(module, "ClusterLaunch", Stand(made))
    monkeypatch.setattr(module.clusters, "can_run", lambda *_, **__: True)
    schedule = resolve_schedule("polar_express", 5)
    program = copy.deepcopy(write_program("standard", schedule, (), folded=False))  # knows nothing yet
    x = matrices()
    assert module.can_run(program, x)
    got = module.run_program(program, [x.clone()])
    assert made == [(15, [0, 0, 0])]
    assert torch.equal(got, by_form("standard", schedule, (), False, x))


def test_what_cannot_run_now_is_asked_again_until_it_has_run(monkeypatch):
    answers = [False, True, True]
    monkeypatch.setattr(module, "ClusterLaunch", Stand([]))
    monkeypatch.setattr(module.clusters, "can_run", lambda *_, **__: answers.pop(0))
    program = copy.deepcopy(write_program("standard", resolve_schedule("polar_express", 5), (), folded=False))
    x = matrices()
    assert not module.can_run(program, x)
    assert module.can_run(program, x)
    assert module.can_run(program, x), "asked again: nothing was prepared yet"
    module.run_program(program, [x.clone()])
    assert module.can_run(program, x), "known by now"


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch):
    asked = []
    monkeypatch.setattr(clusters, "_impossible", lambda *_: "")
    monkeypatch.setattr(clusters, "is_available", lambda *_: asked.append(1) or True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    results = (clusters.Result(768, 768, True),)
    assert not clusters.can_run(torch.device("cuda", 0), torch.float16, batch=3, results=results)
    assert not asked

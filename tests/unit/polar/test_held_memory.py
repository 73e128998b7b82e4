"""The iteration holds no more matrices at a time than its workspace was planned for."""

import weakref

import pytest
import torch
from tests.distributed.memory import LiveBytes

from meshmuon.polar import cost, orthogonalize
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.gram import folded_gram_newton_schulz, gram_newton_schulz, held_small
from meshmuon.polar.newton_schulz import newton_schulz
from meshmuon.polar.operations import TorchOperations
from meshmuon.polar.recipe import Recipe


class Watching(TorchOperations):
    """Counts the numbers of all results that somebody still holds, at the widest moment."""

    def __init__(self):
        self.held, self.most = 0, 0

    def watch(self, tensor):
        self.held += tensor.numel()
        self.most = max(self.most, self.held)
        weakref.finalize(tensor, self._gone, tensor.numel())
        return tensor

    def _gone(self, numbers):
        self.held -= numbers

    def gram(self, x):
        return self.watch(super().gram(x))

    def quadratic(self, gram, triple):
        return self.watch(super().quadratic(gram, triple))

    def symmetric_product(self, left, right):
        return self.watch(super().symmetric_product(left, right))

    def apply(self, factor, x, out=None):
        return self.watch(super().apply(factor, x, out))

    def gram_in_halves(self, x):
        return tuple(map(self.watch, super().gram_in_halves(x)))

    def congruence(self, factor, halves):
        product = self.watch(torch.empty_like(factor))  # q·r, which kernels write before the result
        result = self.watch(super().congruence(factor, halves))
        del product
        return result


class WatchingWhole(Watching):
    """As our products in fp32, which read x.mT row by row and so copy it."""

    def gram(self, x):
        copy = self.watch(x.mT.contiguous())
        result = super().gram(x)
        del copy
        return result


def planned(batch, m, n, *, small):
    return batch * cost.workspace_bytes(m, n, compute_bytes=1, input_bytes=1, fused=True, small=small)


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 32, 48), (1, 32, 128)], ids=str)
@pytest.mark.parametrize("restarts", [(), (2,), (2, 4)], ids=str)
def test_the_gram_form_holds_what_was_planned(shape, restarts):
    watching = Watching()
    start = [watching.watch(torch.randn(shape))]
    schedule = resolve_schedule("polar_express", 5)
    gram_newton_schulz(start, schedule=schedule, restarts=restarts, operations=watching)
    assert watching.most == planned(*shape, small=held_small(schedule, restarts, folded=False))


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 32, 48), (1, 32, 128)], ids=str)
@pytest.mark.parametrize("restarts", [None, (), (2,), (2, 4)], ids=str)
def test_whole_products_hold_no_more_than_was_planned(shape, restarts):
    watching, schedule = WatchingWhole(), resolve_schedule("polar_express", 5)
    start = [watching.watch(torch.randn(shape))]
    if restarts is None:
        newton_schulz(start, schedule=schedule, operations=watching)
    else:
        gram_newton_schulz(start, schedule=schedule, restarts=restarts, operations=watching)
    small = 2 if restarts is None else held_small(schedule, restarts, folded=False)
    assert watching.most <= planned(*shape, small=small)


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 32, 96), (1, 32, 192)], ids=str)
@pytest.mark.parametrize("restart", [1, 2, 3, 4])
def test_a_folded_restart_holds_what_was_planned(shape, restart):
    watching = Watching()
    start = [watching.watch(torch.randn(shape))]
    schedule = resolve_schedule("polar_express", 5)
    folded_gram_newton_schulz(start, schedule=schedule, restarts=(restart,), operations=watching)
    assert watching.most == planned(*shape, small=held_small(schedule, (restart,), folded=True))


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 32, 48), (1, 32, 128)], ids=str)
def test_the_standard_form_holds_what_was_planned(shape):
    watching = Watching()
    start = [watching.watch(torch.randn(shape))]
    newton_schulz(start, schedule=resolve_schedule("polar_express", 5), operations=watching)
    assert watching.most == planned(*shape, small=2)


def test_a_stack_that_is_kept_costs_more():
    watching = Watching()
    start = watching.watch(torch.randn(2, 32, 128))
    schedule = resolve_schedule("polar_express", 5)
    gram_newton_schulz(start, schedule=schedule, restarts=(2,), operations=watching)
    assert watching.most > planned(2, 32, 128, small=4)


@pytest.mark.parametrize("shape", [(2, 32, 64), (3, 48, 48), (1, 16, 128)], ids=str)
@pytest.mark.parametrize("form", ["svd", "gram", "standard"])
def test_a_whole_call_stays_within_what_was_planned(shape, form):
    batch, m, n = shape
    recipe = orthogonalize.choose_recipe(
        m, n, schedule=resolve_schedule("polar_express", 5), orthogonalizer=orthogonalize.Orthogonalizer(form=form),
        device=torch.device("cpu"), dtype=torch.float32, eps=1e-7,
    )  # fmt: skip
    counter = LiveBytes()
    with counter:
        orthogonalize.orthogonalize_stack([torch.ones(shape)], recipe)
    assert 0 < counter.peak <= batch * recipe.workspace_bytes(m, n)


@pytest.mark.parametrize("given", [True, False])
def test_what_is_given_away_is_gone_before_the_iteration_begins(monkeypatch, given):
    x = torch.randn(3, 16, 32)
    before, seen = x.clone(), weakref.ref(x)
    gone = []

    class Looking(TorchOperations):
        def gram(self, x):
            gone.append(seen() is None)
            return super().gram(x)

    recipe: Recipe = orthogonalize.choose_recipe(
        16, 32, schedule=resolve_schedule("polar_express", 5), orthogonalizer=orthogonalize.Orthogonalizer(),
        device=x.device, dtype=x.dtype, eps=1e-7,
    )  # fmt: skip
    monkeypatch.setattr(orthogonalize, "_takes_threads", lambda *_: False)  # as on a GPU
    monkeypatch.setitem(orthogonalize._OPERATIONS, ("torch", recipe.invariant), Looking())
    stack = [x] if given else x
    if given:
        del x
    orthogonalize.orthogonalize_stack(stack, recipe)
    assert gone
    assert all(gone) is given
    if not given:
        assert torch.equal(stack, before), "never written"

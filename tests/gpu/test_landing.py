"""Steps that parameters take where the last product is computed. Run with `pytest -m gpu`. See [Note: landing]."""

import importlib.util
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from meshmuon import Muon, Orthogonalizer, View
from meshmuon.kernels import elementwise
from meshmuon.update.fused import BucketUpdates

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

# Wide, tall, square; sides that fill no tile, no box and no 16; one matrix and many; all kinds of programs.
SHAPES = [(256, 512), (512, 256), (768, 768), (1000, 264), (264, 1000), (296, 296), (1408, 2048), (2048, 1408)]
SHAPES += [(2048, 2048), (512, 2048), (3, 512, 256), (4096, 4352), (4352, 4096), (16, 48), (48, 24), (128, 896)]


def from_memory():
    """As it is without landing: directions are written, and read again by a launch of their own."""
    return mock.patch.object(BucketUpdates, "landing", return_value=None)


def parameters(shapes, *, copies=1):
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, device="cuda")) for s in shapes for _ in range(copies)]


def give_gradients(params, step):
    generator = torch.Generator(device="cuda").manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device="cuda")


def named(params):
    return [(f"layers.{i}.experts.weight" if p.ndim == 3 else f"layers.{i}.weight", p) for i, p in enumerate(params)]


def trained(params, *, steps=5, prepare=lambda params, step: None, **options):
    """Parameters and momentum after some steps, and how many launches took updates from memory."""
    options.setdefault("orthogonalizer", Orthogonalizer(dtype="float16"))  # also of small ones
    opt = Muon(named(params), lr=0.02, **options)
    with mock.patch.object(elementwise, "apply_update", wraps=elementwise.apply_update) as applied:
        for step in range(steps):
            give_gradients(params, step)
            prepare(params, step)
            opt.step()
    state = [opt.state[p]["momentum_buffer"].clone() for p in params]
    return [p.detach().clone() for p in params], state, applied.call_count


def both_ways(make, **options):
    found = []
    for way in (nullcontext, from_memory):
        with way():
            found.append(trained(make(), **options))
    return found


def assert_same(landed, applied):
    assert landed[2] == 0 and applied[2] > 0, "both ways were taken"
    for one, other in zip((*landed[0], *landed[1]), (*applied[0], *applied[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_steps_from_memory(shape, mode):
    assert_same(*both_ways(lambda: parameters([shape], copies=3), weight_decay=0.3, weight_decay_mode=mode))


def test_other_numbers_give_other_bits():
    landed, _ = both_ways(lambda: parameters([(512, 256)], copies=3), weight_decay=0.3)
    other = trained(parameters([(512, 256)], copies=3), weight_decay=0.2)
    assert not torch.equal(landed[0][0], other[0][0])


def test_many_matrices_and_several_groups_of_shapes():
    shapes = [(1408, 2048), (2048, 1408), (768, 768), (768, 3072), (3072, 768)]
    assert_same(*both_ways(lambda: parameters(shapes, copies=40), steps=3))


def test_one_without_a_gradient_stays_as_it_is():
    def without(params, step):
        params[step % 3].grad = None

    assert_same(*both_ways(lambda: parameters([(512, 768)], copies=3), prepare=without))


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_nothing_lands_in_a_step_that_is_skipped(policy):
    def spoiled(params, step):
        if step == 2 and policy == "skip":
            params[1].grad[3, 4] = float("nan")

    landed, applied = both_ways(
        lambda: parameters([(512, 768), (768, 512)], copies=2), prepare=spoiled, non_finite=policy
    )
    assert_same(landed, applied)
    assert all(torch.isfinite(p).all() for p in landed[0])


def test_blocks_of_a_parameter_that_are_not_whole_rows():
    """q, k and v in one weight; and heads on columns, which are strided."""
    for view in (View(split_rows=(512, 256, 256)), View(split_cols=(256, 256)), View(heads=2)):
        options = {"overrides": {"layers.*": view}}
        assert_same(*both_ways(lambda: parameters([(1024, 512)], copies=2), **options))


@contextmanager
def counted():
    """Counts the launches that take updates from memory."""
    with mock.patch.object(elementwise, "apply_update", wraps=elementwise.apply_update) as applied:
        yield applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_learning_rate_on_the_device_that_changes(dtype):
    found = []
    for way in (nullcontext, from_memory):
        params = parameters([(512, 768)], copies=3)
        opt = Muon(params, lr=torch.tensor(0.02, device="cuda", dtype=dtype))
        with way(), counted() as applied:
            for step in range(4):
                give_gradients(params, step)
                opt.param_groups[0]["lr"].fill_(0.02 / (1 + step))
                opt.step()
        assert applied.call_count == (0 if way is nullcontext else 4)
        found.append([p.detach().clone() for p in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_captured_step_lands_with_live_numbers_and_can_be_skipped():
    found = []
    for graph in (False, True):
        params = parameters([(512, 768), (768, 512)], copies=3)
        opt = Muon(params, lr=0.02, cuda_graph=graph)
        give_gradients(params, 0)
        healthy = params[1].grad[3, 4].clone()
        with counted() as applied:
            for step in range(9):
                opt.param_groups[0].update(lr=0.02 / (1 + step), weight_decay=0.1 * (1 + step))
                params[1].grad[3, 4] = float("nan") if step == 6 else healthy
                opt.step()
        assert applied.call_count == 0 and bool(opt._graphs and opt._graphs._captured) is graph
        found.append([p.detach().clone() for p in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(p.isfinite().all() for p in found[1])


@pytest.mark.parametrize("options", [{"offload": True}, {"release_grads": True}, {"weight_decay": 0.0}], ids=str)
def test_other_options_keep_the_bits(options):
    assert_same(*both_ways(lambda: parameters([(512, 768), (768, 512)], copies=2), **options))


def test_two_groups_and_two_optimizers_of_equal_shapes_keep_apart():
    """They may be given the same workspace."""
    found = []
    for way in (nullcontext, from_memory):
        params = parameters([(512, 768)], copies=4)
        opts = [
            Muon([{"params": params[:1], "lr": 0.1}, {"params": params[1:2], "lr": 0.02}], weight_decay=0.3),
            Muon(params[2:], lr=0.05, weight_decay_mode="cautious"),
        ]
        with way():
            for step in range(4):
                give_gradients(params, step)
                for opt in opts:
                    opt.step()
        found.append([p.detach().clone() for p in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_parameters_that_are_stored_turned():
    def likewise(params, step):
        for param in params:
            param.grad = param.grad.mT.contiguous().mT  # as backward passes leave them

    turned = [nn.Parameter(p.detach().mT) for p in parameters([(512, 768)], copies=3)]
    assert not turned[0].is_contiguous()
    assert_same(*both_ways(lambda: [nn.Parameter(p.detach().clone()) for p in turned], prepare=likewise))


def test_products_in_bf16():
    settings = {"orthogonalizer": Orthogonalizer(dtype="bfloat16")}
    assert_same(*both_ways(lambda: parameters([(512, 768), (768, 512)], copies=2), **settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_in_16_bits_take_steps_from_memory(dtype):
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters([(512, 768)], copies=3)]
    opt = Muon(named(params), lr=0.02)
    with mock.patch.object(elementwise, "apply_update", wraps=elementwise.apply_update) as applied:
        for param in params:
            param.grad = torch.randn_like(param)
        opt.step()
    assert applied.call_count == 1

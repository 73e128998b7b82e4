"""The whole optimizer through the kernels, in Triton's interpreter, beside the plain torch path."""

import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshmuon import Muon, Orthogonalizer
from meshmuon.kernels.dispatch import choose_kernels
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.orthogonalize import orthogonalize_stack
from meshmuon.polar.recipe import choose_recipe
from meshmuon.runtime.offload import StreamedState

SHAPES = {"wide": (48, 80), "tall": (80, 48), "odd": (33, 50), "square": (48, 48)}
FEW = {"tall": (40, 24), "odd": (33, 50)}
SMALL = {"a": (16, 32), "b": (16, 32)}
VIEWS = {"qkv": ((72, 48), {"split_rows": (32, 24, 16)}), "experts": ((3, 32, 48), {"experts": True})}


def optimizer(kernels, settings, dtype, *, shapes=SHAPES, views=VIEWS):
    generator = torch.Generator().manual_seed(0)
    groups = [{"params": [(n, torch.randn(s, generator=generator).requires_grad_())]} for n, s in shapes.items()]
    for name, (shape, view) in views.items():
        param = torch.randn(shape, generator=generator).requires_grad_()
        groups.append({"params": [(name, param)], "algorithm": "muon", "view": view})
    for group in groups:
        group.setdefault("algorithm", "muon")
    return Muon(groups, lr=0.02, orthogonalizer=Orthogonalizer(dtype=dtype, kernels=kernels), **settings)


def train(opt, steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        opt.step()
    return [p.detach() for g in opt.param_groups for p in g["params"]], [
        s["momentum_buffer"] for s in opt.state.values()
    ]


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [({}, SHAPES), ({"nesterov": False, "weight_decay_mode": "cautious"}, FEW), ({"weight_decay_mode": "l2"}, FEW)],
)
def test_a_step_is_that_of_plain_torch(settings, shapes):
    ours, theirs = (optimizer(kernels, settings, "float16", shapes=shapes) for kernels in ("triton", "torch"))
    assert "triton kernels" in str(ours) and "triton" not in str(theirs)
    start = [p.detach().clone() for g in ours.param_groups for p in g["params"]]
    params, momentum = train(ours)
    expected, expected_momentum = train(theirs)
    for first, got, wanted in zip(start, params, expected, strict=True):
        # The interpreter truncates inputs to bf16, torch rounds them; where a sign is close to call, decay may differ.
        assert (got - wanted).norm() < 0.03 * (wanted - first).norm()
    for got, wanted in zip(momentum, expected_momentum, strict=True):
        # The interpreter contracts nothing, torch's CPU kernels do; on a GPU the two are equal bit for bit. With "l2"
        # the momentum knows the parameters.
        bound = 1e-4 if settings.get("weight_decay_mode") == "l2" else 1e-6
        assert (got - wanted).norm() < bound * wanted.norm()


def test_the_step_can_be_skipped_and_a_missing_gradient_leaves_a_matrix_alone():
    opt = optimizer("triton", {}, "float16", shapes=FEW)
    train(opt, 1)
    before = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, float("nan"))
    with pytest.warns(UserWarning, match="skipped"):
        opt.step()
    after = [p.detach() for g in opt.param_groups for p in g["params"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for group in opt.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    opt.param_groups[0]["params"][0].grad = None
    opt.step()
    after = [p.detach() for g in opt.param_groups for p in g["params"]]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [False] + [True] * (len(moved) - 1)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(3, 48, 80), (1, 33, 50), (2, 64, 64)])
def test_polar_factors_are_those_of_torch(form, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(torch.bfloat16)
    x[0] *= 1e20
    results = {}
    for kernels in ("triton", "torch"):
        recipe = choose_recipe(
            *shape[1:],
            schedule=resolve_schedule("polar_express", 5),
            orthogonalizer=Orthogonalizer(form=form, dtype="float16", kernels=kernels),
            device=x.device,
            dtype=torch.float32,
            eps=1e-7,
        )
        before = x.clone()
        results[kernels] = orthogonalize_stack(x, recipe).float()
        assert torch.equal(x, before), "never written unless it may be consumed"
    assert (results["triton"] - results["torch"]).norm() < 0.02 * results["torch"].norm()


def test_zero_gives_zero():
    recipe = choose_recipe(
        32,
        48,
        schedule=resolve_schedule("polar_express", 5),
        orthogonalizer=Orthogonalizer(dtype="float16", kernels="triton"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        eps=1e-7,
    )
    assert not orthogonalize_stack(torch.zeros(2, 32, 48, dtype=torch.bfloat16), recipe).any()


def test_the_choice_has_a_reason():
    cpu = torch.device("cpu")
    assert choose_kernels("auto", m=512, dtype=torch.float16, device=cpu).reason == "on a CPU"
    assert choose_kernels("torch", m=512, dtype=torch.float16, device=cpu).reason == "asked for"
    assert choose_kernels("triton", m=512, dtype=torch.float16, device=cpu).products == "triton"


def test_gradients_are_gone_when_the_user_lets_go_of_them():
    """Tables are kept from step to step; a tensor in them would cost as much memory as all gradients."""
    opt = optimizer("triton", {}, "float16", shapes=SMALL, views={})
    train(opt, 2)
    seen = [weakref.ref(p.grad) for g in opt.param_groups for p in g["params"]]
    opt.zero_grad()
    assert [ref for ref in seen if ref() is not None] == []


def test_lent_state_is_gone_after_a_step(monkeypatch):
    buffers = []

    def allocate(size, device):
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        buffers.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(StreamedState.__init__, "__defaults__", (allocate,))
    opt = optimizer("triton", {"offload": True}, "float16", shapes=SMALL, views={})
    train(opt, 2)
    assert buffers and all(ref.expired() for ref in buffers)


def test_products_one_by_one_are_the_same_products(monkeypatch):
    """`layout_invariant` keeps batches, and gives cuBLAS one matrix at a time."""
    from meshmuon.polar.kernel_operations import KernelOperations

    asked = []
    bmm = torch.bmm

    def counted(a, b, out=None):
        asked.append(len(a))
        return bmm(a, b, out=out)

    generator = torch.Generator().manual_seed(0)
    factor, x = (torch.randn(3, 16, n, generator=generator) for n in (16, 32))
    expected = bmm(factor, x)
    monkeypatch.setattr(torch, "bmm", counted)
    for out in (None, torch.empty_like(x)):
        got = KernelOperations(invariant=True).apply(factor, x, out)
        torch.testing.assert_close(got, expected)
        assert out is None or got is out
    assert asked == [1] * 6
    KernelOperations().apply(factor, x)
    assert asked[-1] == 3

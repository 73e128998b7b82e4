"""The one-device optimizer on a GPU. Run with `pytest -m gpu`."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from meshmuon import Muon, NonFiniteGradientWarning, Orthogonalizer, orthogonalize
from meshmuon.kernels import launching
from meshmuon.kernels.self_check import check_kernels
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.testing import ReferenceMuon, plain_newton_schulz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32), nn.LayerNorm(32)).cuda()


def set_gradients(model, seed, *, bad=False):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, device="cuda")
    if bad:
        model[1].weight.grad[3, 4] = float("nan")


def everything(model, opt):
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + [v.clone() for p in model.parameters() for v in opt.state[p].values()]


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(64, 64), (96, 384), (384, 96), (7, 33), (1, 40)])
def test_orthogonalize_is_close_to_the_fp64_iteration(shape, form, dtype):
    x = torch.randn(3, *shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
    got = orthogonalize(x, form=form, dtype=dtype)
    bound = {"bfloat16": 8e-2, "float32": 1e-3}.get(dtype, 1e-2)
    for i in range(3):
        truth = plain_newton_schulz(x[i], resolve_schedule("polar_express", 5))
        assert (got[i] - truth).norm() / truth.norm() < bound
        assert torch.linalg.matrix_norm(got[i].double(), 2) <= 1.35


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_tf32_is_kept_out_of_fp32(form):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 512, device="cuda", dtype=torch.float64)).Q for n in (512, 2048))
    x = ((left * torch.arange(1, 513, device="cuda").double() ** -1.1) @ right.mT).float()  # Gaussians would not tell
    truth = plain_newton_schulz(x, resolve_schedule("polar_express", 5))
    exact = orthogonalize(x, form=form, dtype="float32")
    try:
        torch.set_float32_matmul_precision("high")
        gram = x.double() @ x.double().mT
        assert ((x @ x.mT) - gram).norm() / gram.norm() > 1e-5, "it is on"
        found = orthogonalize(x, form=form, dtype="float32")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, exact) and (found - truth).norm() / truth.norm() < 5e-3


def test_five_steps_match_the_reference():
    model = small_model()
    opt = Muon(model, lr=0.02)
    weights = [model[1].weight.detach().clone(), model[3].weight.detach().clone()]
    reference = ReferenceMuon(weights, lr=0.02)
    for step in range(5):
        set_gradients(model, step)
        reference.step([model[1].weight.grad, model[3].weight.grad])
        opt.step()
    for got, expected in zip((model[1].weight, model[3].weight), weights, strict=True):
        assert (got - expected).norm() / expected.norm() < 1e-2
    assert torch.equal(opt.state[model[1].weight]["momentum_buffer"], reference.buffers[0])


def test_a_step_never_waits_for_the_device():
    model = small_model()
    opt = Muon(model, lr=0.02)
    for step in range(2):  # the first step reads its verdict at once
        set_gradients(model, step)
        opt.step()
    set_gradients(model, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_first_step_compiles_what_all_others_need():
    shapes = [(256, 256), (256, 1024), (1024, 256), (100, 72), (384, 640)]
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    check_kernels.cache_clear()
    with mock.patch.dict(launching._compiled, clear=True):
        opt = Muon(params)
        before = set(launching._compiled)
        assert before, "kernels are checked when the optimizer is made"
        compiled = []
        for step in range(3):
            for param in params:
                param.grad = torch.randn_like(param) * (step + 1)
            opt.step()
            compiled.append(set(launching._compiled))
        assert compiled[0] == compiled[1] == compiled[2]


def test_a_non_finite_gradient_changes_nothing_and_is_reported_later():
    model = small_model()
    opt = Muon(model, lr=0.02)
    for step in range(2):
        set_gradients(model, step)
        opt.step()
    before = everything(model, opt)
    set_gradients(model, 2, bad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, opt), strict=True))
    with pytest.warns(NonFiniteGradientWarning, match=r"step 3.*1\.weight"):
        assert opt.metrics()["skipped_non_finite"] == 1
    set_gradients(model, 3)
    opt.step()
    assert not torch.equal(before[1], model[1].weight)


def test_grad_scaler_with_a_real_overflow():
    model = small_model()
    opt = Muon(model, lr=0.02, non_finite="raise")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**100)
    tokens = torch.arange(64, device="cuda")
    before = everything(model, opt)
    scaler.scale(model(tokens).square().mean() * 1e30).backward()
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, opt), strict=True))
    assert scaler.get_scale() < 2.0**100
    assert opt.metrics()["skipped_grad_scaler"] == 1


def test_moving_the_model_takes_the_state_along():
    model = small_model().cpu()
    opt = Muon(model, lr=0.02)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    momentum = opt.state[model[1].weight]["momentum_buffer"].clone()
    model.cuda()
    for p in model.parameters():
        p.grad = None
    assert torch.equal(opt.state_dict()["state"][0]["momentum_buffer"].cpu(), momentum)
    set_gradients(model, 0)
    opt.step()


def alone_and_in_company(shape, count, **settings):
    """A matrix after three steps by itself and as one of several, which are given as well, and the plan of those."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    together = [torch.randn(shape, device="cuda", generator=generator).requires_grad_() for _ in range(count)]
    alone = copy.deepcopy(together[3])
    one, many = Muon([alone], **settings), Muon(together, **settings)
    for _ in range(3):
        for p in together:
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
        alone.grad = together[3].grad.clone()
        one.step()
        many.step()
    return alone, together, many.plan


@pytest.mark.parametrize("shape", [(128, 256), (256, 256), (100, 333), (768, 3072), (1024, 1024)], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_layout_invariant_gives_the_same_bits_alone_and_in_company(shape, kernels):
    settings = {"layout_invariant": True, "orthogonalizer": Orthogonalizer(kernels=kernels)}
    alone, together, plan = alone_and_in_company(shape, 6, **settings)
    assert len(plan.buckets) == (1 if kernels == "auto" else 6)
    assert torch.equal(alone, together[3])


@pytest.mark.parametrize("shape", [(16, 16), (64, 256), (256, 64), (100, 333), (128, 1024), (240, 240)], ids=str)
def test_small_matrices_have_the_same_bits_in_company_unasked(shape):
    alone, together, plan = alone_and_in_company(shape, 300)
    assert len(plan.buckets) == 1 and plan.buckets[0].recipe.dtype == torch.float32
    assert torch.equal(alone, together[3])
    x = torch.stack([p.detach() for p in together])
    assert torch.equal(orthogonalize(x)[5], orthogonalize(x[5]))
    assert torch.equal(orthogonalize(x), orthogonalize(x, dtype="float32"))


@pytest.mark.parametrize("shape", [(64, 256), (128, 128), (192, 768)])
def test_small_matrices_of_low_rank_are_as_exact_as_in_fp32_in_a_step_too(shape):
    left, right = (torch.linalg.qr(torch.randn(n, shape[0] // 8, device="cuda", dtype=torch.float64)).Q for n in shape)
    param = torch.zeros(shape, device="cuda", requires_grad=True)
    param.grad = ((left / torch.arange(1, shape[0] // 8 + 1, device="cuda")) @ right.mT).float()
    Muon([param], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    step, ideal = -param.detach().double(), plain_newton_schulz(param.grad, resolve_schedule("polar_express", 5))
    assert (step / step.norm() - ideal / ideal.norm()).norm() < 1e-3


def test_bf16_and_tensor_lr():
    model = small_model().bfloat16()
    opt = Muon(model, lr=torch.tensor(0.02, device="cuda"), orthogonalizer=Orthogonalizer(dtype="bfloat16"))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        scheduler.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ---------------------------------------------------------------- CUDA graphs


def _model_params(seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = {"a": (512, 768), "b": (512, 768), "tall": (768, 512), "norm": (768,), "embed": (300, 64)}
    shapes |= {"small": (64, 200)}
    return {n: torch.randn(s, generator=generator, device="cuda").requires_grad_() for n, s in shapes.items()}


def _graph_optimizer(params, **settings):
    muon = [(n, params[n]) for n in ("a", "b", "tall", "small")]
    rest = [(n, params[n]) for n in ("norm", "embed")]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}]
    return Muon(groups, lr=0.02, **settings)


def _give(params, step):
    generator = torch.Generator(device="cuda").manual_seed(step)
    for param in params.values():
        grad = torch.randn(param.shape, generator=generator, device="cuda")
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


def test_cuda_graph_replay_with_changing_numbers_equals_eager_steps():
    results = []
    for settings in ({}, {"cuda_graph": True}):
        params = _model_params()
        opt = _graph_optimizer(params, **settings)
        for step in range(12):
            for group in opt.param_groups:
                group["lr"] = 0.02 * (1 + step) / 12
            opt.param_groups[0].update(momentum=0.9 + 0.005 * step, weight_decay=0.1 + 0.01 * step)
            _give(params, step)
            if step == 9:
                params["b"].grad[3, 5] = float("nan")  # decided on the device: the graph must not write
            opt.step()
        results.append((params, opt))
    (eager, _), (graphed, opt) = results
    assert len(opt._graphs._captured) >= 1, "a graph was captured and replayed"
    for name in ("a", "b", "tall", "small"):
        assert torch.equal(eager[name], graphed[name]), name
    for name in ("norm", "embed"):  # AdamW reads its lr in fp32 from the device there
        torch.testing.assert_close(eager[name], graphed[name], rtol=1e-5, atol=1e-6)


def test_cuda_graph_follows_gradients_to_new_addresses():
    params, other = _model_params(), _model_params()
    opt, eager = _graph_optimizer(params, cuda_graph=True), _graph_optimizer(other)
    kept = []
    for step in range(10):
        for tensors in (params, other):
            for param in tensors.values():
                kept.append(param.grad)
                param.grad = None
            _give(tensors, step)
        opt.step()
        eager.step()
    for name in ("a", "b", "tall", "small"):
        assert torch.equal(other[name], params[name]), name


def test_cuda_graph_sees_the_scale_of_every_step_and_leaves_out_what_has_no_gradient():
    results = []
    for settings in ({}, {"cuda_graph": True}):
        params = _model_params()
        opt = _graph_optimizer(params, **settings)
        moving = {name: param for name, param in params.items() if name != "b"}
        for step in range(10):
            scale = 1024.0 if step < 6 else 2048.0
            opt.grad_scale = torch.full((), scale, device="cuda")
            opt.found_inf = torch.full((), float(step == 8), device="cuda")
            _give(moving, step)
            for param in moving.values():
                param.grad.mul_(scale)
            opt.step()
        results.append((params, opt))
    (eager, _), (graphed, opt) = results
    assert opt._graphs._captured
    assert torch.equal(graphed["b"], _model_params()["b"])
    for name in ("a", "tall"):
        assert torch.equal(eager[name], graphed[name]), name
    for name in ("norm", "embed"):
        torch.testing.assert_close(eager[name], graphed[name], rtol=1e-5, atol=1e-6)


def test_cuda_graph_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="cuda_graph"):
        Muon([torch.randn(8, 8, requires_grad=True)], cuda_graph=True)
    with pytest.raises(ValueError, match="cuda_graph"):
        _graph_optimizer(_model_params(), cuda_graph=True, release_grads=True)


@pytest.mark.parametrize("coefficients", ["polar_express", "keller", "you"])
def test_both_forms_agree_in_fp32_on_a_large_matrix_of_rank_one(coefficients):
    generator = torch.Generator(device="cuda").manual_seed(0)
    left, right = (torch.randn(size, generator=generator, device="cuda") for size in ((4096, 1), (1, 4096)))
    gram, standard = (
        orthogonalize(left @ right, coefficients=coefficients, form=form, dtype="float32")
        for form in ("gram", "standard")
    )
    assert (gram - standard).norm() < 5e-3 * standard.norm()

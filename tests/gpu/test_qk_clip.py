"""QK-clip on a GPU: decided on the device, outside of CUDA graphs. Run with `pytest -m gpu`."""

import pytest
import torch
from torch.nn import functional as F

from meshmuon import Muon, QKClip, QKLogits, max_logits
from meshmuon.cli.gpt import GPT, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLIP = QKClip(head_dim=64, q="layers.{layer}.q.weight", k="layers.{layer}.k.weight", kind="gqa")
SHAPES = {"layers.0.q.weight": (512, 768), "layers.0.k.weight": (128, 768), "other": (512, 768)}


def parameters():
    generator = torch.Generator(device="cuda").manual_seed(0)
    return {n: torch.randn(s, generator=generator, device="cuda").requires_grad_() for n, s in SHAPES.items()}


def give(params, step):
    """Gradients that stay where they are, and logits of 8 heads on 2 k heads."""
    generator = torch.Generator(device="cuda").manual_seed(step)
    for param in params.values():
        grad = torch.randn(param.shape, generator=generator, device="cuda")
        param.grad = grad if param.grad is None else param.grad.copy_(grad)
    return {0: torch.rand(8, generator=generator, device="cuda") * 400}


def run(steps, *, bad_at=None, **settings):
    params = parameters()
    opt = Muon(params.items(), lr=0.02, **settings)
    for step in range(steps):
        logits = give(params, step)
        if step == bad_at:
            params["other"].grad[3, 5] = float("nan")
        opt.step(**({"qk_logits": logits} if "qk_clip" in settings else {}))
    return {name: param.detach().clone() for name, param in params.items()}, opt


def test_a_step_with_logits_never_waits_for_the_device():
    params = parameters()
    opt = Muon(params.items(), lr=0.02, qk_clip=CLIP)
    for step in range(2):  # the first step reads its verdict at once
        opt.step(qk_logits=give(params, step))
    logits = give(params, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step(qk_logits=logits)
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_are_scaled_by_the_factors_of_their_heads():
    (bare, _), (clipped, opt) = run(1), run(1, qk_clip=CLIP)
    logits = give(parameters(), 0)[0]
    need = torch.full_like(logits, 100.0) / logits.clamp(min=100.0)
    shared = need.view(2, 4).amax(1).sqrt()
    q = (need / shared.repeat_interleave(4)).repeat_interleave(64)[:, None]
    k = shared.repeat_interleave(64)[:, None]
    assert torch.equal(clipped["layers.0.q.weight"], bare["layers.0.q.weight"] * q)
    assert torch.equal(clipped["layers.0.k.weight"], bare["layers.0.k.weight"] * k)
    assert torch.equal(clipped["other"], bare["other"])
    assert opt.metrics()["qk_clipped_heads"] == int((need < 1).sum()) > 0


def test_a_gradient_that_is_not_finite_scales_nothing():
    (before, _), (after, opt) = run(3, qk_clip=CLIP), run(4, qk_clip=CLIP, bad_at=3)
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)
    with pytest.warns(UserWarning, match="step 4"):
        assert opt.metrics()["qk_clipped_heads"] == 0


def test_cuda_graph_clips_outside_of_the_graph():
    (eager, _), (graphed, opt) = run(8, qk_clip=CLIP), run(8, qk_clip=CLIP, cuda_graph=True)
    assert len(opt._graphs._captured) >= 1, "a graph was captured and replayed"
    assert all(torch.equal(eager[name], graphed[name]) for name in SHAPES)


def test_the_collector_with_a_fused_kernel_underneath():
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=128, layers=2, heads=2)).cuda().bfloat16()
    tokens = torch.randint(256, (2, 100), device="cuda")
    with QKLogits(model) as seen:
        model(tokens)
    assert {name: value.shape for name, value in seen.items()} == dict.fromkeys(
        ("blocks.0.attention", "blocks.1.attention"), (2,)
    )
    q, k = torch.randn(2, 2, 4, 300, 64, device="cuda").bfloat16()
    whole = (q.float() @ k.float().mT / 8).masked_fill(torch.ones(300, 300, device="cuda").triu(1).bool(), -torch.inf)
    torch.testing.assert_close(max_logits(q, k, causal=True), whole.amax((0, 2, 3)), rtol=1e-4, atol=1e-4)
    assert F.scaled_dot_product_attention(q, k, q).isfinite().all()

"""The largest logits, against whole matrices of logits; and the collector, against the helper."""

import re

import pytest
import torch
from tests.unit.attention_models import KINDS, Layers, Separate, inputs, logits_of, make_model
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshmuon import Muon, QKClip, QKLogits, max_logits
from meshmuon.cli.gpt import GPT, GPTConfig


def whole_logits(q, k, *, scale=None, causal=False, mask=None):
    """The definition, as torch documents it, with everything in memory."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    logits = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.amax((-1, -2)).reshape(-1, q.shape[-3]).amax(0)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = [
    ((2, 4, 13, 8), (2, 4, 13, 8)),
    ((3, 6, 9, 5), (3, 2, 17, 5)),
    ((4, 11, 3), (1, 4, 3)),
    ((2, 3, 2, 7, 4), (2, 3, 1, 5, 4)),
]


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masking", ["none", "bool", "added", "by head"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_largest_logits_are_those_of_the_whole_matrix(shapes, masking, causal, chunk):
    q, k = random(*shapes[0]), random(*shapes[1], seed=1)
    places = (q.shape[-2], k.shape[-2])
    mask = {
        "none": None,
        "bool": random(*places, seed=2) > -0.5,
        "added": random(*places, seed=2) * 3,
        "by head": random(q.shape[-3], *places, seed=2) > 0,
    }[masking]
    got = max_logits(q, k, causal=causal, mask=mask, chunk=chunk)
    assert got.dtype == torch.float32 and got.shape == (q.shape[-3],)
    torch.testing.assert_close(got, whole_logits(q, k, causal=causal, mask=mask), rtol=1e-5, atol=1e-6)


def test_another_mask_or_another_pairing_of_heads_has_other_logits():
    q, k = random(2, 4, 13, 8), random(2, 2, 13, 8, seed=1)
    got = max_logits(q, k, chunk=4)
    assert not torch.allclose(got, whole_logits(q, k, causal=True))
    assert not torch.allclose(got, whole_logits(q, k, mask=random(13, 13) > 0))
    assert not torch.allclose(got, whole_logits(q, k.flip(1)))
    assert not torch.allclose(got, whole_logits(q, k.repeat(1, 2, 1, 1))), "k heads one after the other, not in turn"


def test_scale_dtype_and_gradients():
    q, k = random(2, 4, 9, 8).requires_grad_(), random(2, 2, 9, 8, seed=1).requires_grad_()
    for scale in (0.0, 0.3, -1.0, 40.0):
        torch.testing.assert_close(max_logits(q, k, scale=scale), whole_logits(q, k, scale=scale))
    assert not max_logits(q, k).requires_grad
    half = max_logits(q.bfloat16(), k.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole_logits(q.bfloat16(), k.bfloat16()))


def test_what_is_hidden_and_what_is_not_a_number():
    q, k = random(1, 2, 5, 4), random(1, 2, 5, 4, seed=1)
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    assert torch.equal(max_logits(q, k, mask=nothing), torch.full((2,), -torch.inf))
    q[0, 1, 3, 0] = torch.nan
    got = max_logits(q, k, chunk=2)
    assert got[0].isfinite() and got[1].isnan()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor) and not func.is_view and each.is_contiguous():
                self.numbers = max(self.numbers, each.numel())
        return result


def test_the_whole_matrix_is_never_there():
    q, k = random(1, 4, 512, 8), random(1, 2, 512, 8, seed=1)
    mask = torch.ones(512, 512, dtype=torch.bool)
    with Largest() as seen:
        max_logits(q, k, causal=True, mask=mask, chunk=32)
    assert seen.numbers <= 4 * 32 * 32
    with Largest() as seen:
        max_logits(q, k, chunk=512)
    assert seen.numbers == 4 * 512 * 512, "the count can tell"


@pytest.mark.parametrize(
    ("q", "k", "settings", "words"),
    [
        ((4, 8), (4, 8), {}, "q of shape"),
        ((2, 3, 4, 8), (2, 2, 4, 8), {}, "q of shape"),
        ((2, 4, 4, 8), (3, 4, 4, 8), {}, "q of shape"),
        ((2, 4, 4, 8), (2, 4, 4, 7), {}, "q of shape"),
        ((2, 4, 0, 8), (2, 4, 0, 8), {}, "not empty"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"mask": torch.ones(4, 5)}, "mask"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"chunk": 0}, "chunk"),
        ((2, 4, 5, 8), (2, 4, 5, 8), {"scale": float("nan")}, "scale"),
    ],
)
def test_what_does_not_fit_is_refused(q, k, settings, words):
    with pytest.raises(ValueError, match=words):
        max_logits(torch.ones(q), torch.ones(k), **settings)


def test_batches_that_broadcast_as_in_attention_itself():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 8)
    assert torch.equal(max_logits(q, k), max_logits(q, k.expand(2, 4, 5, 8)))
    assert torch.equal(max_logits(k, q), max_logits(k.expand(2, 4, 5, 8), q))
    assert torch.equal(max_logits(q, k[0]), max_logits(q, k))


# ---- the collector ----


@pytest.mark.parametrize("kind", KINDS)
def test_the_collector_sees_what_the_model_computes(kind):
    model = make_model(kind)
    with QKLogits(model, module="layers.{layer}", chunk=3) as seen:
        loss = model(inputs())
    expected = logits_of(model)
    assert list(seen) == ["0", "1"] and len(seen) == 2
    for layer, logits in expected.items():
        torch.testing.assert_close(seen[str(layer)], logits)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    torch.testing.assert_close(loss, model(inputs()), rtol=0, atol=0)


def test_with_the_optimizer_logits_stay_at_the_threshold():
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, layers=2, heads=4))
    for block in model.blocks:
        nn.init.normal_(block.attention.q.weight, std=2.0)
        nn.init.normal_(block.attention.k.weight, std=2.0)
    clip = QKClip(threshold=5.0, head_dim=8, q="{layer}.q.weight", k="{layer}.k.weight")
    opt = Muon(model, lr=1e-4, qk_clip=clip)
    tokens = torch.randint(256, (2, 30))
    counts, largest = [], []
    for _ in range(4):
        with QKLogits(model) as seen:  # called as the modules are: blocks.0.attention
            loss = model(tokens).logsumexp(-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step(qk_logits=seen)
        counts.append(opt.metrics()["qk_clipped_heads"])
        largest.append(opt.metrics()["qk_max_logit"])
    assert set(seen) == {"blocks.0.attention", "blocks.1.attention"}
    assert counts[0] == 8 and largest[0] > 20 and max(largest[1:]) < 5.5


def test_several_runs_give_the_largest_and_a_new_context_forgets():
    model, x = make_model("gqa"), inputs()
    collector = QKLogits(model, module="layers.{layer}")
    with collector:
        model(x)
        model(2 * x)
        model(x)
    torch.testing.assert_close(collector["0"], 4 * logits_of(model)[0])
    with collector as seen:
        model(x)
    torch.testing.assert_close(seen["0"], logits_of(model)[0])


def test_nothing_is_left_behind():
    model = make_model("mha")
    seen = QKLogits(model)
    with pytest.raises(RuntimeError), seen:
        model(torch.ones(2, 7, 3))
    with seen:
        model(inputs())
    before = {name: value.clone() for name, value in seen.items()}
    model(3 * inputs())
    assert all(torch.equal(value, seen[name]) for name, value in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_inside_a_layer_does_not_confuse_the_names():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    model = make_model("mha")
    model.layers[0].fails = Fails()
    with QKLogits(model) as seen:
        with pytest.raises(ValueError, match="on purpose"):
            model.layers[0].fails(inputs())
        model(inputs())
    assert set(seen) == {"layers.0", "layers.1"}


def test_calls_from_other_modules_are_not_counted():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = Layers(lambda: Separate(2))
            self.cross = Separate(2)

        def forward(self, x):
            return self.own(x) + self.cross(x).sum() + F.scaled_dot_product_attention(x, x, x).sum()

    model = Both()
    with QKLogits(model, module="own.layers.{layer}") as seen:
        model(inputs())
    assert set(seen) == {"0", "1"}
    with QKLogits(model) as seen:
        F.scaled_dot_product_attention(*[inputs()] * 3)
    assert not seen, "nor calls from outside of the model"


def test_wrappers_in_names_and_recomputed_layers():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model("mha").layers

        def forward(self, x):
            return sum(checkpoint(layer, x, use_reentrant=False).sum() for layer in self.layers)

    model = Checkpointed()
    with QKLogits(nn.Sequential(), module="{layer}") as nothing:
        pass
    wrapped = nn.DataParallel(model) if torch.cuda.is_available() else nn.ModuleDict({"module": model})
    with QKLogits(wrapped, module="layers.{layer}") as seen:
        model(inputs().requires_grad_()).backward()
    assert not nothing
    for layer, logits in logits_of(model).items():
        torch.testing.assert_close(seen[str(layer)], logits)


def test_a_compiled_model_is_watched_and_not_compiled_again():
    model, compiled_graphs = make_model("mha"), []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    compiled(inputs())
    before = len(compiled_graphs)
    assert before
    with QKLogits(compiled, module="layers.{layer}") as seen:
        compiled(inputs())
    torch.testing.assert_close(seen["1"], logits_of(model)[1])
    compiled(inputs())
    assert len(compiled_graphs) == before


def test_the_helper_compiles():
    q, k = random(2, 4, 20, 8), random(2, 2, 20, 8, seed=1)
    compiled = torch.compile(lambda q, k: max_logits(q, k, causal=True, chunk=8), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k), max_logits(q, k, causal=True, chunk=8))


def test_a_layer_that_is_not_seen_is_named_by_the_step():
    """nn.MultiheadAttention is one function to torch: what it calls inside is not seen."""
    model = make_model("mha")
    opt = Muon(model, qk_clip=KINDS["mha"][1])
    with QKLogits(model, module="layers.{layer}") as seen:
        model.layers[0](inputs())
    with pytest.raises(ValueError, match="nothing for layer '1'"):
        opt.step(qk_logits=seen)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QKLogits(3), "QKLogits: a int"),
        (lambda: QKLogits(nn.Linear(2, 2), module="layers"), r"QKLogits\(module=\).*\{layer\}"),
        (lambda: QKLogits(nn.Linear(2, 2), chunk=0), r"QKLogits\(chunk=\)"),
    ],
)
def test_a_collector_of_nothing_is_refused(make, words):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert re.search(words, str(caught.value))


def test_logits_collected_under_torch_func_are_plain_and_of_vmap_refused():
    model, x = make_model("mha"), inputs()
    params = dict(model.named_parameters())
    with QKLogits(model, module="layers.{layer}") as expected:
        model(x)

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().mean()

    with QKLogits(model, module="layers.{layer}") as seen:
        torch.func.grad(loss)(params, x)
    assert all(type(logits) is torch.Tensor and not logits.requires_grad for logits in seen.values())
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(logits) for logits in seen.values())
    assert seen.keys() == expected.keys() and all(torch.equal(seen[layer], expected[layer]) for layer in expected)
    with sdpa_kernel(SDPBackend.MATH), QKLogits(model, module="layers.{layer}") as twice:
        torch.func.grad(lambda x: next(iter(torch.func.grad(loss)(params, x).values())).sum())(x)
    assert len(twice) and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, twice.values()))
    one_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with QKLogits(model, module="layers.{layer}"), pytest.raises(ValueError, match=r"QKLogits of '0'.*vmap"):
        one_each(params, x[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_under_autocast_are_those_without(dtype):
    """In fp16 the largest became inf, which counts as not known: the heads that needed it most were left alone."""
    q, k = (300 * torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = max_logits(q, k)
    with torch.autocast("cpu", dtype):
        found = max_logits(q, k)
    assert torch.equal(found, expected) and (expected > 65504).all()

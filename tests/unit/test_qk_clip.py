"""QK-clip on one device: a real attention is brought back to the threshold, and nothing else changes a bit."""

import copy
import math
import pickle
import re
import warnings
from unittest import mock

import pytest
import torch
from tests.unit.attention_models import (
    DIM,
    HEADS,
    KEYS,
    KINDS,
    Fused,
    Layers,
    Separate,
    clip,
    inputs,
    logits_of,
    make_model,
)
from torch import nn

from meshmuon import Muon, NonFiniteGradientWarning, QKClip, max_logits
from meshmuon.runtime import qk_clip
from meshmuon.update.qk_clip import clip_factors, usable_logits

NAN, INF = math.nan, math.inf


def stepped(kind, logits=None, *, steps=1, dtype=torch.float32, clips=True, seed=0, **settings):
    """A model after some steps; its gradients are a pure function of the step and the parameter."""
    model = make_model(kind, seed).to(dtype)
    opt = Muon(model, lr=0.01, qk_clip=KINDS[kind][1] if clips else None, **settings)
    for step in range(steps):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(97 * step + number)).to(dtype)
        opt.step(qk_logits=logits if clips else None)
    return model, opt


def problems(kind):
    """What is wrong after a step with the logits that its weights have before they are scaled."""
    threshold = KINDS[kind][1].threshold
    bare, _ = stepped(kind, clips=False)
    given = logits_of(bare)
    model, opt = stepped(kind, given)
    found, clipped = [], 0
    for (layer, before), after in zip(given.items(), logits_of(model).values(), strict=True):
        over = before > threshold
        assert 0 < over.sum() < HEADS, "the model must have both kinds of heads"
        clipped += int(over.sum())
        found += [f"{layer}: head {h} is at {after[h]}" for h in range(HEADS) if after[h] > threshold * (1 + 1e-5)]
        found += [
            f"{layer}: head {h} fell to {after[h]}" for h in range(HEADS) if over[h] and after[h] < threshold * 0.999
        ]
        found += [f"{layer}: head {h} has other logits" for h in range(HEADS) if not over[h] and after[h] != before[h]]
    metrics = opt.metrics()
    assert metrics["qk_clipped_heads"] == clipped
    assert metrics["qk_max_logit"] == pytest.approx(max(float(each.max()) for each in given.values()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_recomputed_logits_are_back_at_the_threshold(kind):
    assert problems(kind) == []


def _wrong(change):
    def factors(logits, key_of, **others):
        table = clip_factors(logits, key_of, **others)
        return change(table, len(logits))

    return mock.patch.object(qk_clip, "clip_factors", factors)


def _k_alone(table, heads):
    return torch.cat([table[: 2 * heads], torch.ones_like(table[2 * heads :])])


def _rope_by_the_root(table, heads):
    return torch.cat([table[:heads], table[:heads], table[2 * heads :]])


@pytest.mark.parametrize("kind", ["mha", "mla", "fused mha"])
def test_k_that_is_not_scaled_is_noticed(kind):
    with _wrong(_k_alone):
        assert any("is at" in problem for problem in problems(kind))


def test_a_shared_k_that_takes_the_smallest_factor_is_noticed():
    """The rule of others: it changes heads that were never over."""

    def smallest(table, heads):
        whole = table[heads : 2 * heads]
        return torch.cat([whole.sqrt(), whole, whole.view(-1, HEADS // KEYS).amin(1).sqrt(), table[-1:]])

    with _wrong(smallest):
        assert any("other logits" in problem for problem in problems("gqa"))


def test_a_part_with_positions_that_takes_the_root_is_noticed():
    with _wrong(_rope_by_the_root):
        assert any("is at" in problem for problem in problems("mla"))


def test_every_row_by_hand():
    """The factors from the definition, in plain Python, row by row; rows of other heads and of v keep their bits."""
    given = {layer: torch.tensor([7.0, 2.9, 5.0, 30.0, 4.0, 6.0]) for layer in range(2)}
    bare, _ = stepped("grouped gqa", clips=False)
    model, _ = stepped("grouped gqa", given)
    need = [min(1.0, 3.0 / logit) for logit in given[0].tolist()]
    group = HEADS // KEYS
    for before, after in zip(bare.layers, model.layers, strict=True):
        for g in range(KEYS):
            mates = need[g * group : (g + 1) * group]
            shared = math.sqrt(max(mates))
            factors = [each / shared for each in mates] + [shared, 1.0]
            for part, factor in enumerate(factors):
                rows = slice((g * (group + 2) + part) * DIM, (g * (group + 2) + part + 1) * DIM)
                if factor == 1.0:
                    assert torch.equal(after.qkv.weight[rows], before.qkv.weight[rows])
                    assert torch.equal(after.qkv.bias[rows], before.qkv.bias[rows])
                else:
                    torch.testing.assert_close(after.qkv.weight[rows], before.qkv.weight[rows] * factor)
                    torch.testing.assert_close(after.qkv.bias[rows], before.qkv.bias[rows] * factor)
    assert max(need[:group]) == 1.0 and max(need[group:]) < 1.0, "one k head is left alone, one is not"


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1e30, 0.0, -0.0, 1e-30, 3.0])
@pytest.mark.parametrize("kind", ["mha", "gqa", "mla"])
def test_nothing_changes_for_logits_that_are_not_over(kind, value):
    logits = {layer: torch.full((HEADS,), value) for layer in range(2)}
    bare, _ = stepped(kind, clips=False, steps=2)
    model, opt = stepped(kind, logits, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True))
    assert opt.metrics()["qk_clipped_heads"] == 0


def test_negative_logits_and_nan_leave_other_heads_alone():
    """A peer took the square root of a negative factor, and wrote NaN into q and k."""
    logits = {layer: torch.tensor([NAN, -200.0, 12.0, INF, 1.0, -INF]) for layer in range(2)}
    bare, _ = stepped("mha", clips=False)
    model, opt = stepped("mha", logits)
    for before, after in zip(bare.layers, model.layers, strict=True):
        for name in ("q", "k"):
            old, new = (getattr(each, name).weight.unflatten(0, (HEADS, DIM)) for each in (before, after))
            assert [h for h in range(HEADS) if not torch.equal(old[h], new[h])] == [2]
            torch.testing.assert_close(new[2], old[2] * 0.5)
    assert opt.metrics()["qk_clipped_heads"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_scaled_in_fp32_and_rounded_once(dtype):
    logits = {layer: torch.tensor([7.0, 1.0, 5.0, 30.0, 4.0, 2.0], dtype=torch.float64) for layer in range(2)}
    bare, _ = stepped("mha", clips=False, dtype=dtype)
    model, _ = stepped("mha", logits, dtype=dtype)
    whole = torch.tensor(3.0) / logits[0].float().clamp(min=3.0)
    for before, after in zip(bare.layers, model.layers, strict=True):
        rows = (whole / whole.sqrt()).repeat_interleave(DIM)[:, None]
        once = (before.q.weight.detach().to(torch.promote_types(dtype, torch.float32)) * rows).to(dtype)
        assert torch.equal(after.q.weight, once)
        twice = before.q.weight.detach() * rows.to(dtype)
        assert dtype == torch.float64 or not torch.equal(after.q.weight, twice), "a rounded factor gives other bits"
        assert torch.equal(after.v.weight, before.v.weight)


def test_a_step_that_is_skipped_scales_nothing():
    model = make_model("mha")
    opt = Muon(model, qk_clip=KINDS["mha"][1])
    for param in model.parameters():
        param.grad = torch.full_like(param, NAN)
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(NonFiniteGradientWarning):
        opt.step(qk_logits=logits_of(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert opt.metrics()["qk_clipped_heads"] == 0


@pytest.mark.parametrize("go", [True, False])
def test_the_flag_of_a_gpu_is_multiplied_into_the_factors(go):
    model = make_model("gqa")
    opt = Muon(model, qk_clip=KINDS["gqa"][1])
    before = copy.deepcopy(model.state_dict())
    heads = opt._ready().heads
    heads.scale_(heads.read(logits_of(model)), opt.param_groups, torch.tensor(go))
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert bool(changed) == go
    assert bool(opt.metrics()["qk_clipped_heads"]) == go


def test_parameters_without_a_gradient_are_scaled_too():
    model = make_model("mha")
    opt = Muon(model, qk_clip=KINDS["mha"][1])
    opt.step(qk_logits=logits_of(model))
    assert all(each.max() <= 3.0 * (1 + 1e-5) for each in logits_of(model).values())


def test_steps_without_logits_change_nothing_more():
    bare, _ = stepped("mha", clips=False, steps=3)
    model, opt = stepped("mha", None, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), model.parameters(), strict=True))
    assert opt.metrics()["qk_max_logit"] == -INF


def test_through_grad_scaler_a_scheduler_and_a_closure():
    model = make_model("mha")
    opt = Muon(model, lr=0.0, qk_clip=KINDS["mha"][1])
    schedule = torch.optim.lr_scheduler.ConstantLR(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(inputs())).backward()
    scaler.step(opt, qk_logits=logits_of(model))
    scaler.update()
    schedule.step()
    assert opt.metrics()["qk_clipped_heads"] > 0
    assert all(each.max() <= 3.0 * (1 + 1e-5) for each in logits_of(model).values())
    assert opt.step(lambda: 7.0, qk_logits=logits_of(model)) == 7.0
    assert opt.metrics()["qk_max_logit"] <= 3.0 * (1 + 1e-5)


def test_heads_that_take_adamw_and_heads_stored_the_other_way_round():
    model, other = make_model("mha"), make_model("mha")
    Muon(model, lr=0.0, qk_clip=KINDS["mha"][1], overrides={"*.q.weight": "adamw"}).step(qk_logits=logits_of(model))
    turned = [(n, nn.Parameter(p.detach().mT.contiguous())) for n, p in other.named_parameters()]
    groups = [{"params": turned, "algorithm": "muon", "view": {"transposed": True}}]
    Muon(groups, lr=0.0, qk_clip=KINDS["mha"][1]).step(qk_logits=logits_of(other))
    for (_, straight), (_, across) in zip(model.named_parameters(), turned, strict=True):
        assert torch.equal(straight, across.mT)
    assert not torch.equal(model.layers[0].q.weight, other.layers[0].q.weight)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_and_checkpoints_go_on_clipping(way):
    _, opt = stepped("gqa", logits_of(make_model("gqa")))
    saved = copy.deepcopy(opt.state_dict())
    twin = pickle.loads(pickle.dumps(opt)) if way == "pickle" else copy.deepcopy(opt)
    assert twin._execution.qk_clip == KINDS["gqa"][1] and "qk_clip: 2 layers" in str(twin)
    twin.load_state_dict(saved)
    for optimizer in (opt, twin):
        for group in optimizer.param_groups:
            for number, param in enumerate(group["params"]):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step(qk_logits={0: torch.full((HEADS,), 9.0), 1: torch.full((HEADS,), 2.0)})
    ours, theirs = ([p for g in o.param_groups for p in g["params"]] for o in (opt, twin))
    assert all(torch.equal(a, b) and a is not b for a, b in zip(ours, theirs, strict=True))
    assert twin.metrics()["qk_clipped_heads"] == HEADS


def test_print_says_what_is_clipped():
    text = str(stepped("gqa")[1])
    assert "qk_clip: 2 layers of 6 q heads on 2 k heads (gqa), 5 rows each: logits above 3" in text
    assert "qk_clip" not in str(stepped("gqa", clips=False)[1])


def test_a_stage_without_attention_says_so():
    opt = Muon(nn.Linear(3, 4), allow_no_muon=True, qk_clip=clip())
    assert "qk_clip: no attention layer here" in str(opt)
    opt.step()


# ---- what is refused, by name, before anything is changed ----


def full(value=9.0, heads=HEADS):
    return torch.full((heads,), value)


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        ({0: full()}, "nothing for layer '1'"),
        ({}, "nothing for layer '0', '1'"),
        ({0: full(), 1: full(), 2: full()}, "no layer '2'.*'0', '1'"),
        ({0: full(), "0": full(), 1: full()}, "twice"),
        ({0: full(), 1: full(heads=5)}, r"qk_logits\['1'\].*5 heads.*6"),
        ({0: full(), 1: full()[None]}, r"qk_logits\['1'\].*\(1, 6\)"),
        ({0: full(), 1: 9.0}, r"qk_logits\['1'\].*float"),
        ({0: full(), 1: full().to(torch.complex64)}, r"qk_logits\['1'\].*complex"),
        ([full(), full()], "qk_logits: a list"),
    ],
)
def test_logits_that_do_not_fit_are_refused_and_nothing_is_changed(logits, words):
    model = make_model("mha")
    opt = Muon(model, qk_clip=KINDS["mha"][1])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=words):
        opt.step(qk_logits=logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    opt.step(qk_logits={"0": full(), "1": full()})
    assert opt.metrics()["qk_clipped_heads"] == 2 * HEADS


def test_logits_without_qk_clip_are_refused():
    opt = Muon([nn.Parameter(torch.ones(3, 4))])
    with pytest.raises(ValueError, match="given without qk_clip"):
        opt.step(qk_logits={0: full()})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": 0}, "threshold"),
        ({"threshold": NAN}, "threshold"),
        ({"head_dim": 0}, "head_dim"),
        ({"q": "layers.0.q.weight"}, r"QKClip\(q=\).*\{layer\}"),
        ({"k": "{layer}.{layer}"}, r"QKClip\(k=\).*\{layer\}"),
        ({"q": 3}, r"QKClip\(q=\)"),
        ({"kind": "mqa"}, "kind.*mha"),
        ({"q_heads": 4, "k_heads": 2}, 'k_heads.*2 for 4.*kind="mha"'),
        ({"q_heads": 4, "k_heads": 3, "kind": "gqa"}, "k_heads.*3 for 4"),
        ({"kind": "mla"}, "q_heads.*mla"),
        ({"fused_rows": (5, 5)}, "fused_rows.*two parameters"),
        ({"k": "a.{layer}.q"}, "fused_rows.*one parameter"),
        ({"k": "a.{layer}.q", "fused_rows": (5,)}, "fused_rows"),
        ({"k": "a.{layer}.q", "fused_rows": (5, 6)}, "fused_rows.*head_dim=5"),
        ({"k": "a.{layer}.q", "fused_rows": 5}, "fused_rows"),
        ({"k": "a.{layer}.q", "fused_rows": (5, 5), "kind": "mla", "q_heads": 1}, "fused_rows.*mla"),
    ],
)
def test_contradictions_are_refused(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        QKClip(**{"head_dim": DIM, "q": "a.{layer}.q", "k": "a.{layer}.k", **settings})


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        ("mha", clip("query"), r"QKClip\(q=\).*no parameter.*layers.\{layer\}.query.weight.*layers.0.q.weight"),
        ("mha", clip(k="key"), r"QKClip\(k=\).*no parameter"),
        ("mha", clip(head_dim=7), "layers.0.q.weight.*30 rows.*head_dim=7"),
        ("mha", clip(q_heads=3), "layers.0.q.weight.*30 rows.*3 heads"),
        ("gqa", clip(), 'layers.0.q.weight.*6 q heads and 2 k heads.*kind="gqa"'),
        ("mla", clip(k="up", kind="mla", q_heads=5), "layers.0.q.weight.*42 rows.*5 heads"),
        ("mla", clip(k="up", kind="mla", q_heads=6, head_dim=8), "layers.0.q.weight.*head_dim=8"),
        ("fused gqa", clip("qkv", "qkv", fused_rows=(30, 10, 11), kind="gqa"), r"layers.0.qkv.weight.*50 rows.*11"),
        ("mha", QKClip(head_dim=5, q="{layer}.q.weight", k="layers.{layer}.k.weight"), "layers.0.k.weight.*not"),
    ],
)
def test_parameters_that_are_not_as_said_are_refused_by_name(kind, said, words):
    with pytest.raises(ValueError, match=words):
        Muon(make_model(kind), qk_clip=said)


def test_a_frozen_q_beside_a_trained_k_is_refused():
    model = make_model("mha")
    model.layers[1].q.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=re.escape("'layers.1.k.weight' is trained here, 'layers.1.q.weight' is not")):
        Muon(model, qk_clip=KINDS["mha"][1])


@pytest.mark.parametrize("value", [1, "on", {"q": 1}, torch.zeros(2)], ids=str)
def test_anything_but_a_qkclip_is_refused(value):
    with pytest.raises(TypeError, match=r"qk_clip.*QKClip"):
        Muon([nn.Parameter(torch.ones(3, 4))], qk_clip=value)


# ---- the arithmetic alone ----


def test_factors_are_exactly_one_up_to_the_threshold_whatever_it_is():
    for threshold in torch.rand(200, generator=torch.Generator().manual_seed(0)).mul(300).tolist():
        logits = torch.tensor([threshold, threshold / 2, -INF, 0.0])
        table = clip_factors(logits, torch.tensor([0, 0, 1, 1]), keys=2, threshold=threshold)
        assert torch.equal(table, torch.ones(11)), threshold


def test_factors_of_a_group_multiply_to_what_each_head_needs():
    logits = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 400
    key_of = torch.arange(64) // 4
    table = clip_factors(usable_logits(logits), key_of, keys=16, threshold=100.0)
    q, whole, k = table[:64], table[64:128], table[128:144]
    torch.testing.assert_close(logits * q * k[key_of], logits.clamp(max=100.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(whole, q * k[key_of])
    untouched = (logits <= 100.0).view(16, 4).any(1)
    assert untouched.any() and not untouched.all()
    assert bool((k[untouched] == 1).all()) and bool((k[~untouched] < 1).all())
    assert bool((q[logits <= 100.0] == 1).all())


def test_one_layer_of_each_is_what_the_models_are():
    """The oracle of this file sees what the models compute: their own attention gives the same output."""
    for make in (lambda: Separate(KEYS), lambda: Fused(KEYS, grouped=True), lambda: Fused(KEYS, grouped=False)):
        torch.manual_seed(0)
        layer = make()
        q, k, v = layer.heads(inputs())
        k, v = (each.repeat_interleave(HEADS // KEYS, dim=1) for each in (k, v))
        scores = (q @ k.mT / DIM**0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -INF).softmax(-1)
        torch.testing.assert_close((scores @ v).sum((1, 3)), layer(inputs()))
    assert isinstance(Layers(lambda: Separate(1))(inputs()), torch.Tensor)


class Biased(nn.Module):
    """torch's own attention, whose biases are `in_proj_bias`, and large; or a q bias under a name of its own."""

    def __init__(self, q_bias=False):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, bias=not q_bias, batch_first=True)
        if q_bias:
            self.attn.q_bias = nn.Parameter(torch.zeros(16))
        with torch.no_grad():
            self.attn.in_proj_weight.copy_(torch.randn(48, 16, generator=torch.Generator().manual_seed(0)))
            if not q_bias:
                self.attn.in_proj_bias.copy_(5 * torch.randn(48, generator=torch.Generator().manual_seed(1)))

    def logits(self):
        x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(2))
        q, k, _ = (x @ self.attn.in_proj_weight.T + self.attn.in_proj_bias).chunk(3, -1)
        return max_logits(*(each.view(3, 7, 2, 8).transpose(1, 2) for each in (q, k)))


BIASED = {"head_dim": 8, "q": "{layer}.in_proj_weight", "k": "{layer}.in_proj_weight", "fused_rows": (16, 16, 16)}


def test_the_bias_of_torchs_attention_is_scaled_along():
    """`in_proj_bias` beside `in_proj_weight`: left alone, logits stayed three times above the threshold."""
    model = Biased()
    opt = Muon(model, lr=0.0, qk_clip=QKClip(threshold=10.0, **BIASED))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    before = model.logits()
    assert (before > 50).all()
    opt.step(qk_logits={"attn": before})
    torch.testing.assert_close(model.logits(), torch.full((2,), 10.0))


@pytest.mark.parametrize("harmless", ["v_bias", "out_bias", "bias_o"])
def test_other_biases_are_not_named(harmless):
    model = Biased(q_bias=True)
    del model.attn.q_bias
    setattr(model.attn, harmless, nn.Parameter(torch.zeros(16)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(model, qk_clip=QKClip(threshold=10.0, **BIASED))


def test_a_bias_that_is_not_scaled_along_is_named():
    with pytest.warns(UserWarning, match=r"'attn.q_bias' is not scaled along"):
        Muon(Biased(q_bias=True), qk_clip=QKClip(threshold=10.0, **BIASED))


@pytest.mark.parametrize("bias", ["attn.q_bias", "attn.in_proj_bias"])
def test_a_frozen_bias_is_named_because_it_cannot_be_scaled(bias):
    model = Biased(q_bias=bias == "attn.q_bias")
    model.get_parameter(bias).requires_grad_(False)
    with pytest.warns(UserWarning, match=rf"layer 'attn': '{bias}' is frozen.*may stay above 10"):
        Muon(model, qk_clip=QKClip(threshold=10.0, **BIASED))


def test_frozen_parameters_that_make_no_logits_are_not_named():
    model = Biased(q_bias=False)
    model.attn.register_parameter("v_bias", nn.Parameter(torch.zeros(16), requires_grad=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(model, qk_clip=QKClip(threshold=10.0, **BIASED))


def test_what_was_said_of_biases_is_not_said_again_by_printing():
    with pytest.warns(UserWarning, match="not scaled along"):
        opt = Muon(Biased(q_bias=True), qk_clip=QKClip(threshold=10.0, **BIASED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "qk_clip" in str(opt)


class StoredTurned(nn.Module):
    """A linear layer whose weight is (in, out), as in GPT-2. Square: its shape does not tell."""

    nf = 8

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))


StoredTurned.__name__ = "Conv1D"


@pytest.mark.parametrize("overrides", [None, {"*.weight": "adamw"}], ids=["muon", "adamw"])
def test_weights_stored_the_other_way_round_are_scaled_by_columns_whatever_trains_them(overrides):
    model = nn.ModuleDict({"q": StoredTurned(), "k": StoredTurned()})
    before = {name: module.weight.detach().clone() for name, module in model.items()}
    layers = nn.ModuleDict({"0": model})
    clip = QKClip(threshold=10.0, head_dim=4, q="{layer}.q.weight", k="{layer}.k.weight")
    opt = Muon(layers, lr=0.0, qk_clip=clip, overrides=overrides, allow_no_muon=True)
    for module in model.values():
        module.weight.grad = torch.ones(8, 8)
    opt.step(qk_logits={"0": torch.tensor([40.0, 5.0])})
    for name, module in model.items():
        ratio = module.weight.detach() / before[name]
        torch.testing.assert_close(ratio[:, :4], torch.full((8, 4), 0.5))
        assert (ratio[:, 4:] == 1).all()

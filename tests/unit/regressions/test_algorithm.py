"""Section B: runs that said "Muon" and were something else."""

import copy
import math

import pytest
import torch
from tests.unit.regressions.tools import (
    Holder,
    direction_of,
    must_fail,
    parameter,
    products_of,
    randn,
    reasons,
    relative_error,
    routes,
    singular_values,
    step,
    train,
)
from torch import Tensor, nn

from meshmuon import Muon, convert_lr, orthogonalize, scale_factor
from meshmuon.testing import ReferenceMuon


def check_orthogonal(update: Tensor) -> None:
    values = singular_values(update)
    assert values.min() > 0.7 and values.max() < 1.35


@pytest.mark.parametrize("nesterov", [True, False])
def test_newton_schulz_never_runs(nesterov: bool) -> None:
    """#15: plain SGD under the name of Muon; the loss fell, so nobody saw. The update must be orthogonal."""
    grad = randn(8, 12)
    update = direction_of(grad, nesterov=nesterov)
    check_orthogonal(update)
    must_fail(check_orthogonal, grad / grad.norm())
    must_fail(check_orthogonal, 0.05 * grad)
    must_fail(check_orthogonal, grad.sign())


def test_newton_schulz_runs_for_some_of_the_matrices_only() -> None:
    """#15: every matrix of a model is orthogonalized, whatever its shape; without gradients nothing runs."""
    shapes = [(8, 12), (12, 8), (8, 12), (5, 5), (1, 9)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    opt = Muon(params, lr=1.0, weight_decay=0.0, adjust_lr_fn="none")
    assert products_of(lambda: step(opt, params, [None] * len(params))) == 0
    grads = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert products_of(lambda: step(opt, params, grads)) > 0
    for p in params:
        check_orthogonal(p.detach())


def test_placeholders_look_one_dimensional_and_everything_goes_to_adamw() -> None:
    """#16: under zero.Init a weight is an empty 1-D placeholder; routing by its ndim sent the model to AdamW."""
    for flat in (torch.empty(0), torch.zeros(24), torch.zeros(1)):
        linear = nn.Linear(6, 4)
        linear.weight = nn.Parameter(flat)
        with pytest.raises(ValueError, match=r"layer\.weight.*fully_shard"):
            Muon(Holder(layer=linear), allow_no_muon=True)
    assert routes(Muon(Holder(layer=nn.Linear(6, 4))))["layer.weight"] == "muon"


def test_flat_partitions_are_trained_without_newton_schulz() -> None:
    """#17: flat partitions have no matrices left in them; they are refused, also when they come later."""

    class FlatParameter(nn.Parameter):
        pass

    for flat in (FlatParameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))):
        if type(flat) is nn.Parameter:
            flat.ds_id = 0
        for algorithm in ("muon", "adamw"):
            opt = Muon([parameter(4, 6)])
            with pytest.raises(ValueError, match="flat shard"):
                opt.add_param_group({"params": [flat], "algorithm": algorithm})


def test_clipping_shrinks_the_update() -> None:
    """#19: the clip factor was applied to the orthogonalized update. Clipping gradients must not change its size."""
    for width in (4, 16, 64):
        weights = []
        for clip in (None, 0.1):
            p = nn.Parameter(torch.zeros(width, width))
            opt = Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="none")
            p.grad = randn(width, width)
            if clip is not None:
                nn.utils.clip_grad_norm_([p], clip)
            opt.step()
            weights.append(p.detach())
        free, clipped = weights

        def check_not_shrunk(found: Tensor, expected: Tensor = free) -> None:
            assert relative_error(found, expected) < 1e-5

        check_not_shrunk(clipped)
        must_fail(check_not_shrunk, free * (0.1 / free.norm()))


def test_momentum_advances_once_per_micro_batch() -> None:
    """#20: once per optimizer step. Four micro-batches equal one batch of their sum, in bits and in work."""
    model, whole = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    whole.load_state_dict(model.state_dict())
    opts = [Muon(model, lr=0.1), Muon(whole, lr=0.1)]
    momentum = torch.zeros(4, 6)
    for number in range(5):
        before = model.weight.detach().clone()
        micro = [randn(3, 6, seed=10 * number + i) for i in range(4)]
        for batch in micro:
            (model(batch) ** 2).sum().backward()
        whole.weight.grad = model.weight.grad.clone()
        assert products_of(opts[0].step) == products_of(opts[1].step) > 0
        assert torch.equal(model.weight, whole.weight)
        assert not torch.equal(model.weight, before)
        momentum = torch.lerp(momentum, model.weight.grad, 0.05)
        assert torch.equal(opts[0].state[model.weight]["momentum_buffer"], momentum), "one average for each step"
        model.zero_grad()
    # The faulty way, on the last gradients: a momentum of the parts is not a momentum of the sum.
    faulty = torch.zeros(4, 6)
    for part in [randn(4, 6, seed=i) for i in range(4)]:
        faulty = torch.lerp(faulty, part, 0.05)
    once = torch.lerp(torch.zeros(4, 6), sum(randn(4, 6, seed=i) for i in range(4)), 0.05)
    assert relative_error(faulty, once) > 0.05


def test_groups_of_the_user_lose_their_learning_rate_and_decay() -> None:
    """#21: the values of every group are kept, and each is what its parameters are trained with."""
    params = [parameter(4, 6, seed=i) for i in range(4)]
    start = [p.detach().clone() for p in params]
    groups = [
        {"params": [params[0]], "lr": 0.5, "weight_decay": 0.0},
        {"params": [params[1]], "lr": 0.01, "weight_decay": 2.0, "momentum": 0.5},
        {"params": [params[2]], "algorithm": "adamw", "lr": 0.25, "weight_decay": 0.5},
        {"params": [params[3]], "algorithm": "adamw"},
    ]
    opt = Muon(groups, lr=0.125, weight_decay=0.75, adamw_lr_ratio=0.5)
    kept = [(g["lr"], g["weight_decay"]) for g in opt.param_groups]
    assert kept == [(0.5, 0.0), (0.01, 2.0), (0.25, 0.5), (0.125, 0.75)]
    grads = [randn(4, 6, seed=50 + i) for i in range(4)]
    step(opt, params, grads)
    for index, (lr, decay, momentum) in enumerate([(0.5, 0.0, 0.95), (0.01, 2.0, 0.5)]):
        expected = start[index].clone()
        ReferenceMuon([expected], lr=lr, weight_decay=decay, momentum=momentum).step([grads[index]])
        assert torch.equal(params[index], expected)
    for index, (lr, decay) in ((2, (0.25, 0.5)), (3, (0.125 * 0.5, 0.75))):
        expected = nn.Parameter(start[index].clone())
        adamw = torch.optim.AdamW([expected], lr=lr, weight_decay=decay, betas=(0.9, 0.95), fused=True)
        expected.grad = grads[index].clone()
        adamw.step()
        assert torch.equal(params[index], expected)


def test_matrices_fall_back_to_adamw_unnoticed() -> None:
    """#22: a benchmark of Muon had run AdamW. Each parameter's algorithm and reason are data, and are printed."""
    model = Holder(embed=nn.Embedding(50, 8), up=nn.Linear(8, 24), norm=nn.LayerNorm(8), head=nn.Linear(8, 50))
    opt = Muon(model)
    found = routes(opt)
    assert found == {
        "up.weight": "muon",
        "embed.weight": "adamw",
        "up.bias": "adamw",
        "norm.weight": "adamw",
        "norm.bias": "adamw",
        "head.weight": "adamw",
        "head.bias": "adamw",
    }
    lines = str(opt).splitlines()
    for name, algorithm in found.items():
        line = next(line for line in lines if f" {name} " in line)
        assert line.split()[0] == algorithm and reasons(opt)[name] in line
    # What runs is what is printed: only Muon's parameters have a momentum, only AdamW's have moments.
    for record in opt.plan.parameters:
        state = opt.state[opt.param_groups[record.group]["params"][record.position]]
        assert set(state) == (
            {"momentum_buffer"} if found[record.name] == "muon" else {"step", "exp_avg", "exp_avg_sq"}
        )


@pytest.mark.parametrize("mode", ["decoupled", "cautious", "l2"])
def test_weight_decay_does_nothing(mode: str) -> None:
    """#23: decay was a no-op, and its test passed because lr·wd was below the tolerance. Here it halves the weights."""
    grads = [randn(6, 9, seed=s) for s in range(5)]
    arguments = {"lr": 0.5, "weight_decay": 1.0, "weight_decay_mode": mode, "adjust_lr_fn": "none"}
    found, _ = train(lambda ps: Muon(ps, **arguments), grads)

    def check(**changes: object) -> None:
        expected = parameter(6, 9).detach()
        reference = ReferenceMuon([expected], **{**arguments, **changes})
        for g in grads:
            reference.step([g])
        assert torch.equal(found, expected)

    check()
    for changes in (
        {"weight_decay": 0.0},
        {"weight_decay": 0.999},
        *({"weight_decay_mode": m} for m in MODES - {mode}),
    ):
        with pytest.raises(AssertionError):
            check(**changes)


MODES = {"decoupled", "cautious", "l2"}


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_raw_gradient_is_orthogonalized_instead_of_the_momentum(nesterov: bool) -> None:
    """#24: after four steps one way, one small step across it must still go mostly the first way."""
    along, across = randn(6, 9, seed=1), randn(6, 9, seed=2) * 0.01
    p, opt = train(lambda ps: Muon(ps, nesterov=nesterov, lr=0.1, weight_decay=0.0, adjust_lr_fn="none"), [along] * 4)
    before, buffer = p.detach().clone(), opt.state[p]["momentum_buffer"].clone()
    step(opt, [p], [across])
    update = (before - p.detach()) / 0.1
    average = torch.lerp(buffer, across, 0.05)
    expected = orthogonalize(torch.lerp(across, average, 0.95) if nesterov else average)

    def check(direction: Tensor) -> None:
        assert relative_error(update, direction) < 1e-4

    check(expected)
    must_fail(check, orthogonalize(across))
    must_fail(check, orthogonalize(torch.lerp(across, average, 0.95) if not nesterov else average))


RULES = [
    ("original", (8, 32), 1.0),
    ("original", (32, 8), 2.0),
    ("original", (7, 7), 1.0),
    ("shape_scaling", (32, 8), 2.0),
    (None, (32, 8), 2.0),
    ("match_rms_adamw", (8, 25), 1.0),
    ("match_rms_adamw", (100, 8), 2.0),
    ("spectral", (8, 25), 5.0),
    ("spectral", (100, 8), 10.0),
    ("unit_rms_norm", (8, 32), 0.5),
    ("unit_rms_norm", (32, 8), 2.0),
    ("none", (32, 8), 1.0),
    ("original", (5, 0), 0.0),
    ("unit_rms_norm", (0, 5), 0.0),
]


@pytest.mark.parametrize(("rule", "shape", "factor"), RULES)
def test_a_scale_rule_means_something_else_than_its_name_says(rule: str, shape: tuple[int, int], factor: float) -> None:
    """#25: a "spectral" without Kimi's 0.2 beside one with it. The table, by hand, and what a step really does."""
    assert scale_factor(shape, rule) == pytest.approx(factor, rel=1e-12)
    if 0 in shape:
        return
    grad = randn(*shape)
    unscaled = direction_of(grad)
    assert relative_error(direction_of(grad, adjust_lr_fn=rule), factor * unscaled) < 1e-6
    assert relative_error(direction_of(grad, adjust_lr_fn=rule, extra_scale_factor=3.0), 3 * factor * unscaled) < 1e-6
    assert convert_lr(0.1, shape, source=rule, target="none") == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral", "unit_rms_norm"])
@pytest.mark.parametrize("shape", [(17, 33), (33, 17), (3, 5), (1, 2)])
def test_padding_enters_the_scale(shape: tuple[int, int], rule: str) -> None:
    """#26: products are padded to multiples of 16; the scale belongs to the logical shape, and so does the update."""
    grad = randn(*shape)
    found = direction_of(grad, adjust_lr_fn=rule)
    rows, cols = shape
    ratios = {"original": max(1, rows / cols), "match_rms_adamw": 0.04 * max(shape)}
    ratios |= {"spectral": max(shape), "unit_rms_norm": rows / cols}

    def check(factor: float) -> None:
        assert relative_error(found, factor * direction_of(grad)) < 1e-6

    check(math.sqrt(ratios[rule]))
    padded = tuple(-(-side // 16) * 16 for side in shape)
    if scale_factor(padded, rule) != pytest.approx(math.sqrt(ratios[rule])):
        must_fail(check, scale_factor(padded, rule))


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_sum_of_gradients_is_mixed_up_with_their_average(nesterov: bool) -> None:
    """#28: a heavy-ball buffer is this buffer divided by 1 - momentum: same direction, another buffer."""
    grads = [randn(6, 9, seed=s, dtype=torch.float64) for s in range(6)]
    p, opt = train(lambda ps: Muon(ps, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.0), grads)
    buffer = opt.state[p]["momentum_buffer"]
    heavy, expected = torch.zeros(6, 9, dtype=torch.float64), parameter(6, 9, dtype=torch.float64).detach()
    for g in grads:
        heavy = 0.9 * heavy + g
        expected -= (
            0.1 * scale_factor((6, 9), "match_rms_adamw") * orthogonalize(g + 0.9 * heavy if nesterov else heavy)
        )
    assert relative_error(buffer, heavy * 0.1) < 1e-12
    assert relative_error(p.detach(), expected) < 1e-9
    # Loaded as it is, the other kind is ten times too heavy: the next step goes elsewhere.
    results = []
    for factor in (0.1, 1.0):
        state = copy.deepcopy(opt.state_dict())
        state["state"][0]["momentum_buffer"] = heavy * factor
        q = nn.Parameter(p.detach().clone())
        other = Muon([q], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.0)
        other.load_state_dict(state)
        step(other, [q], [grads[0]])
        results.append(q.detach())
    step(opt, [p], [grads[0]])
    assert relative_error(results[0], p.detach()) < 1e-9 < 1e-3 < relative_error(results[1], p.detach())

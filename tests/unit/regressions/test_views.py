"""Section C, second half: each block of a view equals the same block held as a parameter of its own, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.unit.regressions.tools import must_fail, parameter, randn, step
from torch import Tensor, nn

from meshmuon import Muon, View

Cut = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A view, a shape, and the blocks it should give, cut by hand."""

    shape: tuple[int, ...]
    view: View
    cut: Cut


def heads(t: Tensor, count: int) -> list[Tensor]:
    return list(t.chunk(count, dim=0))


CASES = {
    "q, k, v as equal rows": Case((24, 10), View(split_rows=(8, 8, 8)), lambda t: [t[:8], t[8:16], t[16:]]),
    "q, k, v of unequal rows (GQA)": Case((20, 10), View(split_rows=(12, 4, 4)), lambda t: [t[:12], t[12:16], t[16:]]),
    "four blocks (gated attention)": Case(
        (23, 9), View(split_rows=(8, 8, 6, 1)), lambda t: [t[:8], t[8:16], t[16:22], t[22:]]
    ),
    "gate and up as rows": Case((26, 8), View(split_rows=(13, 13)), lambda t: [t[:13], t[13:]]),
    "unequal columns": Case((8, 19), View(split_cols=(11, 8)), lambda t: [t[:, :11], t[:, 11:]]),
    "rows and columns": Case(
        (9, 12),
        View(split_rows=(5, 4), split_cols=(2, 10)),
        lambda t: [t[:5, :2], t[:5, 2:], t[5:, :2], t[5:, 2:]],
    ),
    "heads on rows": Case((12, 10), View(heads=3), lambda t: heads(t, 3)),
    "heads on columns": Case((10, 12), View(heads=4, heads_on="cols"), lambda t: [*t.chunk(4, dim=1)]),
    "heads on rows, columns split": Case(
        (6, 11), View(heads=2, split_cols=(4, 7)), lambda t: [c for h in heads(t, 2) for c in (h[:, :4], h[:, 4:])]
    ),
    "experts": Case((3, 7, 10), View(experts=True), lambda t: [*t]),
    "experts of experts": Case((2, 3, 5, 8), View(experts=True), lambda t: [m for stack in t for m in stack]),
    "experts with gate and up": Case(
        (3, 11, 6), View(experts=True, split_rows=(7, 4)), lambda t: [b for m in t for b in (m[:7], m[7:])]
    ),
    "experts with unequal columns": Case(
        (2, 6, 11), View(experts=True, split_cols=(3, 8)), lambda t: [b for m in t for b in (m[:, :3], m[:, 3:])]
    ),
    "experts with heads": Case((2, 8, 5), View(experts=True, heads=4), lambda t: [h for m in t for h in heads(m, 4)]),
    "a convolution": Case((9, 3, 2, 4), View(flatten=True), lambda t: [t.reshape(9, 24)]),
    "a convolution in row blocks": Case(
        (9, 3, 5), View(flatten=True, split_rows=(5, 4)), lambda t: [t[:5].reshape(5, 15), t[5:].reshape(4, 15)]
    ),
    "a transposed convolution": Case(
        (3, 9, 2, 4), View(flatten=True, transposed=True), lambda t: [t.transpose(0, 1).reshape(9, 24)]
    ),
    "stored (in, out)": Case((6, 10), View(transposed=True), lambda t: [t.T]),
    "stored (in, out), q, k, v": Case(
        (6, 10), View(transposed=True, split_rows=(5, 3, 2)), lambda t: [t[:, :5].T, t[:, 5:8].T, t[:, 8:].T]
    ),
}


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_fused_matrices_treated_as_one(name: str, dtype: torch.dtype) -> None:
    """#32, #33, #34 and #35: five steps, parameters and momentum; the whole as one matrix must differ."""
    case = CASES[name]
    arguments: dict[str, Any] = {"lr": 0.1, "adjust_lr_fn": "original"}
    fused = parameter(*case.shape, dtype=dtype)
    parts = [nn.Parameter(block.detach().clone(memory_format=torch.contiguous_format)) for block in case.cut(fused)]
    opt = Muon([("fused", fused)], overrides={"fused": case.view}, **arguments)
    separate = Muon(parts, **arguments)
    for seed in range(5):
        # Blocks of very different size: a norm taken over more than one of them would show.
        grad = randn(*case.shape, seed=seed, dtype=torch.float64)
        for i, block in enumerate(case.cut(grad) if "convolution" not in name else []):
            block.mul_(10.0 ** (4 * (i % 3) - 4))
        grad = grad.to(dtype)
        step(opt, [fused], [grad])
        step(separate, parts, [block.contiguous() for block in case.cut(grad)])
        check_equal(case.cut(fused.detach()), [p.detach() for p in parts])
        momentum = case.cut(opt.state[fused]["momentum_buffer"])
        check_equal(momentum, [separate.state[p]["momentum_buffer"] for p in parts])


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if len(case.shape) == 2 and "stored" not in name]
)
def test_fused_matrices_treated_as_one_would_be_noticed(name: str) -> None:
    """The sabotage of #32 to #35: the same comparison against the parameter as one matrix, and against other blocks."""
    case = CASES[name]
    results = []
    for view in (case.view, View(), View(split_rows=(1, case.shape[0] - 1))):
        fused = parameter(*case.shape)
        opt = Muon([("fused", fused)], overrides={"fused": view}, lr=0.1)
        step(opt, [fused], [randn(*case.shape)])
        results.append(case.cut(fused.detach()))
    must_fail(check_equal, results[0], results[1])
    must_fail(check_equal, results[0], results[2])


@pytest.mark.parametrize(
    ("sizes", "shape"), [((8, 8, 8), (32, 10)), ((8, 8), (24, 10)), ((24, 1), (24, 10)), ((12, 13), (24, 10))]
)
def test_a_split_into_three_of_a_projection_with_four_blocks(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """#33: gated attention has four blocks where three were assumed. Sizes that do not sum up are an error."""
    with pytest.raises(ValueError, match=r"qkv.*sums to"):
        Muon([("qkv", parameter(*shape))], overrides={"qkv": View(split_rows=sizes)})


def test_heads_are_normalised_over_the_whole_batch() -> None:
    """#35: one huge head silenced the others, because the norm was taken over all of them."""
    scales = [1e-20, 1.0, 1e20]
    p = nn.Parameter(torch.zeros(12, 6))
    grad = torch.cat([randn(4, 6, seed=i) * s for i, s in enumerate(scales)])
    opt = Muon([("q", p)], overrides={"q": View(heads=3)}, lr=1.0, weight_decay=0.0, adjust_lr_fn="none")
    step(opt, [p], [grad])

    def check(update: Tensor) -> None:
        for head in update.chunk(3):
            assert torch.linalg.svdvals(head).min() > 0.7

    check(p.detach())
    whole = nn.Parameter(torch.zeros(12, 6))
    step(Muon([whole], lr=1.0, weight_decay=0.0, adjust_lr_fn="none"), [whole], [grad])
    must_fail(check, whole.detach())


@pytest.mark.parametrize(
    "view", [View(split_rows=(6, 4, 2)), View(split_cols=(1, 5)), View(split_rows=(11, 1)), View()]
)
def test_gradients_released_early_are_missing_for_the_blocks_that_come_later(view: View) -> None:
    """Blocks of different sizes are in different buckets: the gradient may go only when all of them have read it."""
    results = []
    for release in (False, True):
        fused = parameter(12, 6)
        opt = Muon([("qkv", fused)], overrides={"qkv": view}, lr=0.1, release_grads=release)
        for seed in range(3):
            step(opt, [fused], [randn(12, 6, seed=seed)])
            assert (fused.grad is None) == release
        results.append((fused.detach(), opt.state[fused]["momentum_buffer"]))
    (plain, momentum), (released, its_momentum) = results
    assert torch.equal(plain, released) and torch.equal(momentum, its_momentum)
    start = parameter(12, 6).detach()
    assert not any(torch.equal(a, b) for a, b in zip(plain, start, strict=True)), "every row has moved"


def test_a_view_is_lost_when_the_state_is_saved_or_the_optimizer_copied() -> None:
    """#32: the blocks are decided by the view in the group, which travels with it."""
    fused = parameter(12, 6)
    opt = Muon([("qkv", fused)], overrides={"qkv": View(split_rows=(6, 3, 3))}, lr=0.1)
    view = opt.param_groups[0]["view"]
    assert view == {"split_rows": (6, 3, 3)} and opt.state_dict()["param_groups"][0]["view"] == view
    other = parameter(12, 6)
    groups = [{"params": [("qkv", other)], "algorithm": "muon", "view": view}]
    again = Muon(groups, lr=0.1)
    again.load_state_dict(opt.state_dict())
    for seed in range(2):
        step(opt, [fused], [randn(12, 6, seed=seed)])
        step(again, [other], [randn(12, 6, seed=seed)])
    assert torch.equal(fused, other)

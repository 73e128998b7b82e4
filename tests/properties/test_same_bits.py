"""A matrix gives the same bits alone, in any batch, misaligned, in transposed storage, and with any thread count."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.libraries import LIBRARIES, using_library
from tests.threads import using

from meshmuon import Muon, orthogonalize

SHAPES = [
    (1, 40),
    (40, 1),
    (3, 5),
    (7, 33),
    (18, 8),
    (16, 16),
    (64, 96),
    (100, 300),
    (192, 192),
    (257, 130),
    (128, 512),
    (400, 421),
]


def misaligned(x, offset):
    flat = torch.empty(x.numel() + offset)
    return flat[offset:].view(x.shape).copy_(x)


def appearances(x, form):
    """The same matrix in every dress it may come in."""
    others = torch.randn(7, *x.shape, generator=torch.Generator().manual_seed(9))
    for count in (1, 2):
        with using(count):
            yield "alone", orthogonalize(x, form=form)
            for offset in (1, 2, 3):
                yield f"misaligned by {offset}", orthogonalize(misaligned(x, offset), form=form)
            yield "transposed storage", orthogonalize(x.T.contiguous().T, form=form)
            if x.shape[0] != x.shape[1]:  # a square one is taken as it stands
                yield "transposed", orthogonalize(x.T, form=form).T
            for size in (2, 3, 8):
                stack = torch.cat([others[: size - 1], x[None]])
                yield f"last of {size}", orthogonalize(stack, form=form)[-1]
                yield f"first of {size}", orthogonalize(stack.flip(0), form=form)[0]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_appearance_of_a_matrix_gives_the_same_bits(shape, form, library):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with using_library(library):
        first = orthogonalize(x, form=form)
        for dress, result in appearances(x, form):
            assert torch.equal(result, first), dress


@pytest.mark.parametrize("shape", [(64, 96), (7, 33)])
def test_without_the_canonical_entry_bits_do_differ(shape):
    """The sabotage: plain products in another dress. If these agreed, the one above shows nothing."""

    def plain(x):
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
        return x

    results = []
    for count in (1, 2):
        with using(count):
            for seed in range(8):
                x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
                results.append(plain(x))
                results.append(plain(misaligned(x, 1)))
                results.append(plain(x.mT.contiguous().mT))
    half = len(results) // 2
    pairs = [
        *zip(results[0::3], results[1::3]),
        *zip(results[0::3], results[2::3]),
        *zip(results[:half], results[half:]),
    ]
    assert not all(torch.equal(a, b) for a, b in pairs)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    batch=st.integers(1, 6),
    offset=st.integers(0, 7),
    form=st.sampled_from(["standard", "gram"]),
    seed=st.integers(0, 1000),
)
def test_random_matrices_keep_their_bits_in_random_batches(rows, cols, batch, offset, form, seed):
    stack = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(seed))
    together = orthogonalize(misaligned(stack, offset), form=form)
    for i in range(batch):
        assert torch.equal(together[i], orthogonalize(stack[i], form=form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_keep_their_bits_in_any_company(dtype):
    """One optimizer with many matrices, against one optimizer per matrix: parameters and momentum over five steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (24, 40), (7, 33), (24, 40), (1, 9)]
    together = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    alone = [p.detach().clone().requires_grad_() for p in together]
    one, many = Muon(together, lr=0.02), [Muon([p], lr=0.02) for p in alone]
    for _ in range(5):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.clone()
        with using(2):
            one.step()
        with using(1):
            for opt in many:
                opt.step()
    for p, q, opt in zip(together, alone, many, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(one.state[p]["momentum_buffer"], opt.state[q]["momentum_buffer"])


@pytest.mark.parametrize("workspace_bytes", [1, 20_000, 2**30])
def test_the_size_of_buckets_does_not_change_a_bit(workspace_bytes):
    params = [torch.randn(24, 40, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(5)]
    reference = [p.detach().clone().requires_grad_() for p in params]
    opt, ref = Muon(params, workspace_bytes=workspace_bytes), Muon(reference)
    for p, q in zip(params, reference, strict=True):
        p.grad = q.grad = torch.sin(p.detach() * 3)
    opt.step()
    ref.step()
    assert all(torch.equal(p, q) for p, q in zip(params, reference, strict=True))
    if workspace_bytes == 1:
        assert len(opt.plan.buckets) == 5
        assert "more than workspace_bytes=1" in str(opt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_factor_has_the_same_bits_in_every_batch(dtype):
    """Products of small matrices in fp64 depend on the batch: one in eight had other bits."""
    for rows, cols, batch in itertools.product((2, 3, 5, 7, 11, 19, 33), (3, 5, 6, 9, 13, 17, 31), (2, 3, 5)):
        stack = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(100 * rows + cols)).to(dtype)
        together = orthogonalize(stack, form="svd")
        for one, found in zip(stack, together, strict=True):
            assert torch.equal(orthogonalize(one, form="svd"), found), (rows, cols, batch)

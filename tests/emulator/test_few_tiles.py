"""few_tiles.cu on the machine of machine.h: right to the last bit, however threads and engines are interleaved."""

import pytest
import torch

from meshmuon.kernels import few_tiles
from meshmuon.kernels.agenda import Product
from tests.emulator.by_torch import Exact
from tests.emulator.gpu import Gpu, emulated

# All kernels, pairs on the diagonal, sides that end in a part of a box, and more steps than slots.
SHAPES = [(1, 8, 8), (1, 64, 64), (3, 136, 200), (1, 256, 1000), (1, 704, 64), (1, 768, 72), (12, 232, 520)]
SHAPES += [(1, 1024, 72), (1, 1088, 200), (1, 1472, 136), (1, 1536, 64), (7, 512, 64), (1, 1088, 648)]


def random(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def symmetric(*shape, dtype, seed):
    x = random(*shape, dtype=torch.float32, seed=seed)
    return (x + x.mT).to(dtype)


def by_gpu(a, b=None, c=None, *, terms, gpu=None):
    d = torch.full((*a.shape[:-1], a.shape[-2]), float("nan"), dtype=a.dtype)
    with emulated(gpu or Gpu()):
        few_tiles.FewLaunch(a, b, c, d).scaled(*terms)
    return d


def by_torch(a, b=None, c=None, *, terms):
    d = torch.empty((*a.shape[:-1], a.shape[-2]), dtype=a.dtype)
    product = Product(0, 0 if b is None else 1, None if c is None else 2, 3, mirrored=True)
    Exact([product], [a, b, c, d]).scaled(*terms)
    return d


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_with_itself_and_all_terms(shape, dtype):
    a = random(*shape, dtype=dtype)
    c = symmetric(shape[0], shape[1], shape[1], dtype=dtype, seed=1)
    for added, terms in ((None, (0.7, 0.0, 0.5)), (c, (1.5, -2.5, 3.0))):
        expected = by_torch(a, c=added, terms=terms)
        assert torch.equal(expected, expected.mT)
        for seed in range(2):
            assert torch.equal(by_gpu(a, c=added, terms=terms, gpu=Gpu(seed=seed)), expected)
    wrong = by_torch(a, c=c, terms=(1.5, -2.5, 2.0))
    assert not torch.equal(wrong, expected), "the last term counts"


@pytest.mark.parametrize("shape", [(2, 136, 200), (1, 1024, 72), (1, 1472, 136)], ids=str)
def test_two_that_are_not_the_same(shape):
    a, b = (random(*shape, seed=seed) for seed in (0, 1))
    got = by_gpu(a, b, terms=(1.0, 0.0, 0.0))
    assert torch.equal(got, by_torch(a, b, terms=(1.0, 0.0, 0.0)))  # the lower triangle, mirrored


def test_a_stack_that_is_part_of_a_larger_one_and_a_result_over_what_is_added():
    whole = random(4, 208, 264)
    a, c = whole[1:3, 8:144, 64:200], symmetric(2, 136, 136, dtype=torch.float16, seed=1)
    expected = by_torch(a, c=c, terms=(1.0, -0.5, 0.25))
    with emulated(Gpu()):
        few_tiles.FewLaunch(a, None, c, c).scaled(1.0, -0.5, 0.25)
    assert torch.equal(c, expected)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_that_begins_early_reads_nothing_too_early(seed):
    """Each product reads what the one before wrote, and writes what the one before that read."""

    def chain(gpu):
        r = symmetric(1, 264, 264, dtype=torch.float16, seed=5) / 64
        buffers = [r.clone(), torch.zeros_like(r), torch.zeros_like(r)]
        with emulated(gpu), gpu.stream():
            for step in range(6):
                a, out = buffers[step % 3], buffers[(step + 1) % 3]
                few_tiles.FewLaunch(a, None, a, out).scaled(1.0, -0.5, 0.25)
        assert len(gpu.launched) == 6
        return buffers[0]

    alone = chain(Gpu(blocks=1))
    assert alone.isfinite().all() and alone.abs().max() > 1e-3
    assert torch.equal(chain(Gpu(seed=seed, blocks=24)), alone)

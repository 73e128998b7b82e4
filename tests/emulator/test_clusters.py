"""clusters.cu on the machine of machine.h: single products and whole programs, right to the last bit."""

from dataclasses import replace

import pytest
import torch

from meshmuon.kernels import clusters
from meshmuon.kernels.agenda import Product, Second
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.program import write_program
from meshmuon.polar.ways import Way
from tests.emulator.by_torch import Exact
from tests.emulator.gpu import Gpu, emulated, text_of

DTYPES = [torch.float16, torch.bfloat16]
# One tile and many, sides that end in a part of a box, odd numbers of tiles, more steps than slots; with two clusters
# the last ones are cut in halves.
SQUARES = [(1, 8, 8), (1, 128, 64), (3, 136, 200), (2, 200, 72), (1, 328, 1000), (1, 264, 64), (1, 392, 136)]
WAYS = [
    (5, Way("standard")),
    (5, Way("gram", (2,))),
    (5, Way("gram", (2,), whole=True)),
    (5, Way("gram", (2,), paired=True)),
    (5, Way("gram", (2,), whole=True, paired=True)),
    (5, Way("gram", (2, 3), paired=True)),
    (5, Way("gram", (2,), folded=True)),
    (5, Way("gram", (2,), folded=True, paired=True)),
]


def random(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def symmetric(*shape, dtype=torch.float16, seed=0):
    x = random(*shape, dtype=torch.float32, seed=seed)
    return (x + x.mT).to(dtype)


def nothing(*shape, dtype=torch.float16):
    return torch.full(shape, float("nan"), dtype=dtype)


def copied(stacks):
    """The same, and what is one stack stays one."""
    copies = {id(stack): stack.clone() for stack in stacks}
    return [copies[id(stack)] for stack in stacks]


def by_gpu(products, stacks, gpu, texts=None):
    written = clusters.counters(stacks[0]) if len(products) > 1 else None  # a launch knows it by its address
    with emulated(gpu, texts=texts):
        clusters.ClusterLaunch(products, stacks, written)()


def assert_exact(products, stacks, *, seeds=2, texts=None, **how):
    """Whatever comes when, all stacks end with the bits of by_torch.py, also where nothing is to be written."""
    expected = copied(stacks)
    Exact(products, expected)()
    assert any(not torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(expected, stacks, strict=True))
    for seed in range(seeds):
        found = copied(stacks)
        by_gpu(products, found, Gpu(seed=seed, **how), texts)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SQUARES, ids=str)
@pytest.mark.parametrize("pairs", [1, 2])
def test_a_product_with_itself(shape, dtype, pairs):
    a, d = random(*shape, dtype=dtype), nothing(shape[0], shape[1], shape[1], dtype=dtype)
    assert_exact([Product(0, 0, None, 1, True, alpha=0.7, gamma=0.5)], [a, d], clusters=pairs)


@pytest.mark.parametrize("shape", [(1, 264, 64), (1, 392, 136)], ids=str)
def test_half_tiles_as_older_compilers_have_them(shape):
    """All sums of a tile are added to, whatever is where the lower half's operand would be."""
    text = text_of("clusters.cu")
    assert text.count("kShortSteps = true;") == 1
    older = {"clusters.cu": text.replace("kShortSteps = true;", "kShortSteps = false;")}
    a, d = random(*shape), nothing(shape[0], shape[1], shape[1])
    assert_exact([Product(0, 0, None, 1, True, gamma=0.5)], [a, d], texts=older)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "m"), [(1, 64), (3, 136), (1, 320), (2, 392)])
@pytest.mark.parametrize("over", [False, True])
def test_two_with_all_terms_and_two_results(batch, m, dtype, over):
    a, b, c, e = (symmetric(batch, m, m, dtype=dtype, seed=seed) for seed in range(4))
    first, second = (e, c) if over else (nothing(batch, m, m, dtype=dtype) for _ in range(2))
    one = Product(0, 1, 2, 4, True, alpha=1.5, beta=-2.5, gamma=3.0)
    assert_exact([one], [a, b, c, e, first])
    two = replace(one, e=3, delta=-0.75, second=Second(5, alpha=-0.25, beta=0.5, delta=1.25, gamma=-1.0))
    assert_exact([two], [a, b, c, e, first, second])


@pytest.mark.parametrize(("batch", "m", "k"), [(3, 136, 200), (1, 264, 1032)])
def test_two_halves_of_a_result(batch, m, k):
    halves = Product(0, 0, None, 1, True, second=Second(2, alpha=2048.0), in_halves=True)
    assert_exact([halves], [random(batch, m, k), nothing(batch, m, m), nothing(batch, m, m)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "m", "n"), [(1, 16, 16), (3, 200, 328), (2, 144, 64), (1, 264, 520)])
def test_a_whole_product(batch, m, n, dtype):
    a, x, c = random(batch, m, m, dtype=dtype), *(random(batch, m, n, dtype=dtype, seed=seed) for seed in (1, 2))
    d = nothing(batch, m, n, dtype=dtype)
    assert_exact([Product(0, 1, None, 3, False)], [a, x, c, d])
    assert_exact([Product(0, 1, 2, 3, False, alpha=0.5, beta=-2.0)], [a, x, c, d])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("batch", "m", "n"), [(1, 16, 48), (3, 144, 208), (2, 272, 400)])
@pytest.mark.parametrize("pairs", [1, 3])
def test_a_program(way, batch, m, n, pairs):
    """All stacks begin as NaN, so that nobody reads what nobody wrote: upper triangles, too."""
    steps, way = way
    program = write_program(resolve_schedule("polar_express", steps), way)
    x = random(batch, m, n, dtype=torch.float32)
    x = (x / x.norm(dim=(1, 2), keepdim=True)).half()
    stacks = [x, *(nothing(batch, m, m if side == "m" else n) for side in program.columns[1:])]
    assert_exact(program.products, stacks, seeds=1, clusters=pairs, blocks=2 * pairs)


def test_a_program_of_which_few_clusters_ever_come():
    """Nobody waits for blocks that are not there: two at a time, of eight."""
    program = write_program(resolve_schedule("polar_express", 5), Way("gram", (2,), paired=True))
    x = (random(3, 272, 288, dtype=torch.float32) / 280).half()
    stacks = [x, *(nothing(3, 272, 272 if side == "m" else 288) for side in program.columns[1:])]
    assert_exact(program.products, stacks, clusters=4, blocks=2)


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_that_begins_early_reads_nothing_too_early(seed):
    def chain(gpu):
        r = symmetric(2, 264, 264, seed=5) / 64
        buffers = [r.clone(), torch.zeros_like(r), torch.zeros_like(r)]
        with emulated(gpu), gpu.stream():
            for step in range(6):
                a, out = buffers[step % 3], buffers[(step + 1) % 3]
                product = Product(0, 0, 1, 2, True, beta=-0.5, gamma=0.25)
                clusters.ClusterLaunch([product], [a, a, out])()
        return buffers[0]

    alone = chain(Gpu(blocks=2))
    assert alone.isfinite().all() and alone.abs().max() > 1e-3
    assert torch.equal(chain(Gpu(seed=seed, blocks=12)), alone)

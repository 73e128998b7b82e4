"""Products by clusters of thread blocks, single and as programs. Run with `pytest -m gpu`."""

import importlib.util
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch

from meshmuon.kernels import clusters
from meshmuon.kernels import symmetric_matmul as module
from meshmuon.kernels.agenda import Product, Result, Second
from meshmuon.kernels.configs import TileConfig
from meshmuon.kernels.symmetric_matmul import symmetric_matmul, symmetric_matmul_with
from meshmuon.polar import program as programs
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.kernel_operations import KernelOperations
from meshmuon.polar.program import write_program
from meshmuon.polar.ways import Way, evaluate

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
TRITON = TileConfig(128, 64, 4, 3, tensor_memory=True)
SHAPES = [(1, 8, 8), (1, 128, 64), (3, 136, 200), (7, 200, 72), (1, 256, 4096), (3, 1000, 520), (48, 768, 768)]
SHAPES += [(5, 1416, 1416), (2, 1408, 2048), (1, 2048, 2048), (1, 4096, 264)]
# On 132 multiprocessors, the last round of these has so few tiles that they are cut in halves. Also with one step of k,
# and with sides whose last tile has all of its lower half, a part of it, or nothing.
HALVED = [(1, 3072, 3072), (1, 3072, 520), (1, 2176, 264), (1, 2176, 64), (1, 2088, 136), (1, 2160, 72), (4, 1000, 520)]
HALVED += [(3, 1096, 200)]
SIDES_HALVED = sorted({shape[:2] for shape in HALVED})


def random(*shape, dtype=torch.float16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def symmetric(*shape, dtype, seed):
    x = random(*shape, dtype=torch.float32, seed=seed) / shape[-1] ** 0.5
    return (x + x.mT).to(dtype)


def by_clusters(a, b=None, *, alpha=1.0, beta=0.0, c=None, gamma=0.0, out=None):
    if out is None:
        out = torch.full((*a.shape[:-1], a.shape[-2]), float("nan"), dtype=a.dtype, device="cuda")
    result = Result(a.shape[1], a.shape[1], mirrored=True)
    assert clusters.can_run(a.device, a.dtype, batch=len(a), results=(result,))
    product = Product(a=0, b=0 if b is None else 1, c=None if c is None else 2, d=3, mirrored=True)
    stacks = [a, a if b is None else b, out if c is None else c, out]
    clusters.ClusterLaunch([product], stacks).scaled(alpha, beta, gamma)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *HALVED], ids=str)
def test_a_product_with_itself_has_the_same_bits(shape, dtype):
    a = random(*shape, dtype=dtype)
    got = by_clusters(a, alpha=0.7, gamma=0.5)
    assert torch.equal(got, got.mT)
    assert torch.equal(got, symmetric_matmul_with(TRITON, a, alpha=0.7, gamma=0.5))
    wrong = symmetric_matmul_with(TRITON, a, alpha=0.7, gamma=0.25)
    assert not torch.equal(got, wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "m"),
    [(1, 64), (3, 136), (60, 320), (60, 384), (60, 448), (2, 1000), (12, 1408), (3, 2048), *SIDES_HALVED],
)
def test_two_with_all_terms_have_the_same_bits(batch, m, dtype):
    a, c = (symmetric(batch, m, m, dtype=dtype, seed=seed) for seed in (0, 1))
    b = (a.double() @ a.double()).to(dtype)
    terms = {"alpha": 1.5, "beta": -2.5, "gamma": 3.0}
    got = by_clusters(a, b, c=c, **terms)
    expected = symmetric_matmul_with(TRITON, a, b, c=c, **terms)
    assert torch.equal(got, expected)
    assert torch.equal(by_clusters(a, b, c=c, out=c, **terms), expected), "over what is added"


def test_a_matrix_has_the_same_bits_alone_and_in_company_and_again():
    a = random(9, 1000, 1000)
    together = by_clusters(a)
    for i in range(9):
        assert torch.equal(by_clusters(a[i : i + 1])[0], together[i])
    for _ in range(20):
        assert torch.equal(by_clusters(a), together)


def test_halves_have_the_same_bits_again_and_beside_others():
    ones = [random(1, 3072, 1024), random(4, 1000, 1024)]
    expected = [symmetric_matmul_with(TRITON, one) for one in ones]
    for one, wanted in zip(ones, expected, strict=True):
        for _ in range(50):
            assert torch.equal(by_clusters(one), wanted)
    for found in on_two_streams(by_clusters, ones):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_large_products_go_there_and_others_do_not():
    symmetric_matmul(
        random(41, 1024, 512)
    )  # compared with torch, in clusters as well; of another shape, or it is bound
    with mock.patch.object(module.clusters, "ClusterLaunch", wraps=clusters.ClusterLaunch) as made:
        symmetric_matmul(random(40, 1024, 512, seed=3))
        assert made.call_count == 1
        symmetric_matmul(random(2, 256, 512, seed=3))  # too few tiles
        symmetric_matmul(random(40, 1024, 513, seed=3))  # rows that are not aligned
        symmetric_matmul(random(40, 1024, 512, seed=4), rest=torch.empty(40, 1024, 1024, device="cuda").half())
        assert made.call_count == 1


def test_a_captured_graph_has_the_same_bits_with_other_data():
    a = random(40, 640, 512)
    out = torch.empty(40, 640, 640, dtype=a.dtype, device="cuda")
    symmetric_matmul(a, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        symmetric_matmul(a, out=out)
    a.copy_(random(40, 640, 512, seed=1))
    graph.replay()
    assert torch.equal(out, symmetric_matmul_with(TRITON, a))


def test_a_shape_first_seen_while_a_graph_is_captured_goes_to_triton():
    a = random(40, 648, 520)
    out = torch.empty(40, 648, 648, dtype=a.dtype, device="cuda")
    symmetric_matmul_with(TRITON, a)  # compiled
    graph = torch.cuda.CUDAGraph()
    with (
        mock.patch.object(module.clusters, "ClusterLaunch", wraps=clusters.ClusterLaunch) as made,
        torch.cuda.graph(graph),
    ):
        symmetric_matmul(a, out=out)
    graph.replay()
    assert made.call_count == 0
    assert torch.equal(out, symmetric_matmul_with(TRITON, a))


def on_two_streams(compute, ones):
    """Compute each on a stream of its own, at the same time, twenty times."""
    streams = [torch.cuda.Stream() for _ in ones]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for one, stream in zip(ones, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(compute(one))
        torch.cuda.synchronize()
        yield found


def test_two_streams_at_once():
    ones = [random(40, 640, 512, seed=seed) for seed in range(2)]
    expected = [symmetric_matmul_with(TRITON, one) for one in ones]
    for found in on_two_streams(symmetric_matmul, ones):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_new_thread():
    a = random(40, 640, 512, seed=5)
    expected = symmetric_matmul_with(TRITON, a)
    found = []
    thread = threading.Thread(target=lambda: found.append(by_clusters(a)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_the_rest_has_the_same_bits_alone_and_in_company():
    a = random(40, 640, 512, seed=6)
    rests = torch.empty(40, 640, 640, dtype=a.dtype, device="cuda")
    alone = torch.empty(1, 640, 640, dtype=a.dtype, device="cuda")
    symmetric_matmul(a, rest=rests)
    symmetric_matmul(a[:1], rest=alone)
    assert torch.equal(rests[:1], alone)


@pytest.mark.parametrize(
    ("product", "batch", "m"), [(by_clusters, 8, 768), (by_clusters, 24, 768), (symmetric_matmul, 1, 512)]
)
def test_a_chain_that_begins_early_reads_nothing_too_early(product, batch, m):
    """Each product reads what the one before wrote, and writes what the one before that read."""

    def chain(pause):
        r = symmetric(batch, m, m, dtype=torch.float16, seed=5) / 4
        buffers = [r.clone(), torch.empty_like(r), torch.empty_like(r)]
        for step in range(60):
            a, out = buffers[step % 3], buffers[(step + 1) % 3]
            product(a, beta=-0.5, c=a, gamma=0.25, out=out)
            pause()
        return buffers[0].clone()

    careful = chain(torch.cuda.synchronize)
    assert careful.isfinite().all() and careful.abs().max() > 1e-3
    for _ in range(20):
        assert torch.equal(chain(lambda: None), careful)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "n"), [(1, 16, 16), (3, 200, 328), (2, 144, 64), (1, 1000, 4096), (48, 768, 768), (2, 1408, 2048)]
)
def test_a_whole_product(batch, m, n, dtype):
    a, x = random(batch, m, m, dtype=dtype), random(batch, m, n, dtype=dtype, seed=1)
    c = random(batch, m, n, dtype=dtype, seed=2)
    for product, stacks, wide in (
        (Product(0, 1, None, 2, False), [a, x], a.double() @ x.double()),
        (Product(0, 1, 2, 3, False, alpha=0.5, beta=-2.0), [a, x, c], 0.5 * (a.double() @ x.double()) - 2 * c.double()),
    ):
        got = torch.full_like(x, float("nan"))
        clusters.ClusterLaunch([product], [*stacks, got])()
        error = (got.double() - wide).abs().max() / wide.abs().max()
        assert error < torch.finfo(dtype).eps
        alone = torch.empty_like(x[:1])
        clusters.ClusterLaunch([product], [*(stack[-1:] for stack in stacks), alone])()
        assert torch.equal(alone[0], got[-1]), "the same bits alone"


WAYS = [
    Way("standard"),
    Way("gram", (2,)),
    Way("gram", (2,), whole=True),
    Way("gram", (2,), paired=True),
    Way("gram", (2,), whole=True, paired=True),
    Way("gram", (2, 3), paired=True),
    Way("gram", (2,), folded=True),
    Way("gram", (2,), folded=True, paired=True),
]
SCHEDULE = resolve_schedule("polar_express", 5)


def normalised(batch, m, n, dtype=torch.float16):
    x = random(batch, m, n, dtype=torch.float32)
    return (x / x.norm(dim=(1, 2), keepdim=True)).to(dtype)


def by_program(way, x):
    program = write_program(SCHEDULE, way)
    assert programs.can_run(program, x)
    return programs.run_program(program, [x.clone()])


class ByClusters(KernelOperations):
    """Each operation by itself, with whole products by clusters."""

    def apply(self, factor, x, out=None):
        result = torch.empty_like(x)
        clusters.ClusterLaunch([Product(0, 1, None, 2, False)], [factor, x, result])()
        return result

    def congruence(self, factor, halves):
        high, rest = halves
        first = self.apply(factor, rest)
        second = torch.empty_like(first)
        add = Product(0, 1, 2, 3, False, beta=1.0 / module.REST_SCALE)
        clusters.ClusterLaunch([add], [factor, high, first, second])()
        return symmetric_matmul(second, factor)

    def combined(self, left, right, added, wanted):
        """Each result by a launch of its own."""
        found = []
        for terms in wanted:
            c, e = (*added, None)[:2]
            beta, delta = (*terms.added, 0.0)[:2]
            factors = {"alpha": terms.product, "beta": beta, "gamma": terms.identity, "delta": delta}
            product = Product(0, 1, 2, 4, True, e=None if e is None else 3, **factors)
            found.append(torch.full_like(left, float("nan")))
            clusters.ClusterLaunch([product], [left, right, c, c if e is None else e, found[-1]])()
        return found


def by_form(way, x):
    return evaluate(x, way, schedule=SCHEDULE, operations=ByClusters(), pairs=ByClusters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "m"), [(1, 64), (3, 136), (60, 384), (12, 1408), (3, 2048)])
@pytest.mark.parametrize("over", [False, True])
def test_two_results_with_two_more_terms(batch, m, dtype, over):
    a, c, e = (symmetric(batch, m, m, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    square, eye = a.double() @ a.double(), torch.eye(m, device="cuda", dtype=torch.float64)
    expected = [
        0.5 * square + 1.5 * c.double() - 0.75 * e.double() + 2.0 * eye,
        -0.25 * square + 0.5 * c.double() + 1.25 * e.double() - 1.0 * eye,
    ]
    first, second = (e, c) if over else (torch.full_like(a, float("nan")) for _ in range(2))
    more = Second(4, alpha=-0.25, beta=0.5, delta=1.25, gamma=-1.0)
    product = Product(0, 0, 1, 3, True, alpha=0.5, beta=1.5, gamma=2.0, e=2, delta=-0.75, second=more)
    clusters.ClusterLaunch([product], [a, c, e, first, second])()
    for got, wide in zip((first, second), expected, strict=True):
        assert torch.equal(got, got.mT)
        assert (got.double() - wide).abs().max() <= torch.finfo(dtype).eps * wide.abs().max()


@pytest.mark.parametrize(("batch", "m", "k"), [(3, 136, 200), (24, 768, 3072), (8, 2048, 1032), (1, 3072, 520)])
def test_both_halves_have_the_bits_of_triton(batch, m, k):
    x = random(batch, m, k) / k**0.5
    high, rest, other = (torch.full((batch, m, m), float("nan"), dtype=x.dtype, device="cuda") for _ in range(3))
    product = Product(0, 0, None, 1, True, second=Second(2, alpha=module.REST_SCALE), in_halves=True)
    clusters.ClusterLaunch([product], [x, high, rest])()
    expected = symmetric_matmul_with(TRITON, x, rest=other)
    assert torch.equal(high, expected) and torch.equal(rest, other) and rest.any()


def test_without_more_terms_it_has_the_bits_it_had():
    a, c = (symmetric(12, 1408, 1408, dtype=torch.float16, seed=seed) for seed in (0, 1))
    expected = symmetric_matmul_with(TRITON, a, alpha=0.5, beta=1.5, c=c, gamma=2.0)
    results = [torch.full_like(a, float("nan")) for _ in range(2)]
    more = Second(4, alpha=0.5, beta=1.5, delta=0.0, gamma=2.0)
    product = Product(0, 0, 1, 3, True, alpha=0.5, beta=1.5, gamma=2.0, e=2, delta=0.0, second=more)
    clusters.ClusterLaunch([product], [a, c, a, *results])()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("batch", "m", "n"),
    [
        (3, 48, 80),
        (40, 128, 896),
        (1, 256, 512),
        (3, 272, 304),
        (48, 768, 768),
        (3, 1008, 1040),
        (5, 1408, 2048),
        (24, 768, 3072),
        (2, 2048, 2048),
        (2, 4096, 4352),
    ],
)
def test_a_program_has_the_bits_of_its_products_one_by_one(batch, m, n, way, dtype):
    x = normalised(batch, m, n, dtype)
    expected = by_form(way, x)
    for _ in range(10):
        assert torch.equal(by_program(way, x), expected)
    assert torch.equal(by_program(way, x[-1:])[0], expected[-1]), "alone"
    assert not torch.equal(by_program(way, x.flip(0) * 0.99), expected)


@pytest.mark.parametrize("way", [Way("standard"), Way("gram", (2, 3), paired=True)], ids=str)
def test_a_captured_program_has_the_same_bits_with_other_data(way):
    x = normalised(40, 768, 768)
    program = write_program(SCHEDULE, way)
    programs.run_program(program, [x.clone()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = programs.run_program(program, [x.clone()])
    x.copy_(x.flip(0).clone())
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, by_program(way, x))


def test_programs_on_two_streams_at_once():
    """Both want the whole GPU, and each may hold a part of it while it waits for its own tiles."""
    in_pairs = partial(by_program, Way("gram", (2, 3), paired=True))
    ones = [normalised(40, 640, 512), normalised(24, 512, 768)]
    expected = [in_pairs(one) for one in ones]
    for found in on_two_streams(in_pairs, ones):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def holding(multiprocessors):
    """Keep so many of them busy until the number that is given back becomes something else than zero."""
    import triton
    import triton.language as tl

    @triton.jit
    def hold(flag):
        while tl.atomic_add(flag, 0) == 0:
            pass

    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    hold[(multiprocessors,)](flag, num_warps=32)  # compiled
    torch.cuda.synchronize()
    flag.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        hold[(multiprocessors,)](flag, num_warps=32)
    return flag


@pytest.mark.parametrize("free", [12, 40])
def test_a_program_ends_beside_one_that_holds_most_of_the_gpu(free):
    """As a collective does that waits for other ranks: no block may wait for another one that is not there yet."""
    x = normalised(9, 768, 768)
    expected = by_program(Way("standard"), x)
    flag = holding(torch.cuda.get_device_properties(0).multi_processor_count - free)
    try:
        found = by_program(Way("standard"), x)
        done = torch.cuda.Event()
        done.record()
        given_up = time.monotonic() + 20
        while not done.query() and time.monotonic() < given_up:
            time.sleep(0.01)
        in_time = done.query()
    finally:
        with torch.cuda.stream(torch.cuda.Stream()):
            flag.fill_(1)
        torch.cuda.synchronize()
    assert in_time, "it waited for the whole GPU"
    assert torch.equal(found, expected)


def test_a_program_takes_the_memory_it_says():
    x = normalised(24, 768, 3072)
    program = write_program(SCHEDULE, Way("gram", (2,), folded=True))
    programs.run_program(program, [x.clone()])
    torch.cuda.synchronize()
    given = [x.clone()]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    programs.run_program(program, given)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 2 * 24 * (program.held(768, 3072) - 768 * 3072) + 2**20

"""Symmetric products by clusters of thread blocks: the bits of the Triton kernel. Run with `pytest -m gpu`."""

import importlib.util
import threading
from unittest import mock

import pytest
import torch

from meshmuon.kernels import clusters
from meshmuon.kernels import symmetric_matmul as module
from meshmuon.kernels.configs import TileConfig
from meshmuon.kernels.symmetric_matmul import symmetric_matmul, symmetric_matmul_with

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
TRITON = TileConfig(128, 64, 4, 3, tensor_memory=True)
SHAPES = [(1, 8, 8), (1, 128, 64), (3, 136, 200), (7, 200, 72), (1, 256, 4096), (3, 1000, 520), (48, 768, 768)]
SHAPES += [(5, 1416, 1416), (2, 1408, 2048), (1, 2048, 2048), (1, 4096, 264)]


def random(*shape, dtype=torch.float16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def symmetric(*shape, dtype, seed):
    x = random(*shape, dtype=torch.float32, seed=seed) / shape[-1] ** 0.5
    return (x + x.mT).to(dtype)


def by_clusters(a, b=None, *, alpha=1.0, beta=0.0, c=None, gamma=0.0, out=None):
    if out is None:
        out = torch.full((*a.shape[:-1], a.shape[-2]), float("nan"), dtype=a.dtype, device="cuda")
    assert clusters.can_run(a.device, a.dtype, batch=len(a), m=a.shape[1])
    clusters.ClusterLaunch(a, b, c, out)(alpha, beta, gamma)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_with_itself_has_the_same_bits(shape, dtype):
    a = random(*shape, dtype=dtype)
    got = by_clusters(a, alpha=0.7, gamma=0.5)
    assert torch.equal(got, got.mT)
    assert torch.equal(got, symmetric_matmul_with(TRITON, a, alpha=0.7, gamma=0.5))
    wrong = symmetric_matmul_with(TRITON, a, alpha=0.7, gamma=0.25)
    assert not torch.equal(got, wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "m"), [(1, 64), (3, 136), (60, 320), (60, 384), (60, 448), (2, 1000), (12, 1408), (3, 2048)]
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


def test_large_products_go_there_and_others_do_not():
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


def test_two_streams_at_once():
    ones = [random(40, 640, 512, seed=seed) for seed in range(2)]
    expected = [symmetric_matmul_with(TRITON, one) for one in ones]
    streams = [torch.cuda.Stream() for _ in ones]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for one, stream in zip(ones, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(symmetric_matmul(one))
        torch.cuda.synchronize()
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


@pytest.mark.parametrize("batch", [8, 24])
def test_a_chain_that_begins_early_reads_nothing_too_early(batch):
    """Each product reads what the one before wrote, and writes what the one before that read."""

    def chain(pause):
        r = symmetric(batch, 768, 768, dtype=torch.float16, seed=5) / 4
        buffers = [r.clone(), torch.empty_like(r), torch.empty_like(r)]
        for step in range(60):
            a, out = buffers[step % 3], buffers[(step + 1) % 3]
            by_clusters(a, beta=-0.5, c=a, gamma=0.25, out=out)
            pause()
        return buffers[0].clone()

    careful = chain(torch.cuda.synchronize)
    assert careful.isfinite().all() and careful.abs().max() > 1e-3
    for _ in range(20):
        assert torch.equal(chain(lambda: None), careful)

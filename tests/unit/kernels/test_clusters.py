"""How symmetric products are shared out to pairs of thread blocks. The kernel itself is tested on a GPU."""

import ctypes
from itertools import pairwise
from unittest import mock

import pytest
import torch

from meshmuon.kernels import clusters, cuda
from meshmuon.kernels.clusters import pair_up, share_out
from meshmuon.kernels.configs import choose_config

SHARED, IDLE = 1, 2


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [8, 128, 136, 256, 1000, 1408, 2048])
def test_every_tile_of_the_lower_triangle_is_computed_once(batch, m):
    pairs = pair_up(batch, m)
    found = [item[:3] for pair in pairs for item in pair if not item.flags & IDLE]
    sides = -(-m // 128)
    wanted = {(z, 128 * i, 128 * j) for z in range(batch) for i in range(sides) for j in range(i + 1)}
    assert len(found) == len(wanted)
    assert set(found) == wanted


@pytest.mark.parametrize("m", [136, 1408, 2048])
def test_pairs_that_share_have_the_same_columns(m):
    shared = [pair for pair in pair_up(3, m) if pair[0].flags & SHARED]
    assert shared
    for first, second in shared:
        assert second.flags == first.flags
        assert (first.matrix, first.col) == (second.matrix, second.col)
        assert first.row != second.row


def test_most_pairs_share():
    pairs = pair_up(4, 2048)
    assert sum(first.flags & SHARED for first, _ in pairs) > 0.9 * len(pairs)


def test_at_most_one_block_idles():
    for batch in range(1, 5):
        idle = [item for pair in pair_up(batch, 384) for item in pair if item.flags & IDLE]
        assert len(idle) <= 1


@pytest.mark.parametrize("count", [1, 5, 66])
def test_each_cluster_gets_its_pairs(count):
    pairs = pair_up(3, 640)
    items, starts = share_out(3, 640, count)
    assert len(starts) == count + 1
    assert 2 * starts[-1] == len(items) == 2 * len(pairs)
    for cluster, (start, end) in enumerate(pairwise(starts)):
        assert (
            list(zip(items[2 * start : 2 * end : 2], items[2 * start + 1 : 2 * end : 2], strict=True))
            == pairs[cluster::count]
        )


def test_only_large_products_on_hopper_go_to_clusters():
    for shape in ((48, 1408, 1408), (12, 2048, 2048), (4, 4096, 4096), (3, 4096, 4096), (8, 2048, 8192)):
        assert choose_config("hopper", *shape, torch.float16).clusters
    assert not choose_config("hopper", 1, 1024, 1024, torch.float16).clusters
    assert not choose_config("hopper", 8, 2048, 8192, torch.float32).clusters
    for architecture in ("blackwell", "ampere", "rocm", "other"):
        assert not choose_config(architecture, 8, 2048, 8192, torch.float16).clusters
    assert not clusters.can_run(torch.device("cpu"), torch.float16, batch=8, m=2048)
    assert clusters.describe(torch.device("cpu"), torch.float16).endswith("stay with Triton: not on a Hopper GPU")


def test_where_it_cannot_be_compiled_triton_stands_in_and_somebody_hears_of_it(monkeypatch):
    def missing():
        raise OSError("libnvrtc.so.99 was not found")

    monkeypatch.setattr(cuda, "_nvrtc", missing)
    clusters._kernel.cache_clear()
    with pytest.warns(UserWarning, match=r"libnvrtc.so.99 was not found.*same bits"):
        assert clusters._kernel(torch.device("cuda", 0), torch.float16) == "OSError: libnvrtc.so.99 was not found"
    clusters._kernel.cache_clear()


class Recorder:
    """A CUDA driver that does nothing but remember."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 0

        return call


def test_a_launch_tells_the_kernel_sizes_coefficients_and_whether_to_add(monkeypatch):
    driver, launched = Recorder(), []

    def launch(blocks, threads, arguments, stream):
        numbers = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_int)).contents.value for i in (6, 7, 8)]
        scale = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_float)).contents.value for i in (9, 10, 11)]
        launched.append((blocks, threads, numbers, scale, stream))

    kernel = clusters._Kernel(mock.Mock(launch=launch), 5)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(clusters, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: mock.Mock(cuda_stream=7))
    a, c = torch.zeros(2, 256, 500, dtype=torch.float16), torch.zeros(2, 256, 256, dtype=torch.float16)
    bound = clusters.ClusterLaunch(a, None, c, torch.empty_like(c))
    bound(1.0, 2.0, 3.0)
    bound(4.0, 5.0, 6.0)
    clusters.ClusterLaunch(a, None, None, torch.empty_like(c))(1.0, 0.0, 0.0)
    assert launched[0] == (10, 384, [256, 8, 1], [1.0, 2.0, 3.0], 7)
    assert launched[1][3] == [4.0, 5.0, 6.0]
    assert launched[2][2] == [256, 8, 0]
    boxes = [list(arguments[6]) for name, arguments in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert boxes[:4] == [[64, 128, 1], [64, 64, 1], [64, 128, 1], [64, 64, 1]]
    addresses = [arguments[0].value for name, arguments in driver.calls if name == "cuTensorMapEncodeTiled"]
    assert not any(address % 64 for address in addresses)

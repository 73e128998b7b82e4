"""How symmetric products are shared out to pairs of thread blocks. The kernel itself is tested on a GPU."""

import ctypes
from importlib import resources
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


def test_a_kernel_may_begin_while_the_one_before_still_runs():
    """The launch says so, and the kernel waits before it touches anything that the one before may write or read."""
    driver = Recorder()
    arguments = (ctypes.c_void_p * 1)(0)
    launch = cuda.Launch(ctypes.c_void_p(5), 0, (132, 384, 1000), arguments)
    with mock.patch.object(cuda, "_driver", return_value=driver):
        launch(77)
    ((name, (config, function, given, extra)),) = driver.calls
    config = config._obj
    assert (name, function.value, given, extra) == ("cuLaunchKernelEx", 5, arguments, None)
    assert (list(config.sides), config.shared_bytes, config.stream) == ([132, 1, 1, 384, 1, 1], 1000, 77)
    assert config.attribute_count == 1
    assert (config.attributes[0].id, config.attributes[0].value[0]) == (6, 1)
    loads = source().split("void load_items(")[1].split("// ---- a group")[0]
    assert loads.index("wait_for_kernel_before()") < loads.index("load(")
    assert "wait_for_kernel_before" not in source().split("__global__")[1], "each thread that loads does it, once"


def source():
    return resources.files("meshmuon.kernels").joinpath("clusters.cu").read_text(encoding="utf-8")


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

    def bind(blocks, threads, arguments):
        def launch(stream):
            numbers = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_int)).contents.value for i in (6, 7, 8)]
            scale = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_float)).contents.value for i in (9, 10, 11)]
            launched.append((blocks, threads, numbers, scale, stream))

        return launch

    kernel = clusters._Kernel(mock.Mock(bind=bind), 5)
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

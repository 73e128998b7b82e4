"""The kernels in CUDA C++, compiled for Hopper by NVRTC, as on a machine with a GPU; nothing is run."""

import importlib.util
import re
from importlib import resources
from unittest import mock

import pytest
import torch

from meshmuon.kernels import cuda, few_tiles, hopper

NVRTC = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")
pytestmark = pytest.mark.skipif(not NVRTC, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")


def compiled(text, element, *options):
    """The machine code, and all that the compiler says."""
    said = []
    answer = cuda._answer

    def listen(*asked):
        said.append(answer(*asked))
        return said[-1]

    cuda._nvrtc.cache_clear()
    try:
        with mock.patch.object(torch.version, "cuda", "13.0"), mock.patch.object(cuda, "_answer", listen):
            options = [f'-DELEMENT="{element}"', "--ptxas-options=-v", *options]
            code = cuda.compile_source(text, architecture="sm_90a", options=options)
    finally:
        cuda._nvrtc.cache_clear()
    return code, said[0].decode()


def text_of(source):
    folder = resources.files("meshmuon.kernels")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in (*hopper.SHARED, source))


@pytest.mark.parametrize("element", hopper.DTYPES.values())
def test_few_tiles_spill_nothing(element):
    code, log = compiled(text_of("few_tiles.cu"), element)
    assert code.cubin and not code.slow
    assert set(re.findall(r"entry function '(\w+)'", log)) == {cut.kernel for cut in few_tiles.CUTS}
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


@pytest.mark.parametrize("element", hopper.DTYPES.values())
def test_products_in_clusters_do_not_wait_for_each_other(element):
    code, log = compiled(text_of("clusters.cu"), element)
    assert code.cubin and not code.slow
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log)
    assert int(spilled) < 400, "a few numbers of products with two results, outside the main loop"


def test_that_products_wait_for_each_other_is_noticed():
    """Sums that a function of its own adds to: the compiler cannot follow them."""
    text = text_of("few_tiles.cu")
    start = "template <int COLUMNS> __device__ __forceinline__ void accumulate("
    assert start in text
    code, log = compiled(text.replace(start, start.replace("__forceinline__", "__noinline__")), "f16")
    assert "serialized" in code.slow and code.slow in log
    assert code.cubin


def test_what_cannot_be_compiled_is_quoted():
    with pytest.raises(
        RuntimeError, match=r"NVRTC error 6: meshmuon.cu\(1\): error: identifier .nonsense. is undefined"
    ):
        compiled("__device__ int x = nonsense;", "f16")

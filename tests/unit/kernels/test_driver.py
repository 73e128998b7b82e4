"""What the driver is asked for: how boxes lie, how much shared memory there is, what a launch takes. Nothing is run."""

import ctypes
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from meshmuon.kernels import cuda, few_tiles


class Driver:
    """Takes down its calls, with numbers instead of pointers where a test looks at them."""

    def __init__(self):
        self.attributes, self.maps, self.launches = [], [], []

    def __getattr__(self, name):
        return lambda *_: 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return 0

    def cuTensorMapEncodeTiled(self, address, element, dims, base, sides, strides, box, steps, *how):
        numbers = (list(sides), list(strides), list(box), list(steps))
        self.maps.append((address.value, element, dims, base.value, *numbers, how))
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        given = config._obj
        attributes = [given.attributes[i].id for i in range(given.attribute_count)]
        self.launches.append((list(given.sides), given.shared_bytes, given.stream, attributes))
        return 0


@contextmanager
def driver():
    asked = Driver()
    device = mock.patch.object(torch.cuda, "current_device", return_value=0)
    with device, mock.patch.object(cuda, "_driver", return_value=asked):
        yield asked


def test_a_kernel_has_all_of_the_shared_memory_and_takes_what_it_needs():
    maximum, carveout = 8, 9  # CU_FUNC_ATTRIBUTE_*
    with driver() as asked:
        launch = cuda.Function(b"code", "few", shared_bytes=1000).bind(7, 160, (ctypes.c_void_p * 1)())
        launch(5)
    assert asked.attributes == [(maximum, 1000), (carveout, 100)]
    begins_early = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert asked.launches == [([7, 1, 1, 160, 1, 1], 1000, 5, [begins_early])]


@pytest.mark.parametrize(("dtype", "element"), [(torch.float16, 6), (torch.bfloat16, 9)])
def test_a_stack_is_described_by_columns_first_in_swizzled_boxes(dtype, element):
    x = torch.zeros(3, 40, 80, dtype=dtype)[:, :, :72]
    with driver() as asked:
        cuda.describe_stack(x, 4096)
    ((address, kind, dims, base, sides, strides, taken, steps, how),) = asked.maps
    assert (address, kind, dims, base) == (4096, element, 3, x.data_ptr())
    assert sides == [72, 40, 3] and strides == [160, 160 * 40]
    assert taken == [64, 64, 1] and steps == [1, 1, 1]
    interleave, swizzled, promotion, fill = how
    assert (interleave, swizzled, promotion, fill) == (0, 3, 2, 0), "rows of 128 bytes"


def test_kernels_for_few_tiles_are_loaded_with_what_each_takes():
    loaded = []

    def function(cubin, name, *, shared_bytes):
        loaded.append((name, shared_bytes))
        return name

    with mock.patch.object(few_tiles, "Function", function), mock.patch.object(few_tiles, "launching_on"):
        kernels = few_tiles._load(torch.device("cuda", 0), b"code")
    assert loaded == [(cut.kernel, cut.shared_bytes) for cut in few_tiles.CUTS]
    assert kernels == {cut: cut.kernel for cut in few_tiles.CUTS}

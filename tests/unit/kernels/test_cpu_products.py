"""Products on a CPU: both libraries multiply, and each is asked only for what it is fast at."""

from unittest import mock

import pytest
import torch
from tests.libraries import LIBRARIES, using_library

from meshmuon import _compat
from meshmuon.kernels import cpu_products
from meshmuon.kernels.cpu_products import multiply

SHAPES = [(1, 128, 128, 128), (3, 144, 160, 176), (2, 16, 32, 48), (1, 512, 384, 128)]


def whole_numbers(*shape):
    """Their products are exact in fp32, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def dresses(right):
    """The second operand in rows, in columns, and as part of something wider."""
    yield "rows", right
    yield "columns", right.mT.contiguous().mT
    wide = right.new_zeros(*right.shape[:2], right.shape[2] + 16)
    wide[:, :, : right.shape[2]] = right
    yield "part of wider rows", wide[:, :, : right.shape[2]]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("batch", "m", "k", "n"), SHAPES)
def test_products_are_exact_for_whole_numbers(library, batch, m, k, n):
    left, right = whole_numbers(batch, m, k), whole_numbers(batch, k, n)
    expected = torch.bmm(left.double(), right.double()).float()
    with using_library(library):
        for dress, other in dresses(right):
            assert torch.equal(multiply(left, other), expected), dress
            out = torch.full((batch, m, 2 * n), -1.0)
            assert multiply(left, other, out[:, :, :n]) is not None
            assert torch.equal(out[:, :, :n], expected) and (out[:, :, n:] == -1).all()


@pytest.mark.skipif(_compat.linear_by_onednn() is None, reason="no oneDNN")
@pytest.mark.parametrize(
    ("dress", "dtype", "side", "asked"),
    [
        ("rows", torch.float32, 128, True),
        ("columns", torch.float32, 128, True),
        ("part of wider rows", torch.float32, 128, False),  # a hundred times slower there
        ("rows", torch.float32, 112, False),
        ("rows", torch.float64, 128, False),
        ("rows", torch.bfloat16, 128, False),
    ],
)
def test_what_onednn_is_asked_for(dress, dtype, side, asked):
    x = whole_numbers(2, side, side).to(dtype)
    right = dict(dresses(x))[dress]
    linear = mock.Mock(side_effect=_compat.linear_by_onednn())
    with using_library("onednn"), mock.patch.object(cpu_products, "linear_by_onednn", return_value=linear):
        multiply(x, right)
    assert linear.call_count == (2 if asked else 0)


def test_an_operation_that_means_something_else_is_not_taken():
    meant = _compat.linear_by_onednn.__wrapped__
    for odd in (lambda x, w, *_: x @ w.mT + 1, mock.Mock(side_effect=RuntimeError("no such schema"))):
        with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", mock.Mock(default=odd)):
            assert meant() is None


@pytest.mark.parametrize(
    ("capability", "described", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_it_depends_on_the_processor_alone(capability, described, expected):
    with (
        mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability),
        mock.patch.object(_compat.Path, "read_text", return_value=f"vendor_id : {described}"),
        mock.patch.object(_compat.platform, "processor", return_value=described),
    ):
        assert _compat.has_wide_registers_of_amd.__wrapped__() is expected

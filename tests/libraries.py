"""On which of torch's two libraries products in fp32 are left to on a CPU: both are tested wherever both are there."""

from unittest import mock

import pytest

from meshmuon._compat import linear_by_onednn
from meshmuon.kernels import cpu_products

LIBRARIES = ["mkl", pytest.param("onednn", marks=pytest.mark.skipif(linear_by_onednn() is None, reason="no oneDNN"))]


def using_library(name):
    """Leave products to a library, whatever the processor; "mkl" stands for what torch does by itself."""
    return mock.patch.object(cpu_products, "prefers_onednn", return_value=name == "onednn")

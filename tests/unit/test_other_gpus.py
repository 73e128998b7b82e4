"""Tiles for GPUs that nobody has measured: at least they compile there, in the shared memory there is."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from meshmuon.kernels.configs import Architecture

COEFFICIENTS = 3  # sets of them that compile_for multiplies with

KB = 1024
TARGETS: dict[str, tuple[Architecture, int, str]] = {
    "cuda:75:32": ("other", 64 * KB, "cubin"),
    "cuda:80:32": ("ampere", 163 * KB, "cubin"),
    "cuda:86:32": ("ampere", 99 * KB, "cubin"),
    "cuda:90:32": ("hopper", 227 * KB, "cubin"),
    "cuda:100:32": ("blackwell", 227 * KB, "cubin"),
    "hip:gfx942:64": ("rocm", 64 * KB, "hsaco"),
}
KERNELS = {"peak_kernel", "measure_kernel", "momentum_kernel", "norm_kernel", "normalise_kernel", "apply_kernel"}
KERNELS |= {"whole_kernel"}
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_with_the_tiles_of_the_table(target, tmp_path):
    architecture, shared_bytes, binary = TARGETS[target]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.compile_for", target, architecture]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    through_tma = {"tensor_memory_kernel"} if architecture in ("hopper", "blackwell") else set()
    assert {name for name, *_ in found} == KERNELS | {"pointer_kernel"} | through_tma
    for name, shared, made, _, rounds_to_tf32 in found:
        assert binary in made and shared <= shared_bytes and not rounds_to_tf32, name
    products = [compiled for name, _, _, compiled, _ in found if name in ("pointer_kernel", "tensor_memory_kernel")]
    assert len(products) == COEFFICIENTS * len(set(products)), "coefficients compile nothing"

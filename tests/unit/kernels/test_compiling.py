"""Kernels in CUDA C++: compiled in the background, kept between processes, and missed aloud."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import resources
from unittest import mock

import pytest
import torch

from meshmuon.kernels import clusters, cuda, few_tiles, hopper

GPU = torch.device("cuda", 0)


@contextmanager
def nothing_compiled_yet():
    caches = (clusters._kernel, few_tiles._kernels, hopper.machine_code)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


ASK = {"clusters.cu": clusters._kernel, "few_tiles.cu": few_tiles._kernels}
FAILURES = {
    "no compiler": (cuda, "_nvrtc", OSError("libnvrtc.so.99 was not found")),
    "no thread": (ThreadPoolExecutor, "submit", RuntimeError("can't start new thread")),
}


@pytest.mark.parametrize("file", ASK)
@pytest.mark.parametrize("failure", FAILURES)
def test_where_it_cannot_be_compiled_triton_stands_in_and_somebody_hears_of_it(file, failure):
    where, name, error = FAILURES[failure]
    missing = mock.patch.object(where, name, side_effect=error)
    words = rf"{file}.*{error}.*cuBLAS are used"
    with nothing_compiled_yet(), missing, pytest.warns(UserWarning, match=words):
        assert ASK[file](GPU, torch.float16) == f"{type(error).__name__}: {error}"


class Compiler:
    """Stands in for NVRTC, which tells its version."""

    def __init__(self, version):
        self.version = version

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0


def code(number):
    return cuda.MachineCode(f"code {number}".encode())


@contextmanager
def counting_compiler(cache):
    """Each compilation gives another code."""
    compiled = []

    def compile_source(source, *, architecture, options):
        compiled.append((source, architecture, options))
        return code(len(compiled))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "compile_source", compile_source)
        patch.setattr(cuda, "_nvrtc", lambda: Compiler((12, 8)))
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        yield partial(cuda.compile_once, "source", architecture="sm_90a", options=["-O3"]), patch


def test_what_is_compiled_is_kept_for_other_processes(tmp_path):
    with counting_compiler(tmp_path) as (once, patch):
        assert once() == once() == code(1)
        assert cuda.compile_once("another", architecture="sm_90a", options=["-O3"]) == code(2)
        assert once(options=["-O0"]) == code(3)
        patch.setattr(cuda, "_nvrtc", lambda: Compiler((12, 9)))
        assert once() == code(4), "another compiler"
        assert once(architecture="sm_100a") == code(5)
        patch.setattr(cuda, "_LANGUAGE", "--std=c++20")
        assert once() == code(6)


def test_it_does_without_a_place_to_keep_it(tmp_path):
    (tmp_path / "no folder").write_text("")
    with counting_compiler(tmp_path / "no folder") as (once, _):
        assert once() == code(1) and once() == code(2)
    with counting_compiler(tmp_path / "read only") as (once, _):
        with mock.patch("triton.runtime.cache.FileCacheManager.put", side_effect=PermissionError("read only")) as put:
            assert once() == code(1) and once() == code(2)
        assert put.call_count == 2


SERIALIZED = "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"


def test_what_is_slow_is_told_of_in_every_process(tmp_path):
    """It is right, so it is used; and compiled again each time, since nobody would hear of it otherwise."""
    slow = cuda.MachineCode(b"slow code", SERIALIZED)
    with counting_compiler(tmp_path) as (once, patch):
        patch.setattr(cuda, "compile_source", lambda *_, **__: slow)
        assert once() == slow and once() == slow
        assert not list(tmp_path.rglob("*.cubin"))
    loaded = []
    words = r"few_tiles.cu.*C7511.*right, but slow.*CUDA 12.8"
    compiling = mock.patch.object(hopper, "compile_once", return_value=slow)
    with nothing_compiled_yet(), compiling, pytest.warns(UserWarning, match=words):
        hopper.load_kernel("few_tiles.cu", torch.float16, load=loaded.append)
    assert loaded == [b"slow code"]


DAMAGE = {
    "cut": lambda kept: kept[:-1],
    "nearly empty": lambda kept: kept[:7],
    "empty": lambda kept: b"",
    "longer": lambda kept: kept + b"x",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_compiled_again(tmp_path, how):
    with counting_compiler(tmp_path) as (once, _):
        assert once() == code(1)
        (file,) = tmp_path.rglob("*.cubin")
        file.write_bytes(DAMAGE[how](file.read_bytes()))
        assert once() == code(2) and once() == code(2)


def test_it_is_compiled_in_the_background_and_only_where_it_runs():
    asked, may_end = threading.Event(), threading.Event()

    def compile_once(source, **how):
        asked.set()
        may_end.wait(60)
        return cuda.MachineCode(source.encode())

    with nothing_compiled_yet(), mock.patch.object(hopper, "compile_once", compile_once):
        clusters.begin_to_compile(torch.device("cpu"), torch.float16)
        assert not asked.is_set()
        with mock.patch.object(clusters, "why_impossible", return_value=""):
            clusters.begin_to_compile(GPU, torch.float16)  # returns, though it cannot be done
        assert asked.wait(60)
        assert not hopper.machine_code("clusters.cu", torch.float16).done()
        may_end.set()
        assert b"run_program" in hopper.machine_code("clusters.cu", torch.float16).result(60).cubin


@pytest.mark.parametrize("file", ["clusters.cu", "few_tiles.cu"])
@pytest.mark.parametrize(("dtype", "element"), [(torch.float16, "f16"), (torch.bfloat16, "bf16")])
def test_what_both_kernels_share_is_compiled_before_each_for_a_dtype(file, dtype, element):
    folder = resources.files("meshmuon.kernels")
    with nothing_compiled_yet(), mock.patch.object(hopper, "compile_once", return_value=code(1)) as compiled:
        assert hopper.machine_code(file, dtype).result(60) == code(1)
    names = ("instructions.cuh", "hopper.cuh", file)
    text = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
    compiled.assert_called_once_with(text, architecture="sm_90a", options=[f'-DELEMENT="{element}"'])


def test_the_thread_imports_nothing_of_triton():
    """The one that asks does: two threads that import modules which need each other can find half of one."""
    script = """
import sys
from unittest import mock
import torch
from meshmuon.kernels import hopper
imported = []
def compile_once(*_, **__):
    imported.append("triton.runtime.cache" in sys.modules)
assert "triton" not in sys.modules
with mock.patch.object(hopper, "compile_once", compile_once):
    hopper.machine_code("clusters.cu", torch.float16).result(60)
assert imported == [True], imported
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_that_there_is_no_thread_to_compile_in_is_told_when_the_kernel_is_wanted():
    where, name, error = FAILURES["no thread"]
    possible = mock.patch.object(clusters, "why_impossible", return_value="")
    with nothing_compiled_yet(), possible, mock.patch.object(where, name, side_effect=error):
        clusters.begin_to_compile(GPU, torch.float16)
        with pytest.raises(RuntimeError, match="new thread"):
            hopper.machine_code("clusters.cu", torch.float16).result()

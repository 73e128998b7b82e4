"""A Hopper GPU that a CPU plays: our CUDA C++ kernels, and the Python that launches them, on tensors in host memory.

What is real: hopper.cuh and the kernels, compiled by the machine's C++ compiler, and everything in `meshmuon.kernels`
that prepares a launch. What is played: the instructions (instructions.h), on a machine that interleaves threads and
engines as a seed says (machine.h), and the driver's few calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshmuon.kernels import clusters, few_tiles, hopper

MULTIPROCESSORS = 132
_KERNELS = {"few_tiles.cu": [cut.kernel for cut in few_tiles.CUTS], "clusters.cu": ["run_program"]}
_CLUSTER = {"run_program": 2}
_HERE = Path(__file__).parent
_OPTIONS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-Wno-psabi"]
_MESSAGE_BYTES = 4096


class GoneWrong(AssertionError):
    """What a kernel did that it must not do."""


def text_of(source: hopper.Source) -> str:
    """What is compiled for a GPU, without the instructions."""
    folder = resources.files("meshmuon.kernels")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("hopper.cuh", source))


@functools.cache
def compiled(source: hopper.Source, text: str, element: str) -> ctypes.CDLL:
    """A kernel's text as a library of this machine; kept between runs of the tests."""
    finds = "".join(f'  if (name == "{name}") return bind({name}, given);\n' for name in _KERNELS[source])
    find = f"std::function<void()> find_kernel(const std::string& name, void** given) {{\n{finds}  return {{}};\n}}\n"
    machine = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("machine.h", "instructions.h"))
    whole = machine + text + find
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    command = [compiler, *_OPTIONS, f'-DELEMENT="{element}"', "-x", "c++", "-"]
    key = hashlib.sha256(repr((command, whole)).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"meshmuon-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        made = folder / f"{key}.{os.getpid()}.so"  # others may be compiling it as well
        subprocess.run([*command, "-o", str(made)], input=whole.encode(), check=True)
        made.rename(library)
    return ctypes.CDLL(str(library))


def _describe(x: Tensor, address: int) -> None:
    """`describe_stack`, for instructions.h."""
    size = x.element_size()
    assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    assert all(step * size % 16 == 0 for step in x.stride()[:2]), "the copy engine takes aligned rows"
    numbers = [x.data_ptr(), *reversed(x.shape), x.stride(1) * size, x.stride(0) * size]
    (ctypes.c_uint64 * 6).from_address(address)[:] = numbers


class Gpu:
    """What runs kernels.

    Args:
        seed: Of who comes when.
        blocks: How many thread blocks are there at a time, of all kernels.
        clusters: How many pairs of them a launch in clusters is told there are.
    """

    def __init__(self, *, seed: int = 0, blocks: int = 4, clusters: int = 2) -> None:
        self.blocks, self.clusters = blocks, clusters
        self.launched: list[str] = []
        self._seeds = itertools.count(1000 * seed)
        self._library: ctypes.CDLL | None = None
        self._waiting = 0  # launches that are recorded; None: each runs at once
        self._defers = False

    def record(self, library: ctypes.CDLL, name: str, blocks: int, threads: int, shared: int, arguments: Any) -> None:
        """Launch a kernel."""
        assert self._library in (None, library), "one stream of kernels of one source"
        self.launched.append(name)
        code = library.record(name.encode(), blocks, threads, shared, _CLUSTER.get(name, 1), arguments)
        assert code == 0, f"the launch of {name} was refused: {code}"
        self._library = library
        self._waiting += 1
        if not self._defers:
            self.synchronize()

    def synchronize(self) -> None:
        """Run what was launched."""
        library, self._library = self._library, None
        if library is None:
            return
        wrong = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if library.run(next(self._seeds), self.blocks, wrong, _MESSAGE_BYTES):
            raise GoneWrong(wrong.value.decode())

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Let launches wait for the end of the block, and then run as they would in a stream, one beginning early."""
        self._defers = True
        try:
            yield
            self.synchronize()
        finally:
            self._defers = False

    def function(self, source: hopper.Source, element: str, name: str, *, shared_bytes: int, text: str | None) -> Any:
        """What stands for a loaded kernel."""
        library = compiled(source, text_of(source) if text is None else text, element)

        def bind(blocks: int, threads: int, arguments: Any) -> Any:
            return lambda stream: self.record(library, name, blocks, threads, shared_bytes, arguments)

        return SimpleNamespace(bind=bind)


@contextlib.contextmanager
def emulated(gpu: Gpu, *, texts: dict[str, str] | None = None) -> Iterator[Gpu]:
    """Have tensors on the CPU multiplied as on a Hopper GPU.

    Args:
        gpu: What runs the kernels.
        texts: Kernels to take instead of those of the package: how a test breaks one.
    """
    texts = texts or {}

    def few(device: torch.device, dtype: torch.dtype) -> dict[few_tiles.Cut, Any]:
        made = functools.partial(gpu.function, "few_tiles.cu", hopper.DTYPES[dtype], text=texts.get("few_tiles.cu"))
        return {cut: made(cut.kernel, shared_bytes=cut.shared_bytes) for cut in few_tiles.CUTS}

    def program(device: torch.device, dtype: torch.dtype) -> Any:
        made = functools.partial(gpu.function, "clusters.cu", hopper.DTYPES[dtype], text=texts.get("clusters.cu"))
        function = made("run_program", shared_bytes=clusters._SHARED_BYTES)
        return SimpleNamespace(function=function, clusters=gpu.clusters)

    def chosen(device: torch.device, batch: int, m: int, same: bool) -> Any:
        return few_tiles.choose_cut(batch, m, same=same, multiprocessors=MULTIPROCESSORS)

    with (
        mock.patch.object(few_tiles, "_kernels", few),
        mock.patch.object(few_tiles, "_chosen", chosen),
        mock.patch.object(few_tiles, "describe_stack", _describe),
        mock.patch.object(clusters, "_kernel", program),
        mock.patch.object(clusters, "_tables", {}),
        mock.patch.object(clusters, "describe_stack", _describe),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)),
    ):
        yield gpu

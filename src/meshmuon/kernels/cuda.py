"""CUDA C++ kernels without a compiler on the machine: NVRTC comes with torch, and the driver with the GPU.

Only what the kernels for Hopper need, over ctypes: compile, load, describe a tensor to the copy engine (TMA), launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MAXIMUM_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in per cent
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_BEGINS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_LANGUAGE = "--std=c++17"
_SERIALIZED = "instructions are serialized"  # every product on the tensor cores waits for the one before
_DIGEST_BYTES = 32
_SWIZZLE_128_BYTES, _PROMOTE_128_BYTES = 3, 2
MAP_BYTES = 128
MAP_ALIGNMENT = 64


class MachineCode(NamedTuple):
    """What a program was compiled to.

    Attributes:
        cubin: The code.
        slow: Why it is slower than it could be, as the compiler says; else empty.
    """

    cubin: bytes
    slow: str = ""


def compile_source(source: str, *, architecture: str, options: Sequence[str] = ()) -> MachineCode:
    """Compile CUDA C++ to machine code.

    Args:
        source: The program.
        architecture: What for, e.g. "sm_90a".
        options: More of NVRTC's.

    Returns:
        The machine code.

    Raises:
        OSError: If there is no NVRTC.
        RuntimeError: If it refuses the program; with its log.
    """
    library = _nvrtc()
    program = ctypes.c_void_p()
    _expect(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"meshmuon.cu", 0, None, None), "NVRTC")
    given = [f"--gpu-architecture={architecture}", _LANGUAGE, *options]
    try:
        code = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*map(str.encode, given)))
        log = _answer(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        if code:
            raise RuntimeError(f"NVRTC error {code}: {log.rstrip(bytes(1)).decode(errors='replace').strip()}")
        slow = [line for line in log.decode(errors="replace").splitlines() if _SERIALIZED in line]
        return MachineCode(
            _answer(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), "".join(slow[:1]).strip()
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def compile_once(source: str, *, architecture: str, options: Sequence[str] = ()) -> MachineCode:
    """Compile to machine code, or find what another process compiled: it is kept where Triton keeps its own.

    What is slow is not kept, so that every process hears of it.

    Args:
        source: As for `compile_source`.
        architecture: As for `compile_source`.
        options: As for `compile_source`.

    Returns:
        The machine code.
    """
    from triton.runtime.cache import get_cache_manager

    major, minor = ctypes.c_int(), ctypes.c_int()
    _expect(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC")
    told = repr((source, architecture, _LANGUAGE, tuple(options), major.value, minor.value))
    key, name = hashlib.sha256(told.encode()).hexdigest(), "meshmuon.cubin"
    with contextlib.suppress(Exception):  # a user's cache can be anything, and it can do without
        path = get_cache_manager(key).get_file(name)
        kept = b"" if path is None else Path(path).read_bytes()
        digest, cubin = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if digest == hashlib.sha256(cubin).digest():  # a full disk can leave half a file
            return MachineCode(cubin)
    code = compile_source(source, architecture=architecture, options=options)
    if not code.slow:
        with contextlib.suppress(Exception):
            get_cache_manager(key).put(hashlib.sha256(code.cubin).digest() + code.cubin, name)
    return code


def _answer(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _expect(size_of(program, ctypes.byref(size)), "NVRTC")
    buffer = ctypes.create_string_buffer(size.value)
    _expect(get(program, buffer), "NVRTC")
    return buffer.raw


def _expect(code: int, whose: str) -> None:
    if code:
        raise RuntimeError(f"{whose} error {code}")


@functools.cache
def _nvrtc() -> Any:
    """The NVRTC of torch's own CUDA version: loaded or known to the system, or in a package beside torch."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        pass
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(folder).glob(f"*/lib/{name}")):
            for builtins in path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))  # it looks for them by name alone
            return ctypes.CDLL(str(path))
    raise OSError(f"{name} was not found")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _succeed(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {code}, {(text.value or b'unknown').decode()}")


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("sides", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def _enter_context(device: int) -> None:
    """Make torch's context of a device that of this thread: a new one has none until torch itself launches."""
    context = ctypes.c_void_p()
    _succeed(_driver().cuCtxGetCurrent(ctypes.byref(context)), "context")
    if not context.value:
        _succeed(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "context")
        _succeed(_driver().cuCtxSetCurrent(context), "context")


class Function:
    """A kernel on the device that was current when it was loaded.

    Args:
        cubin: Machine code.
        name: Of the kernel in it.
        shared_bytes: Of dynamic shared memory.
    """

    def __init__(self, cubin: bytes, name: str, *, shared_bytes: int) -> None:
        self._shared_bytes, self._device = shared_bytes, torch.cuda.current_device()
        module, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        _enter_context(self._device)
        _succeed(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "load")
        _succeed(_driver().cuModuleGetFunction(ctypes.byref(self._handle), module, name.encode()), name)
        _succeed(_driver().cuFuncSetAttribute(self._handle, _MAXIMUM_SHARED_MEMORY, shared_bytes), name)
        # All there can be, whatever a launch takes: another division between two launches would have to wait for both.
        _succeed(_driver().cuFuncSetAttribute(self._handle, _CARVEOUT, 100), name)

    def clusters_at_once(self, size: int, threads: int) -> int:
        """Ask how many clusters the device can run side by side: GPUs differ in which multiprocessors are neighbours.

        Args:
            size: Thread blocks in a cluster.
            threads: In each block.

        Returns:
            How many.
        """
        attribute = _Attribute(id=_CLUSTER_DIMENSION, value=(size, 1, 1))
        blocks = torch.cuda.get_device_properties(self._device).multi_processor_count // size * size
        config = _LaunchConfig((blocks, 1, 1, threads, 1, 1), self._shared_bytes, None, ctypes.pointer(attribute), 1)
        found = ctypes.c_int()
        code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._handle, ctypes.byref(config))
        _succeed(code, "clusters")
        return found.value

    def bind(self, blocks: int, threads: int, arguments: ctypes.Array[ctypes.c_void_p]) -> Launch:
        """Prepare a launch.

        Args:
            blocks: How many thread blocks.
            threads: In each.
            arguments: Addresses of its arguments.

        Returns:
            What can be launched again and again.
        """
        return Launch(self._handle, self._device, (blocks, threads, self._shared_bytes), arguments)


class Launch:
    """A kernel with its grid and its arguments.

    It begins while the kernel before it in the stream still runs, and has to wait for that one by itself
    (`griddepcontrol.wait`) before it reads or writes.

    Args:
        function: The kernel.
        device: Where it was loaded.
        sizes: Thread blocks, threads in each, and bytes of shared memory.
        arguments: Addresses of its arguments.
    """

    def __init__(
        self,
        function: ctypes.c_void_p,
        device: int,
        sizes: tuple[int, int, int],
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        blocks, threads, shared_bytes = sizes
        attribute = ctypes.pointer(_Attribute(id=_BEGINS_EARLY, value=(1,)))
        self._config = _LaunchConfig((blocks, 1, 1, threads, 1, 1), shared_bytes, None, attribute, 1)
        self._call = (ctypes.byref(self._config), function, arguments, None)
        self._device = device

    def __call__(self, stream: int) -> None:
        """Launch it.

        Args:
            stream: On which.
        """
        self._config.stream = stream
        code = _driver().cuLaunchKernelEx(*self._call)
        if code == _NO_CONTEXT:
            _enter_context(self._device)
            code = _driver().cuLaunchKernelEx(*self._call)
        _succeed(code, "launch")


def describe_stack(x: Tensor, address: int) -> None:
    """Describe a (batch, rows, columns) stack of 16-bit numbers to the copy engine, which takes boxes of 64 by 64.

    Args:
        x: The stack: columns side by side, everything else 16-byte aligned. It is known by its address.
        address: Where the description goes: `MAP_BYTES` in the memory of this machine, aligned to `MAP_ALIGNMENT`.
    """
    size = x.element_size()
    sides = (ctypes.c_uint64 * 3)(*reversed(x.shape))
    strides = (ctypes.c_uint64 * 2)(x.stride(1) * size, x.stride(0) * size)
    box, ones = (ctypes.c_uint32 * 3)(64, 64, 1), (ctypes.c_uint32 * 3)(1, 1, 1)  # 128 bytes in a row, swizzled
    where = (ctypes.c_void_p(x.data_ptr()), sides, strides, box, ones)
    how = (0, _SWIZZLE_128_BYTES, _PROMOTE_128_BYTES, 0)
    code = _driver().cuTensorMapEncodeTiled(ctypes.c_void_p(address), _ELEMENTS[x.dtype], 3, *where, *how)
    _succeed(code, "tensor map")

"""Products on Hopper, by pairs of thread blocks that share operands (clusters.cu): one, or a program of many.

Single symmetric products have the bits of the Triton kernel, which stands in wherever this one cannot run. It is faster
by 4 to 10 %: no tensor core waits for results to be written, and less is read (benchmarks/NOTES.md). A program may be
evaluated another way than its products would be one by one (polar/ways.py), and then has other bits.

[Note: many launches at a time] In a launch of several products, thread blocks wait for each other's tiles. They take
tiles in the order of one list, so the first that is not done can always go on, even with a single pair of blocks on the
GPU: beside a collective that waits for other ranks, a second stream or another process, a launch becomes slower and
nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshmuon.kernels.agenda import MOST_ROWS, TILE, Product, Result, Second, list_pairs, tiles_before
from meshmuon.kernels.availability import launching_on
from meshmuon.kernels.configs import Architecture
from meshmuon.kernels.cuda import MAP_ALIGNMENT, MAP_BYTES, Function, describe_stack
from meshmuon.kernels.hopper import DTYPES, load_kernel, machine_code, why_impossible
from meshmuon.kernels.landing import Arguments, Landing

STEP = 64  # numbers of the inner dimension at a time
_THREADS = 384
# The ring and its barriers, staging memory, what is sent to all warps and its barriers, progress.
_SHARED_BYTES = 6 * (2 * TILE * STEP * 2 + 2 * 8) + 4 * STEP * STEP * 2 + 4 * (16 + 2 * 8) + 8
MOST_STACKS, MOST_PRODUCTS = 12, 39  # as in clusters.cu: all arguments take 4 KB, the most that older drivers pass
_TWO_HALVES = 2  # as in clusters.cu
_Key = tuple[torch.device, torch.dtype, int, tuple[Result, ...]]
_tables: dict[_Key, Tensor] = {}  # kept: there are few shapes, and graphs know addresses
_lock = threading.Lock()


def _table_of(key: _Key, clusters: int) -> Tensor:
    device, _, batch, results = key
    with _lock:
        if key not in _tables:
            _tables[key] = list_pairs(batch, results, clusters).to(device)
        return _tables[key]


class _Kernel(NamedTuple):
    function: Function
    clusters: int  # that run side by side


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype) -> _Kernel | str:
    """The compiled kernel, or why it cannot be had."""
    return load_kernel("clusters.cu", dtype, load=functools.partial(_load, device))


def _load(device: torch.device, cubin: bytes) -> _Kernel:
    with launching_on(device):
        function = Function(cubin, "run_program", shared_bytes=_SHARED_BYTES)
        clusters = function.clusters_at_once(2, _THREADS)
    if clusters < 1:
        raise RuntimeError("not one cluster fits on this device")
    return _Kernel(function, clusters)


def begin_to_compile(device: torch.device, dtype: torch.dtype) -> None:
    """Have the kernel compiled in the background, while Triton compiles the others. Returns at once.

    Args:
        device: Where it will run, if it can.
        dtype: Of the operands.
    """
    if not why_impossible(device, dtype):
        machine_code("clusters.cu", dtype)


def can_run(device: torch.device, dtype: torch.dtype, *, batch: int, results: tuple[Result, ...]) -> bool:
    """Say whether products of this kind can run in clusters now.

    Args:
        device: Where.
        dtype: Of the operands.
        batch: Number of matrices.
        results: Of the products.

    Returns:
        Whether. Not while a CUDA graph is captured that would be the first to ask: then nothing may be uploaded.
    """
    if why_impossible(device, dtype) or any(max(result.rows, result.cols) > MOST_ROWS for result in results):
        return False
    known = (device, dtype, batch, results) in _tables
    return (known or not torch.cuda.is_current_stream_capturing()) and is_available(device, dtype)


def is_possible(device: torch.device, dtype: torch.dtype, *, architecture: Architecture | None = None) -> bool:
    """Say whether anything could run in clusters there, if it can be compiled.

    Args:
        device: Where.
        dtype: Of the operands.
        architecture: Of a GPU that is elsewhere; None: look at the device.

    Returns:
        Whether.
    """
    if architecture is not None:
        return architecture == "hopper" and dtype in DTYPES
    return not why_impossible(device, dtype)


def is_available(device: torch.device, dtype: torch.dtype, *, architecture: Architecture | None = None) -> bool:
    """Say whether anything can run in clusters there. The first time, it is compiled.

    Args:
        device: Where.
        dtype: Of the operands.
        architecture: Of a GPU that is elsewhere, with everything installed; None: look at the device.

    Returns:
        Whether.
    """
    possible = is_possible(device, dtype, architecture=architecture)
    return possible and (architecture is not None or not isinstance(_kernel(device, dtype), str))


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Say whether products run in clusters, or why not.

    Args:
        device: Where.
        dtype: Of the operands.

    Returns:
        A few words.
    """
    reason = why_impossible(device, dtype)
    kernel = reason or _kernel(device, dtype)
    if isinstance(kernel, str):
        return f"products stay with Triton and cuBLAS: {kernel}"
    return f"products run in {kernel.clusters} clusters at a time"


class _Terms(ctypes.Structure):
    """The factors of one result of a product."""

    _fields_ = tuple((name, ctypes.c_float) for name in ("alpha", "beta", "delta", "gamma"))


class _Described(ctypes.Structure):
    """A product as clusters.cu knows it."""

    _fields_ = (
        *((name, ctypes.c_ubyte) for name in ("a", "b", "c", "e", "d", "second")),
        *((name, ctypes.c_ubyte) for name in ("mirrored", "added", "awaited", "twice")),
        *((name, ctypes.c_ubyte) for name in ("half_a", "half_b", "half_d", "lands")),
        *((name, ctypes.c_int) for name in ("rows", "cols", "steps", "after")),
        ("terms", _Terms * 2),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("maps", ctypes.c_ubyte * (MAP_BYTES * MOST_STACKS)),
        ("products", _Described * MOST_PRODUCTS),
    )


def results_of(products: Sequence[Product], shapes: Sequence[tuple[int, ...]]) -> tuple[Result, ...]:
    """Give the shapes of what a program computes.

    Args:
        products: Its products.
        shapes: (batch, rows, columns) of its stacks.

    Returns:
        One for each.
    """
    return tuple(Result(shapes[product.d][1], shapes[product.d][2], product.mirrored) for product in products)


class ClusterLaunch:
    """A launch bound to its memory by address: it keeps no tensor alive.

    Args:
        products: What is computed, one after the other.
        stacks: (batch, rows, columns) each, that the products name by number.
        written: What `counters` gives. None for a single product.
        lands: How parameters take the results of the last product as steps (`Landing.flag`); 0: these are written.
    """

    def __init__(
        self,
        products: Sequence[Product],
        stacks: Sequence[Tensor],
        written: Tensor | None = None,
        lands: int = 0,
    ) -> None:
        device, dtype, batch = stacks[0].device, stacks[0].dtype, len(stacks[0])
        kernel = _kernel(device, dtype)
        assert not isinstance(kernel, str), "can_run says whether it can"
        assert written is not None or len(products) == 1, "what waits has to count"
        has_triangles = any(one.half_a or one.half_b or one.half_d for one in products)
        assert len(products) > 1 or not has_triangles, "halves of tiles are neither turned nor left unmirrored"
        results = results_of(products, [stack.shape for stack in stacks])
        table = _table_of((device, dtype, batch, results), kernel.clusters)
        self._device, self._batch = device, batch
        memory = ctypes.create_string_buffer(ctypes.sizeof(_Program) + MAP_ALIGNMENT)
        self._program = _Program.from_buffer(memory, -ctypes.addressof(memory) % MAP_ALIGNMENT)
        for i, stack in enumerate(stacks):
            describe_stack(stack, ctypes.addressof(self._program) + i * MAP_BYTES)
        for i, (product, after) in enumerate(zip(products, tiles_before(results), strict=True)):
            last = i == len(products) - 1
            self._program.products[i] = _described(product, stacks, after=after, last=last, lands=lands if last else 0)
        counted = ctypes.c_void_p(None if written is None else written.data_ptr())
        numbers = (ctypes.c_void_p(table.data_ptr()), ctypes.c_int(len(table)), counted, ctypes.c_int(batch))
        self._landed_on = Arguments()
        self._kept = (*numbers, self._landed_on)  # the arguments are their addresses
        addresses = [ctypes.addressof(each) for each in (self._program, *self._kept)]
        self._launch = kernel.function.bind(2 * kernel.clusters, _THREADS, (ctypes.c_void_p * 6)(*addresses))

    def __call__(self) -> None:
        """Launch it on the current stream."""
        with launching_on(self._device):
            self._launch(torch.cuda.current_stream(self._device).cuda_stream)

    def onto(self, landing: Landing) -> None:
        """Launch it on parameters that take its results as steps.

        Args:
            landing: The parameters, and what a step needs; where all that lies may change from launch to launch.
        """
        assert landing.table.matrices == self._batch and landing.table.can_be_landed_on, "the caller looks"
        for name, address in zip(Arguments.NAMES, landing.addresses, strict=True):
            setattr(self._landed_on, name, address)
        self()

    def scaled(self, alpha: float, beta: float, gamma: float) -> None:
        """Launch it with other coefficients of its first product.

        Args:
            alpha: Factor of the product.
            beta: Factor of c.
            gamma: What is added to the diagonal.
        """
        self._program.products[0].terms[0] = _Terms(alpha, beta, 0.0, gamma)
        self()


def counters(stack: Tensor) -> Tensor:
    """Make what a launch of several products counts with: tiles that are written, pairs that are taken.

    Args:
        stack: One of the program's.

    Returns:
        A zero for each matrix, and one more.
    """
    return torch.zeros(len(stack) + 1, dtype=torch.int32, device=stack.device)


def _described(product: Product, stacks: Sequence[Tensor], *, after: int, last: bool, lands: int = 0) -> _Described:
    assert not set(product.results) & set(product.operands), "tiles read what others write"
    assert product.second is None or product.second.d != product.d, "every result has a place of its own"
    assert product.e is None or product.c is not None, "E is added beside C"
    if product.in_halves:
        assert product.second is not None and product.mirrored and not product.added, "nothing is added to halves"
        assert not product.gamma and product.second[2:] == (0.0, 0.0, 0.0), "nothing is added to halves"
    else:
        assert product.second is None or product.e is not None, "a second result has all terms"
    assert product.half_b or not (product.mirrored and product.half_a), "a triangle is multiplied with triangles"
    only_symmetric = product.e is not None or product.gamma or product.half_d
    assert product.mirrored or not only_symmetric, "what is not symmetric has no E, no I and no half"
    _, rows, cols = stacks[product.d].shape
    steps = -(-stacks[product.a].shape[2] // STEP)
    c, e = (product.d if stack is None else stack for stack in (product.c, product.e))  # d: not touched
    second = Second(product.d, 0.0, 0.0, 0.0, 0.0) if product.second is None else product.second
    names = (product.a, product.b, c, e, product.d, second.d)
    twice = _TWO_HALVES if product.in_halves else product.second is not None
    flags = (product.mirrored, len(product.added), not last, twice)
    assert not lands or not (product.mirrored or product.added), "only whole products land, as they are"
    halves = (product.half_a, product.half_b, product.half_d, lands)
    terms = (_Terms(product.alpha, product.beta, product.delta, product.gamma), _Terms(*second[1:]))
    return _Described(*names, *flags, *halves, rows, cols, steps, after, (_Terms * 2)(*terms))

"""Launches of Triton's kernels for symmetric products: through TMA, bound to their memory, and through pointers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshmuon.kernels.availability import is_interpreted, launching_on
from meshmuon.kernels.configs import TileConfig
from meshmuon.kernels.launching import run

Stacks: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]  # a, b, c, out, rest
REST_SCALE = 2048.0  # unscaled, what rounding takes from fp16 would often be subnormal, with few digits
_TMA_ALIGNMENT = 16  # bytes, of the base and of every stride but the last
_compiled: dict[tuple[Any, ...], Any] = {}


def uses_tma(config: TileConfig, tensors: Sequence[Tensor | None]) -> bool:
    """Say whether tiles move through TMA: where the table wants that, and memory is as TMA needs it.

    Args:
        config: The tiles.
        tensors: All that is read or written.

    Returns:
        Whether.
    """
    inner = tensors[0].shape[-1] if tensors[0] is not None else 0
    return config.tensor_memory and inner > 0 and all(x is None or _fits_tma(x) for x in tensors)


def _fits_tma(x: Tensor) -> bool:
    size = x.element_size()
    *outer, last = x.stride()
    aligned = all(stride > 0 and stride * size % _TMA_ALIGNMENT == 0 for stride in outer)
    return aligned and last == 1 and x.data_ptr() % _TMA_ALIGNMENT == 0


class TmaLaunch:
    """A launch through TMA, bound to its memory by address: it keeps no tensor alive.

    What is left to do per call is Triton's own launch. Its look-up of the compiled kernel, the checks and the making of
    descriptors would cost twice as much host time.

    Args:
        config: The tiles.
        a: (batch, m, k).
        b: Of a's shape; None means a.
        c: (batch, m, m), or None.
        d: (batch, m, m), written.
        rest: Of d's shape, written; or None.
    """

    __slots__ = ("_binary", "_config", "_device", "_early", "_head", "_programs", "_tail")

    def __init__(
        self, config: TileConfig, a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor, rest: Tensor | None
    ) -> None:
        batch, m, k = a.shape
        tiles = _tiles(config, m)
        operand, square = (1, config.block, config.block_k), (1, config.block, config.block)
        self._config = config
        self._device = a.device
        self._early = config.early and not is_interpreted()
        self._programs = batch * tiles
        read = (_descriptor(a, operand), _descriptor(b, operand), _descriptor(c, square))
        self._head = (*read, _descriptor(d, square), _descriptor(rest, square), m, k, tiles)
        wanted = (b is None, c is not None, None if rest is None else REST_SCALE)
        self._tail = (*wanted, config.block, config.block_k, config.group, self._early)
        self._binary = (config, a.dtype, *wanted, a.device)  # all that the compiled kernel depends on

    def __call__(self, alpha: float, beta: float, gamma: float) -> None:
        """Launch with these coefficients."""
        arguments = (*self._head, alpha, beta, gamma, *self._tail)
        compiled = _compiled.get(self._binary)
        with launching_on(self._device):
            if compiled is None:
                self._first(arguments)
            else:
                run(compiled, self._programs, arguments, self._device)

    def _first(self, arguments: tuple[Any, ...]) -> None:
        from meshmuon.kernels.symmetric_tiles import tensor_memory_kernel

        options: dict[str, Any] = {"num_warps": self._config.warps, "num_stages": self._config.stages}
        if self._early:
            options["launch_pdl"] = True
        compiled = tensor_memory_kernel[(self._programs,)](*arguments, **options)
        if not is_interpreted():
            _compiled[self._binary] = compiled


def launch_pointers(
    config: TileConfig,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor,
    rest: Tensor | None,
    *numbers: float,
) -> None:
    """Launch through plain pointers: any strides, any alignment, any GPU.

    Args:
        config: The tiles.
        a: (batch, m, k).
        b: Of a's shape; None means a.
        c: (batch, m, m), or None.
        d: (batch, m, m), written.
        rest: Of d's shape, written; or None.
        *numbers: alpha, beta, gamma.
    """
    from meshmuon.kernels.symmetric_tiles import pointer_kernel

    batch, m, k = a.shape
    tiles = _tiles(config, m)
    tensors = (a, a if b is None else b, d if c is None else c, d, d if rest is None else rest)  # d: not touched
    strides = tuple(tensor.stride() for tensor in tensors)
    with launching_on(a.device):
        pointer_kernel[(batch * tiles,)](
            *tensors,
            *strides,
            m,
            k,
            tiles,
            *numbers,
            LONG=any(abs(step) * 2 * config.block >= 2**31 for steps in strides for step in steps[1:]),
            ADD=c is not None,
            REST_SCALE=None if rest is None else REST_SCALE,
            BLOCK=config.block,
            BLOCK_K=config.block_k,
            GROUP=config.group,
            num_warps=config.warps,
            num_stages=config.stages,
        )


def _tiles(config: TileConfig, m: int) -> int:
    sides = -(-m // config.block)
    return sides * (sides + 1) // 2


class _Address:
    """What a tensor descriptor needs to know of its tensor, without keeping the tensor's memory alive."""

    __slots__ = ("_pointer", "dtype")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self._pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._pointer


def _descriptor(x: Tensor | None, block: tuple[int, ...]) -> Any:
    if x is None:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    base = x if is_interpreted() else _Address(x.data_ptr(), x.dtype)  # the interpreter moves the tensor itself
    return TensorDescriptor(base, list(x.shape), list(x.stride()), list(block))

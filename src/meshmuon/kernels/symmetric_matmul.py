"""Products that are known to be symmetric: one triangle is computed, the other one mirrored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshmuon.errors import message
from meshmuon.kernels import clusters, few_tiles
from meshmuon.kernels.agenda import Product, Result
from meshmuon.kernels.availability import check_runnable
from meshmuon.kernels.configs import TileConfig, architecture_of, choose_config
from meshmuon.kernels.symmetric_launches import Stacks, TmaLaunch, launch_pointers, uses_tma
from meshmuon.kernels.tables import whereabouts

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_BOUND = 4096
_Launch: TypeAlias = Callable[[float, float, float], None]
# What is multiplied to check the kernels (problems.py).
QUADRATIC, HALVES = "symmetric_matmul (quadratic)", "symmetric_matmul (in halves)"
FEW, TMA, POINTERS = (f"symmetric_matmul ({how})" for how in ("few tiles", "through TMA", "through pointers"))
_bound: dict[tuple[Any, ...], _Launch] = {}


def symmetric_matmul(
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    gamma: float = 0.0,
    out: Tensor | None = None,
    rest: Tensor | None = None,
) -> Tensor:
    """Compute alpha·A·Bᵀ + beta·C + gamma·I for matrices whose result is symmetric, with half the arithmetic.

    That A·Bᵀ and C are symmetric is the caller's promise: B = A, or two symmetric matrices that commute. Only the lower
    triangle is computed (and only C's is used), summed in fp32 and rounded once; the result equals its transpose bit
    for bit. A matrix gets the same bits alone or in any batch. The coefficients are run-time numbers: changing them
    compiles nothing.

    Args:
        a: (batch, m, k) or (m, k) in fp16, bf16 or fp32, on a GPU. Any strides; 16-byte-aligned rows are fastest.
        b: Of a's shape and dtype; None means a.
        alpha: Factor of the product.
        beta: Factor of c.
        c: (batch, m, m) or (m, m), of a's dtype, or None. Not read if beta is 0.
        gamma: What is added to the diagonal.
        out: Where to write; may be c, never a or b. None makes a new tensor.
        rest: Where to write what rounding took from the result, times 2048, or None: out + rest / 2048 has about twice
            the digits of out. Of out's shape and dtype.

    Returns:
        `out`, or a new contiguous tensor of shape (batch, m, m) or (m, m).

    Raises:
        ModuleNotFoundError: If Triton is not installed.
        TypeError: If dtypes differ or are not supported.
        ValueError: If shapes or devices do not fit.
    """
    if beta == 0.0:
        c = None
    result = a.new_empty((*a.shape[:-1], a.shape[-2])) if out is None and a.ndim > 1 else out
    # The same memory again, as in every step of an optimizer: checked, described and looked up before.
    key = (_whereabouts(a), _whereabouts(b), _whereabouts(c), _whereabouts(result), _whereabouts(rest))
    known = _bound.get(key)
    if known is not None and result is not None and (beta == 0.0 or c is not None):
        known(float(alpha), float(beta), float(gamma))
        return result
    _check(a, b, beta, c, out, rest)
    assert result is not None
    if result.numel() == 0:
        return result
    batch, (m, k) = a.shape[0] if a.ndim == 3 else 1, a.shape[-2:]
    config = choose_config(architecture_of(a.device), batch, m, k, a.dtype, rest=rest is not None)
    stacks = _stacks(a, b, c, result, rest)
    launch = _bind(config, stacks)
    launch(float(alpha), float(beta), float(gamma))
    if a.device.type == "cuda" and uses_tma(config, stacks):
        if len(_bound) >= _MOST_BOUND:
            _bound.clear()
        _bound[key] = launch
    return result


def symmetric_matmul_with(
    config: TileConfig,
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Tensor | None = None,
    gamma: float = 0.0,
    out: Tensor | None = None,
    rest: Tensor | None = None,
) -> Tensor:
    """Compute the same with given tiles, for tuning; arguments are not checked.

    Args:
        config: The tiles.
        a: (batch, m, k) or (m, k).
        b: Of a's shape, or None.
        alpha: Factor of the product.
        beta: Factor of c.
        c: (batch, m, m) or (m, m), or None.
        gamma: What is added to the diagonal.
        out: Where to write, or None.
        rest: Where to write what rounding took, or None.

    Returns:
        `out` or a new tensor.
    """
    result = a.new_empty((*a.shape[:-1], a.shape[-2])) if out is None else out
    if result.numel() == 0:
        return result
    stacks = _stacks(a, b, c if beta != 0.0 else None, result, rest)
    _bind(config, stacks)(float(alpha), float(beta), float(gamma))
    return result


class _Way(NamedTuple):
    """A kernel that can take a product.

    Attributes:
        check: The problem by which it is compared with torch.
        bind: Given tiles and stacks, gives the launch that is left to be told its coefficients.
    """

    check: str
    bind: Callable[[TileConfig, Stacks], _Launch]


def _bind(config: TileConfig, stacks: Stacks) -> _Launch:
    """The launch of a kernel that has been compared with torch."""
    from meshmuon.kernels.self_check import check_before_use  # whose problems are multiplied here

    way = _choose_way(config, stacks)
    check_before_use(way.check, stacks[0].device, stacks[0].dtype)
    return way.bind(config, stacks)


def _choose_way(config: TileConfig, stacks: Stacks) -> _Way:
    a, b, _, _, rest = stacks
    tma = uses_tma(config, stacks)
    if rest is not None or not tma:  # only Triton's kernels do without TMA, or write a rest
        return _Way(POINTERS if rest is None else HALVES, _in_tiles if tma else _through_pointers)
    batch, m, _ = a.shape
    if config.few and few_tiles.can_run(a.device, a.dtype, batch=batch, m=m, same=b is None):
        return _Way(FEW, _in_few_tiles)
    result = Result(m, m, mirrored=True)
    if config.clusters and clusters.can_run(a.device, a.dtype, batch=batch, results=(result,)):
        return _Way(QUADRATIC, _in_clusters)
    return _Way(TMA, _in_tiles)


def _in_tiles(config: TileConfig, stacks: Stacks) -> _Launch:
    return TmaLaunch(config, *stacks)


def _through_pointers(config: TileConfig, stacks: Stacks) -> _Launch:
    return partial(launch_pointers, config, *stacks)


def _in_few_tiles(config: TileConfig, stacks: Stacks) -> _Launch:
    return few_tiles.FewLaunch(*stacks[:4]).scaled


def _in_clusters(config: TileConfig, stacks: Stacks) -> _Launch:
    a, b, c, d, _ = stacks
    product = Product(a=0, b=0 if b is None else 1, c=None if c is None else 2, d=3, mirrored=True)
    return clusters.ClusterLaunch([product], (a, a if b is None else b, d if c is None else c, d)).scaled


def _stacks(a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor, rest: Tensor | None) -> Stacks:
    return _stacked(a), _stacked(None if b is a else b), _stacked(c), _stacked(d), _stacked(rest)


def _stacked(x: Tensor | None) -> Any:
    return x if x is None or x.ndim == 3 else x.unsqueeze(0)


def _whereabouts(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a bound launch depends on. Addresses tell devices apart as well."""
    return None if x is None else (x.shape, *whereabouts(x))


def _check(a: Tensor, b: Tensor | None, beta: float, c: Tensor | None, out: Tensor | None, rest: Tensor | None) -> None:
    if a.ndim not in (2, 3):
        raise ValueError(message("a", found=f"{a.ndim}-D", do="Pass (m, k) or (batch, m, k)"))
    if a.dtype not in _DTYPES:
        raise TypeError(message("a", found=f"{a.dtype}", do="Use fp16, bf16 or fp32"))
    if beta != 0.0 and c is None:
        raise ValueError(message("beta", found=f"{beta} without c", do="Pass c, or leave beta at 0"))
    square = (*a.shape[:-1], a.shape[-2])
    for name, tensor, shape in (("b", b, a.shape), ("c", c, square), ("out", out, square), ("rest", rest, square)):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(message(name, found=f"shape {tuple(tensor.shape)}", do=f"Pass {tuple(shape)}"))
        if tensor.dtype != a.dtype:
            raise TypeError(message(name, found=f"{tensor.dtype}", do=f"Pass {a.dtype} as in a"))
    for name, written, others in (("out", out, (a, b)), ("rest", rest, (a, b, c, out))):
        if written is not None and written.numel() and any(_start_together(written, other) for other in others):
            do = "Pass other memory: tiles read all of it"
            raise ValueError(message(name, found="the memory of another argument", do=do))
    check_runnable("symmetric_matmul", *(t for t in (a, b, c, out, rest) if t is not None))


def _start_together(x: Tensor, other: Tensor | None) -> bool:
    return other is not None and x.data_ptr() == other.data_ptr()

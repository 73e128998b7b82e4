"""A small problem for every kernel of products, with torch's answer; and the table of all that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from meshmuon.kernels import clusters
from meshmuon.kernels.agenda import Product, Result, Second
from meshmuon.kernels.configs import architecture_of, choose_config
from meshmuon.kernels.elementwise_problems import ELEMENTWISE, Problem, go, numbers
from meshmuon.kernels.hopper import why_impossible
from meshmuon.kernels.landing import Landing
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.symmetric_matmul import (
    FEW,
    HALVES,
    POINTERS,
    QUADRATIC,
    TMA,
    symmetric_matmul,
    symmetric_matmul_with,
)
from meshmuon.kernels.tables import Slot, build_tables
from meshmuon.kernels.whole_matmul import WHOLE, whole_matmul

_ROUNDS = 4  # of two products in one launch
STACK, SMALL_STACK = (32, 272, 208), (2, 144, 208)  # on a GPU; interpreted
SMALL_TILES = (48, 144, 208)  # which Hopper's table cuts smaller
FEW_TILES = (144, 976, 1040, 1424, 1488)  # rows of single matrices: cut in all the ways there are


def _stack(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sides that fill no tile. On a GPU so large that it is given the tiles of the products that train."""
    return _factors(device, dtype, *(SMALL_STACK if device.type == "cpu" else STACK))


def _factors(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """What to multiply, so that products are a few units large and all terms of `_all_terms` count in 16 bits."""
    return _with_heavy_end(numbers(device, dtype, *shape) / 8)


def _with_heavy_end(x: Tensor) -> Tensor:
    """Double the last numbers of the inner dimension: a product that forgets what fills no tile is off by a quarter."""
    x[..., -16:] *= 2
    return x


def _gram(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype)
    return symmetric_matmul(x), torch.bmm(x.double(), x.double().mT)


def _few(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Single products in tiles of every size, with all that can be added."""
    if why_impossible(device, dtype):
        return _gram(device, dtype)
    stacks = [_factors(device, dtype, 1, rows, 208) for rows in FEW_TILES]
    return _together(*(_all_terms(x, torch.bmm(x, x.mT)) for x in stacks))


def _through_tma(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In large tiles; in small ones, of two that are not the same tensor."""
    small = _factors(device, dtype, *(SMALL_STACK if device.type == "cpu" else SMALL_TILES))
    return _together(_by_triton(_stack(device, dtype)), _by_triton(small, small.clone()))


def _through_pointers(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows that TMA could take, and rows that are not aligned: Triton compiles other code for those."""
    x = _stack(device, dtype)
    return _together(_by_triton(x, tensor_memory=False), _by_triton(_unaligned(x), _unaligned(x)))


def _by_triton(a: Tensor, b: Tensor | None = None, *, tensor_memory: bool = True) -> tuple[Tensor, Tensor]:
    """Also where another kernel would be chosen. Through TMA only where the table ever does."""
    config = choose_config(architecture_of(a.device), *a.shape, a.dtype)
    config = replace(config, tensor_memory=tensor_memory and config.tensor_memory, clusters=False, few=False)
    return _all_terms(a, torch.bmm(a, a.mT), multiply=partial(symmetric_matmul_with, config, b=b))


def _unaligned(x: Tensor) -> Tensor:
    return x[:, :-1, :-1].contiguous()


def _halves(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype)
    return _together(_with_rest(x), _with_rest(_unaligned(x)))


def _with_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    rest = x.new_empty(*x.shape[:-1], x.shape[-2])
    return _from_halves(x, symmetric_matmul(x, rest=rest), rest)


def _halves_in_clusters(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype)
    batch, m, _ = x.shape
    results = (Result(m, m, mirrored=True),)
    if dtype != torch.float16 or not clusters.can_run(device, dtype, batch=batch, results=results):
        return _gram(device, dtype)
    high, rest = x.new_full((2, batch, m, m), float("nan"))
    product = Product(0, 0, None, 1, mirrored=True, second=Second(2, alpha=REST_SCALE), in_halves=True)
    clusters.ClusterLaunch([product], [x, high, rest])()
    return _from_halves(x, high, rest)


def _from_halves(x: Tensor, high: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Both are about as large. Sums are in fp32, of which rounding takes nothing in fp32."""
    product = torch.bmm(x.double(), x.double().mT)
    taken = (product - high.double()) * (REST_SCALE if x.dtype != torch.float32 else 0.0)
    return _flat([high, rest]), _flat([product, taken])


def _quadratic(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _stack(device, dtype)
    r = torch.bmm(x, x.mT)
    return _all_terms(_with_heavy_end(r / 32), r)


def _all_terms(x: Tensor, c: Tensor, *, multiply: Callable[..., Tensor] | None = None) -> tuple[Tensor, Tensor]:
    wide = x.double()
    expected = torch.baddbmm(c.double(), wide, wide.mT, beta=-2.5, alpha=1.5)
    expected.diagonal(dim1=-2, dim2=-1).add_(3.0)
    return (multiply or symmetric_matmul)(x, alpha=1.5, beta=-2.5, c=c, gamma=3.0), expected


def _one_after_the_other(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x·xᵀ and its product with x, both again and again in one launch, where there is a kernel for both.

    So often that every cluster takes more pairs than it knows ahead. Only the last round gives what is expected. One
    triangle of x·xᵀ is there, as in the programs that train.
    """
    x = _stack(device, dtype)
    batch, m, n = x.shape
    results = (Result(m, m, mirrored=True), Result(m, n, mirrored=False)) * _ROUNDS
    if not clusters.can_run(device, dtype, batch=batch, results=results):
        return _gram(device, dtype)
    r, product = x.new_full((batch, m, m), float("nan")), torch.empty_like(x)
    gram = Product(a=0, b=0, c=None, d=1, mirrored=True, half_d=True)
    whole = Product(a=1, b=0, c=None, d=2, mirrored=False, half_a=True)
    products = [replace(gram, alpha=2.0), whole] * (_ROUNDS - 1) + [gram, whole]
    written = clusters.counters(x)
    clusters.ClusterLaunch(products, [x, r, product], written)()
    expected = torch.bmm(x.double(), x.double().mT).to(dtype)
    return product, torch.bmm(expected.double(), x.double())


def _landing(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The product of the check before, taken as a step by parameters: half of them lie as it does, half across."""
    x = _stack(device, dtype)
    batch, m, n = x.shape
    results = (Result(m, n, mirrored=False),)
    if not clusters.can_run(device, dtype, batch=batch, results=results):
        return _gram(device, dtype)
    half, factor = batch // 2, torch.bmm(x, x.mT)
    direction = torch.bmm(factor.double(), x.double())
    alpha = 2.0 / float(direction.abs().max())  # as large as parameters: what decays is not to be lost beside it
    direction = (alpha * direction).float()
    params = [numbers(device, torch.float32, half, *sides) for sides in ((m, n), (n, m))]
    slots = [
        Slot(
            param=param,
            buffer=param,
            grad=param,
            input_offset=None,
            direction_offset=i * half * m * n,
            padded=(m, n),
            turned=i > 0,
            scale=0.25,
        )
        for i, param in enumerate(params)
    ]
    expected = [0.5 * params[0] - 0.5 * direction[:half], 0.5 * params[1] - 0.5 * direction[half:].mT]
    lr, decay = (torch.full((1,), number, dtype=torch.float32, device=device) for number in (2.0, 0.25))
    landing = Landing(build_tables(slots)[0][0], lr, decay, proceed=go(device))
    product = Product(0, 1, None, 2, mirrored=False, alpha=alpha)
    clusters.ClusterLaunch([product], [factor, x, torch.empty_like(x)], lands=landing.flag).onto(landing)
    return _flat(params).to(dtype), _flat(expected)


def _whole(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In fp32 whatever others are in: a Gram matrix, a whole result, and all that can be added."""
    x = _factors(device, torch.float32, *SMALL_STACK)
    return _together(
        (whole_matmul(x, x.mT), torch.bmm(x.double(), x.double().mT)),
        (whole_matmul(x[..., :144], x), torch.bmm(x[..., :144].double(), x.double())),
        _all_terms(x, torch.bmm(x, x.mT), multiply=partial(whole_matmul, b=x.mT)),
    )


def _together(*answers: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    got, expected = zip(*answers, strict=True)
    return _flat(got), _flat(expected)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


# The products of most steps in 16 bits; those in fp32 are WHOLE.
SYMMETRIC: dict[str, Problem] = {
    "symmetric_matmul (gram)": _gram,
    QUADRATIC: _quadratic,
    "a product in halves": _halves_in_clusters,
    "one product after the other": _one_after_the_other,
    "steps where directions are computed": _landing,
}
# Of those that most steps run, Triton's come first; their arguments are of the kind that steps pass, which compile no
# others then. From the first product on they wait, on a Hopper GPU, for what is compiled in the background.
CHECKS: dict[str, Problem] = {
    **ELEMENTWISE,
    WHOLE: _whole,
    **SYMMETRIC,
    FEW: _few,
    HALVES: _halves,
    TMA: _through_tma,
    POINTERS: _through_pointers,
}

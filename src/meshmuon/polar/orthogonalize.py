"""From a stack of matrices to their polar factors: normalise, iterate in the chosen form, give back the shape.

[Note: canonical entry] The guarantee that a matrix gets the same bits alone, in any batch, from any storage and with
any number of threads is kept here, by one path for all: a fresh, wide (m <= n), zero-padded, contiguous 3-D buffer;
norms by rows, then over the rows (a reduction to a single number is split differently among threads); and products that
belong to one thread each ([Note: one product, one thread] in kernels/crew.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from meshmuon.config import DTypeChoice, Form, Orthogonalizer
from meshmuon.errors import message
from meshmuon.kernels.crew import share
from meshmuon.kernels.landing import Landing
from meshmuon.polar import cost
from meshmuon.polar.coefficients import Schedule, resolve_schedule
from meshmuon.polar.cpu_operations import CpuOperations, count_panels
from meshmuon.polar.kernel_operations import KernelOperations, WholeOperations
from meshmuon.polar.normalise import normalised, normalised_by_kernels, normalised_by_torch
from meshmuon.polar.operations import Given, Operations, TorchOperations, taken
from meshmuon.polar.program import can_run, run_program
from meshmuon.polar.recipe import Recipe, choose_recipe
from meshmuon.polar.ways import evaluate

# By products, and whether they are batch-invariant: torch's on a GPU are made so by taking one matrix at a time.
_OPERATIONS: dict[tuple[str, bool], Operations] = {
    ("threads", False): CpuOperations(),  # torch's on a CPU, which are invariant
    ("torch", False): TorchOperations(),
    ("torch", True): TorchOperations(),
    ("triton", False): KernelOperations(),
    ("triton", True): KernelOperations(invariant=True),
    ("whole", False): WholeOperations(),
    ("whole", True): WholeOperations(),
}
_DEFAULT_WORKSPACE = 2**30
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Numbers of Gram matrices that a thread of a CPU takes at a time: 1 MB in fp32, so that they stay near it.
_CACHED_NUMBERS = 2**18
_LARGE = 2**26  # multiplications that are worth the while of several threads: half a millisecond


def orthogonalize(
    x: Tensor,
    *,
    coefficients: str | Sequence[object] = "polar_express",
    steps: int = 5,
    form: Form = "auto",
    dtype: DTypeChoice = "auto",
) -> Tensor:
    """Replace each matrix by (an approximation of) its polar factor U·Vᵀ.

    The result does not depend on the scale of x: gradients times 1e-30 or 1e30 give the same. Zero gives zero. A
    matrix gives the same bits alone or in any batch.

    Args:
        x: (..., m, n), floating point; never written.
        coefficients: "polar_express", "keller", "you", one triple, or `steps` triples.
        steps: Number of iteration steps, 1 to 20. Five steps resolve singular values above about 1e-3 of the norm.
        form: "standard", "gram", "svd" (exact), or "auto": the cheaper of the first two.
        dtype: What to compute in. "auto": fp32 on a CPU (fp64 for fp64), fp16 on a GPU, where matrices of less than 256
            rows or columns are in fp32 as well.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If x is not a floating-point tensor.
    """
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.layout != torch.strided:
        raise TypeError(
            message(
                "x", found=_kind(x), do="Pass a dense floating-point tensor of shape (..., m, n), of 16 bits or more"
            )
        )
    if x.ndim < 2:
        raise ValueError(message("x", found=f"{x.ndim}-D", do="Pass matrices: shape (..., m, n)"))
    schedule = schedule_of(coefficients, steps)
    if x.numel() == 0:
        return torch.empty_like(x)
    rows, cols = x.shape[-2:]
    m, n = min(rows, cols), max(rows, cols)
    recipe = choose_recipe(
        m,
        n,
        schedule=schedule,
        orthogonalizer=Orthogonalizer(form=form, dtype=dtype),
        device=x.device,
        dtype=x.dtype,
        eps=1e-7,
    )
    stack = x.detach().reshape(-1, rows, cols)
    stack = stack.mT if rows > cols else stack
    at_once = max(1, _DEFAULT_WORKSPACE // recipe.workspace_bytes(m, n))
    parts = [orthogonalize_stack(part, recipe) for part in stack.split(at_once)]
    result = torch.cat(parts) if len(parts) > 1 else parts[0]
    result = result.mT if rows > cols else result
    return result.to(x.dtype).reshape(x.shape)


def schedule_of(coefficients: str | Sequence[object], steps: int) -> Schedule:
    """Resolve a schedule under the names that `orthogonalize` has for its arguments.

    Args:
        coefficients: As in `orthogonalize`.
        steps: As in `orthogonalize`.

    Returns:
        The schedule.

    Raises:
        ValueError: If one is out of range.
        TypeError: If one is of the wrong type.
    """
    try:
        return resolve_schedule(coefficients, steps)
    except (ValueError, TypeError) as error:
        raise type(error)(re.sub(r"\bns_(?=steps|coefficients)", "", str(error))) from None


def orthogonalize_stack(x: Given, recipe: Recipe, *, partials: Tensor | None = None) -> Tensor:
    """Compute the polar factors of a stack of wide matrices.

    Args:
        x: (batch, m, n) with m <= n, any strides, in any floating dtype. Given away in a list, its memory is used up;
            else it is never written.
        recipe: How.
        partials: Sums of squares of x by tiles, where the kernels have made them already.

    Returns:
        A new (batch, m, n) in the recipe's dtype.
    """
    consume = isinstance(x, list)
    x = taken(x)
    m, n = x.shape[-2:]
    if x.numel() == 0:
        return x.new_zeros(x.shape, dtype=recipe.dtype)
    if recipe.form == "svd":
        if x.device.type == "cpu":  # one at a time, each by one thread: LAPACK's bits, too, depend on both
            found = share(partial(_svd_polar, eps=recipe.eps), x.split(1), device=x.device)
            return torch.cat(found).to(recipe.dtype)
        return _svd_polar(x, eps=recipe.eps).to(recipe.dtype)
    if _takes_threads(recipe, x.device):
        return _by_threads(x, recipe, consume=consume)
    if recipe.fused:
        start = [normalised_by_kernels(x, recipe, partials, consume=consume)]
    else:
        start = [normalised_by_torch(x, recipe)]
    del x  # the iteration is to be the only one that holds it
    if recipe.one_by_one:
        return _one_by_one(taken(start), recipe)[:, :m, :n]
    return _iterate(start, recipe)[:, :m, :n]


def orthogonalize_onto(
    landing: Landing | None, x: Given, recipe: Recipe, *, partials: Tensor | None = None
) -> Tensor | None:
    """Compute polar factors that parameters take as steps where they are computed, if that can be.

    Args:
        landing: The parameters; None: there are none that can.
        x: As in `orthogonalize_stack`.
        recipe: As in `orthogonalize_stack`.
        partials: As in `orthogonalize_stack`.

    Returns:
        None if the steps have been taken, else what `orthogonalize_stack` gives.
    """
    program, (batch, m, n) = recipe.program, (x[0] if isinstance(x, list) else x).shape
    if landing is None or program is None or not batch:
        return orthogonalize_stack(x, recipe, partials=partials)
    start = [normalised_by_kernels(taken(x), recipe, partials, consume=isinstance(x, list))]
    if can_run(program, start[0]):
        run_program(program, start, landing)
        return None
    return _iterate(start, recipe)[:, :m, :n]


def _takes_threads(recipe: Recipe, device: torch.device) -> bool:
    return device.type == "cpu" and recipe.kernels.products == "torch"


def _by_threads(x: Tensor, recipe: Recipe, *, consume: bool) -> Tensor:
    """The same on a CPU, where each thread takes as many matrices at a time as it can keep in its cache.

    Large ones that are too few for all threads are taken one after the other: then threads share their panels. Results
    take the place of what is consumed: a CPU touches new memory slowly.
    """
    batch, m, n = x.shape
    threads, rows = torch.get_num_threads(), cost.padded(m)
    in_place = consume and x.is_contiguous() and x.dtype == recipe.dtype
    result = x if in_place else x.new_empty(x.shape, dtype=recipe.dtype)
    padded = (m, n) != (rows, cost.padded(n))
    few = batch % threads if count_panels(rows, recipe.dtype) > batch % threads else 0

    def start(part: slice) -> Tensor:
        return normalised_by_torch(x[part], recipe)

    def iterate(x: Given, part: slice) -> Tensor:
        return _iterate(x, recipe, out=None if padded else result[part])

    def crop(found: Tensor, part: slice) -> None:
        result[part] = found[:, :m, :n]

    def find(part: slice) -> None:
        found = iterate([start(part)], part)
        if padded:
            crop(found, part)

    parts = _even_parts(batch - few, most=max(1, _CACHED_NUMBERS // rows**2), threads=threads)
    share(find, parts, device=x.device, large=16 * batch * m * m * n > _LARGE)
    for i in range(batch - few, batch):
        one = slice(i, i + 1)
        found = iterate(share(start, [one], device=x.device), one)
        if padded:
            share(partial(crop, found), [one], device=x.device)
    return result


def _even_parts(count: int, *, most: int, threads: int) -> list[slice]:
    """Cut a stack into parts of at most so many, the same share for every thread; longer ones first."""
    rounds = math.ceil(count / (threads * most))
    parts = min(count, threads * rounds)
    ends = [math.ceil(count * i / parts) for i in range(1, parts + 1)]
    return sorted(map(slice, [0, *ends], ends), key=lambda part: part.start - part.stop)


def _one_by_one(start: Tensor, recipe: Recipe) -> Tensor:
    """Iterate on one matrix at a time, for the same bits in every batch."""
    result = torch.empty_like(start)
    for part, out in zip(start.split(1), result.split(1), strict=True):
        _iterate(part, recipe, out=out)
    return result


def _iterate(start: Given, recipe: Recipe, out: Tensor | None = None) -> Tensor:
    program = recipe.program
    if program is not None and can_run(program, start[0]):
        assert isinstance(start, list) and out is None, "a program overwrites what it is given"
        return run_program(program, start)
    # A program whose tables are not on the device yet while somebody captures a graph: product by product, unpaired.
    products = "threads" if _takes_threads(recipe, start[0].device) else recipe.kernels.products
    operations = _OPERATIONS[products, recipe.invariant]
    return evaluate(start, recipe.way, schedule=recipe.schedule, operations=operations, out=out)


def _svd_polar(x: Tensor, *, eps: float) -> Tensor:
    """U·Vᵀ in float64, over the singular values that stand out from the rounding of the input.

    Rounding the entries of an m×n matrix (m <= n) adds singular values of up to about 0.6·eps / sqrt(m) of the largest.
    The rest stays zero, so that zero gives zero and a low rank stays low.
    """
    wide = x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    is_finite = wide.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    wide.masked_fill_(~is_finite, 0.0)  # a decomposition would raise
    u, s, vh = torch.linalg.svd(normalised(wide, eps=eps), full_matrices=False)
    own_error = x.shape[-1] * torch.finfo(torch.float64).eps
    threshold = max(own_error, 2.0 * torch.finfo(x.dtype).eps / x.shape[-2] ** 0.5)
    keep = (s > threshold * s[:, :1]).to(s.dtype)
    return torch.bmm(u * keep.unsqueeze(-2), vh).masked_fill_(~is_finite, torch.nan)


def _kind(x: object) -> str:
    return f"a {x.dtype} tensor ({x.layout})" if isinstance(x, Tensor) else f"a {type(x).__name__}"

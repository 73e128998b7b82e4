"""How the polar factors of one shape are computed: everything decided once, from shape, device and wishes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from meshmuon.config import Orthogonalizer, Restarts
from meshmuon.kernels import clusters
from meshmuon.kernels.availability import runs_here
from meshmuon.kernels.clusters import is_available, is_possible
from meshmuon.kernels.configs import Architecture
from meshmuon.kernels.dispatch import SMALLEST_SIDE, Dispatch, choose_kernels
from meshmuon.kernels.self_check import check_kernels_ahead
from meshmuon.kernels.symmetric_matmul import FEW, HALVES
from meshmuon.kernels.whole_matmul import WHOLE
from meshmuon.polar import cost
from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.gram import choose_restarts, held_small
from meshmuon.polar.program import Program, write_program
from meshmuon.polar.ways import Way, choose_way, count_flops

# The short side below which a GPU computes in fp32, too. Five steps lift by up to 1e3 what rounding leaves where the
# input has nothing; the smaller the matrix, the more that is beside the result. At rank m/8 fp16 is 0.022 further from
# the polar factor than fp32 at 64 rows, 0.011 at 192 and 0.008 at 240, and from bf16, in which matrices would arrive,
# 0.33 at 64. Up to 0.01 is promised.
_FP32_BELOW = SMALLEST_SIDE
# The short side up to which products follow each other in one launch: measured no further.
_PROGRAMS_TO = 8192
# The short side from which one matrix at a time in cuBLAS costs next to nothing (2.9 % measured at 2048, nothing at
# 4096: NOTES.md).
_ALONE_FROM = 2048
# How many times longer products in fp32 take than cuBLAS's in 16 bits: iterations on 64x128x512, 48x192x768 and
# 384x128x4096 come to 19 to 24 TFLOP/s on an H200 (NOTES.md).
_IN_FP32 = 25.0
# Numbers a CPU takes through a step at a time: 16 MB in fp32, which its cache holds. With fewer its threads would wait
# for each other.
_CPU_NUMBERS = 2**22


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the polar factors of one shape are computed: everything decided, nothing left to look up.

    Attributes:
        schedule: One triple per step.
        way: How the polynomial is evaluated.
        dtype: What the products are computed in.
        input_dtype: What matrices arrive in, here or over a wire: fp32 for an iteration in fp32, else bf16 (fp16 would
            overflow before it is normalised), and fp64 for parameters in fp64.
        eps: Guards 0/0.
        kernels: What products and element-wise work run in, and why.
        invariant: Whether a matrix gets the same bits in every batch, also where the library does not promise that.
        program: All products as one program, for one launch; or None.
        slowness: How many times longer an operation takes than in 16 bits, where there is such a difference.
    """

    schedule: Schedule
    way: Way
    dtype: torch.dtype
    input_dtype: torch.dtype
    eps: float
    kernels: Dispatch
    invariant: bool = False
    program: Program | None = None
    slowness: float = 1.0

    @property
    def form(self) -> Literal["standard", "gram", "svd"]:
        """Its form."""
        return self.way.form

    @property
    def restarts(self) -> tuple[int, ...]:
        """Where the Gram form starts anew."""
        return self.way.restarts

    @property
    def fused(self) -> bool:
        """Whether element-wise work runs in kernels of ours."""
        return self.kernels.fused

    @property
    def one_by_one(self) -> bool:
        """Whether matrices are iterated on one at a time, because the products of torch depend on their batch."""
        return self.invariant and self.kernels.products == "torch"

    def flops(self, m: int, n: int) -> float:
        """Count the operations for one m×n matrix (m <= n)."""
        return count_flops(m, n, self.way, schedule=self.schedule, symmetric=self.kernels.products == "triton")

    def cost(self, m: int, n: int) -> float:
        """Count them by the time they take: as operations in 16 bits."""
        return self.slowness * self.flops(m, n)

    def whole_flops(self, m: int, n: int) -> float:
        """Count those of them that are in products no symmetric kernel can take."""
        if self.way.folded:
            return 2.0 * m * m * n + cost.folded_extra(len(self.schedule) - self.restarts[0], 0.0) * m**3
        applied = len(self.restarts) + 1 if self.form == "gram" else len(self.schedule)
        last = len(self.schedule) - max(self.restarts, default=0)
        return 2.0 * m * m * n * applied + (2.0 * m**3 if self.way.whole and last > 2 else 0.0)

    def in_gram_space(self, restarts: Restarts = "auto") -> Recipe:
        """Give the recipe by which a matrix stays cut, and only its Gram matrix is iterated on."""
        restarts = choose_restarts(self.schedule, self.dtype) if restarts == "auto" else restarts
        kernels = replace(self.kernels, products="torch")
        return replace(self, way=Way("gram", restarts), kernels=kernels, invariant=False, program=None)

    def workspace_bytes(self, m: int, n: int) -> int:
        """Bound the memory for one m×n matrix (m <= n)."""
        if self.form == "svd":
            return cost.svd_bytes(m, n)
        sizes = {"compute_bytes": self.dtype.itemsize, "input_bytes": self.input_dtype.itemsize}
        if self.program is not None:
            return cost.program_bytes(m, n, held=self.program.held(cost.padded(m), cost.padded(n)), **sizes)
        gram = self.form == "gram"
        return cost.workspace_bytes(
            m,
            n,
            **sizes,
            fused=self.fused and not self.one_by_one,  # then the input stays until the last result is there
            small=held_small(self.schedule, self.restarts, folded=self.way.folded) if gram else 2,
        )

    def batch(self, m: int, n: int, device: torch.device) -> int | None:
        """Give how many m×n matrices are best taken through a step together; None: as many as fit."""
        return max(1, _CPU_NUMBERS // (m * n)) if device.type == "cpu" and m * n else None

    def describe(self) -> str:
        """Say the form, its restarts and the dtype in a few words."""
        word = "folded" if self.way.folded else "restart"
        restarts = f" {word} {','.join(map(str, self.restarts))}" if self.restarts else ""
        ours = f" {self.kernels.library} kernels" if self.fused else ""
        program = " paired program" if self.way.paired else " cluster program"
        kernels = program if self.program else ours
        return f"{self.form}{restarts} {str(self.dtype).removeprefix('torch.')}{kernels}"


def begin_to_compile(matrices: Iterable[Tensor], orthogonalizer: Orthogonalizer) -> None:
    """Have begun, in the background, what takes longest to compile of what matrices will need. Returns at once.

    Args:
        matrices: Parameters that will be orthogonalized.
        orthogonalizer: The user's choices.
    """
    if orthogonalizer.kernels == "torch":
        return
    for device, compute in {(x.device, _most_rows_in(x, orthogonalizer.dtype)) for x in matrices}:
        if runs_here(device):
            clusters.begin_to_compile(device, compute)


def choose_recipe(
    m: int,
    n: int,
    *,
    schedule: Schedule,
    orthogonalizer: Orthogonalizer,
    device: torch.device,
    dtype: torch.dtype,
    eps: float,
    invariant: bool | None = None,
    architecture: Architecture | None = None,
) -> Recipe:
    """Decide form, dtype and restarts for matrices of one shape, from the logical shape and the device alone.

    Args:
        m: Short side.
        n: Long side.
        schedule: One triple per step.
        orthogonalizer: The user's choices, with their "auto"s.
        device: Where it will be computed.
        dtype: The dtype of the parameter or input.
        eps: Guards 0/0.
        invariant: Whether the bits of a matrix may not depend on its batch; None: where that costs next to nothing. On
            a CPU they never do.
        architecture: Of a GPU that is elsewhere; None: look at the device.

    Returns:
        The recipe.
    """
    compute = compute_dtype(orthogonalizer.dtype, m=m, device=device, dtype=dtype)
    orthogonalizer.check_steps(len(schedule))
    choose = partial(choose_way, m, n, schedule=schedule, wishes=orthogonalizer, compute=compute)
    wanted = orthogonalizer.kernels
    where: dict[str, Any] = {"device": device, "architecture": architecture}
    which = partial(choose_kernels, wanted, m=m, dtype=compute, given=dtype, **where)
    possible = wanted != "torch" and m <= _PROGRAMS_TO and is_possible(device, compute, architecture=architecture)
    kernels = which(one_launch=possible)
    if kernels.fused and architecture is None:
        check_kernels_ahead(device, compute)  # before anybody waits for what is compiled in the background
    ours = kernels.products == "triton" and m <= _PROGRAMS_TO
    programs = ours and is_available(device, compute, architecture=architecture)
    way = choose(symmetric=kernels.products == "triton", programs=programs)
    program = write_program(schedule, way) if programs and way.form != "svd" else None
    if kernels.products == "triton" and program is None:  # there is no kernel for one, or it would be too long
        kernels = which(one_launch=False)
        way = choose(symmetric=kernels.products == "triton", programs=False)
    if way.form == "svd" and compute not in (torch.float32, torch.float64):
        compute = torch.float32
    symmetric, whole = kernels.products == "triton", kernels.products == "whole" and way.form != "svd"
    if program is None and way.form != "svd" and architecture is None:
        _check_others_ahead(m, way, kernels, device=device, compute=compute)
    free = program is not None or whole or (symmetric and m >= _ALONE_FROM)  # of charge
    arrives = torch.float32 if compute in (torch.float32, torch.float64) else torch.bfloat16
    return Recipe(
        schedule=schedule,
        way=way,
        dtype=compute,
        input_dtype=torch.float64 if dtype == torch.float64 else arrives,
        program=program,
        eps=eps,
        kernels=kernels,
        slowness=_IN_FP32 if device.type != "cpu" and compute.itemsize > 2 else 1.0,
        invariant=device.type != "cpu" and (free if invariant is None else invariant or program is not None),
    )


def _check_others_ahead(m: int, way: Way, kernels: Dispatch, *, device: torch.device, compute: torch.dtype) -> None:
    """Check the kernels of products that are no part of a program."""
    symmetric = kernels.products == "triton"
    wanted = {WHOLE: kernels.products == "whole", FEW: symmetric and m <= _ALONE_FROM, HALVES: way.folded}
    for name, is_wanted in wanted.items():
        if is_wanted:
            check_kernels_ahead(device, compute, alone=name)


def _most_rows_in(x: Tensor, choice: str) -> torch.dtype:
    """What the products of a parameter are in if it is a square. Reshaped or not, it has no longer short side.

    A plain shard of a larger matrix may: its kernel is begun a little later then.
    """
    return compute_dtype(choice, m=math.isqrt(x.numel()), device=x.device, dtype=x.dtype)


def compute_dtype(choice: str, *, m: int, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Decide what the products of one shape are computed in.

    Args:
        choice: The user's.
        m: Short side.
        device: Where.
        dtype: The dtype of the parameter or input.

    Returns:
        The dtype.
    """
    if choice != "auto":
        result: torch.dtype = getattr(torch, choice)
        return result
    if dtype == torch.float64:
        return torch.float64
    # bf16 products on most CPUs are 9-28x slower than fp32. On a GPU fp16 costs up to 15 % more than bf16 (it clocks
    # lower) but rounds 8x finer, so that the Gram form needs one restart instead of two.
    return torch.float32 if device.type == "cpu" or m < _FP32_BELOW else torch.float16

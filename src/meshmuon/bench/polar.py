"""Polar factors alone: our `orthogonalize` beside torch.optim.Muon's, against ceilings measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torchs

from meshmuon.bench.measure import Say, measure_ceilings, milliseconds, say_ceilings
from meshmuon.bench.workloads import Size, Stack, polar_floor_ms, stacks
from meshmuon.config import Orthogonalizer
from meshmuon.polar.coefficients import KELLER, resolve_schedule
from meshmuon.polar.orthogonalize import orthogonalize
from meshmuon.polar.recipe import choose_recipe

OURS, TORCHS = "meshmuon", "torch.optim.Muon"
_WARM_UP = 3
_LEAST_MS = 20.0  # of one timed round on a GPU: short work is repeated, so that launches and clocks settle


def torch_polar(x: Tensor) -> Tensor:
    """Orthogonalize as torch.optim.Muon does: one matrix after the other, in bf16.

    Args:
        x: (batch, m, n).

    Returns:
        The last direction; the others are dropped, as its optimizer drops them.
    """
    result = x[0]
    for matrix in x:
        result = torchs._zeropower_via_newtonschulz(matrix, KELLER, 5, 1e-7)
    return result


def time_polar(work: Callable[[], object], device: str, *, repeats: int) -> tuple[float, float]:
    """Time a polar factor after a warm-up.

    Args:
        work: What to time.
        device: Where.
        repeats: Timed rounds.

    Returns:
        The median and the least, in ms per call.
    """
    on_gpu = device != "cpu"
    for _ in range(_WARM_UP if on_gpu else 1):
        work()
    once = milliseconds(work, device)
    calls = max(1, round(_LEAST_MS / once)) if on_gpu else 1
    times = [milliseconds(work, device, calls=calls) for _ in range(repeats)]
    return statistics.median(times), min(times)


def measure_stack(stack: Stack, device: str, *, repeats: int) -> dict[str, Any]:
    """Time one stack.

    Args:
        stack: Its sizes.
        device: Where. Matrices arrive as over the wire: in bf16 on a GPU unless they are small, in fp32 on a CPU.
        repeats: Timed rounds.

    Returns:
        How we compute it, and the times.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(stack.batch, stack.m, stack.n, generator=generator, device=device)
    recipe = choose_recipe(
        stack.m,
        stack.n,
        schedule=resolve_schedule("polar_express", 5),
        orthogonalizer=Orthogonalizer(),
        device=x.device,
        dtype=x.dtype,
        eps=1e-7,
    )
    x = x.to(recipe.input_dtype)
    theirs = x.clone()  # torch's divides a bf16 input in place
    found: dict[str, Any] = {"recipe": recipe.describe(), "reason": recipe.kernels.reason}
    for name, work in ((OURS, lambda: orthogonalize(x)), (TORCHS, lambda: torch_polar(theirs))):
        median, least = time_polar(work, device, repeats=repeats)
        found[name] = {"ms": median, "least ms": least}
    return found


def run_polar(
    device: str, *, say: Say, only: str | None = None, repeats: int = 7, size: Size = "full"
) -> dict[str, Any]:
    """Measure every stack, telling as it goes.

    Args:
        device: "cpu" or "cuda".
        say: Where progress and tables go.
        only: Stacks whose name contains this.
        repeats: Timed rounds.
        size: Which stacks, see `workloads.stacks`.

    Returns:
        The ceilings, and stack → numbers.
    """
    ceilings = measure_ceilings(device, quick=size == "quick")
    say(f"\npolar factors, five steps\n{say_ceilings(ceilings, device)}")
    say(f"{'batch x m x n':14s} {'ours ms':>9s} {'torch ms':>9s} {'floor ms':>9s} {'x floor':>8s} {'x torch':>8s}  how")
    results: dict[str, Any] = {"ceilings": {"flops": ceilings.flops, "bandwidth": ceilings.bandwidth}}
    itemsize = 4 if device == "cpu" else 2
    for stack in stacks(size):
        if only is not None and only not in stack.name:
            continue
        row = measure_stack(stack, device, repeats=repeats)
        row["floor ms"] = polar_floor_ms(stack, ceilings, itemsize=itemsize)
        results[stack.name] = row
        say(_line(stack.name, row))
        if device != "cpu":
            torch.cuda.empty_cache()
    return results


def _line(name: str, row: dict[str, Any]) -> str:
    ours, theirs, floor = row[OURS]["ms"], row[TORCHS]["ms"], row["floor ms"]
    numbers = f"{ours:9.3f} {theirs:9.3f} {floor:9.3f} {ours / floor:8.2f} {theirs / ours:8.2f}"
    how = row["recipe"].split()[0]  # the form; the rest is in the JSON
    return f"{name:14s} {numbers}  {how}"

"""Clocks and ceilings: how long work takes on a device, and what the device can do at best."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshmuon import __version__
from meshmuon.bench.workloads import Ceilings, Shape
from meshmuon.kernels.availability import triton_version

Say = Callable[[str], None]


def matrices(shapes: list[Shape], device: str) -> list[Tensor]:
    """Make parameters with gradients, the same ones each time.

    Args:
        shapes: Of the matrices.
        device: Where.

    Returns:
        The parameters.
    """
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.randn(shape, generator=generator, device=device).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device)
    return params


def synchronize(device: str) -> None:
    """Wait until a device has done all it was asked for.

    Args:
        device: Which.
    """
    if device != "cpu":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], device: str, *, calls: int = 1) -> float:
    """Measure the time per call, the device's work included.

    Args:
        work: What to do.
        device: Where it is done.
        calls: How often.

    Returns:
        Milliseconds.
    """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def measure_ceilings(device: str = "cuda", *, quick: bool = False) -> Ceilings:
    """Time the largest product and the largest copy of the library, on random numbers.

    Args:
        device: "cuda": 8192³ in bf16, and a copy of 1 GB. "cpu": 1024³ in fp32, the fast dtype there, and 64 MB.
        quick: Much smaller ones, for tests.

    Returns:
        The ceilings.
    """
    on_gpu = device != "cpu"
    side, numbers = (8192, 2**28) if on_gpu else (1024, 2**24)
    if quick:
        side, numbers = 128, 2**16
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if on_gpu:
        a, b = a.bfloat16(), b.bfloat16()
    out = torch.empty_like(a)
    rounds = {"calls": 20 if on_gpu else 3}
    product = min(milliseconds(lambda: torch.mm(a, b, out=out), device, **rounds) for _ in range(5))
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    rounds = {"calls": 10 if on_gpu else 3}
    copy = min(milliseconds(lambda: target.copy_(source), device, **rounds) for _ in range(5))
    return Ceilings(2 * side**3 / product * 1e3, 2 * source.numel() * 4 / copy * 1e3)


def sustained_flops(seconds: float = 1.0) -> dict[str, float]:
    """Run the same product for a while: a GPU under its power bound clocks lower than in the burst of a ceiling.

    Args:
        seconds: How long, for each dtype.

    Returns:
        bf16, which the ceiling is measured in, and fp16, which products are computed in: operations per second.
    """
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        start, rounds = time.perf_counter(), []
        while time.perf_counter() - start < seconds:
            rounds.append(milliseconds(partial(torch.mm, a, b, out=out), "cuda", calls=20))
        late = rounds[len(rounds) // 2 :]
        found[str(dtype).removeprefix("torch.")] = 2 * 8192**3 * len(late) / sum(late) * 1e3
    return found


def say_ceilings(ceilings: Ceilings, device: str) -> str:
    """Put ceilings into words.

    Args:
        ceilings: What was measured.
        device: Where.

    Returns:
        One line.
    """
    product = "8192³ bf16" if device != "cpu" else "fp32"
    if device == "cpu":
        return f"ceilings: {ceilings.flops / 1e9:.0f} GFLOP/s ({product}), {ceilings.bandwidth / 1e9:.1f} GB/s (copy)"
    return f"ceilings: {ceilings.flops / 1e12:.0f} TFLOP/s ({product}), {ceilings.bandwidth / 1e12:.2f} TB/s (copy)"


def circumstances(device: str) -> dict[str, Any]:
    """Say when, on what and with which versions something was measured.

    Args:
        device: Where.

    Returns:
        Plain JSON types.
    """
    return {
        "date": str(datetime.date.today()),
        "hardware": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "meshmuon": __version__,
    }

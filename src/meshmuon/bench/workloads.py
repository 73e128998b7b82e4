"""Lists of matrices that stand for a model, stacks to orthogonalize, and the least that either can cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, int]
Size = Literal["full", "small", "quick"]


def _repeat(count: int, *shapes: Shape) -> list[Shape]:
    return [shape for _ in range(count) for shape in shapes]


CPU = {
    "gpt-192, 6 blocks with fused q, k, v: 24 matrices of 192...768": _repeat(
        6, (576, 192), (192, 192), (768, 192), (192, 768)
    ),
    "square matrices: 24 of 192...768": _repeat(6, (192, 192), (384, 384), (576, 576), (768, 768)),
    "qwen2-0.5b at a quarter of its width, 6 blocks: 42 matrices": _repeat(
        6, (224, 224), (224, 224), (32, 224), (32, 224), (1216, 224), (1216, 224), (224, 1216)
    ),
}
GPU = {
    "gpt2-124m": _repeat(12, (768, 768), (768, 768), (768, 768), (768, 768), (3072, 768), (768, 3072)),
    "qwen2-0.5b": _repeat(24, (896, 896), (896, 896), (128, 896), (128, 896), (4864, 896), (4864, 896), (896, 4864)),
    "llama-1b": _repeat(
        16, (2048, 2048), (2048, 2048), (512, 2048), (512, 2048), (8192, 2048), (8192, 2048), (2048, 8192)
    ),
    "llama-8b/4": _repeat(
        8, (4096, 4096), (4096, 4096), (1024, 4096), (1024, 4096), (14336, 4096), (14336, 4096), (4096, 14336)
    ),
    "moe 4x64": _repeat(256, (1408, 2048), (1408, 2048), (2048, 1408)),
}
QUICK = {"quick: 6 matrices of 32...96": _repeat(2, (32, 32), (96, 32), (32, 96))}
ELEMENTWISE_BYTES = 24  # per fp32 parameter: gradient, momentum and parameter once each way, and 16-bit copies


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of one shape, orthogonalized together."""

    batch: int
    m: int
    n: int

    @property
    def name(self) -> str:
        """Such as `16x768x3072`."""
        return f"{self.batch}x{self.m}x{self.n}"

    def smaller(self, factor: int, *, most: int) -> Stack:
        """Divide its sides, and bound its batch."""
        return Stack(min(self.batch, most), max(16, self.m // factor), max(16, self.n // factor))


# Of GPT-2, Llama 1B, 8B and 70B, and a mixture of experts.
STACKS = (
    Stack(16, 768, 768),
    Stack(16, 768, 3072),
    Stack(1, 1024, 1024),
    Stack(8, 2048, 2048),
    Stack(8, 2048, 8192),
    Stack(1, 4096, 4096),
    Stack(4, 4096, 4096),
    Stack(1, 4096, 14336),
    Stack(4, 4096, 14336),
    Stack(64, 1408, 2048),
    Stack(1, 8192, 8192),
)


def stacks(size: Size) -> list[Stack]:
    """Give the stacks to orthogonalize.

    Args:
        size: "full" for a GPU; "small": sides an eighth, at most two at a time, for a CPU; "quick": three tiny ones.

    Returns:
        Each once.
    """
    if size == "full":
        return list(STACKS)
    if size == "small":
        return list(dict.fromkeys(stack.smaller(8, most=2) for stack in STACKS))
    return [stack.smaller(32, most=2) for stack in STACKS[:3]]


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at best, measured in the same run.

    Attributes:
        flops: Operations per second of the library's largest product.
        bandwidth: Bytes per second of a copy, read plus written.
    """

    flops: float
    bandwidth: float


def least_flops(shape: Shape) -> float:
    """Count the operations of the cheapest exact form of five steps, symmetric products at half cost.

    Args:
        shape: Of a matrix.

    Returns:
        Operations.
    """
    m, n = min(shape), max(shape)
    standard = 5 * (3.0 * m * m * n + m**3)
    gram = 6.0 * m * m * n + 14.0 * m**3  # one restart, as fp16 needs
    return min(standard, gram)


def floor_ms(shapes: list[Shape], ceilings: Ceilings) -> float:
    """Give the least time of a step on these matrices in fp32.

    Args:
        shapes: Of the matrices.
        ceilings: Of the machine.

    Returns:
        Milliseconds.
    """
    products = sum(map(least_flops, shapes)) / ceilings.flops
    passes = sum(m * n for m, n in shapes) * ELEMENTWISE_BYTES / ceilings.bandwidth
    return (products + passes) * 1e3


def polar_floor_ms(stack: Stack, ceilings: Ceilings, *, itemsize: int) -> float:
    """Give the least time to orthogonalize a stack: its products, and to read and write it once.

    Args:
        stack: The stack.
        ceilings: Of the machine.
        itemsize: Bytes of a number.

    Returns:
        Milliseconds.
    """
    products = stack.batch * least_flops((stack.m, stack.n)) / ceilings.flops
    passes = 2.0 * stack.batch * stack.m * stack.n * itemsize / ceilings.bandwidth
    return (products + passes) * 1e3

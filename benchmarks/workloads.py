"""Lists of matrices that stand for a model, and the least a Muon step on them can cost."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, int]


def _repeat(count: int, *shapes: Shape) -> list[Shape]:
    return [shape for _ in range(count) for shape in shapes]


CPU = {
    "gpt-192, 6 blocks with fused q, k, v: 24 matrices of 192...768": _repeat(
        6, (576, 192), (192, 192), (768, 192), (192, 768)
    ),
    "square matrices: 24 of 192...768": _repeat(6, (192, 192), (384, 384), (576, 576), (768, 768)),
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
ELEMENTWISE_BYTES = 24  # per fp32 parameter: gradient, momentum and parameter once each way, and 16-bit copies


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
    """Operations of the cheapest exact form of five steps, symmetric products at half cost."""
    m, n = min(shape), max(shape)
    standard = 5 * (3.0 * m * m * n + m**3)
    gram = 6.0 * m * m * n + 14.0 * m**3  # one restart, as fp16 needs
    return min(standard, gram)


def floor_ms(shapes: list[Shape], ceilings: Ceilings) -> float:
    """The least time of a step on these matrices in fp32."""
    products = sum(map(least_flops, shapes)) / ceilings.flops
    passes = sum(m * n for m, n in shapes) * ELEMENTWISE_BYTES / ceilings.bandwidth
    return (products + passes) * 1e3

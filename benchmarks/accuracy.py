"""How far the default dtypes of a GPU stay from the exact polar factor, beside fp32, up to 8192 x 8192.

python -m benchmarks.accuracy [--json FILE] [--device cuda] [--dtype auto]

The default of a CPU is fp32; `--device cpu --dtype float16` shows there what a GPU's does from 256 rows on.

Inputs are made from their singular vectors, or (Gaussian ones) taken apart in fp64, so the exact factor is known.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshmuon import Orthogonalizer, orthogonalize
from meshmuon.bench.measure import circumstances
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.recipe import choose_recipe

SHAPES = ((64, 256), (128, 128), (256, 256), (256, 1024), (512, 2048), (704, 1024), (768, 768), (768, 3072))
SHAPES += ((1024, 1024), (1024, 4096), (1408, 2048), (2048, 2048), (4096, 4096), (8192, 8192))
SETS = (("polar_express", 5), ("keller", 5), ("you", 5))
REPORTED = (("polar_express", 8), ("polar_express", 10))
LARGEST_SIGMA = 1.35


def orthonormal(rows: int, cols: int, device: str) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, cols, device=device, dtype=torch.float64)).Q


def inputs(m: int, n: int, device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, input, exact factor), in fp64."""
    torch.manual_seed(0)
    gaussian = torch.randn(m, n, device=device, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(gaussian @ gaussian.mT)
    yield "gaussian", gaussian, vectors @ ((vectors.mT @ gaussian) * values.clamp_min(1e-300).rsqrt()[:, None])
    left, right = orthonormal(m, m, device), orthonormal(n, m, device)
    index = torch.arange(1, m + 1, device=device, dtype=torch.float64)
    sigma = index ** -(math.log(1e3) / math.log(m))
    yield "power law 1e3", (left * sigma) @ right.mT, left @ right.mT
    rank = m // 8
    yield "low rank m/8", (left[:, :rank] * sigma[:rank]) @ right[:, :rank].mT, left[:, :rank] @ right[:, :rank].mT
    yield "rank 1", left[:, :1] @ right[:, :1].mT, left[:, :1] @ right[:, :1].mT


def distance(x: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))


def top_sigma(x: Tensor) -> float:
    """The largest singular value, by forty power iterations."""
    v = torch.randn(x.shape[-1], 1, device=x.device, dtype=torch.float64)
    wide = x.double()
    for _ in range(40):
        v = wide.mT @ (wide @ v)
        v /= torch.linalg.vector_norm(v)
    return float(torch.linalg.vector_norm(wide @ v))


def as_it_arrives(x: Tensor, dtype: str) -> Tensor:
    """Rounded as a step does before it iterates."""
    settings = {"schedule": resolve_schedule("polar_express", 5), "device": x.device, "dtype": x.dtype, "eps": 1e-7}
    recipe = choose_recipe(*sorted(x.shape), orthogonalizer=Orthogonalizer(dtype=dtype), **settings)
    return x.to(recipe.input_dtype).float()


def gram_from_standard(x: Tensor, given: dict[str, Any], dtype: str) -> float:
    """How far apart the two forms come out."""
    gram, standard = (orthogonalize(x, **given, dtype=dtype, form=form) for form in ("gram", "standard"))
    return distance(gram, standard.double())


def in_words(row: dict[str, Any]) -> str:
    verdict = {None: "", True: "ok", False: "OVER"}[row["bound holds"]]
    return (
        f"{row['shape']:10s} {row['input']:14s} {row['set']:16s} default {row['default']:.4f} fp32 {row['fp32']:.4f} "
        f"in a step {row['default, in a step']:.4f} bf16 {row['bf16']:.4f} sigma {row['sigma']:.3f} "
        f"gram {row['gram - standard (fp32)']:.1e}, fp16 {row['gram - standard (fp16)']:.1e} {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto", help="the default dtype, if it is to be another than the device's")
    parser.add_argument("--largest", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for m, n in SHAPES:
        if m > arguments.largest:
            continue
        for name, exact_input, exact in inputs(m, n, arguments.device):
            x = exact_input.float()
            for (coefficients, steps), asked in [*((s, True) for s in SETS), *((s, False) for s in REPORTED)]:
                given = {"coefficients": coefficients, "steps": steps}
                found = orthogonalize(x, **given, dtype=arguments.dtype)
                wide = orthogonalize(x, **given, dtype="float32")
                apart = {dtype: gram_from_standard(x, given, dtype) for dtype in ("float32", "float16")}
                bf16 = orthogonalize(x, **given, dtype="bfloat16")
                in_a_step = orthogonalize(as_it_arrives(x, arguments.dtype), **given, dtype=arguments.dtype)
                row = {
                    "shape": f"{m}x{n}",
                    "input": name,
                    "set": f"{coefficients} {steps}",
                    "default": distance(found, exact),
                    "fp32": distance(wide, exact),
                    "bf16": distance(bf16, exact),
                    "default, in a step": distance(in_a_step, exact),
                    "sigma": max(top_sigma(found), top_sigma(bf16)),
                    "gram - standard (fp32)": apart["float32"],
                    "gram - standard (fp16)": apart["float16"],
                    "bound holds": None,
                }
                if asked and name != "rank 1":
                    row["bound holds"] = row["default"] <= row["fp32"] + 0.01
                rows.append(row)
                print(in_words(row), flush=True)
    over = [row for row in rows if row["bound holds"] is False or row["sigma"] > LARGEST_SIGMA]
    print(f"{len(rows)} rows, {len(over)} outside their bounds")
    if arguments.json:
        record = {**circumstances(arguments.device), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

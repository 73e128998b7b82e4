"""Which tiles a symmetric product is computed in, by architecture and size. A table, so that no user waits for tuning.

[Note: bits and batches] A matrix has to get the same bits alone or in company. On Hopper all tiles of the table, with a
`block_k` of 64 or 128, were measured to give the same bits (tests/gpu/test_kernels.py keeps watch), so the choice may
depend on how many tiles there are to fill the device with. Elsewhere nobody measured it, and the choice does not depend
on the batch.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from meshmuon.errors import message

Architecture = Literal["hopper", "blackwell", "ampere", "rocm", "other"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one product is cut into programs.

    Attributes:
        block: Side of the square output tile.
        block_k: How much of the inner dimension one step takes.
        warps: Warps per program.
        stages: Depth of the software pipeline.
        group: Tile rows walked together, for L2.
        tensor_memory: Whether tiles may move through TMA descriptors.
        clusters: Whether pairs of thread blocks take the product instead where they can (clusters.py): same bits.
        few: Whether each tile gets a multiprocessor of its own instead where it can (few_tiles.py): same bits.
        early: Whether it begins while the kernel before it still runs, and waits for that one by itself.
    """

    block: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    tensor_memory: bool = False
    clusters: bool = False
    few: bool = False
    early: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: it holds up to (and including) these sizes.

    Attributes:
        config: The tiles.
        largest_m: Side of the result.
        largest_k: Inner dimension.
        largest_count: Tiles of 128×128 in the whole batch. Only where tiles do not change bits.
        even_waves: Whether it holds only if those tiles, one per SM at a time, take an even number of rounds.
    """

    config: TileConfig
    largest_m: float = float("inf")
    largest_k: float = float("inf")
    largest_count: float = float("inf")
    even_waves: bool = False


_HOPPER_SMS = 132
# fp32 products run on the plain units with exact (ieee) arithmetic: small tiles, no TMA.
_FLOAT32 = TileConfig(block=64, block_k=32, warps=4, stages=2)
_TABLE: dict[Architecture, tuple[Row, ...]] = {
    # Measured on an H200 (132 SMs, two programs of 128×128 with three stages on each). Up to about one tile per SM,
    # smaller tiles fill the device better; if there are fewer of those than SMs, longer steps and an early start count
    # (where few_tiles.py cannot run). Batches of small matrices have too little k for more than two stages.
    # Few large tiles with a long k are best one on each SM. A fourth stage costs the second program: it pays where k is
    # long, or where an odd number of rounds would leave the second program of the last one without a tile.
    "hopper": (
        Row(TileConfig(64, 128, 4, 4, tensor_memory=True, few=True, early=True), largest_count=28),
        Row(TileConfig(64, 64, 4, 4, tensor_memory=True, few=True), largest_count=78),
        Row(TileConfig(64, 64, 4, 4, tensor_memory=True, few=True), largest_count=132, largest_k=1024),
        Row(TileConfig(128, 64, 4, 4, tensor_memory=True, few=True), largest_count=132),
        Row(TileConfig(64, 64, 4, 3, tensor_memory=True), largest_count=136),
        Row(TileConfig(64, 64, 4, 2, tensor_memory=True), largest_m=256, largest_k=256),
        Row(TileConfig(128, 64, 4, 3, tensor_memory=True, clusters=True), largest_k=3071),
        Row(TileConfig(128, 64, 4, 3, tensor_memory=True, clusters=True), largest_k=4096, even_waves=True),
        Row(TileConfig(128, 64, 4, 4, tensor_memory=True, clusters=True)),
    ),
    # Not measured by us. Data-centre Blackwell has TMA and 228 KB of shared memory as Hopper has.
    "blackwell": (
        Row(TileConfig(64, 64, 4, 4, tensor_memory=True), largest_m=1024),
        Row(TileConfig(128, 64, 4, 4, tensor_memory=True)),
    ),
    # 164 KB of shared memory on A100 but 100 KB on consumer cards: three stages of 128×128×32 take 48 KB.
    "ampere": (
        Row(TileConfig(64, 32, 4, 4), largest_m=1024),
        Row(TileConfig(128, 32, 8, 3)),
    ),
    # 64 KB of local memory; AMD's compiler counts the tile in registers as a stage of its own.
    "rocm": (
        Row(TileConfig(64, 64, 4, 2), largest_m=1024),
        Row(TileConfig(128, 64, 8, 2)),
    ),
    "other": (Row(TileConfig(64, 32, 4, 2)),),
}


@functools.cache
def architecture_of(device: torch.device) -> Architecture:
    """Name the kind of GPU.

    Args:
        device: A device.

    Returns:
        Its row in the table; "other" for what is unknown, the interpreter included.
    """
    if device.type != "cuda" or not torch.cuda.is_available():  # plans are made for GPUs that are elsewhere, too
        return "other"
    if torch.version.hip is not None:
        return "rocm"
    major, _ = torch.cuda.get_device_capability(device)
    names: dict[int, Architecture] = {8: "ampere", 9: "hopper", 10: "blackwell"}
    return names.get(major, "ampere" if major > 10 else "other")


@functools.lru_cache(maxsize=4096)
def choose_config(
    architecture: Architecture, batch: int, m: int, k: int, dtype: torch.dtype, *, rest: bool = False
) -> TileConfig:
    """Choose the tiles of a product.

    Args:
        architecture: The kind of GPU.
        batch: Number of matrices. See [Note: bits and batches].
        m: Side of the result.
        k: Inner dimension.
        dtype: Of the operands.
        rest: Whether what rounding takes is written as well. The fourth stage of large tiles is left out then: it is
            0.92 to 1.15 of the time, 0.99 where most time goes, and would be one more kernel to compile.

    Returns:
        The configuration.
    """
    if dtype == torch.float32:
        return _FLOAT32
    tuned = tuned_tiles().get((architecture, m, k), {})
    if batch in tuned or None in tuned:
        return tuned[batch] if batch in tuned else tuned[None]
    sides = -(-m // 128)
    count = batch * sides * (sides + 1) // 2
    fits = (
        row.config
        for row in _TABLE[architecture]
        if m <= row.largest_m
        and k <= row.largest_k
        and count <= row.largest_count
        and not (row.even_waves and -(-count // _HOPPER_SMS) % 2)
    )
    config = next(fits)
    return replace(config, stages=3) if rest and architecture == "hopper" and config.block == 128 else config


# [Note: tuned tiles] `meshmuon bench --tune FILE` writes what is fastest on one GPU; who sets this variable wants it.
# Shapes in the file get its tiles, all others those of the table. Bits must stay independent of the batch: on Hopper
# because every `block_k` of the table gives the same, elsewhere because its rows hold for every batch.
VARIABLE = "MESHMUON_TILES"
Tuned = Mapping[tuple[Architecture, int, int], Mapping[int | None, TileConfig]]


@functools.cache
def tuned_tiles() -> Tuned:
    """Read the tiles the user has measured, if `MESHMUON_TILES` names a file of them. Read once in a process.

    Returns:
        (architecture, m, k) → batch, or None for every batch → tiles.

    Raises:
        ValueError: If the file cannot be used here. It is not ignored: somebody asked for it.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return {}
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        do = f"Write it with `meshmuon bench --tune FILE`, or unset {VARIABLE}"
        raise ValueError(message(f"{VARIABLE}={path}", found=f"{type(error).__name__}: {error}", do=do)) from error
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return read_tiles(record, source=f"{VARIABLE}={path}", gpu=here)


def read_tiles(record: Any, *, source: str, gpu: str | None) -> Tuned:
    """Check a file of tuned tiles.

    Args:
        record: What `bench.tune` made: gpu, architecture and rows of `as_row`.
        source: Where it came from, for messages.
        gpu: Name of the GPU here; None if there is none, as where a plan is made for others.

    Returns:
        As `tuned_tiles`.

    Raises:
        ValueError: If it is not such a file, was made on another GPU, or would change bits.
    """
    do = f"Write a new one with `meshmuon bench --tune FILE` on this machine, or unset {VARIABLE}"
    try:
        architecture, made_on, rows = record["architecture"], record["gpu"], record["rows"]
        listed = [(row["m"], row["k"], row["batch"], TileConfig(**row["config"])) for row in rows]
    except (KeyError, TypeError) as error:
        raise ValueError(message(source, found=f"not a table of tiles ({error})", do=do)) from error
    if architecture not in get_args(Architecture):
        raise ValueError(message(source, found=f"architecture {architecture!r}", do=do))
    if gpu is not None and gpu != made_on:
        raise ValueError(message(source, found=f"measured on {made_on}, but this is {gpu}", do=do))
    steps = {row.config.block_k for row in _TABLE[architecture]}
    found: dict[tuple[Architecture, int, int], dict[int | None, TileConfig]] = {}
    for m, k, batch, config in listed:
        if architecture == "hopper" and config.block_k not in steps:
            raise ValueError(message(source, found=f"block_k {config.block_k} for {m}x{k}, which changes bits", do=do))
        if architecture != "hopper" and batch is not None:
            raise ValueError(message(source, found=f"a row for batch {batch} on {architecture}", do=do))
        found.setdefault((architecture, m, k), {})[batch] = config
    return found


def as_row(m: int, k: int, batch: int | None, config: TileConfig) -> dict[str, Any]:
    """Write one row of a file of tuned tiles.

    Args:
        m: Side of the result.
        k: Inner dimension.
        batch: Number of matrices; None: any.
        config: The tiles.

    Returns:
        Plain JSON types.
    """
    return {"m": m, "k": k, "batch": batch, "config": asdict(config)}

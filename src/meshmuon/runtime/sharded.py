"""The journey of matrices that are cut along their long side, where only m×m matrices travel. See [Note: one round]."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from meshmuon.errors import message
from meshmuon.exchange.contributions import Contributions
from meshmuon.plan.bucket import Bucket
from meshmuon.polar.sharded_gram import added_grams, apply_factors, find_factors, local_gram
from meshmuon.runtime.spans import span
from meshmuon.update.tensors import MatrixTensors

_NUMBERS = 2  # beside the factors: 1 / norm, and the exponent of the scale; in fp32


def sharded_directions(
    bucket: Bucket, matrices: Sequence[MatrixTensors], inputs: Tensor, contributions: Contributions, *, rank: int
) -> Generator[None, None, Tensor]:
    """Find each rank's part of the directions, where only Gram matrices and factors travel.

    Args:
        bucket: A bucket of the sharded route.
        matrices: What this rank holds of its matrices.
        inputs: The flat buffer of what will be orthogonalized.
        contributions: Brings Gram matrices to owners, and factors to everyone.
        rank: This process's global rank.

    Yields:
        Wherever something is on its way.

    Returns:
        The directions, flat, where the inputs stood.
    """
    m = bucket.wide_shape[0]
    by_owner = sorted(range(len(matrices)), key=lambda i: (bucket.owners[i], i))
    shards = [_wide(matrices[i], inputs) for i in by_owner]
    counts = [sum(owner == member for owner in bucket.owners) for member in range(len(bucket.team))]
    size = m * (m + 1) // 2 + 1
    with span("gather", bucket):
        sent = torch.cat([_packed(*local_gram(shard)) for shard in shards])
        arrives = contributions.collect(bucket.team, check_wire(sent), [count * size for count in counts], rank=rank)
    del sent
    if arrives.in_flight:
        yield
    received = arrives.wait().view(len(bucket.team), -1, size)
    back = _back_size(bucket)
    with span("polar", bucket):
        own = _factors(received, bucket) if received.shape[1] else inputs.new_empty(0, dtype=bucket.recipe.dtype)
    with span("scatter", bucket):
        comes = contributions.give(bucket.team, own, [count * back for count in counts])
    if comes.in_flight:
        yield
    directions = inputs.new_empty(inputs.numel(), dtype=bucket.recipe.dtype)
    for i, shard, packed in zip(by_owner, shards, comes.wait().view(-1, back), strict=True):
        factors, inverse, exponent = _unpacked(packed, bucket)
        _wide(matrices[i], directions).copy_(apply_factors(shard, factors, inverse=inverse, exponent=exponent))
    return directions


def check_wire(grams: Tensor) -> Tensor:
    """Refuse Gram matrices that were rounded to 16 bits: what the iteration lifts would be lost.

    Args:
        grams: What is about to travel.

    Returns:
        The same.

    Raises:
        TypeError: If it is not fp32 or fp64.
    """
    if grams.dtype.itemsize < 4:
        raise TypeError(message("Gram matrices", found=f"{grams.dtype} on the wire", do="Send them in float32"))
    return grams


def _wide(item: MatrixTensors, flat: Tensor) -> Tensor:
    """This rank's shard of a matrix, short side first: (1, m, n of this rank), as a view of the buffer."""
    assert item.place.input is not None
    rows, cols = item.matrix.block.shape
    stored = flat[item.place.input : item.place.input + rows * cols].view(1, rows, cols)
    return stored.mT if item.matrix.tall else stored


@functools.lru_cache(maxsize=64)
def _triangle(m: int, device: torch.device) -> Tensor:
    rows, cols = torch.triu_indices(m, m, device=device)
    return rows * m + cols


def _packed(gram: Tensor, exponent: Tensor) -> Tensor:
    return torch.cat([gram.reshape(-1)[_triangle(gram.shape[-1], gram.device)], exponent])


def _symmetric(packed: Tensor, m: int) -> Tensor:
    """(batch, triangle) → (batch, m, m)."""
    full = packed.new_zeros(packed.shape[0], m * m)
    full[:, _triangle(m, packed.device)] = packed
    upper = full.view(-1, m, m)
    return upper + upper.triu(1).mT


def _back_size(bucket: Bucket) -> int:
    m = bucket.wide_shape[0]
    return (len(bucket.recipe.restarts) + 1) * m * (m + 1) // 2 + _NUMBERS * 4 // bucket.recipe.dtype.itemsize


def _factors(received: Tensor, bucket: Bucket) -> Tensor:
    """What an owner sends back for each of its matrices: packed factors, and two numbers bit by bit."""
    m = bucket.wide_shape[0]
    total, exponent = added_grams(
        [_symmetric(part[:, :-1], m) for part in received], [part[:, -1] for part in received]
    )
    factors, inverse = find_factors(total, bucket.recipe)
    triangle = _triangle(m, received.device)
    numbers = torch.stack([inverse, exponent], dim=1).view(bucket.recipe.dtype)
    parts = [factor.reshape(len(factor), -1)[:, triangle] for factor in factors]
    return torch.cat([*parts, numbers], dim=1).reshape(-1)


def _unpacked(packed: Tensor, bucket: Bucket) -> tuple[list[Tensor], Tensor, Tensor]:
    m = bucket.wide_shape[0]
    size = m * (m + 1) // 2
    segments = len(bucket.recipe.restarts) + 1
    factors = [_symmetric(packed[None, i * size : (i + 1) * size], m) for i in range(segments)]
    inverse, exponent = packed[segments * size :].clone().view(torch.float32).unbind()
    return factors, inverse[None], exponent[None]

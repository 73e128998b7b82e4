"""What ranks must agree on, in words; and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from meshmuon.config import Execution
from meshmuon.layout.records import ParameterRecord
from meshmuon.plan.bucket import Bucket


def fingerprint(
    parameters: Iterable[ParameterRecord], *, settings: Mapping[int, str], execution: Execution
) -> list[str]:
    """Say, a line for each parameter, everything that ranks must agree on.

    Args:
        parameters: The parameters they share.
        settings: For each group, its hyper-parameters, exactly.
        execution: How the step runs: what is in flight together decides the order of collectives.

    Returns:
        Lines whose hash is the same on every rank that will do the same. Groups count from the first that is shared:
        their numbers may differ where ranks have groups of their own.
    """
    numbers: dict[int, int] = {}
    lines = [f"(execution) {execution}"]
    for p in parameters:
        group = numbers.setdefault(p.group, len(numbers))
        cuts = p.layout.cuts if p.layout else None
        what = f"{p.shape} {p.dtype} {p.routing.algorithm} {p.routing.view.as_dict()} {cuts}"
        lines.append(f"{p.name} {what} group {group}: {settings[p.group]}")
    return lines


def digest(lines: Iterable[str]) -> bytes:
    """Hash the lines of a fingerprint.

    Args:
        lines: The lines.

    Returns:
        32 bytes.
    """
    return hashlib.sha256("\n".join(lines).encode()).digest()


def team_fingerprints(buckets: Iterable[Bucket]) -> dict[tuple[int, ...], list[str]]:
    """Say, for each team, what its members will exchange, in order.

    Parameters of two meshes may travel within one team. Each mesh agrees on its own, not on how they are interleaved.

    Args:
        buckets: All buckets of a rank.

    Returns:
        Team → a line for each matrix.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for bucket in buckets:
        if bucket.team:
            lines = (
                f"{matrix.parameter.name} {matrix.shape} computed by {bucket.team[owner]}, {bucket.recipe.describe()}"
                for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True)
            )
            found.setdefault(bucket.team, []).extend((*lines, "(end of a bucket)"))
    return found

"""How long collectives take: an alpha-beta model of teams that may span nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshmuon.plan.hardware import Hardware

# Measured: the host's cost of an uneven all-to-all. Assumed: the rest.
_LAUNCH = 20e-6
_HOP = 5e-6  # for each doubling of the team
_MESSAGE = 1.5e-6  # for each peer of an all-to-all
_HOST = 8e-6
_HOST_PEER = 0.077e-6

# Python, and torch's way to a kernel. For a piece that an owner takes in or gives out: measured, on a slow core
# (`python -m benchmarks.host_time`, see NOTES.md). For any other call: assumed.
_HOST_PIECE = 30e-6
_HOST_CALL = 10e-6


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks that exchange something: how many, and how many of them in one node."""

    size: int
    in_node: int

    @classmethod
    def of(cls, ranks: Sequence[int], hardware: Hardware) -> Team:
        """Count the ranks of a team, and those in the node of its first."""
        node = ranks[0] // hardware.node
        return cls(len(ranks), sum(rank // hardware.node == node for rank in ranks[: hardware.node]))


def all_to_all(hardware: Hardware, team: Team, *, busiest: float, peers: int) -> float:
    """Predict an all-to-all.

    Args:
        hardware: On what.
        team: Among whom.
        busiest: Bytes sent or received, whichever is more, by the rank for which that is most.
        peers: How many others that rank exchanges anything with.

    Returns:
        Seconds. Each GPU has its own network card, and uses it for what leaves the node.
    """
    if team.size == 1:
        return 0.0
    near = (team.in_node - 1) / (team.size - 1)
    wire = max(busiest * near / hardware.inside.useful, busiest * (1 - near) / hardware.across.useful)
    return _LAUNCH + _HOP * math.log2(team.size) + (_MESSAGE * peers if busiest else 0.0) + wire


def ring(hardware: Hardware, team: Team, *, total: float, calls: int) -> float:
    """Predict all-gathers or reduce-scatters.

    Args:
        hardware: On what.
        team: Among whom.
        total: Bytes of the whole that is gathered or reduced.
        calls: In how many collectives.

    Returns:
        Seconds. Across nodes a ring uses the network cards of all its ranks in a node.
    """
    if team.size == 1:
        return 0.0
    rate = hardware.inside.useful
    if team.in_node < team.size:
        rate = min(rate, hardware.across.useful * team.in_node)
    return calls * (_LAUNCH + _HOP * math.log2(team.size)) + total * (team.size - 1) / team.size / rate


def host_seconds(*, calls: float, team: Team, pieces: int = 0, exchanges: int = 0) -> float:
    """Predict what Python takes to launch a bucket.

    Args:
        calls: Kernels.
        team: Among whom it is exchanged.
        pieces: How many pieces an owner takes in and gives out, one by one.
        exchanges: All-to-alls.

    Returns:
        Seconds.
    """
    return calls * _HOST_CALL + pieces * _HOST_PIECE + exchanges * (_HOST + _HOST_PEER * team.size)

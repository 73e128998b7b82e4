"""How a matrix gets to where it is orthogonalized. A route is data: it decides which transfers a bucket has."""

from __future__ import annotations

from enum import Enum


class Route(Enum):
    """Where the polar factor of a matrix is computed.

    LOCAL: the whole matrix is on this device already, and nothing travels.
    OWNED: its pieces travel to one member of the team, the owner, and pieces of the result travel back.
    SHARDED: it stays where it is; Gram matrices travel to the owner, and factors travel back.
    """

    LOCAL = "local"
    OWNED = "owner"
    SHARDED = "gram"

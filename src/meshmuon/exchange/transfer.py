"""Who sends which piece to whom: one table per bucket, read forward to gather and backward to scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshmuon.layout.records import Matrix, Piece
from meshmuon.plan.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Stop:
    """One piece of a matrix this rank owns: where it stands in the buffer, and in the stack of whole matrices."""

    offset: int
    piece: Piece
    index: int
    tall: bool

    def place(self, stack: Tensor, buffer: Tensor) -> None:
        """Copy the piece from the buffer into its matrix."""
        for whole, part in self._pairs(stack, buffer):
            whole.copy_(part)

    def take(self, stack: Tensor, buffer: Tensor) -> None:
        """Copy the piece out of its matrix into the buffer."""
        for whole, part in self._pairs(stack, buffer):
            part.copy_(whole)

    def _pairs(self, stack: Tensor, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        matrix = stack[self.index].mT if self.tall else stack[self.index]
        stored = buffer[self.offset : self.offset + self.piece.numel].view(self.piece.shape)
        pairs = []
        row = 0
        for top, bottom in self.piece.rows:
            col = 0
            for left, right in self.piece.cols:
                part = stored[row : row + bottom - top, col : col + right - left]
                pairs.append((matrix[top:bottom, left:right], part))
                col += right - left
            row += bottom - top
        return pairs


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a bucket's exchange, as one member of the team sees it.

    Attributes:
        spread: Numbers exchanged with each member on the side of the pieces: this rank's own.
        gathered: Numbers exchanged with each member on the side of the whole matrices it owns.
        offsets: For each matrix of the bucket, where this rank's own piece stands; None if it does not take this way.
        stops: What is exchanged on the side of the whole matrices, piece by piece.
    """

    spread: tuple[int, ...]
    gathered: tuple[int, ...]
    offsets: tuple[int | None, ...]
    stops: tuple[Stop, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """The table of one bucket: pieces to owners, and back. Between replicas only the way back exists."""

    out: Way
    back: Way
    owned: int


def transfer_of(bucket: Bucket, *, rank: int) -> Transfer:
    """Make the table of an owned bucket.

    Buffers are ordered by the other side's rank, then by the bucket's order of matrices: sender and receiver need no
    other agreement. An owner takes the pieces of its own replica, and gives pieces of the result to all of them.

    Args:
        bucket: The bucket.
        rank: This process's global rank.

    Returns:
        The table.
    """
    owned = bucket.owned_by(rank)
    out = _way(bucket, owned, rank, between_replicas=False)
    back = out if _copies(bucket) == 1 else _way(bucket, owned, rank, between_replicas=True)
    return Transfer(out, back, len(owned))


def _copies(bucket: Bucket) -> int:
    return max(len(matrix.share.copies) for matrix in bucket.matrices if matrix.share is not None)


def _way(bucket: Bucket, owned: Sequence[Matrix], rank: int, *, between_replicas: bool) -> Way:
    def takes_part(matrix: Matrix, one: int, other: int) -> bool:
        assert matrix.share is not None
        return between_replicas or one in matrix.share.copy_of(other)

    offsets: list[int | None] = [None] * len(bucket.matrices)
    spread = []
    filled = 0
    for member, owner in enumerate(bucket.team):
        start = filled
        for i, matrix in enumerate(bucket.matrices):
            if bucket.owners[i] == member and takes_part(matrix, owner, rank):
                offsets[i] = filled
                filled += matrix.piece(rank).numel
        spread.append(filled - start)
    stops: list[Stop] = []
    gathered = []
    filled = 0
    for source in bucket.team:
        start = filled
        for index, matrix in enumerate(owned):
            piece = matrix.piece(source)
            if piece.numel and takes_part(matrix, source, rank):
                stops.append(Stop(filled, piece, index, matrix.tall))
                filled += piece.numel
        gathered.append(filled - start)
    return Way(tuple(spread), tuple(gathered), tuple(offsets), tuple(stops))

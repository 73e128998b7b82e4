"""Who sends which piece to whom: one table per bucket, read forward to gather and backward to scatter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshmuon.layout.records import Matrix, Piece
from meshmuon.plan.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Arrival:
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
class Transfer:
    """The table of one bucket, as one member of its team sees it.

    Attributes:
        send_splits: Numbers sent to each member when gathering: its pieces of the matrices that member owns.
        receive_splits: Numbers received from each member when gathering.
        offsets: For each matrix of the bucket, where this rank's own piece stands in its send buffer.
        arrivals: What is received, piece by piece.
        owned: How many whole matrices that makes.
    """

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    offsets: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    owned: int


def transfer_of(bucket: Bucket, *, rank: int) -> Transfer:
    """Make the table of an owned bucket.

    Buffers are ordered by the other side's rank, then by the bucket's order of matrices: sender and receiver need no
    other agreement.

    Args:
        bucket: The bucket.
        rank: This process's global rank.

    Returns:
        The table.
    """
    member = bucket.team.index(rank)
    mine = [matrix.piece(rank).numel for matrix in bucket.matrices]
    offsets = [0] * len(mine)
    send_splits = []
    filled = 0
    for owner in range(len(bucket.team)):
        start = filled
        for i, size in enumerate(mine):
            if bucket.owners[i] == owner:
                offsets[i] = filled
                filled += size
        send_splits.append(filled - start)
    owned = [matrix for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True) if owner == member]
    arrivals, receive_splits = _arrivals(owned, bucket.team)
    return Transfer(tuple(send_splits), tuple(receive_splits), tuple(offsets), tuple(arrivals), len(owned))


def _arrivals(owned: list[Matrix], team: tuple[int, ...]) -> tuple[list[Arrival], list[int]]:
    arrivals: list[Arrival] = []
    splits = []
    filled = 0
    for source in team:
        start = filled
        for index, matrix in enumerate(owned):
            piece = matrix.piece(source)
            if piece.numel:
                arrivals.append(Arrival(filled, piece, index, matrix.tall))
                filled += piece.numel
        splits.append(filled - start)
    return arrivals, splits

"""Move matrices to where they are orthogonalized, and the results back. A local bucket does not move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshmuon.exchange.groups import Groups
from meshmuon.exchange.transfer import Transfer, transfer_of
from meshmuon.layout.records import Matrix, Place
from meshmuon.plan.bucket import Bucket
from meshmuon.plan.route import Route


@dataclass(frozen=True, slots=True)
class Pending:
    """Numbers on their way, or already here.

    Attributes:
        finish: Turns what arrived into what was asked for.
        work: The collective under way; None if nothing travels.
        sent: The buffer it reads from: held here, so that it is not freed before the collective has finished.
    """

    finish: Callable[[], Tensor]
    work: Any = None
    sent: Tensor | None = None

    @property
    def in_flight(self) -> bool:
        """Whether there is anything to wait for."""
        return self.work is not None

    def wait(self) -> Tensor:
        """Return what was asked for, once it is here."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Exchange:
    """Carries out the transfers of buckets."""

    def __init__(self, groups: Groups, *, rank: int) -> None:
        self._groups = groups
        self._rank = rank
        self._tables: dict[int, Transfer] = {}
        self._places: dict[int, tuple[Bucket, list[Place], int]] = {}

    def places(self, bucket: Bucket) -> list[Place]:
        """Give the place of each matrix of a bucket in the flat buffers that `gather` takes and `scatter` gives.

        Args:
            bucket: The bucket.

        Returns:
            One for each matrix.
        """
        if bucket.route is Route.OWNED:
            table = self.table(bucket)
            pairs = zip(table.out.offsets, table.back.offsets, strict=True)
            return [Place(out, back) for out, back in pairs if back is not None]
        return self._standing(bucket)[0]

    def _standing(self, bucket: Bucket) -> tuple[list[Place], int]:
        """Where matrices that do not travel stand, one behind the other, and how long that is."""
        known, places, size = self._places.get(bucket.number, (None, [], 0))
        if known is not bucket:  # but, say, a smaller one, because some matrices have no gradient in this step
            starts = list(itertools.accumulate((self._held(bucket, matrix) for matrix in bucket.matrices), initial=0))
            places, size = [Place(start, start) for start in starts[:-1]], starts[-1]
            self._places[bucket.number] = (bucket, places, size)
        return places, size

    def _held(self, bucket: Bucket, matrix: Matrix) -> int:
        """How many numbers of a matrix that does not travel lie here."""
        if bucket.route is Route.SHARDED:
            return matrix.piece(self._rank).numel
        return matrix.count * bucket.wide_shape[0] * bucket.wide_shape[1]

    def buffer_size(self, bucket: Bucket) -> int:
        """Give the size of the buffer that `gather` takes.

        Args:
            bucket: The bucket.

        Returns:
            Numbers.
        """
        if bucket.route is Route.OWNED:
            return sum(self.table(bucket).out.spread)
        return self._standing(bucket)[1]

    def gather(self, bucket: Bucket, inputs: Tensor) -> Pending:
        """Bring whole matrices together where they are orthogonalized.

        Args:
            bucket: Whose transfers to carry out.
            inputs: What this rank holds of them, flat.

        Returns:
            The stack of whole matrices (batch, m, n) to be computed here, once waited for.
        """
        if bucket.route is Route.LOCAL:
            return Pending(lambda: inputs.view(-1, *bucket.wide_shape))
        table = self.table(bucket)
        received = inputs.new_empty(sum(table.out.gathered))
        work = self._all_to_all(bucket, received, inputs, table.out.gathered, table.out.spread)

        def assembled() -> Tensor:
            stack = received.new_empty(table.owned, *bucket.wide_shape)
            for stop in table.out.stops:
                stop.place(stack, received)
            return stack

        return Pending(assembled, work, inputs)

    def scatter(self, bucket: Bucket, directions: Tensor) -> Pending:
        """Bring directions back to the ranks that hold the parameters: the same table, inverted.

        Args:
            bucket: Whose transfers to carry out.
            directions: The stack (batch, m, n) that was computed here.

        Returns:
            What this rank's parameters need, flat, once waited for.
        """
        if bucket.route is Route.LOCAL:
            return Pending(lambda: directions.reshape(-1))
        table = self.table(bucket)
        sent = directions.new_empty(sum(table.back.gathered))
        for stop in table.back.stops:
            stop.take(directions, sent)
        received = directions.new_empty(sum(table.back.spread))
        work = self._all_to_all(bucket, received, sent, table.back.spread, table.back.gathered)
        return Pending(lambda: received, work, sent)

    def _all_to_all(
        self,
        bucket: Bucket,
        received: Tensor,
        sent: Tensor,
        receive_splits: tuple[int, ...],
        send_splits: tuple[int, ...],
    ) -> Any:
        if not dist.is_initialized():  # a team of one process that needs no job
            received.copy_(sent)
            return None
        return dist.all_to_all_single(
            received, sent, list(receive_splits), list(send_splits), group=self._groups[bucket.team], async_op=True
        )

    def table(self, bucket: Bucket) -> Transfer:
        """Give the transfers of an owned bucket.

        Args:
            bucket: The bucket.

        Returns:
            Its table, made once.
        """
        if bucket.number not in self._tables:
            self._tables[bucket.number] = transfer_of(bucket, rank=self._rank)
        return self._tables[bucket.number]

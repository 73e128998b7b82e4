"""Plain records about parameters: data, never tensors. Routing writes them, the plan reads them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from meshmuon.config import Algorithm, Mode, RouteChoice
from meshmuon.kernels.configs import Architecture
from meshmuon.layout.block import Block
from meshmuon.layout.matrix_view import WHOLE, MatrixView
from meshmuon.layout.shard_layout import Interval, Intervals, ShardLayout, clip, length


@dataclass(frozen=True, slots=True)
class Routing:
    """Which algorithm a parameter takes, and why.

    Attributes:
        name: Its normalised name.
        algorithm: What it takes.
        reason: In words, for the user.
        view: How it is a stack of matrices.
        like_a_vector: Whether it is a norm or a bias, whatever its shape: not decayed unless that was asked for.
    """

    name: str
    algorithm: Algorithm
    reason: str
    view: MatrixView = WHOLE
    like_a_vector: bool = False


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter of the optimizer: where it stands in the groups, what it is, where it lies, how it was routed.

    Attributes:
        routing: Its algorithm, view and reason.
        group: Index of its group.
        position: Its place in the group.
        shape: Its logical (global) shape.
        dtype: Its dtype.
        device: Its device.
        local_shape: The shape of what this rank holds.
        layout: How it lies on a mesh; None for a plain tensor.
        route: "owner" makes even matrices that lie here whole take the way of shared ones; "gram" leaves shared ones
            where they are, and lets their Gram matrices travel.
        mode: "blockwise" takes what each rank holds of a matrix for a matrix of its own.
        architecture: Of a GPU that is elsewhere, for plans of jobs to come; None: look at the device.
    """

    routing: Routing
    group: int
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    local_shape: tuple[int, ...]
    layout: ShardLayout | None = None
    route: RouteChoice = "auto"
    mode: Mode = "exact"
    architecture: Architecture | None = None

    @property
    def name(self) -> str:
        """Its normalised name."""
        return self.routing.name

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands: its group, and its place there."""
        return (self.group, self.position)

    @property
    def is_vector(self) -> bool:
        """Whether it is not decayed unless that was asked for: it has fewer than 2 dims, or is a norm or a bias."""
        return len(self.shape) < 2 or self.routing.like_a_vector

    @property
    def numel(self) -> int:
        """How many numbers it holds, over all ranks."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of one matrix: a product of row and column intervals, in the order it stores them."""

    rows: Intervals
    cols: Intervals

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns it stores."""
        return (length(self.rows), length(self.cols))

    @property
    def numel(self) -> int:
        """How many numbers that is."""
        return math.prod(self.shape)


@dataclass(slots=True)  # not frozen: one is made for every tensor at every step, in a third of the time
class Place:
    """Where a matrix stands in the flat buffers of its bucket: of inputs (None if not there), and of directions."""

    input: int | None
    direction: int


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give what gradients travel in where the optimizer averages them.

    Args:
        dtype: That of the parameter.

    Returns:
        The same; fp32 for fp16, in which gradients without GradScaler's factor would vanish.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@functools.lru_cache(maxsize=1024)
def _together(copies: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(sorted(rank for copy in copies for rank in copy))


@dataclass(frozen=True, slots=True)
class Share:
    """A matrix that several ranks hold together.

    Attributes:
        rows: Its rows inside the parameter's rows.
        cols: Its columns inside the parameter's columns.
        copies: For each replica that takes part, the global ranks (ascending) that hold it together.
    """

    rows: Interval
    cols: Interval
    copies: tuple[tuple[int, ...], ...]

    @property
    def team(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return _together(self.copies)

    def copy_of(self, rank: int) -> tuple[int, ...]:
        """Give the replica that a rank belongs to."""
        return next(copy for copy in self.copies if rank in copy)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One thing to orthogonalize: a block of one parameter.

    Attributes:
        parameter: Whose block it is.
        block: Where the part of it that this rank holds lies in this rank's tensor.
        share: None if that part is the whole.
        logical_shape: What the lr rule sees, where that is not the matrix itself: of a block, the whole it is cut from.
    """

    parameter: ParameterRecord
    block: Block
    share: Share | None = None
    logical_shape: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.parameter.name

    @property
    def count(self) -> int:
        """How many matrices the block stacks; a shared one stands alone."""
        return self.block.count

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of what is orthogonalized."""
        if self.share is None:
            return self.block.shape
        return (self.share.rows[1] - self.share.rows[0], self.share.cols[1] - self.share.cols[0])

    @property
    def scaled_shape(self) -> tuple[int, int]:
        """(out, in) as the lr rule sees it."""
        return self.shape if self.logical_shape is None else self.logical_shape

    @property
    def tall(self) -> bool:
        """Whether it is orthogonalized transposed, so that every matrix of a bucket is wide."""
        return self.shape[0] > self.shape[1]

    @property
    def wide_shape(self) -> tuple[int, int]:
        """(short side, long side)."""
        return (min(self.shape), max(self.shape))

    def piece(self, rank: int) -> Piece:
        """Give what a member of the team holds of a shared matrix.

        Args:
            rank: Its global rank.

        Returns:
            Intervals counted from the matrix's own first row and column.
        """
        layout, share = self.parameter.layout, self.share
        assert layout is not None and share is not None
        rows, cols = self.parameter.routing.view.matrix_intervals(layout.region(rank), self.parameter.shape)
        return Piece(clip(rows, *share.rows), clip(cols, *share.cols))

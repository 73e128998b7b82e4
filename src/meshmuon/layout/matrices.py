"""From a parameter to the matrices it is made of, wherever its pieces lie."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from meshmuon.layout.block import Block
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.records import Matrix, ParameterRecord, Share
from meshmuon.layout.shard_layout import Interval, ShardLayout, clip, length, position


def matrices_of(parameter: ParameterRecord, *, rank: int, split_replicas: bool = False) -> tuple[Matrix, ...]:
    """Cut a Muon parameter into its matrices.

    Where whole matrices lie on this rank, equal ones are stacked in one record. Where ranks share them, there is one
    record for each, on every rank of the team, in the same order.

    Args:
        parameter: The record.
        rank: This process's global rank.
        split_replicas: Whether ranks that hold the same whole matrices share them as well.

    Returns:
        The matrices, without empty ones.

    Raises:
        ValueError: If the view does not fit the parameter.
    """
    view = parameter.routing.view
    if parameter.layout is not None and rank not in parameter.layout.ranks:
        return ()  # it lies on a mesh that this rank is not part of
    view.blocks(parameter.name, parameter.shape)  # the view must fit the logical shape, whatever lies here
    copy = copy_of(parameter, rank=rank)
    if parameter.mode == "blockwise" and len(copy) > 1:
        assert parameter.layout is not None
        shared = _shared_matrices(parameter, parameter.layout, (copy,), rank=rank)
        held = (Matrix(parameter, matrix.block, logical_shape=matrix.shape) for matrix in shared)
        return tuple(matrix for matrix in held if math.prod(matrix.block.shape))
    if len(copy) == 1 and parameter.route != "owner" and not split_replicas:
        blocks = view.blocks(parameter.name, parameter.local_shape)
        return tuple(Matrix(parameter, block) for block in blocks if block.count * math.prod(block.shape))
    if parameter.layout is None:
        alone = ShardLayout(parameter.shape, (1,), (rank,), ((),) * len(parameter.shape))
        parameter = replace(parameter, layout=alone)
    assert parameter.layout is not None
    return tuple(_shared_matrices(parameter, parameter.layout, (copy,), rank=rank))


def is_cut_along_the_long_side(matrix: Matrix) -> bool:
    """Tell whether every rank of a matrix's only copy holds whole short sides.

    Args:
        matrix: A shared matrix.

    Returns:
        True if the sharded route can take it.
    """
    assert matrix.share is not None
    short = 1 if matrix.tall else 0
    pieces = (matrix.piece(rank) for rank in matrix.share.team)
    return len(matrix.share.copies) == 1 and all(
        piece.numel == 0 or piece.shape[short] == min(matrix.shape) for piece in pieces
    )


def copies_of(parameter: ParameterRecord, *, rank: int) -> tuple[tuple[int, ...], ...]:
    """Give the replicas of this rank's matrices.

    Args:
        parameter: The record.
        rank: A global rank.

    Returns:
        For each, the global ranks that hold it together, this rank's own among them; in ascending order.
    """
    layout = parameter.layout
    if layout is None or rank not in layout.ranks:
        return ((rank,),)
    lead = parameter.routing.view.lead_dims(len(parameter.shape))
    axes = layout.axes_of(dim for dim in range(len(parameter.shape)) if dim not in lead)
    return _copies(layout.mesh_shape, layout.ranks, layout.coordinates(rank), axes, layout.replica_axes)


@functools.lru_cache(maxsize=1024)
def _copies(
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    place: tuple[int, ...],
    axes: tuple[int, ...],
    replica_axes: tuple[int, ...],
) -> tuple[tuple[int, ...], ...]:
    mesh = ShardLayout((), mesh_shape, ranks, ())
    rank = mesh.rank_at(place)
    return tuple(sorted(mesh.neighbours(peer, axes) for peer in mesh.neighbours(rank, replica_axes)))


def copy_of(parameter: ParameterRecord, *, rank: int) -> tuple[int, ...]:
    """Give the ranks that hold the rows and columns of this rank's matrices together.

    Axes that cut leading dims (experts) only decide which matrices a rank has a part in.

    Args:
        parameter: The record.
        rank: A global rank.

    Returns:
        Global ranks, ascending; the rank alone if it holds whole matrices.
    """
    layout = parameter.layout
    if layout is None or rank not in layout.ranks:
        return (rank,)
    lead = parameter.routing.view.lead_dims(len(parameter.shape))
    axes = layout.axes_of(dim for dim in range(len(parameter.shape)) if dim not in lead)
    return layout.neighbours(rank, axes)


def sent_to_an_owner(parameter: ParameterRecord, *, rank: int) -> ParameterRecord:
    """Give the record of a parameter whose matrices must travel whole, if they are cut.

    Args:
        parameter: The record.
        rank: A global rank.

    Returns:
        The same with the owner route, or the record itself.
    """
    return replace(parameter, route="owner") if len(copy_of(parameter, rank=rank)) > 1 else parameter


def _shared_matrices(
    parameter: ParameterRecord, layout: ShardLayout, copies: tuple[tuple[int, ...], ...], *, rank: int
) -> Iterator[Matrix]:
    view = parameter.routing.view
    region = layout.region(rank)
    held_rows, held_cols = view.matrix_intervals(region, parameter.shape)
    plain = replace(view, split_rows=None, split_cols=None, heads=None)
    leads = [range(length(region[dim])) for dim in view.lead_dims(len(parameter.shape))]
    for rows, cols in view.parts(parameter.name, parameter.shape):
        if rows[0] == rows[1] or cols[0] == cols[1]:
            continue
        share = Share(rows, cols, copies)
        local_rows, local_cols = _stored(held_rows, rows), _stored(held_cols, cols)
        for index in itertools.product(*leads):
            block = _local_block(plain, parameter, local_rows, local_cols, index)
            yield Matrix(parameter, block, share)


def _stored(held: tuple[Interval, ...], wanted: Interval) -> Interval:
    """Where a rank stores the part of an interval that it holds: contiguous, since storage is ascending."""
    start = position(held, wanted[0])
    return (start, start + length(clip(held, *wanted)))


def _local_block(
    view: MatrixView, parameter: ParameterRecord, rows: Interval, cols: Interval, index: tuple[int, ...]
) -> Block:
    stored, ndim = parameter.local_shape, len(parameter.shape)
    rest = tuple(stored[dim] for dim in view.col_dims(ndim))
    col_shape = rest if view.flatten else (cols[1] - cols[0],)
    everything = ((0, stored[view.row_dim(ndim)]), (0, math.prod(rest)))
    return Block(
        view=view,
        rows=rows,
        cols=cols,
        lead_shape=(),
        row_shape=(rows[1] - rows[0],),
        col_shape=col_shape,
        lead_index=index,
        whole=not index and not view.transposed and (rows, cols) == everything,
    )

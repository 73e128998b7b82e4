"""MatrixView: how one parameter is a stack of 2-D matrices, and the way back.

Each block a view cuts out is orthogonalized and scaled as if it were a parameter of its own. A block never copies: it
is a strided view of the parameter, so momentum and update work on it in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from meshmuon.checks import check_bool, check_integer, check_sizes, check_word
from meshmuon.errors import message
from meshmuon.layout.block import Block
from meshmuon.layout.shard_layout import Interval, Intervals, flattened

Side = Literal["rows", "cols"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """How one parameter is a stack of matrices. The default: a 2-D parameter is one matrix (out, in).

    Attributes:
        experts: All dims but the last two count matrices: (E, out, in) is E matrices.
        split_rows: Sizes of row blocks that are matrices of their own, e.g. (q, k, v) of a fused projection.
        split_cols: The same for columns.
        heads: Number of equal blocks, one per attention head.
        heads_on: Whether heads are blocks of "rows" (q, k, v projections) or "cols" (the output projection).
        flatten: (out, in, k, ...) is one matrix (out, in·k...): a convolution.
        transposed: The parameter is stored (in, out, ...): transposed convolutions, some GPT-2 layers.
    """

    experts: bool = False
    split_rows: tuple[int, ...] | None = None
    split_cols: tuple[int, ...] | None = None
    heads: int | None = None
    heads_on: Side = "rows"
    flatten: bool = False
    transposed: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "flatten", "transposed"):
            check_bool(f"view {name}", getattr(self, name))
        for name in ("split_rows", "split_cols"):
            sizes = getattr(self, name)
            if sizes is not None:
                object.__setattr__(self, name, check_sizes(f"view {name}", sizes))
        check_word("view heads_on", self.heads_on, get_args(Side))
        if self.heads is not None:
            check_integer("view heads", self.heads, low=1)
        split = self.split_rows if self.heads_on == "rows" else self.split_cols
        if self.heads is not None and split is not None:
            do = f"Give one of heads and split_{self.heads_on}: both cut the same side"
            raise ValueError(message("view", found=str(self.as_dict()), do=do))
        if self.flatten and (self.experts or self.split_cols is not None or self._heads_on("cols") > 1):
            do = "A flattened parameter can be cut along its rows only"
            raise ValueError(message("view", found=str(self.as_dict()), do=do))

    @classmethod
    def of(cls, value: MatrixView | Mapping[str, Any] | None) -> MatrixView:
        """Read a view from what a group dict may hold.

        Args:
            value: A view, its plain form, or None for the default.

        Returns:
            The view.

        Raises:
            TypeError: If it is something else, or has unknown entries.
            ValueError: If its entries contradict each other.
        """
        if isinstance(value, MatrixView):
            return value
        if value is None:
            return WHOLE
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            raise TypeError(message("view", found=f"{value!r}", do=f"Use View(...) with {', '.join(known)}"))
        return cls(**value)

    def as_dict(self) -> dict[str, Any]:
        """Give the plain form (ints, strings, tuples), which pickles and loads with weights_only=True."""
        pairs = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return {name: value for name, value, default in pairs if value != default}

    def describe(self) -> str:
        """Say the view in a few words."""
        words = [
            "one matrix per leading index" if self.experts else "",
            f"rows split {self.split_rows}" if self.split_rows else "",
            f"cols split {self.split_cols}" if self.split_cols else "",
            f"{self.heads} heads on {self.heads_on}" if self.heads else "",
            "(out, rest)" if self.flatten else "",
            "stored (in, out)" if self.transposed else "",
        ]
        return ", ".join(word for word in words if word)

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """Cut a parameter's shape into blocks.

        Args:
            name: The parameter, for messages.
            shape: Its logical (global) shape.

        Returns:
            One block per pair of row and column parts.

        Raises:
            ValueError: If the view does not fit the shape.
        """
        lead, out, rest = self._dims(name, shape)
        if self.heads is not None:
            lead += (self.heads,)
        everything = ((0, out), (0, math.prod(rest)))
        as_stored = self.heads is None and not self.transposed
        return tuple(
            Block(
                view=self,
                rows=rows,
                cols=cols,
                lead_shape=lead,
                row_shape=((rows[1] - rows[0]) // self._heads_on("rows"),),
                col_shape=rest if self.flatten else ((cols[1] - cols[0]) // self._heads_on("cols"),),
                whole=as_stored and (rows, cols) == everything,
            )
            for rows in _intervals(name, "split_rows", self.split_rows, out)
            for cols in _intervals(name, "split_cols", self.split_cols, math.prod(rest))
        )

    def parts(self, name: str, shape: tuple[int, ...]) -> list[tuple[Interval, Interval]]:
        """Give the rows and columns of each matrix of one leading index, in the parameter's own rows and columns.

        Args:
            name: The parameter, for messages.
            shape: Its logical shape.

        Returns:
            (rows, cols) of each, heads counted one by one.
        """
        _, out, rest = self._dims(name, shape)
        heads_rows, heads_cols = self._heads_on("rows"), self._heads_on("cols")
        rows = _intervals(name, "split_rows", self.split_rows or _equal(out, heads_rows), out)
        cols = _intervals(name, "split_cols", self.split_cols or _equal(math.prod(rest), heads_cols), math.prod(rest))
        return [(r, c) for r in rows for c in cols]

    def lead_dims(self, ndim: int) -> range:
        """Give the dims of a parameter that count matrices."""
        return range(ndim - 2 if self.experts else 0)

    def row_dim(self, ndim: int) -> int:
        """Give the dim of a parameter that makes the rows."""
        return len(self.lead_dims(ndim)) + int(self.transposed)

    def col_dims(self, ndim: int) -> tuple[int, ...]:
        """Give the dims of a parameter that make the columns."""
        return tuple(dim for dim in range(len(self.lead_dims(ndim)), ndim) if dim != self.row_dim(ndim))

    def matrix_intervals(self, region: Sequence[Intervals], shape: tuple[int, ...]) -> tuple[Intervals, Intervals]:
        """Give the rows and columns that a region of the parameter covers.

        Args:
            region: For each dim, the intervals held.
            shape: The parameter's logical shape.

        Returns:
            Intervals of rows and of (flattened) columns.
        """
        cols = self.col_dims(len(shape))
        return region[self.row_dim(len(shape))], flattened([region[d] for d in cols], [shape[d] for d in cols])

    def _heads_on(self, side: Side) -> int:
        return self.heads if self.heads is not None and self.heads_on == side else 1

    def _dims(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Leading dims, rows, and the dims that make up the columns."""
        least = 3 if self.experts else 2
        if len(shape) < least or (len(shape) > 2 and not (self.experts or self.flatten)):
            found = f"{len(shape)}-D of shape {shape}" + (f" with view {self.as_dict()}" if self.as_dict() else "")
            if len(shape) < least:
                do = f'That needs at least {least} dims: correct the view, or send it to "adamw"'
            else:
                do = 'A matrix has 2: give its group view={"experts": True} or {"flatten": True}, or algorithm="adamw"'
            raise ValueError(message(f"parameter {name!r}", found=found, do=do))
        lead = shape[:-2] if self.experts else ()
        out, *rest = shape[len(lead) :]
        if self.transposed:
            out, rest[0] = rest[0], out
        if self.heads is not None:
            side = out if self.heads_on == "rows" else math.prod(rest)
            if side % self.heads:
                found = f"{side} {self.heads_on} do not divide into {self.heads} heads"
                raise ValueError(message(f"parameter {name!r}", found=found, do="Correct heads= or heads_on="))
        return lead, out, tuple(rest)


def _equal(total: int, parts: int) -> tuple[int, ...] | None:
    return None if parts == 1 else (total // parts,) * parts


def _intervals(name: str, what: str, sizes: tuple[int, ...] | None, total: int) -> list[tuple[int, int]]:
    if sizes is None:
        return [(0, total)]
    if sum(sizes) != total:
        found = f"{what}={sizes} sums to {sum(sizes)}, the parameter has {total}"
        raise ValueError(message(f"parameter {name!r}", found=found, do="Correct the sizes"))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


# A 2-D parameter that is one matrix (out, in).
WHOLE = MatrixView()

"""The Triton kernels of `symmetric_matmul`: one program per tile of the lower triangle.

[Note: one writer per element] Tiles are square, so the tile (i, j) below the diagonal and its mirror image are written
by one program and nobody else. A tile on the diagonal takes its strict upper part from its own lower part: for A ≠ B
the computed halves differ by rounding, and D = Dᵀ has to hold bit for bit. Nothing depends on the order in which
programs run.

The idea of computing one triangle and mirroring it is old (BLAS syrk); in Triton it was first seen in
https://github.com/nil0x9/flash-muon. The grouped triangular order below is ours.
"""

# Triton reads annotations as code, and knows none but constexpr.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _triangle_row(index):
    """The row of a linear index into a lower triangle. The root is approximate: both neighbours are corrected."""
    row = ((tl.sqrt((8 * index + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)


@triton.jit
def locate_tile(index, tile_rows, GROUP: tl.constexpr):
    """Give (row, column) of the index-th tile: bands of GROUP tile rows, each walked column by column.

    Programs that run at the same time then share a few rows and a few columns of operands, which stay in L2.
    """
    band = _triangle_row(index) // GROUP
    top = band * GROUP
    height = tl.minimum(GROUP, tile_rows - top)
    inside = index - top * (top + 1) // 2
    left = height * top  # tiles of the band left of its own small triangle
    corner = tl.maximum(inside - left, 0)
    corner_row = _triangle_row(corner)
    in_corner = inside >= left
    row = tl.where(in_corner, top + corner_row, top + inside % height)
    col = tl.where(in_corner, top + corner - corner_row * (corner_row + 1) // 2, inside // height)
    return row, col


@triton.jit
def _finished(total, alpha, on_diagonal, gamma, BLOCK: tl.constexpr):
    """Scale an accumulated tile, and add to the diagonal of the matrix."""
    inner = tl.arange(0, BLOCK)
    eye = (inner[:, None] == inner[None, :]) & on_diagonal
    return alpha * total + tl.where(eye, gamma, 0.0)


@triton.jit
def _mirrored(tile, BLOCK: tl.constexpr):
    """Replace the strict upper part of a diagonal tile by the mirror image of the lower one."""
    inner = tl.arange(0, BLOCK)
    return tl.where(inner[:, None] >= inner[None, :], tile, tl.trans(tile))


@triton.jit
def _taken_by_rounding(result, tile, REST_SCALE: tl.constexpr):
    """What rounding took from a tile, scaled up so that it is no subnormal number."""
    return ((result - tile.to(tl.float32)) * REST_SCALE).to(tile.dtype)


@triton.jit
def _store_with_mirror(d, tile, matrix, row, col, BLOCK: tl.constexpr):
    """Write a tile and its mirror image through a descriptor."""
    if row == col:
        d.store([matrix, row, col], _mirrored(tile, BLOCK).reshape(1, BLOCK, BLOCK))
    else:
        d.store([matrix, row, col], tile.reshape(1, BLOCK, BLOCK))
        d.store([matrix, col, row], tl.trans(tile).reshape(1, BLOCK, BLOCK))


@triton.jit(do_not_specialize=["m", "k", "tiles"])  # one compilation for all sizes
def tensor_memory_kernel(
    a,
    b,
    c,
    d,
    rest,
    m,
    k,
    tiles,
    alpha,
    beta,
    gamma,
    SAME: tl.constexpr,
    ADD: tl.constexpr,
    REST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """D = alpha·A·Bᵀ + beta·C + gamma·I through tensor descriptors (TMA), which read zeros past the edges."""
    if EARLY:
        gdc_launch_dependents()
    matrix = tl.program_id(0) // tiles
    row, col = locate_tile(tl.program_id(0) % tiles, tl.cdiv(m, BLOCK), GROUP)
    on_diagonal = row == col
    row, col = row * BLOCK, col * BLOCK
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if EARLY:
        gdc_wait()  # until here nothing was read that the kernel before may write
    for start in range(0, k, BLOCK_K):
        left = a.load([matrix, row, start]).reshape(BLOCK, BLOCK_K)
        if SAME:
            right = a.load([matrix, col, start]).reshape(BLOCK, BLOCK_K)
        else:
            right = b.load([matrix, col, start]).reshape(BLOCK, BLOCK_K)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    result = _finished(total, alpha, on_diagonal, gamma, BLOCK)
    if ADD:
        result += beta * c.load([matrix, row, col]).reshape(BLOCK, BLOCK).to(tl.float32)
    tile = result.to(d.dtype)
    _store_with_mirror(d, tile, matrix, row, col, BLOCK)
    if REST_SCALE is not None:
        _store_with_mirror(rest, _taken_by_rounding(result, tile, REST_SCALE), matrix, row, col, BLOCK)


@triton.jit
def _pointers(base, matrix, row, col, strides, ROWS: tl.constexpr, COLS: tl.constexpr, LONG: tl.constexpr):
    """Pointers to a tile. Its first element lies at a 64-bit offset: a stack may hold more than 2³¹ elements.

    Inside a tile 32 bits are enough unless rows lie very far apart (LONG); they take half the registers.
    """
    first = base + matrix.to(tl.int64) * strides[0] + row.to(tl.int64) * strides[1] + col.to(tl.int64) * strides[2]
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    if LONG:
        rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return first + (rows[:, None] * strides[1] + cols[None, :] * strides[2])


@triton.jit
def _write_with_mirror(d, tile, matrix, row, col, m, strides, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """Write a tile and its mirror image through pointers."""
    inner = tl.arange(0, BLOCK)
    inside = (row + inner[:, None] < m) & (col + inner[None, :] < m)
    here = _pointers(d, matrix, row, col, strides, BLOCK, BLOCK, LONG)
    if row == col:
        tl.store(here, _mirrored(tile, BLOCK), mask=inside)
    else:
        tl.store(here, tile, mask=inside)
        mirror = _pointers(d, matrix, col, row, strides, BLOCK, BLOCK, LONG)
        tl.store(mirror, tl.trans(tile), mask=tl.trans(inside))


@triton.jit(do_not_specialize=["tiles"])
def pointer_kernel(
    a,
    b,
    c,
    d,
    rest,
    a_strides,
    b_strides,
    c_strides,
    d_strides,
    rest_strides,
    m,
    k,
    tiles,
    alpha,
    beta,
    gamma,
    LONG: tl.constexpr,
    ADD: tl.constexpr,
    REST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The same through plain pointers: any strides, any alignment, any GPU."""
    matrix = tl.program_id(0) // tiles
    row, col = locate_tile(tl.program_id(0) % tiles, tl.cdiv(m, BLOCK), GROUP)
    on_diagonal = row == col
    row, col = row * BLOCK, col * BLOCK
    rows, cols, inner = row + tl.arange(0, BLOCK), col + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    left_tile = _pointers(a, matrix, row, row * 0, a_strides, BLOCK, BLOCK_K, LONG)
    right_tile = _pointers(b, matrix, col, col * 0, b_strides, BLOCK, BLOCK_K, LONG)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        valid = inner[None, :] < k - start
        left = tl.load(left_tile, mask=(rows[:, None] < m) & valid, other=0.0)
        right = tl.load(right_tile, mask=(cols[:, None] < m) & valid, other=0.0)
        total = tl.dot(left, right.T, total, input_precision="ieee")
        left_tile += BLOCK_K * a_strides[2]
        right_tile += BLOCK_K * b_strides[2]
    result = _finished(total, alpha, on_diagonal, gamma, BLOCK)
    if ADD:
        inside = (rows[:, None] < m) & (cols[None, :] < m)
        added = tl.load(_pointers(c, matrix, row, col, c_strides, BLOCK, BLOCK, LONG), mask=inside, other=0.0)
        result += beta * added.to(tl.float32)
    tile = result.to(d.dtype.element_ty)
    _write_with_mirror(d, tile, matrix, row, col, m, d_strides, BLOCK, LONG)
    if REST_SCALE is not None:
        taken = _taken_by_rounding(result, tile, REST_SCALE)
        _write_with_mirror(rest, taken, matrix, row, col, m, rest_strides, BLOCK, LONG)

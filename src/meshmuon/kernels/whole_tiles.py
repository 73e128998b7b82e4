"""The Triton kernel of `whole_matmul`: one program per tile of the result."""

# Triton reads annotations as code, and knows none but constexpr.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def _tile(base, matrix, rows, cols, row_count, col_count):
    """Pointers to a tile, at 64-bit offsets. That rows are a multiple of 16 numbers apart is known."""
    return base + (matrix.to(tl.int64) * row_count + rows[:, None]) * col_count + cols[None, :]


@triton.jit(do_not_specialize=["m_16", "n_16", "k_16", "tiles"])  # one compilation for all sizes
def whole_kernel(a, b, c, d, m_16, n_16, k_16, tiles, alpha, beta, gamma, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """D = alpha·A·B + beta·C + gamma·I in fp32. Every element is summed over k in the same order in every stack."""
    m, n, k = m_16 * 16, n_16 * 16, k_16 * 16
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    down = tl.cdiv(m, BLOCK)
    rows = tile % down * BLOCK + tl.arange(0, BLOCK)
    cols = tile // down * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left_inside = (rows[:, None] < m) & (inner[None, :] < k)
        right_inside = (inner[:, None] < k) & (cols[None, :] < n)
        left = tl.load(_tile(a, matrix, rows, inner, m, k), mask=left_inside, other=0.0)
        right = tl.load(_tile(b, matrix, inner, cols, k, n), mask=right_inside, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    result = alpha * total + tl.where(rows[:, None] == cols[None, :], gamma, 0.0)
    if c is not None:
        result += beta * tl.load(_tile(c, matrix, rows, cols, m, n), mask=inside, other=0.0)
    tl.store(_tile(d, matrix, rows, cols, m, n), result, mask=inside)

"""The Triton kernels of `elementwise` and `peaks`. Programs work on square tiles of a matrix. See [Note: tables].

[Note: no contraction] These kernels are compiled with `enable_fp_fusion=False`: every operation rounds by itself, as
torch's separate kernels do. Where torch's own kernel contracts (lerp), `tl.fma` says so.

[Note: sums in any order] A norm must not depend on how a compiler lays a tile out over threads, nor on whether it was
summed on the way in or from a gathered stack. Adding and subtracting 2^(s+12), with 2^s above the largest square of the
tile, rounds every square to one grid, coarse enough that the sum of 4096 of them is exact in fp64: the order
no longer matters. The grid is 2^-40 of the largest square. Tiles are then added by one program, in a fixed order.

Numbers of tiles, and sizes where they cost nothing, are not specialized on: one compilation serves (nearly) all shapes.
"""

# Triton reads annotations as code, and knows none but constexpr.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

_FIELDS = tl.constexpr(18)


@triton.jit
def _lerp(start, end, weight):
    """torch.lerp, with the two contractions its CUDA kernel is compiled to."""
    difference = end - start
    near = tl.fma(weight, difference, start)
    far = tl.fma(-difference, 1.0 - weight, end)
    return tl.where(tl.abs(weight) < 0.5, near, far)


@triton.jit
def sum_of_squares(x):
    """Sum the squares of a tile in fp64, exactly in any order. See [Note: sums in any order]."""
    peak = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    above = (peak.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022  # the peak is below 2^above
    above = tl.maximum(above, -150)  # a tile of zeros
    grid = ((2 * above + 12 + 1023) << 52).to(tl.float64, bitcast=True)
    wide = x.to(tl.float64)
    rounded = (wide * wide + grid) - grid
    return tl.sum(tl.sum(rounded, axis=1), axis=0)


@triton.jit
def _tile_indices(number, across, turned, TILE: tl.constexpr):
    """Rows and columns of a tile: in the workspace, and of the matrix as it is stored."""
    inner = tl.arange(0, TILE)
    row, col = number // across, number % across
    stored_row, stored_col = tl.where(turned, col, row), tl.where(turned, row, col)
    return row * TILE + inner, col * TILE + inner, stored_row * TILE + inner, stored_col * TILE + inner


@triton.jit
def _place(entry, field: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address and the strides of one of an entry's three tensors, with what is known about their alignment."""
    base = tl.load(entry + field).to(tl.pointer_type(DTYPE))
    row_stride = tl.load(entry + 3 + 2 * field)
    col_stride = tl.load(entry + 4 + 2 * field)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        row_stride = tl.multiple_of(row_stride, 8)
    return base, row_stride, col_stride


@triton.jit
def _elements(place, rows, cols, ALIGNED: tl.constexpr):
    base, row_stride, col_stride = place
    if ALIGNED:
        return base + rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
    return base + rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride


@triton.jit
def _sizes(entry, ALIGNED: tl.constexpr):
    """Rows and columns as stored, rows and columns in the workspace."""
    rows = tl.load(entry + 9).to(tl.int32)
    cols = tl.load(entry + 10).to(tl.int32)
    padded_rows = tl.load(entry + 13).to(tl.int32)
    padded_cols = tl.load(entry + 14).to(tl.int32)
    if ALIGNED:
        cols = tl.multiple_of(cols, 8)
        padded_cols = tl.multiple_of(padded_cols, 8)
    return rows, cols, padded_rows, padded_cols


@triton.jit
def _workspace(base, entry, field: tl.constexpr, padded_cols, rows, cols,
               ALIGNED: tl.constexpr):  # fmt: skip
    offset = tl.load(entry + field)
    if ALIGNED:
        offset = tl.multiple_of(offset, 8)
    return base + offset + rows.to(tl.int64)[:, None] * padded_cols + cols[None, :]


@triton.jit
def _turned(tile, turned):
    """Turn a square tile between how it is stored and how it stands in the workspace."""
    if turned:
        result = tl.trans(tile)
    else:
        result = tile
    return result


@triton.jit(do_not_specialize=["tiles"])
def momentum_kernel(
    table,
    inputs,
    partials,
    numbers,
    unscale,
    proceed,
    tiles,
    GRAD: tl.constexpr,
    BUFFER: tl.constexpr,
    PARAM: tl.constexpr,
    NESTEROV: tl.constexpr,
    L2: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Advance momentum, and write what will be orthogonalized with the sum of its squares."""
    entry = table + (tl.program_id(0) // tiles).to(tl.int64) * _FIELDS
    number = tl.program_id(0) % tiles
    rows, cols, padded_rows, padded_cols = _sizes(entry, ALIGNED)
    turned = tl.load(entry + 15) != 0
    here_rows, here_cols, stored_rows, stored_cols = _tile_indices(number, tl.cdiv(padded_cols, TILE), turned, TILE)
    rows = tl.where(tl.load(entry) != 0, rows, 0)  # no gradient: nothing is read, zeros are written
    inside = (stored_rows[:, None] < rows) & (stored_cols[None, :] < cols)
    grad = tl.load(
        _elements(_place(entry, 0, GRAD, ALIGNED), stored_rows, stored_cols, ALIGNED), mask=inside, other=0.0
    )
    buffers = _elements(_place(entry, 1, BUFFER, ALIGNED), stored_rows, stored_cols, ALIGNED)
    buffer = tl.load(buffers, mask=inside, other=0.0).to(tl.float32)
    grad = grad.to(tl.float32)
    if unscale is not None:
        grad = grad * tl.load(unscale).to(tl.float32)
    if L2:
        params = _elements(_place(entry, 2, PARAM, ALIGNED), stored_rows, stored_cols, ALIGNED)
        grad = grad + tl.load(params, mask=inside, other=0.0).to(tl.float32) * tl.load(numbers + 2)
    if proceed is not None:
        grad = tl.where(tl.load(proceed) != 0, grad, buffer)  # lerp(buf, buf, w) is buf, exactly
    average = _lerp(buffer, grad, tl.load(numbers)).to(BUFFER)
    tl.store(buffers, average, mask=inside)
    average = average.to(tl.float32)
    if NESTEROV:
        average = _lerp(grad, average, tl.load(numbers + 1))  # from the stored buffer: a resumed run has the same bits
    wanted = average.to(inputs.dtype.element_ty)
    room = tl.where(tl.load(entry + 11) >= 0, padded_rows, 0)
    written = (here_rows[:, None] < room) & (here_cols[None, :] < padded_cols)
    there = _workspace(inputs, entry, 11, padded_cols, here_rows, here_cols, ALIGNED)
    tl.store(there, _turned(wanted, turned), mask=written)
    if partials is not None:
        within = number < tl.cdiv(padded_rows, TILE) * tl.cdiv(padded_cols, TILE)
        tl.store(partials + tl.load(entry + 17) + number, sum_of_squares(wanted.to(tl.float32)), mask=within)


@triton.jit(do_not_specialize=["tiles"])
def apply_kernel(
    table,
    directions,
    lr,
    weight_decay,
    proceed,
    tiles,
    PARAM: tl.constexpr,
    MODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decay the parameter and step along the direction, in fp32, rounded once."""
    entry = table + (tl.program_id(0) // tiles).to(tl.int64) * _FIELDS
    number = tl.program_id(0) % tiles
    rows, cols, padded_rows, padded_cols = _sizes(entry, ALIGNED)
    turned = tl.load(entry + 15) != 0
    here_rows, here_cols, stored_rows, stored_cols = _tile_indices(number, tl.cdiv(padded_cols, TILE), turned, TILE)
    rows = tl.where(tl.load(entry) != 0, rows, 0)
    if proceed is not None:
        rows = tl.where(tl.load(proceed) != 0, rows, 0)
    inside = (stored_rows[:, None] < rows) & (stored_cols[None, :] < cols)
    room = tl.where(rows > 0, padded_rows, 0)
    read = (here_rows[:, None] < room) & (here_cols[None, :] < padded_cols)
    params = _elements(_place(entry, 2, PARAM, ALIGNED), stored_rows, stored_cols, ALIGNED)
    param = tl.load(params, mask=inside, other=0.0).to(tl.float32)
    there = _workspace(directions, entry, 12, padded_cols, here_rows, here_cols, ALIGNED)
    direction = tl.load(there, mask=read, other=0.0)
    direction = _turned(direction, turned).to(tl.float32)
    rate = tl.load(lr).to(tl.float32)
    factor = 1.0 - rate * tl.load(weight_decay).to(tl.float32)
    if MODE == "decoupled":
        param = param * factor
    if MODE == "cautious":
        param = tl.where(direction * param > 0, param * factor, param)
    scale = tl.load(entry + 16).to(tl.int32).to(tl.float32, bitcast=True)
    param = param - direction * (rate * scale)
    tl.store(params, param.to(PARAM), mask=inside)


@triton.jit(do_not_specialize=["m", "n", "tiles", "across"])
def measure_kernel(x, partials, strides, m, n, tiles, across, TILE: tl.constexpr):
    """Sum the squares of every tile of a stack: the numbers `momentum_kernel` writes for matrices that lie here."""
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    number = tl.program_id(0) % tiles
    inner = tl.arange(0, TILE)
    rows, cols = (number // across) * TILE + inner, (number % across) * TILE + inner
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    start = x + matrix * strides[0]
    elements = start + rows.to(tl.int64)[:, None] * strides[1] + cols.to(tl.int64)[None, :] * strides[2]
    total = sum_of_squares(tl.load(elements, mask=inside, other=0.0).to(tl.float32))
    tl.store(partials + tl.program_id(0), total)


@triton.jit(do_not_specialize=["tiles"])
def norm_kernel(partials, norms, tiles, CHUNK: tl.constexpr):
    """Add the tiles of one matrix; write 2^-e and 2^e / norm: safe in fp32 for any fp32 matrix. Zero has norm 1."""
    matrix = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), dtype=tl.float64)
    for start in range(0, tiles, CHUNK):
        total += tl.load(partials + matrix * tiles + start + inner, mask=inner < tiles - start, other=0.0)
    norm = tl.sqrt(tl.sum(total, axis=0))
    exponent = (norm.to(tl.int64, bitcast=True) >> 52) - 1022  # the norm is below 2^exponent
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    power = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    tl.store(norms + 2 * matrix, tl.where(norm > 0, power, 1.0).to(tl.float32))
    tl.store(norms + 2 * matrix + 1, tl.where(norm > 0, 1.0 / (norm * power), 1.0).to(tl.float32))


@triton.jit(do_not_specialize=["tiles", "across"])
def normalise_kernel(
    x,
    out,
    norms,
    strides,
    m,
    n,
    padded_m,
    padded_n,
    tiles,
    across,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Scale every matrix by what `norm_kernel` found, round to the dtype of the products; zeros fill the padding."""
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    number = tl.program_id(0) % tiles
    rows = ((number // across) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    cols = ((number % across) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    inside = (rows[:, None] < m) & (cols[None, :] < n)
    written = (rows[:, None] < padded_m) & (cols[None, :] < padded_n)
    elements = x + matrix * strides[0] + rows[:, None] * strides[1] + cols[None, :] * strides[2]
    value = tl.load(elements, mask=inside, other=0.0).to(tl.float32)
    result = value * tl.load(norms + 2 * matrix) * tl.load(norms + 2 * matrix + 1)
    there = out + matrix * padded_m * padded_n + rows[:, None] * padded_n + cols[None, :]
    tl.store(there, result.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["count"])
def peak_kernel(
    owners, spans, addresses, bits, count, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find the largest magnitude in a part of a tensor. Without their sign, numbers are in the order of their bits.

    So the largest can be found with whole numbers, in any order, by any number of programs; NaN is above infinity.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    base = tl.load(addresses + owner).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    size = tl.load(spans + count + owner)
    start = (program - tl.load(spans + owner)) * BLOCK * BLOCKS
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(BLOCKS):
        there = start + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(base + there, mask=there < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(bits + owner, tl.max(largest, axis=0))

"""Encoding: rotate, quantise, scale, pack, and write to rows of bytes.

In: vectors [tokens, heads, dim] of any strides, float32/16/bfloat16; change: (key_scale, offset), what they are
multiplied by and what is subtracted then, [heads, dim] float32 each or none.
Out: rows of packed codes with one scale each (Codec), or raw vectors at 16 bits.
Constexprs: WRITER (tables.Writer), SIDE (tables.Encoder), HEADS, ROWS vectors at a time.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ....format import fit as fitting
from ..common.codes import (
    cast,
    coordinates,
    energy_of,
    load_cells,
    pack_words,
    quantise,
    quantise_groups,
    store_words,
    to_levels,
)

LONGEST = tl.constexpr(fitting.LONGEST)


@triton.jit
def load_matrix(p_matrix, c, SIDE: tl.constexpr):
    """Rows c … of the rotation matrix, SIDE.chunk of them."""
    o_chunk = tl.arange(0, SIDE.chunk)
    o_column = tl.arange(0, SIDE.columns)
    return tl.load(p_matrix + (c + o_chunk)[:, None] * SIDE.columns + o_column[None, :]).to(SIDE.operand)


@triton.jit
def load_vectors(p_row, stride, c, m_row, SIDE: tl.constexpr):
    """Coordinates c … of vectors at p_row [rows], SIDE.chunk of them."""
    o_chunk = tl.arange(0, SIDE.chunk)
    return tl.load(p_row[:, None] + (c + o_chunk)[None, :] * stride, mask=m_row[:, None], other=0)


@triton.jit
def changed(x, change, o_head, o, m):
    """Coordinates o of x [rows, …] as they are stored. o_head [rows]: where the head of a row begins in `change`."""
    if change[0] is not None:
        x = x.to(tl.float32) * tl.load(change[0] + (o_head[:, None] + o[None, :]), mask=m, other=0)
    if change[1] is not None:
        x = x.to(tl.float32) - tl.load(change[1] + (o_head[:, None] + o[None, :]), mask=m, other=0)
    return x


@triton.jit
def add_product(y, x, b, SIDE: tl.constexpr):
    """y + x b, whatever operands it takes."""
    if SIDE.parts == 3:
        high = x.to(SIDE.operand)
        rest = x - high.to(tl.float32)
        middle = rest.to(SIDE.operand)
        low = (rest - middle.to(tl.float32)).to(SIDE.operand)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, y)))
    else:
        return tl.dot(x.to(SIDE.operand), b, y, input_precision="tf32x3")


@triton.jit
def rotate(p_row, stride, change, o_head, m_row, p_matrix, b_matrix, SIDE: tl.constexpr, b_rows=None):
    """R of changed vectors at p_row [rows], over SIDE.post, as a plane-major tile [rows, columns] in float32.

    Where all coordinates are one chunk, b_matrix is load_matrix of them, and b_rows may be the vectors."""
    o_chunk = tl.arange(0, SIDE.chunk)
    COLUMNS: tl.constexpr = SIDE.columns
    y = tl.zeros([p_row.shape[0], COLUMNS], tl.float32)
    for c in range(0, SIDE.dim, SIDE.chunk):
        x = b_rows if b_rows is not None and SIDE.chunk == SIDE.dim else load_vectors(p_row, stride, c, m_row, SIDE)
        x = changed(x, change, o_head, c + o_chunk, m_row[:, None])
        b_part = b_matrix
        if SIDE.chunk < SIDE.dim:
            b_part = load_matrix(p_matrix, c, SIDE)
        if SIDE.chunk < SIDE.dim:  # tensor cores cut long sums off instead of rounding them: parts are added outside
            part = add_product(tl.zeros([p_row.shape[0], COLUMNS], tl.float32), x, b_part, SIDE)
            y = tl.fma(part, tl.full(part.shape, 1.0, tl.float32), y)
        else:
            y = add_product(y, x, b_part, SIDE)
    return y


@triton.jit
def in_range(y):
    """Rows of y over a power of two `unit`, the sums of their squares, and that unit: mostly 1."""
    power = tl.sum(y * y, 1)
    unit = tl.full([y.shape[0]], 1.0, tl.float32)
    if tl.max((~((power > 1e-25) & (power < 1e25))).to(tl.int32), 0) > 0:
        # 2^e next to the peak keeps squares in range; times it and its inverse is exact
        peak = tl.max(tl.abs(y), 1).to(tl.int32, bitcast=True)
        exponent = tl.minimum(tl.maximum(peak & 0x7F800000, 0x00800000), 0x7E800000)
        unit = exponent.to(tl.float32, bitcast=True)
        y = y * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
        power = tl.sum(y * y, 1)
    return y, power, unit


@triton.jit
def best_scale(y, rms, m_column, p_levels, p_bounds, cells, WRITER: tl.constexpr):
    """Which of WRITER.scales [rows], times rms, leaves the smallest error at equal weights: the first of the best."""
    SIDE: tl.constexpr = WRITER.how
    BITS: tl.constexpr = SIDE.bits
    COEF: tl.constexpr = SIDE.coef
    GROUPS: tl.constexpr = SIDE.groups
    ASM: tl.constexpr = WRITER.groups
    GRID: tl.constexpr = WRITER.grid
    SCALES: tl.constexpr = WRITER.scales
    best = tl.full(rms.shape, -1.0, tl.float32)
    chosen = tl.full(rms.shape, 1.0, tl.float32)
    for i in range(len(SCALES)):
        scale = tl.full([], SCALES[0], tl.float32)
        for n in tl.static_range(1, len(SCALES)):
            scale = tl.where(i == n, SCALES[n], scale)
        size = rms * scale
        if len(ASM) > 0:
            _, squares, products = quantise_groups(y, (1.0 / size)[:, None], size[:, None], cells, ASM, GROUPS)
            squares = energy_of(squares, WRITER.square)
            m = (tl.arange(0, GROUPS) < SIDE.dim // 8)[None, :]
        else:
            code = quantise(y * (1.0 / size)[:, None], p_bounds, BITS, GRID)
            level = to_levels(code.to(tl.uint32), p_levels, BITS, COEF)
            squares, products = level * level, y * level
            m = m_column
        if SIDE.columns > SIDE.dim:
            squares = tl.where(m, squares, 0.0)
            products = tl.where(m, products, 0.0)
        mixed, energy = tl.sum(products, 1), tl.sum(squares, 1)
        fits = tl.where(energy > 0, mixed * mixed / energy, 0.0)
        chosen = tl.where(fits > best, scale, chosen)
        best = tl.maximum(fits, best)
    return chosen


@triton.jit
def fitted_scale(own, mixed, energy):
    """As format/fit.py has it, from y'Gy, y'Gl and l'Gl."""
    fits = mixed * mixed / energy
    return mixed / energy * tl.where(own < LONGEST * fits, own / fits, LONGEST)


@triton.jit
def encode_rows(p_row, stride, change, o_head, m_row, p_matrix, b_matrix, p_levels, p_bounds, cells, p_data,
                p_scale, DTYPE: tl.constexpr, WRITER: tl.constexpr, b_rows=None):  # fmt: skip
    """Encode vectors at p_row [rows] into bytes at p_data [rows] and scales at p_scale [rows] of type DTYPE."""
    SIDE: tl.constexpr = WRITER.how
    COLUMNS: tl.constexpr = SIDE.columns
    BITS: tl.constexpr = SIDE.bits
    DIM: tl.constexpr = SIDE.dim
    GROUPS: tl.constexpr = SIDE.groups
    COEF: tl.constexpr = SIDE.coef
    ASM: tl.constexpr = WRITER.groups
    GRID: tl.constexpr = WRITER.grid
    o_coordinate = coordinates(COLUMNS, BITS)
    m_column = (o_coordinate < SIDE.dim)[None, :]
    if SIDE.bits == 16:
        m = m_row[:, None] & m_column
        x = tl.load(p_row[:, None] + o_coordinate[None, :] * stride, mask=m, other=0)
        x = changed(x, (change[0], None), o_head, o_coordinate, m)  # raw vectors have no offset
        p = p_data.to(tl.pointer_type(DTYPE), bitcast=True)
        tl.store(p[:, None] + o_coordinate[None, :], cast(x, DTYPE), mask=m)
    else:
        y = rotate(p_row, stride, change, o_head, m_row, p_matrix, b_matrix, SIDE, b_rows)
        y, power, unit = in_range(y)
        rms = tl.sqrt(power / DIM)
        rms = tl.where(rms > 0, rms, 1.0)
        if len(WRITER.scales) > 0:
            rms = rms * best_scale(y, rms, m_column, p_levels, p_bounds, cells, WRITER)
        inverse = 1.0 / rms
        if len(ASM) > 0:
            word, squares, products = quantise_groups(y, inverse[:, None], rms[:, None], cells, ASM, GROUPS)
            squares = energy_of(squares, WRITER.square)
            if COLUMNS > DIM:
                m_group = (tl.arange(0, GROUPS) < DIM // 8)[None, :]
                squares = tl.where(m_group, squares, 0.0)
                products = tl.where(m_group, products, 0.0)
        else:
            code = quantise(y * inverse[:, None], p_bounds, BITS, GRID)
            level = to_levels(code.to(tl.uint32), p_levels, BITS, COEF)
            if COLUMNS > DIM:
                level = tl.where(m_column, level, 0.0)
            word = pack_words(code, BITS, GROUPS)
            squares, products = level * level, y * level
        energy = tl.sum(squares, 1)
        if len(WRITER.scales) > 0:
            scale = fitted_scale(power, tl.sum(products, 1), energy)
        else:
            scale = tl.sum(products, 1) / energy if SIDE.lsq else tl.sqrt(power / energy)
        scale *= SIDE.post
        scale = tl.where((energy > 0) & (power > 0), scale * unit, 0.0)
        scale = tl.where(scale > SIDE.largest, SIDE.largest, tl.where(scale < -SIDE.largest, -SIDE.largest, scale))
        scale = tl.where(power < float("inf"), scale, float("nan"))  # a vector that is not finite
        tl.store(p_scale, scale.to(DTYPE), mask=m_row)
        store_words(p_data, m_row, word, DIM, BITS, GROUPS)


@triton.jit
def whole_matrix(p_matrix, SIDE: tl.constexpr):
    """What `rotate` takes as b_matrix."""
    if SIDE.bits == 16 or SIDE.chunk < SIDE.dim:
        return tl.full([], 0.0, tl.float32)
    else:
        return load_matrix(p_matrix, 0, SIDE)


@triton.jit
def whole_rows(p_row, stride, m_row, SIDE: tl.constexpr):
    """What `rotate` takes as b_rows."""
    if SIDE.bits == 16 or SIDE.chunk < SIDE.dim:
        return tl.full([], 0.0, tl.float32)
    else:
        return load_vectors(p_row, stride, 0, m_row, SIDE)


@triton.jit
def table_cells(p_bounds, WRITER: tl.constexpr):
    """What `encode_rows` takes as cells."""
    if len(WRITER.groups) > 0:
        return load_cells(p_bounds)
    else:
        nothing = tl.full([], 0, tl.int32)
        return nothing, nothing


@triton.jit(do_not_specialize=["n"])
def encode_kernel(
    x,
    stride_token,
    stride_head,
    stride_dim,
    offset,
    matrix,
    levels,
    bounds,
    data,
    scale,
    row_bytes,
    n,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    WRITER: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x [tokens, heads, dim] into data [n, row_bytes] and scale [n], n = tokens·heads."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    i_token, i_head = (o_row // HEADS).to(tl.int64), o_row % HEADS
    p_scale = scale
    if scale is not None:
        p_scale = scale + o_row
    p_row = x + i_token * stride_token + i_head * stride_head
    p_data = data + o_row.to(tl.int64) * row_bytes
    SIDE: tl.constexpr = WRITER.how
    b_matrix = whole_matrix(matrix, SIDE)
    cells = table_cells(bounds, WRITER)
    encode_rows(
        p_row, stride_dim, (None, offset), i_head * SIDE.dim, m_row, matrix, b_matrix, levels, bounds, cells,
        p_data, p_scale, DTYPE, WRITER,
    )  # fmt: skip

"""Encoding: rotate, quantise, scale, pack, and write to rows of bytes or to the slots of a page table.

In: vectors [tokens, heads, dim] of any strides, float32/16/bfloat16; change: (balance, offset), what they are
multiplied by and what is subtracted then, [heads, dim] float32 each or none.
Out: rows of packed codes with one scale each (Codec), or raw vectors at 16 bits.
Constexprs: K, V, WRITER (tables.Writer), SIDE (tables.Encoder); HEADS; ROWS vectors at a time, LONG see
slots.enter_sequence; SEQS see slots.find_block; RING; OWN: each sequence has one token, of at most ROWS heads, and a
program of its own. The launcher guarantees: lengths, table and overflow as in Pages;
`blocks` at least as many as slots.find_block has (LONG: of tokens, times HEADS).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .codes import (
    INTERPRETED,
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
from .encode_warp import append_alone
from .slots import advance_lengths, enter_sequence, no_sequence, place_rows, place_token

# These vary from call to call: no kernel of its own when one of them is 1 or a multiple of 16.
VARYING = ["tokens", "seqs", "pages", "width", "page_size", "pinned", "blocks"]


@triton.jit
def load_matrix(p_matrix, c, SIDE: tl.constexpr):
    """Rows c … of the rotation matrix, SIDE.chunk of them."""
    o_chunk = tl.arange(0, SIDE.chunk)
    o_column = tl.arange(0, SIDE.columns)
    return tl.load(p_matrix + (c + o_chunk)[:, None] * SIDE.columns + o_column[None, :]).to(SIDE.operand)


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
        if b_rows is not None and SIDE.chunk == SIDE.dim:
            x = b_rows
        else:
            x = tl.load(p_row[:, None] + (c + o_chunk)[None, :] * stride, mask=m_row[:, None], other=0)
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
        power = tl.sum(y * y, 1)
        unit = tl.full([p_row.shape[0]], 1.0, tl.float32)
        if tl.max((~((power > 1e-25) & (power < 1e25))).to(tl.int32), 0) > 0:
            # 2^e next to the peak keeps squares in range; times it and its inverse is exact
            peak = tl.max(tl.abs(y), 1).to(tl.int32, bitcast=True)
            exponent = tl.minimum(tl.maximum(peak & 0x7F800000, 0x00800000), 0x7E800000)
            unit = exponent.to(tl.float32, bitcast=True)
            y = y * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
            power = tl.sum(y * y, 1)
        rms = tl.sqrt(power / DIM)
        rms = tl.where(rms > 0, rms, 1.0)
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
        return tl.load(p_row[:, None] + tl.arange(0, SIDE.chunk)[None, :] * stride, mask=m_row[:, None], other=0)


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


@triton.jit
def prefetch_rows(p_row, m_row, SIDE: tl.constexpr):
    """Ask for the cache lines of rows that are needed soon, without waiting."""
    LINE: tl.constexpr = 1024 // p_row.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (SIDE.columns + LINE - 1) // LINE
    o_line = tl.arange(0, LINES) * LINE
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
        [p_row[:, None] + o_line[None, :], (m_row[:, None] & (o_line < SIDE.dim)[None, :]).to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def append_blocks(side, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                  WRITER: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr, RING: tl.constexpr,
                  SEQS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Keys or values of every so many-th block into the pages; whether one was refused."""
    x, stride, change, matrix, levels, bounds, codes, scales = side
    SIDE: tl.constexpr = WRITER.how
    b_matrix = whole_matrix(matrix, SIDE)
    cells = table_cells(bounds, WRITER)
    known = no_sequence()
    refused = tl.full([], False, tl.int1)
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        known, no = enter_sequence(pool, i_block, known, HEADS, LONG, RING, SEQS, ROWS)
        refused = refused | no
        i_token, i_head, i_row, o_piece, m_row = place_rows(
            pool, i_block, known, tl.arange(0, ROWS), HEADS, LONG, RING, ROWS
        )
        p_row = x + i_token.to(tl.int64) * stride[0] + i_head * stride[1]
        if LONG and not INTERPRETED:
            ahead = tl.num_programs(0) // HEADS * ROWS  # tokens to this program's next block, as a rule
            prefetch_rows(
                p_row + ahead.to(tl.int64) * stride[0], m_row & (i_token + ahead < pool[4]) & (stride[2] == 1), SIDE
            )
        p_data, p_scale = row_places(data, o_piece, i_row, page_bytes, codes, scales, BYTES, DTYPE)
        encode_rows(
            p_row, stride[2], change, i_head * SIDE.dim, m_row, matrix, b_matrix, levels, bounds, cells, p_data,
            p_scale, DTYPE, WRITER,
        )  # fmt: skip
    return refused


@triton.jit
def row_places(data, o_piece, i_row, page_bytes, codes, scales, BYTES: tl.constexpr, DTYPE: tl.constexpr):
    """Where codes and scales of rows of pieces go."""
    p_piece = data + o_piece.to(tl.int64) * page_bytes
    p_scale = (p_piece + scales).to(tl.pointer_type(DTYPE), bitcast=True) + i_row
    return p_piece + codes + i_row.to(tl.int64) * BYTES, p_scale


@triton.jit
def append_side(side, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                WRITER: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr, RING: tl.constexpr,
                SEQS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    if WRITER.alone:
        x, stride, _, matrix, _, bounds, codes, scales = side
        return append_alone(
            x, stride, matrix, bounds, data, page_bytes, codes, scales, pool, blocks, BYTES, DTYPE, WRITER, HEADS, RING,
            SEQS,
        )  # fmt: skip
    else:
        return append_blocks(side, data, page_bytes, pool, blocks, BYTES, DTYPE, WRITER, HEADS, LONG, RING, SEQS, ROWS)


@triton.jit
def ask_for(side, WRITER: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """What is read to encode the vectors of this program's token, wherever they go."""
    x, stride, _, matrix, _, bounds, _, _ = side
    SIDE: tl.constexpr = WRITER.how
    o_head = tl.arange(0, ROWS)
    p_row = x + tl.program_id(0).to(tl.int64) * stride[0] + o_head * stride[1]
    b_rows = whole_rows(p_row, stride[2], o_head < HEADS, SIDE)
    return p_row, b_rows, whole_matrix(matrix, SIDE), table_cells(bounds, WRITER)


@triton.jit
def append_token(key, value, data, page_bytes, pool, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
                 K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr,
                 RING: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The one token of this program's sequence; no other program needs its length.

    Everything is asked for before anything waits: memory is slow, and a page is known after two loads."""
    i_seq = tl.program_id(0)
    old = tl.load(pool[1] + i_seq)
    p_key, b_keys, b_key_matrix, key_cells = ask_for(key, K, HEADS, ROWS)
    p_value, b_values, b_value_matrix, value_cells = ask_for(value, V, HEADS, ROWS)
    i_page, i_row, fits = place_token(pool, i_seq, old, RING)
    i_head = tl.arange(0, ROWS)
    m_row = (i_head < HEADS) & fits
    o_piece, i_row = i_page * HEADS + i_head, i_row + 0 * i_head
    _, stride, change, matrix, levels, bounds, codes, scales = key
    p_data, p_scale = row_places(data, o_piece, i_row, page_bytes, codes, scales, K_BYTES, K_DTYPE)
    encode_rows(
        p_key, stride[2], change, i_head * K.how.dim, m_row, matrix, b_key_matrix, levels, bounds, key_cells,
        p_data, p_scale, K_DTYPE, K, b_keys,
    )  # fmt: skip
    _, stride, change, matrix, levels, bounds, codes, scales = value
    p_data, p_scale = row_places(data, o_piece, i_row, page_bytes, codes, scales, V_BYTES, V_DTYPE)
    encode_rows(
        p_value, stride[2], change, i_head * V.how.dim, m_row, matrix, b_value_matrix, levels, bounds,
        value_cells, p_data, p_scale, V_DTYPE, V, b_values,
    )  # fmt: skip
    tl.debug_barrier()  # all warps have read the length
    if fits:
        tl.store(pool[1] + i_seq, old + 1)
    else:
        tl.atomic_or(pool[2], 1, sem="relaxed")


@triton.jit(do_not_specialize=VARYING)
def append_kernel(
    k,
    k_token,
    k_head,
    k_dim,
    v,
    v_token,
    v_head,
    v_dim,
    key_balance,
    key_offset,
    value_offset,
    key_matrix,
    value_matrix,
    key_levels,
    value_levels,
    key_bounds,
    value_bounds,
    data,
    table,
    lengths,
    overflow,
    starts,
    tokens,
    seqs,
    pages,
    width,
    page_size,
    pinned,
    page_bytes,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    blocks,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    OWN: tl.constexpr,
    LONG: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """k, v [tokens, heads, dim] behind their sequences: program (blocks, side), or (sequence) if OWN."""
    pool = (table, lengths, overflow, starts, tokens, seqs, pages, width, page_size, pinned)
    key = (k, (k_token, k_head, k_dim), (key_balance, key_offset), key_matrix, key_levels, key_bounds, key_codes,
           key_scales)  # fmt: skip
    value = (v, (v_token, v_head, v_dim), (None, value_offset), value_matrix, value_levels, value_bounds, value_codes,
             value_scales)  # fmt: skip
    if OWN:
        append_token(key, value, data, page_bytes, pool, K_BYTES, V_BYTES, K_DTYPE, V_DTYPE, K, V, HEADS, RING, ROWS)
    else:
        if tl.program_id(1) == 0:
            refused = append_side(
                key, data, page_bytes, pool, blocks, K_BYTES, K_DTYPE, K, HEADS, LONG, RING, SEQS, ROWS
            )
        else:
            refused = append_side(
                value, data, page_bytes, pool, blocks, V_BYTES, V_DTYPE, V, HEADS, LONG, RING, SEQS, ROWS
            )
        advance_lengths(pool, refused, 2 * tl.num_programs(0), RING, SEQS_AT_ONCE, ENTRIES)


@triton.jit
def copy_rows(p_from, p_to, m_row, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of BYTES bytes, COLUMNS at a time."""
    for c in range(0, BYTES, COLUMNS):
        o_byte = c + tl.arange(0, COLUMNS)
        m = m_row[:, None] & (o_byte < BYTES)[None, :]
        tl.store(p_to[:, None] + o_byte[None, :], tl.load(p_from[:, None] + o_byte[None, :], mask=m), mask=m)


@triton.jit(do_not_specialize=VARYING)
def append_codes_kernel(
    key_data,
    key_scale,
    value_data,
    value_scale,
    data,
    table,
    lengths,
    overflow,
    starts,
    tokens,
    seqs,
    pages,
    width,
    page_size,
    pinned,
    page_bytes,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    blocks,
    HEADS: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Encoded rows [tokens, heads, row_bytes] with scales [tokens, heads], contiguous, behind their sequences."""
    pool = (table, lengths, overflow, starts, tokens, seqs, pages, width, page_size, pinned)
    i_block = tl.program_id(0)
    known, refused = enter_sequence(pool, i_block, no_sequence(), HEADS, False, RING, SEQS, ROWS)
    i_token, i_head, i_row, o_piece, m_row = place_rows(
        pool, i_block, known, tl.arange(0, ROWS), HEADS, False, RING, ROWS
    )
    o_source = i_token.to(tl.int64) * HEADS + i_head
    p_piece, row = data + o_piece.to(tl.int64) * page_bytes, i_row.to(tl.int64)
    copy_rows(key_data + o_source * K_BYTES, p_piece + key_codes + row * K_BYTES, m_row, K_BYTES, COLUMNS)
    copy_rows(value_data + o_source * V_BYTES, p_piece + value_codes + row * V_BYTES, m_row, V_BYTES, COLUMNS)
    if key_scale is not None:
        p = (p_piece + key_scales).to(tl.pointer_type(key_scale.dtype.element_ty), bitcast=True)
        tl.store(p + i_row, tl.load(key_scale + o_source, mask=m_row, other=0), mask=m_row)
    if value_scale is not None:
        p = (p_piece + value_scales).to(tl.pointer_type(value_scale.dtype.element_ty), bitcast=True)
        tl.store(p + i_row, tl.load(value_scale + o_source, mask=m_row, other=0), mask=m_row)
    advance_lengths(pool, refused, tl.num_programs(0), RING, SEQS_AT_ONCE, ENTRIES)

"""Encoding: rotate, quantise, scale, pack, and write to rows of bytes or to the slots of a page table.

In: vectors [tokens, heads, dim] of any strides, float32/16/bfloat16; offset [heads, dim] float32 or none.
Out: rows of packed codes with one scale each (Codec), or raw vectors at 16 bits.
Constexprs: K, V, SIDE (tables.Encoder); HEADS; ROWS vectors per program; SEQS see slots.find_block; RING.
The launcher guarantees: lengths, table and overflow as in Pages; one program per block of `find_block` and side.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .codes import cast, coordinates, quantise, quantise_symmetric, store_codes, to_levels
from .slots import find_block, seq_tokens, sequences_fit, table_entry

# These vary from call to call: no kernel of its own when one of them is 1 or a multiple of 16.
VARYING = ["tokens", "seqs", "pages", "width", "page_size", "pinned", "programs"]
FIT_ENTRIES = tl.constexpr(1024)  # table entries looked at in one go


@triton.jit
def rotate(p_row, stride, p_offset, m_row, p_matrix, SIDE: tl.constexpr):
    """R (x − offset) / SIDE.post of vectors at p_row [rows], as a plane-major tile [rows, columns] in float32."""
    o_chunk = tl.arange(0, SIDE.chunk)
    o_column = tl.arange(0, SIDE.columns)
    COLUMNS: tl.constexpr = SIDE.columns
    y = tl.zeros([p_row.shape[0], COLUMNS], tl.float32)
    for c in range(0, SIDE.dim, SIDE.chunk):
        x = tl.load(p_row[:, None] + (c + o_chunk)[None, :] * stride, mask=m_row[:, None], other=0)
        if p_offset is not None:
            x = x.to(tl.float32) - tl.load(p_offset[:, None] + (c + o_chunk)[None, :], mask=m_row[:, None], other=0)
        b_matrix = tl.load(p_matrix + (c + o_chunk)[:, None] * SIDE.columns + o_column[None, :])
        y = tl.dot(x.to(SIDE.operand), b_matrix.to(SIDE.operand), y, input_precision="tf32x3")
    return y


@triton.jit
def encode_rows(
    p_row,
    stride,
    p_offset,
    m_row,
    p_matrix,
    p_levels,
    p_bounds,
    p_data,
    p_scale,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Encode vectors at p_row [rows] into bytes at p_data [rows] and scales at p_scale [rows] of type DTYPE."""
    COLUMNS: tl.constexpr = SIDE.columns
    BITS: tl.constexpr = SIDE.bits
    DIM: tl.constexpr = SIDE.dim
    GROUPS: tl.constexpr = SIDE.groups
    COEF: tl.constexpr = SIDE.coef
    BOUNDS: tl.constexpr = SIDE.bounds
    SYMMETRIC: tl.constexpr = SIDE.symmetric
    o_coordinate = coordinates(COLUMNS, BITS)
    m_column = (o_coordinate < SIDE.dim)[None, :]
    if SIDE.bits == 16:
        m = m_row[:, None] & m_column
        x = tl.load(p_row[:, None] + o_coordinate[None, :] * stride, mask=m, other=0)
        p = p_data.to(tl.pointer_type(DTYPE), bitcast=True)
        tl.store(p[:, None] + o_coordinate[None, :], cast(x, DTYPE), mask=m)
    else:
        y = rotate(p_row, stride, p_offset, m_row, p_matrix, SIDE)
        peak = tl.max(tl.abs(y), 1)
        # 2^e next to the peak keeps squares in range; times it and its inverse is exact
        exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000), 0x7E800000)
        unit = y * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
        power = tl.sum(unit * unit, 1)
        rms = tl.sqrt(power / DIM)
        rms = tl.where(rms > 0, rms, 1.0)
        z = unit * (1.0 / rms)[:, None]
        if len(SYMMETRIC) > 0:
            code, size, level = quantise_symmetric(z, BITS, BOUNDS, SYMMETRIC)
        else:
            code = quantise(z, p_bounds, BITS, BOUNDS)
            size = z
            level = to_levels(code.to(tl.uint32), p_levels, BITS, COEF)
        if COLUMNS > DIM:
            level = tl.where(m_column, level, 0.0)
        energy = tl.sum(level * level, 1)
        scale = tl.sqrt(power / energy)
        if SIDE.lsq:
            scale = tl.sum(size * level, 1) * rms / energy
        scale *= SIDE.post
        scale = tl.where((energy > 0) & (peak > 0), scale * exponent.to(tl.float32, bitcast=True), 0.0)
        scale = tl.where(scale > SIDE.largest, SIDE.largest, tl.where(scale < -SIDE.largest, -SIDE.largest, scale))
        scale = tl.where(power < float("inf"), scale, float("nan"))  # a vector that is not finite
        tl.store(p_scale, scale.to(DTYPE), mask=m_row)
        store_codes(p_data, m_row, code, DIM, BITS, GROUPS)


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
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x [tokens, heads, dim] into data [n, row_bytes] and scale [n], n = tokens·heads."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    i_token, i_head = (o_row // HEADS).to(tl.int64), o_row % HEADS
    p_offset = None
    if offset is not None:
        p_offset = offset + i_head * SIDE.dim
    p_scale = scale
    if scale is not None:
        p_scale = scale + o_row
    p_row = x + i_token * stride_token + i_head * stride_head
    p_data = data + o_row.to(tl.int64) * row_bytes
    encode_rows(p_row, stride_dim, p_offset, m_row, matrix, levels, bounds, p_data, p_scale, DTYPE, SIDE)


@triton.jit
def place_rows(
    table,
    lengths,
    starts,
    tokens,
    seqs,
    pages,
    width,
    page_size,
    pinned,
    page_bytes,
    i_block,
    HEADS: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows (token, head) of a block: their token, head, row inside the page, byte offset of the page's piece for that
    head, and which of them are written; and whether the sequence has room."""
    i_seq, i_first, i_from, i_to = find_block(starts, tokens, seqs, i_block, HEADS, ROWS, SEQS)
    o_row = i_first + tl.arange(0, ROWS)
    i_head = o_row % HEADS
    i_token = i_from + o_row // HEADS
    old = tl.load(lengths + i_seq)
    new = old + (i_to - i_from)
    o_one = tl.arange(0, 1)
    fits = sequences_fit(
        table,
        i_seq + o_one,
        o_one == 0,
        old + o_one,
        new + o_one,
        pages,
        width,
        page_size,
        pinned,
        RING,
        1,
        FIT_ENTRIES,
    )
    fits = tl.sum(fits.to(tl.int32), 0) > 0
    position = old + (i_token - i_from)
    m_row = (i_token < i_to) & fits
    if RING:  # of tokens that share a slot only the last one stays
        m_row = m_row & ((position < pinned * page_size) | (position >= new - (width - pinned) * page_size))
    entry = table_entry(tl.maximum(position, 0) // page_size, width, pinned, RING)
    i_page = tl.load(table + i_seq.to(tl.int64) * width + entry, mask=m_row, other=0)
    o_piece = (i_page.to(tl.int64) * HEADS + i_head) * page_bytes
    return i_token, i_head, position % page_size, o_piece, m_row, fits | (i_to <= i_from)


@triton.jit
def advance_lengths(
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
    programs,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The program that ends last advances the lengths: no program may read them afterwards.

    While the kernel runs, `overflow` above its lowest bit counts the programs that have ended.
    """
    tl.debug_barrier()
    ended = tl.atomic_add(overflow, 2, sem="acq_rel") >> 1
    if ended == programs - 1:
        for first in range(0, seqs, SEQS):
            o_seq = first + tl.arange(0, SEQS)
            m_seq = o_seq < seqs
            b_from, b_to = seq_tokens(starts, tokens, o_seq, m_seq)
            b_old = tl.load(lengths + o_seq, mask=m_seq, other=0)
            b_new = b_old + (b_to - b_from)
            m_fits = sequences_fit(
                table, o_seq, m_seq, b_old, b_new, pages, width, page_size, pinned, RING, SEQS, ENTRIES
            )
            tl.store(lengths + o_seq, b_new, mask=m_fits & (b_to > b_from))
        tl.atomic_add(overflow, -2 * programs, sem="acq_rel")


@triton.jit
def append_side(
    p_row,
    stride,
    offset,
    i_head,
    i_row,
    m_row,
    matrix,
    levels,
    bounds,
    p_codes,
    p_scales,
    BYTES: tl.constexpr,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Keys or values of a block into row i_row of the pieces whose codes and scales begin at p_codes and p_scales."""
    p_offset = None
    if offset is not None:
        p_offset = offset + i_head * SIDE.dim
    p_data = p_codes + i_row.to(tl.int64) * BYTES
    p_scale = p_scales.to(tl.pointer_type(DTYPE), bitcast=True) + i_row
    encode_rows(p_row, stride, p_offset, m_row, matrix, levels, bounds, p_data, p_scale, DTYPE, SIDE)


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
    programs,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """k, v [tokens, heads, dim] behind their sequences: program (block, side)."""
    i_token, i_head, i_row, o_piece, m_row, fits = place_rows(
        table,
        lengths,
        starts,
        tokens,
        seqs,
        pages,
        width,
        page_size,
        pinned,
        page_bytes,
        tl.program_id(0),
        HEADS,
        RING,
        SEQS,
        ROWS,
    )
    p_piece = data + o_piece
    if tl.program_id(1) == 0:
        p_row = k + i_token.to(tl.int64) * k_token + i_head * k_head
        append_side(
            p_row,
            k_dim,
            key_offset,
            i_head,
            i_row,
            m_row,
            key_matrix,
            key_levels,
            key_bounds,
            p_piece + key_codes,
            p_piece + key_scales,
            K_BYTES,
            K_DTYPE,
            K,
        )
    else:
        p_row = v + i_token.to(tl.int64) * v_token + i_head * v_head
        append_side(
            p_row,
            v_dim,
            value_offset,
            i_head,
            i_row,
            m_row,
            value_matrix,
            value_levels,
            value_bounds,
            p_piece + value_codes,
            p_piece + value_scales,
            V_BYTES,
            V_DTYPE,
            V,
        )
    if not fits:
        tl.atomic_or(overflow, 1, sem="relaxed")
    advance_lengths(
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
        programs,
        RING,
        SEQS_AT_ONCE,
        ENTRIES,
    )


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
    programs,
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
    i_token, i_head, i_row, o_piece, m_row, fits = place_rows(
        table,
        lengths,
        starts,
        tokens,
        seqs,
        pages,
        width,
        page_size,
        pinned,
        page_bytes,
        tl.program_id(0),
        HEADS,
        RING,
        SEQS,
        ROWS,
    )
    o_source = i_token.to(tl.int64) * HEADS + i_head
    p_piece, row = data + o_piece, i_row.to(tl.int64)
    copy_rows(key_data + o_source * K_BYTES, p_piece + key_codes + row * K_BYTES, m_row, K_BYTES, COLUMNS)
    copy_rows(value_data + o_source * V_BYTES, p_piece + value_codes + row * V_BYTES, m_row, V_BYTES, COLUMNS)
    if key_scale is not None:
        p = (p_piece + key_scales).to(tl.pointer_type(key_scale.dtype.element_ty), bitcast=True)
        tl.store(p + i_row, tl.load(key_scale + o_source, mask=m_row, other=0), mask=m_row)
    if value_scale is not None:
        p = (p_piece + value_scales).to(tl.pointer_type(value_scale.dtype.element_ty), bitcast=True)
        tl.store(p + i_row, tl.load(value_scale + o_source, mask=m_row, other=0), mask=m_row)
    if not fits:
        tl.atomic_or(overflow, 1, sem="relaxed")
    advance_lengths(
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
        programs,
        RING,
        SEQS_AT_ONCE,
        ENTRIES,
    )


@triton.jit
def copy_rows(p_from, p_to, m_row, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of BYTES bytes, COLUMNS at a time."""
    for c in range(0, BYTES, COLUMNS):
        o_byte = c + tl.arange(0, COLUMNS)
        m = m_row[:, None] & (o_byte < BYTES)[None, :]
        tl.store(p_to[:, None] + o_byte[None, :], tl.load(p_from[:, None] + o_byte[None, :], mask=m), mask=m)

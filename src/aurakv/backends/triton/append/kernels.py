"""Appends: vectors or codes of new tokens to the slots of a page table, and the lengths that grow by them.

In: vectors as in encode, or rows of codes with their scales. side: of keys or values, the vectors, their
strides, what changes them, rotation matrix, levels, boundaries, where codes and scales begin in a piece. pool: see
slots.sequences_fit.
Constexprs: K, V, WRITER (specialise.Writer), SIDE (specialise.Encoder); HEADS; ROWS vectors at a time; LONG and
COUNTED see slots.enter_sequence; SEQS see slots.find_block; RING; OWN: each sequence has one token, of at most ROWS
heads, and a program of its own.
first, recent: None, or where first or recent tokens of sequences lie a second time (step.Copies): vectors of 16 bits,
the page of each sequence, how many it has after and before the append, the size of a piece, where values begin there.
The launcher guarantees: lengths, table and overflow as in Pages; `blocks` at least as many as slots.find_block has
(LONG: of tokens, times HEADS), `fitted_blocks` as many as there are of fit.VECTORS tokens of a head.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import INTERPRETED, cast
from ..common.slots import advance_lengths, enter_sequence, no_sequence, place_rows, place_token, row_places
from .encode import changed, encode_rows, table_cells, whole_matrix, whole_rows
from .encode_warp import append_alone
from .fit import scratch_size
from .fit_kernels import append_fitted

COPIED_ROWS = tl.constexpr(8)  # first or recent tokens times heads that are stored at a time

# These vary from call to call: no kernel of its own when one of them is 1 or a multiple of 16.
VARYING = ["tokens", "seqs", "pages", "width", "page_size", "pinned", "blocks", "fitted_blocks"]


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
                  WRITER: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr, COUNTED: tl.constexpr,
                  RING: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Keys or values of every so many-th block into the pages; whether one was refused."""
    x, stride, change, matrix, levels, bounds, codes, scales = side
    SIDE: tl.constexpr = WRITER.how
    b_matrix = whole_matrix(matrix, SIDE)
    cells = table_cells(bounds, WRITER)
    known = no_sequence()
    refused = tl.full([], False, tl.int1)
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        known, no = enter_sequence(pool, i_block, known, HEADS, LONG, COUNTED, RING, SEQS, ROWS)
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
def store_copies(side, pool, copies, i_seq, old, count, begin, LAST: tl.constexpr, HEADS: tl.constexpr,
                 WRITER: tl.constexpr):  # fmt: skip
    """Tokens old … count − 1 of a sequence's page, keys or values, which begin so far behind a piece's start: its first
    new rows, or its last."""
    data, slots, _, _, size, _ = copies
    x, stride, change, _, _, _, _, _ = side
    SIDE: tl.constexpr = WRITER.how
    if old < count:
        row = tl.load(pool[3] + i_seq + 1) - (count - old) if LAST else tl.load(pool[3] + i_seq)
        slot = tl.load(slots + i_seq).to(tl.int64)
        d = tl.arange(0, SIDE.columns)
        for i in range(0, (count - old) * HEADS, COPIED_ROWS):
            o_row = i + tl.arange(0, COPIED_ROWS)
            i_head, i_token = o_row % HEADS, o_row // HEADS
            m = (i_token < count - old)[:, None] & (d < SIDE.dim)[None, :]
            p_row = x + (row + i_token).to(tl.int64) * stride[0] + i_head * stride[1]
            vector = tl.load(p_row[:, None] + d[None, :] * stride[2], mask=m, other=0)
            vector = changed(vector, (change[0], None), i_head * SIDE.dim, d, m)
            p_entry = data + (slot * HEADS + i_head) * size + begin + (old + i_token) * SIDE.dim
            tl.store(p_entry[:, None] + d[None, :], cast(vector, data.dtype.element_ty), mask=m)


@triton.jit
def store_copies_of_all(side, pool, copies, begin, LAST: tl.constexpr, HEADS: tl.constexpr, WRITER: tl.constexpr):
    """`store_copies` of every so many-th sequence."""
    if copies[0] is not None:
        for i_seq in range(tl.program_id(0), pool[5], tl.num_programs(0)):
            old, count = tl.load(copies[3] + i_seq), tl.load(copies[2] + i_seq)
            store_copies(side, pool, copies, i_seq, old, count, begin, LAST, HEADS, WRITER)


@triton.jit
def append_side(side, fit, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                WRITER: tl.constexpr, HEADS: tl.constexpr, LONG: tl.constexpr, COUNTED: tl.constexpr,
                RING: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
                SIZE: tl.constexpr, BOTH: tl.constexpr):  # fmt: skip
    """fit: matrices, near, cells, scratch and blocks of `append_fitted`. SIZE of a program's scratch, BOTH: that of two
    sides."""
    if WRITER.fitted:
        i_scratch = tl.program_id(0) * 2 + tl.program_id(1) if BOTH else tl.program_id(0)
        p_scratch = fit[3] + i_scratch.to(tl.int64) * SIZE
        return append_fitted(
            side, (fit[0], fit[1], fit[2]), p_scratch, data, page_bytes, pool, fit[4], BYTES, DTYPE, WRITER, HEADS,
            COUNTED, RING, SEQS, TOGETHER,
        )  # fmt: skip
    elif WRITER.alone:
        x, stride, _, matrix, _, bounds, codes, scales = side
        return append_alone(
            x, stride, matrix, bounds, data, page_bytes, codes, scales, pool, blocks, BYTES, DTYPE, WRITER, HEADS,
            COUNTED, RING, SEQS,
        )  # fmt: skip
    else:
        return append_blocks(
            side, data, page_bytes, pool, blocks, BYTES, DTYPE, WRITER, HEADS, LONG, COUNTED, RING, SEQS, ROWS
        )


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
def append_token(key, value, data, page_bytes, pool, first, recent, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
                 K_DTYPE: tl.constexpr, V_DTYPE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr,
                 COUNTED: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The one token of this program's sequence; no other program needs its length.

    Everything is asked for before anything waits: memory is slow, and a page is known after two loads."""
    i_seq = tl.program_id(0)
    old = tl.load(pool[1] + i_seq) - COUNTED
    if COUNTED:
        start, end = tl.load(pool[3] + i_seq), tl.load(pool[3] + i_seq + 1)
    if first[0] is not None:
        first_before, first_held = tl.load(first[3] + i_seq), tl.load(first[2] + i_seq)
    if recent[0] is not None:
        recent_before, recent_held = tl.load(recent[3] + i_seq), tl.load(recent[2] + i_seq)
    p_key, b_keys, b_key_matrix, key_cells = ask_for(key, K, HEADS, ROWS)
    p_value, b_values, b_value_matrix, value_cells = ask_for(value, V, HEADS, ROWS)
    i_page, i_row, fits = place_token(pool, i_seq, old, RING)
    if COUNTED:
        fits &= end > start  # else it pads the batch, whatever its length
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
    if first[0] is not None:
        store_copies(key, pool, first, i_seq, first_before, first_held, 0, False, HEADS, K)
        store_copies(value, pool, first, i_seq, first_before, first_held, first[5], False, HEADS, V)
    if recent[0] is not None:
        store_copies(key, pool, recent, i_seq, recent_before, recent_held, 0, True, HEADS, K)
        store_copies(value, pool, recent, i_seq, recent_before, recent_held, recent[5], True, HEADS, V)
    if COUNTED:
        if (not fits) & (old >= 0) & (end > start):
            tl.atomic_or(pool[2], 1, sem="relaxed")
    else:
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
    key_scale,
    key_offset,
    value_offset,
    key_matrix,
    value_matrix,
    key_levels,
    value_levels,
    key_bounds,
    value_bounds,
    key_fit,
    key_near,
    key_cells,
    value_fit,
    value_near,
    value_cells,
    scratch,
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
    fitted_blocks,
    first_data,
    first_slots,
    first_held,
    first_before,
    first_size,
    first_values,
    recent_data,
    recent_slots,
    recent_held,
    recent_before,
    recent_size,
    recent_values,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    OWN: tl.constexpr,
    LONG: tl.constexpr,
    COUNTED: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """k, v [tokens, heads, dim] behind their sequences: program (blocks, side), or (sequence) if OWN.

    COUNTED: lengths count the new tokens already and stay. Fitted sides have their fit (fit.py) of all heads,
    fitted_blocks and a part of scratch, float32 [programs, fitted sides, fit.scratch_size]."""
    pool = (table, lengths, overflow, starts, tokens, seqs, pages, width, page_size, pinned)
    key = (k, (k_token, k_head, k_dim), (key_scale, key_offset), key_matrix, key_levels, key_bounds, key_codes,
           key_scales)  # fmt: skip
    value = (v, (v_token, v_head, v_dim), (None, value_offset), value_matrix, value_levels, value_bounds, value_codes,
             value_scales)  # fmt: skip
    first = (first_data, first_slots, first_held, first_before, first_size, first_values)
    recent = (recent_data, recent_slots, recent_held, recent_before, recent_size, recent_values)
    if OWN:
        append_token(
            key, value, data, page_bytes, pool, first, recent, K_BYTES, V_BYTES, K_DTYPE, V_DTYPE, K, V, HEADS,
            COUNTED, RING, ROWS,
        )  # fmt: skip
    else:
        key_fits = (key_fit, key_near, key_cells, scratch, fitted_blocks)
        value_fits = (value_fit, value_near, value_cells, scratch, fitted_blocks)
        SIZE: tl.constexpr = scratch_size(
            max(K.how.dim, V.how.dim), TOGETHER, max(len(K.scales), len(V.scales)), K.fours or V.fours
        )
        BOTH: tl.constexpr = K.fitted and V.fitted
        if tl.program_id(1) == 0:
            refused = append_side(
                key, key_fits, data, page_bytes, pool, blocks, K_BYTES, K_DTYPE, K, HEADS, LONG, COUNTED, RING,
                SEQS, ROWS, TOGETHER, SIZE, BOTH,
            )  # fmt: skip
            store_copies_of_all(key, pool, first, 0, False, HEADS, K)
            store_copies_of_all(key, pool, recent, 0, True, HEADS, K)
        else:
            refused = append_side(
                value, value_fits, data, page_bytes, pool, blocks, V_BYTES, V_DTYPE, V, HEADS, LONG, COUNTED, RING,
                SEQS, ROWS, TOGETHER, SIZE, BOTH,
            )  # fmt: skip
            store_copies_of_all(value, pool, first, first_values, False, HEADS, V)
            store_copies_of_all(value, pool, recent, recent_values, True, HEADS, V)
        if COUNTED:
            if refused:
                tl.atomic_or(overflow, 1, sem="relaxed")
        else:
            advance_lengths(pool, refused, 2 * tl.num_programs(0), RING, SEQS_AT_ONCE, ENTRIES)


@triton.jit
def copy_rows(p_from, p_to, m_row, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of BYTES bytes, COLUMNS at a time."""
    for c in range(0, BYTES, COLUMNS):
        o_byte = c + tl.arange(0, COLUMNS)
        m = m_row[:, None] & (o_byte < BYTES)[None, :]
        tl.store(p_to[:, None] + o_byte[None, :], tl.load(p_from[:, None] + o_byte[None, :], mask=m), mask=m)


@triton.jit(do_not_specialize=VARYING[:-1])
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
    known, refused = enter_sequence(pool, i_block, no_sequence(), HEADS, False, False, RING, SEQS, ROWS)
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

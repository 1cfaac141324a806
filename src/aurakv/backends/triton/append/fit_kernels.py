"""Appends and encoding of vectors whose codes are fitted with weights (fit.py), a side of its own or both.

As in kernels.py and encode.py, but for: matrix, rotated coordinates in their natural order; fit, see fit.py, here of
all heads; scratch float32 [programs, sides with weights, fit.scratch_size].
Constexprs: as in kernels.py; TOGETHER see fit.py. Sides with weights take blocks of fit.VECTORS tokens of one head,
other sides blocks of ROWS (token, head) pairs.
The launcher guarantees: as in kernels.py; `key_blocks` and `value_blocks` are counts of such blocks.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.slots import advance_lengths, enter_sequence, no_sequence, place_rows
from .fit import VECTORS, find_aims, fit_vectors, scratch_size
from .kernels import append_blocks, row_places, store_first_of_all

VARYING = ["tokens", "seqs", "pages", "width", "page_size", "pinned", "key_blocks", "value_blocks"]


@triton.jit
def fit_of(fit, i_head, DIM: tl.constexpr):
    """Of one head."""
    return fit[0] + i_head * (DIM * DIM), fit[1] + i_head * (DIM * 16), fit[2]


@triton.jit
def groups_of(m_row, TOGETHER: tl.constexpr):
    """How many groups of TOGETHER rows there are up to the last one of m_row [VECTORS]."""
    last = tl.max(tl.where(m_row, tl.arange(0, VECTORS) + 1, 0), 0)
    return (last + (TOGETHER - 1)) // TOGETHER


@triton.jit
def vectors_of(x, stride, pool, i_block, known, HEADS: tl.constexpr, RING: tl.constexpr):
    """The vectors of a block, their head, and which of them are written."""
    i_token, i_head, _, _, m_row = place_rows(
        pool, i_block, known, tl.arange(0, VECTORS), HEADS, True, RING, VECTORS, True
    )
    return x + i_token.to(tl.int64) * stride[0] + i_head * stride[1], i_head, m_row


@triton.jit
def places_of(side, data, page_bytes, pool, i_block, known, i_first, BYTES: tl.constexpr, DTYPE: tl.constexpr,
              HEADS: tl.constexpr, RING: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Where codes and scales of vectors i_first … of a block go, and which of them are written."""
    o_row = i_first + tl.arange(0, TOGETHER)
    _, _, i_row, o_piece, m_vector = place_rows(pool, i_block, known, o_row, HEADS, True, RING, VECTORS, True)
    p_data, p_scale = row_places(data, o_piece, i_row, page_bytes, side[6], side[7], BYTES, DTYPE)
    return p_data, p_scale, m_vector


@triton.jit
def append_fitted(side, fit, p_scratch, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                  WRITER: tl.constexpr, HEADS: tl.constexpr, COUNTED: tl.constexpr, RING: tl.constexpr,
                  SEQS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """kernels.append_blocks for a side with weights."""
    x, stride, change, matrix, levels, bounds, _, _ = side
    SIDE: tl.constexpr = WRITER.how
    known = no_sequence()
    refused = tl.full([], False, tl.int1)
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        known, no = enter_sequence(pool, i_block, known, HEADS, True, COUNTED, RING, SEQS, VECTORS)
        refused = refused | no
        p_row, i_head, m_row = vectors_of(x, stride, pool, i_block, known, HEADS, RING)
        near = fit_of(fit, i_block % HEADS, SIDE.dim)
        find_aims(p_row, stride[2], change, i_head * SIDE.dim, m_row, matrix, near, p_scratch, WRITER)
        for i_group in range(groups_of(m_row, TOGETHER)):
            i_first = i_group * TOGETHER
            p_data, p_scale, m_vector = places_of(
                side, data, page_bytes, pool, i_block, known, i_first, BYTES, DTYPE, HEADS, RING, TOGETHER
            )
            fit_vectors(i_first, near, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE, WRITER, TOGETHER)
    return refused


@triton.jit
def append_fitted_side(side, fit, p_scratch, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                       WRITER: tl.constexpr, HEADS: tl.constexpr, COUNTED: tl.constexpr, RING: tl.constexpr,
                       SEQS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    if WRITER.weights:
        return append_fitted(
            side, fit, p_scratch, data, page_bytes, pool, blocks, BYTES, DTYPE, WRITER, HEADS, COUNTED, RING, SEQS,
            TOGETHER,
        )  # fmt: skip
    else:
        return append_blocks(
            side, data, page_bytes, pool, blocks, BYTES, DTYPE, WRITER, HEADS, False, COUNTED, RING, SEQS, ROWS
        )


@triton.jit(do_not_specialize=VARYING)
def append_fitted_kernel(
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
    key_blocks,
    value_blocks,
    first_data,
    first_slots,
    first_held,
    first_before,
    first_size,
    first_values,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    COUNTED: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """k, v [tokens, heads, dim] behind their sequences: program (blocks, side)."""
    pool = (table, lengths, overflow, starts, tokens, seqs, pages, width, page_size, pinned)
    key = (k, (k_token, k_head, k_dim), (key_scale, key_offset), key_matrix, key_levels, key_bounds, key_codes,
           key_scales)  # fmt: skip
    value = (v, (v_token, v_head, v_dim), (None, value_offset), value_matrix, value_levels, value_bounds, value_codes,
             value_scales)  # fmt: skip
    first = (first_data, first_slots, first_held, first_before, first_size, first_values)
    SIZE: tl.constexpr = scratch_size(max(K.how.dim, V.how.dim), TOGETHER * len(K.scales if K.weights else V.scales))
    i_scratch = tl.program_id(0)
    if K.weights and V.weights:
        i_scratch = i_scratch * 2 + tl.program_id(1)
    p_scratch = scratch + i_scratch.to(tl.int64) * SIZE
    if tl.program_id(1) == 0:
        refused = append_fitted_side(
            key, (key_fit, key_near, key_cells), p_scratch, data, page_bytes, pool, key_blocks, K_BYTES, K_DTYPE, K,
            HEADS, COUNTED, RING, SEQS, ROWS, TOGETHER,
        )  # fmt: skip
        store_first_of_all(key, pool, first, 0, HEADS, K)
    else:
        refused = append_fitted_side(
            value, (value_fit, value_near, value_cells), p_scratch, data, page_bytes, pool, value_blocks, V_BYTES,
            V_DTYPE, V, HEADS, COUNTED, RING, SEQS, ROWS, TOGETHER,
        )  # fmt: skip
        store_first_of_all(value, pool, first, first_values, HEADS, V)
    if COUNTED:
        if refused:
            tl.atomic_or(overflow, 1, sem="relaxed")
    else:
        advance_lengths(pool, refused, 2 * tl.num_programs(0), RING, SEQS_AT_ONCE, ENTRIES)


@triton.jit(do_not_specialize=["tokens"])
def encode_fitted_kernel(
    x,
    stride_token,
    stride_head,
    stride_dim,
    offset,
    matrix,
    levels,
    bounds,
    fit,
    near,
    cells,
    scratch,
    data,
    scale,
    row_bytes,
    tokens,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    WRITER: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """x [tokens, heads, dim] into data [tokens, heads, row_bytes] and scale [tokens, heads]: programs of a grid."""
    SIDE: tl.constexpr = WRITER.how
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * scratch_size(SIDE.dim, TOGETHER * len(WRITER.scales))
    blocks = (tokens + (VECTORS - 1)) // VECTORS * HEADS
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        i_head, i_token = i_block % HEADS, i_block // HEADS * VECTORS
        o_token = i_token + tl.arange(0, VECTORS)
        m_row = o_token < tokens
        p_row = x + o_token.to(tl.int64) * stride_token + i_head * stride_head
        of_head = fit_of((fit, near, cells), i_head, SIDE.dim)
        o_head = i_head * SIDE.dim + 0 * o_token
        find_aims(p_row, stride_dim, (None, offset), o_head, m_row, matrix, of_head, p_scratch, WRITER)
        for i_group in range(groups_of(m_row, TOGETHER)):
            i_first = i_group * TOGETHER
            o_row = i_token + i_first + tl.arange(0, TOGETHER)
            o_vector = o_row.to(tl.int64) * HEADS + i_head
            fit_vectors(
                i_first, of_head, levels, bounds, p_scratch, data + o_vector * row_bytes, scale + o_vector,
                o_row < tokens, DTYPE, WRITER, TOGETHER,
            )  # fmt: skip

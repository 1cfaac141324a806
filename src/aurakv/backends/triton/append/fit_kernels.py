"""Blocks of vectors whose codes are fitted (fit.py, fit_fours.py): a side of an append, and encoding.

As in kernels.py and encode.py, but for: matrix, rotated coordinates in their natural order; fit, see fit.py, here of
all heads; scratch float32, of a program. TOGETHER see fit.py. A block is fit.VECTORS tokens of one head.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.slots import enter_sequence, no_sequence, place_rows, row_places
from .fit import VECTORS, find_aims, fit_vectors, scratch_size
from .fit_fours import ask_for, fit_fours


@triton.jit
def fit_of(fit, i_head, WRITER: tl.constexpr):
    """Of one head."""
    DIM: tl.constexpr = WRITER.how.dim
    if WRITER.fours:
        return fit[0] + i_head * (2 * DIM * DIM), fit[1] + i_head * DIM, fit[2]
    else:
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
def round_vectors(i_first, of_head, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE: tl.constexpr,
                  WRITER: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    if WRITER.fours:
        fit_fours(i_first, of_head, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE, WRITER, TOGETHER)
    else:
        fit_vectors(i_first, of_head, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE, WRITER, TOGETHER)


@triton.jit
def append_fitted(side, fit, p_scratch, data, page_bytes, pool, blocks, BYTES: tl.constexpr, DTYPE: tl.constexpr,
                  WRITER: tl.constexpr, HEADS: tl.constexpr, COUNTED: tl.constexpr, RING: tl.constexpr,
                  SEQS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """kernels.append_blocks for a fitted side."""
    x, stride, change, matrix, levels, bounds, _, _ = side
    SIDE: tl.constexpr = WRITER.how
    known = no_sequence()
    refused = tl.full([], False, tl.int1)
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        of_head = fit
        if not WRITER.equal:
            of_head = fit_of(fit, i_block % HEADS, WRITER)
            if WRITER.fours:
                ask_for(of_head, WRITER, TOGETHER)
        known, no = enter_sequence(pool, i_block, known, HEADS, True, COUNTED, RING, SEQS, VECTORS)
        refused = refused | no
        p_row, i_head, m_row = vectors_of(x, stride, pool, i_block, known, HEADS, RING)
        find_aims(p_row, stride[2], change, i_head * SIDE.dim, m_row, matrix, of_head, p_scratch, WRITER)
        for i_group in range(groups_of(m_row, TOGETHER)):
            i_first = i_group * TOGETHER
            p_data, p_scale, m_vector = places_of(
                side, data, page_bytes, pool, i_block, known, i_first, BYTES, DTYPE, HEADS, RING, TOGETHER
            )
            round_vectors(
                i_first, of_head, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE, WRITER, TOGETHER
            )
    return refused


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
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * scratch_size(
        SIDE.dim, TOGETHER, len(WRITER.scales), WRITER.fours
    )
    blocks = (tokens + (VECTORS - 1)) // VECTORS * HEADS
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        i_head, i_token = i_block % HEADS, i_block // HEADS * VECTORS
        o_token = i_token + tl.arange(0, VECTORS)
        m_row = o_token < tokens
        p_row = x + o_token.to(tl.int64) * stride_token + i_head * stride_head
        of_head = fit_of((fit, near, cells), i_head, WRITER)
        o_head = i_head * SIDE.dim + 0 * o_token
        find_aims(p_row, stride_dim, (None, offset), o_head, m_row, matrix, of_head, p_scratch, WRITER)
        for i_group in range(groups_of(m_row, TOGETHER)):
            i_first = i_group * TOGETHER
            o_row = i_token + i_first + tl.arange(0, TOGETHER)
            o_vector = o_row.to(tl.int64) * HEADS + i_head
            p_data, p_scale, m_vector = data + o_vector * row_bytes, scale + o_vector, o_row < tokens
            round_vectors(
                i_first, of_head, levels, bounds, p_scratch, p_data, p_scale, m_vector, DTYPE, WRITER, TOGETHER
            )

"""Unpack: tokens of sequences, from pages of codes to vectors in a row, as the model made them.

In:  pages, table; begins [n] the first position of each sequence that is wanted, starts [n + 1] where its vectors go.
Out: keys, values [room, HEADS, dim] in their dtype. Keys are divided by key_scale and have key_offset if that is given.
     Attention kernels multiply values behind a sequence by 0, so values are always finite: where one is damaged, the
     key of its token is NaN instead, and behind the last sequence come zeros. Nothing is written behind the room.
Program (tile of TOKENS tokens of a sequence, part of the heads); tiles that are left write the zeros.
Constexprs: K, V (specialise.Side, levels in float16); K_BACK, V_BACK (factor after the rotation back, coordinates
     rotated at a time); SEQS a power of two ≥ the number of sequences.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import cast, load_levels
from ..common.slots import page_bases
from ..portable.kernel import load_vectors

VARYING = ["seqs", "pages", "width", "page_size", "room", "heads_each", "first_seq"]


@triton.jit
def find_tile(starts, i_tile, seqs, TOKENS: tl.constexpr, SEQS: tl.constexpr):
    """The sequence of a tile, the tile's first token inside that, where the sequence's first and last + 1 go, and
    whether the tile is behind all sequences: then the first row there is."""
    o_seq = tl.arange(0, SEQS)
    m_seq = o_seq < seqs
    b_from = tl.load(starts + o_seq, mask=m_seq, other=0)
    b_to = tl.load(starts + o_seq + 1, mask=m_seq, other=0)
    b_tiles = (tl.maximum(b_to - b_from, 0) + (TOKENS - 1)) // TOKENS
    m_before = tl.cumsum(b_tiles, 0) <= i_tile
    i_seq = tl.sum(m_before.to(tl.int32), 0)
    i_first = (i_tile - tl.sum(tl.where(m_before, b_tiles, 0), 0)) * TOKENS
    i_from = tl.sum(tl.where(o_seq == i_seq, b_from, 0), 0)
    i_to = tl.sum(tl.where(o_seq == i_seq, b_to, 0), 0)
    behind = i_seq >= seqs
    i_from = tl.where(behind, tl.max(b_to, 0), i_from)
    return tl.minimum(i_seq, seqs - 1), i_first, i_from, i_to, behind


@triton.jit
def whole_matrix(p_matrix, SIDE: tl.constexpr, BACK: tl.constexpr):
    """The matrix that rotates back, where it is used as a whole."""
    if SIDE.bits == 16 or BACK[1] < SIDE.dim:
        return tl.full([1, 1], 0.0, tl.float16)
    else:
        o_column, o_coordinate = tl.arange(0, SIDE.columns), tl.arange(0, SIDE.dim)
        return tl.load(p_matrix + o_column[:, None] * SIDE.dim + o_coordinate[None, :])


@triton.jit
def load_side(p_piece, codes, scales, i_row, m_row, levels, SIDE: tl.constexpr):
    """Levels or 16-bit vectors of rows of pieces, their scales, and which rows are damaged."""
    p_row = p_piece + codes + i_row * SIDE.bytes
    if SIDE.bits == 16:
        y = load_vectors(p_row.to(tl.pointer_type(SIDE.dtype), bitcast=True), 1, m_row, SIDE)
        bad = tl.max((~(tl.abs(y) < float("inf"))).to(tl.int32), 1) > 0
        return y, tl.full([p_row.shape[0]], 1.0, tl.float32), bad
    else:
        p_scale = (p_piece + scales).to(tl.pointer_type(SIDE.dtype), bitcast=True) + i_row
        b_scale = tl.load(p_scale, mask=m_row, other=0).to(tl.float32)
        return load_levels(p_row, m_row, levels, SIDE), b_scale, ~(tl.abs(b_scale) < float("inf"))


@triton.jit
def store_side(p_out, m_row, y, b_factor, p_matrix, b_matrix, p_divisor, p_offset, SIDE: tl.constexpr,
               BACK: tl.constexpr, FINITE: tl.constexpr):  # fmt: skip
    """Rᵀ y · b_factor, plus the offset, over the divisor, to p_out [rows]."""
    DIM: tl.constexpr = SIDE.dim
    STEP: tl.constexpr = SIDE.columns if SIDE.bits == 16 else BACK[1]
    for c in tl.static_range(0, DIM, STEP):
        o = c + tl.arange(0, STEP)
        m_column = o < SIDE.dim
        if SIDE.bits == 16:
            part = y
        elif BACK[1] == SIDE.dim:
            part = tl.dot(y, b_matrix)
        else:
            o_column = tl.arange(0, SIDE.columns)
            part = tl.dot(y, tl.load(p_matrix + o_column[:, None] * SIDE.dim + o[None, :]))
        part = part * (b_factor * BACK[0])[:, None]
        if p_offset is not None:
            part += tl.load(p_offset + o, mask=m_column, other=0)[None, :]
        if p_divisor is not None:
            part *= (1.0 / tl.load(p_divisor + o, mask=m_column, other=1))[None, :]
        if FINITE and p_out.dtype.element_ty == tl.float16:
            part = tl.clamp(part, -65504.0, 65504.0)
        m = m_row[:, None] & m_column[None, :]
        tl.store(p_out[:, None] + o[None, :], cast(part, p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARYING)
def unpack_kernel(
    data,
    table,
    begins,
    starts,
    keys,
    values,
    key_scale,
    key_offset,
    value_offset,
    key_matrix,
    value_matrix,
    key_levels,
    value_levels,
    first_seq,
    seqs,
    pages,
    width,
    page_size,
    room,
    heads_each,
    page_bytes,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BACK: tl.constexpr,
    V_BACK: tl.constexpr,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Row i of begins and starts belongs to sequence first_seq + i of the table."""
    i_seq, i_first, i_from, i_to, behind = find_tile(starts, tl.program_id(0), seqs, TOKENS, SEQS)
    o_token = i_first + tl.arange(0, TOKENS)
    o_out = i_from + o_token
    m_row = (o_out < room) & ((o_out < i_to) | behind)
    first_head = tl.program_id(1) * heads_each
    last_head = tl.minimum(first_head + heads_each, HEADS)
    if behind:
        COLUMNS: tl.constexpr = V.columns
        o_column = tl.arange(0, COLUMNS)
        zeros = tl.zeros([TOKENS, COLUMNS], values.dtype.element_ty)
        m = m_row[:, None] & (o_column < V.dim)[None, :]
        for i_head in range(first_head, last_head):
            p_out = values + (o_out.to(tl.int64) * HEADS + i_head) * V.dim
            tl.store(p_out[:, None] + o_column[None, :], zeros, mask=m)
    else:
        position = tl.load(begins + i_seq) + o_token
        base = page_bases(table, first_seq + i_seq, position // page_size, m_row, pages, width, 0, False)
        i_row = (position % page_size).to(tl.int64)
        b_key_matrix, b_value_matrix = whole_matrix(key_matrix, K, K_BACK), whole_matrix(value_matrix, V, V_BACK)
        for i_head in range(first_head, last_head):
            p_piece = data + (base * HEADS + i_head) * page_bytes
            y, b_scale, bad = load_side(p_piece, value_codes, value_scales, i_row, m_row, value_levels, V)
            p_offset = None
            if value_offset is not None:
                p_offset = value_offset + i_head * V.dim
            if V.bits == 16:
                y = tl.where(bad[:, None], 0.0, y)
            p_out = values + (o_out.to(tl.int64) * HEADS + i_head) * V.dim
            b_factor = tl.where(bad, 0.0, b_scale)
            store_side(p_out, m_row, y, b_factor, value_matrix, b_value_matrix, None, p_offset, V, V_BACK, True)
            y, b_scale, bad_key = load_side(p_piece, key_codes, key_scales, i_row, m_row, key_levels, K)
            p_divisor, p_offset = None, None
            if key_scale is not None:
                p_divisor = key_scale + i_head * K.dim
            if key_offset is not None:
                p_offset = key_offset + i_head * K.dim
            p_out = keys + (o_out.to(tl.int64) * HEADS + i_head) * K.dim
            b_factor = tl.where(bad | bad_key, float("nan"), b_scale)  # an infinite key damages, it is not a mask
            store_side(p_out, m_row, y, b_factor, key_matrix, b_key_matrix, p_divisor, p_offset, K, K_BACK, False)

"""Decode, scores and values: operations on encoded vectors outside pages, all in float32 accuracy.

Encoded vectors are data [n, heads, row bytes] and scale [n, heads], contiguous; at 16 bits the vectors themselves.
Constexprs: K, V (specialise.Side, float32); HEADS, G as in portable/kernel.py; ROWS, KEYS the tile.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import cast, coordinates, load_levels
from ..common.queries import prepare_rows
from ..common.results import unrotate_store
from ..portable.kernel import load_vectors


@triton.jit
def load_encoded(data, scale, o_vector, m_vector, levels, SIDE: tl.constexpr):
    """Levels or 16-bit vectors [n, columns] and scales [n] of vectors o_vector [n]."""
    p_row = data + o_vector.to(tl.int64) * SIDE.bytes
    if SIDE.bits == 16:
        tile = load_vectors(p_row.to(tl.pointer_type(SIDE.dtype), bitcast=True), 1, m_vector, SIDE)
        b_scale = tl.full([o_vector.shape[0]], 1.0, tl.float32)
    else:
        tile = load_levels(p_row, m_vector, levels, SIDE)
        b_scale = tl.load(scale + o_vector, mask=m_vector, other=0).to(tl.float32)
    return tile, b_scale


@triton.jit(do_not_specialize=["n"])
def decode_kernel(
    data,
    scale,
    offset,
    matrix,
    levels,
    out,
    n,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """n vectors into out [n, dim]; with ROTATED the offset is a rotated one."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < n
    y, b_scale = load_encoded(data, scale, o_row, m_row, levels, V)
    y = y * b_scale[:, None]
    p_out = out + o_row.to(tl.int64) * V.dim
    p_offset = None
    if offset is not None:
        p_offset = offset + (o_row % HEADS) * V.dim
    if ROTATED:
        COLUMNS: tl.constexpr = V.columns
        BITS: tl.constexpr = V.bits
        o_coordinate = coordinates(COLUMNS, BITS)
        m = m_row[:, None] & (o_coordinate < V.dim)[None, :]
        if offset is not None:
            y += tl.load(p_offset[:, None] + o_coordinate[None, :], mask=m, other=0)
        tl.store(p_out[:, None] + o_coordinate[None, :], cast(y, out.dtype.element_ty), mask=m)
    else:
        one = tl.full([ROWS], 1.0, tl.float32)
        unrotate_store(p_out, m_row, y, one, matrix, p_offset, one, UNIT, V, CHUNK)


@triton.jit(do_not_specialize=["rows", "n"])
def scores_kernel(
    q,
    q_token,
    q_head,
    q_dim,
    offset,
    matrix,
    data,
    scale,
    levels,
    out,
    rows,
    n,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """out [tokens, heads, n] of rows = tokens·G queries of each KV head; program (keys, kv head, rows)."""
    i_head = tl.program_id(1)
    o_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    i_token, head = (o_row // G).to(tl.int64), i_head * G + o_row % G
    p_offset = None
    if offset is not None:
        p_offset = offset + i_head * K.dim
    p_row = q + i_token * q_token + head * q_head
    b_q, _, factor, bias = prepare_rows(p_row, q_dim, p_offset, m_row, matrix, 1.0, K, ROTATE)
    o_key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    m_key = o_key < n
    b_k, b_scale = load_encoded(data, scale, o_key * HEADS + i_head, m_key, levels, K)
    s = tl.dot(b_q, tl.trans(b_k), input_precision=K.precision)
    if K.bits != 16:
        s = s * b_scale[None, :] * factor[:, None] + bias[:, None]
    p_out = out + (i_token * (HEADS * G) + head)[:, None] * n + o_key[None, :]
    tl.store(p_out, cast(s, out.dtype.element_ty), mask=m_row[:, None] & m_key[None, :])


@triton.jit(do_not_specialize=["rows", "n"])
def values_kernel(
    weights,
    w_token,
    w_head,
    w_key,
    offset,
    matrix,
    data,
    scale,
    levels,
    out,
    rows,
    n,
    threshold,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """out [tokens, heads, dim] of weights [tokens, heads, n]; program (rows, kv head). SPARSE: there is a threshold,
    and what lies below it in all rows is not decoded."""
    i_head = tl.program_id(1)
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    i_token, head = (o_row // G).to(tl.int64), i_head * G + o_row % G
    p_row = weights + i_token * w_token + head * w_head
    COLUMNS: tl.constexpr = V.columns
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    damaged = tl.zeros([ROWS], tl.int32)
    for i in range(0, n, KEYS):
        o_key = i + tl.arange(0, KEYS)
        m_key = o_key < n
        seen = m_row[:, None] & m_key[None, :]
        w = tl.load(p_row[:, None] + o_key[None, :].to(tl.int64) * w_key, mask=seen, other=0).to(tl.float32)
        seen = seen & ~(w < threshold)
        w = tl.where(seen, w, 0.0)
        total += tl.sum(w, 1)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0) if SPARSE else 1
        if some > 0:
            b_v, b_scale = load_encoded(data, scale, o_key * HEADS + i_head, m_key, levels, V)
            b_v = b_v.to(tl.float32)
            bad = ~(tl.abs(b_scale) < float("inf"))
            if V.bits == 16:
                bad = tl.max((~(tl.abs(b_v) < float("inf"))).to(tl.int32), 1) > 0
                b_v = tl.where(bad[:, None], 0.0, b_v)
            damaged = tl.maximum(damaged, tl.max((seen & bad[None, :]).to(tl.int32), 1))
            w = tl.where(seen & ~bad[None, :], w * b_scale[None, :], 0.0)
            acc = tl.dot(w, b_v, acc, input_precision="tf32x3")
    acc = tl.where((damaged > 0)[:, None], float("nan"), acc)
    p_offset = None
    if offset is not None:
        p_offset = offset + (head // G) * V.dim
    one = tl.full([ROWS], 1.0, tl.float32)
    p_out = out + (i_token * (HEADS * G) + head) * V.dim
    unrotate_store(p_out, m_row, acc, one, matrix, p_offset, total, UNIT, V, CHUNK)

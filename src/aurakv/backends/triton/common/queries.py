"""Preparing queries: rotate, and split into two float16 parts where keys are multiplied in float16.

In: q [tokens, heads, dim] of any strides. Out: `rotated` [tokens·heads, 2, columns] in the type of products, `factors`
[tokens·heads, 2] float32. Constexprs: K (tables.Side), ROTATE (tables.Encoder of the keys), G heads per KV head, ROWS.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..append.encode import load_vectors, rotate, whole_matrix

LARGEST = tl.constexpr(32500.0)  # of a query as integers: both int8 parts stay in range


@triton.jit
def offset_scores(p_row, stride, p_offset, m_row, ROTATE: tl.constexpr):
    """Products of queries at p_row [rows] with an offset."""
    o_chunk = tl.arange(0, ROTATE.chunk)
    scores = tl.zeros([p_row.shape[0]], tl.float32)
    for c in range(0, ROTATE.dim, ROTATE.chunk):
        x = load_vectors(p_row, stride, c, m_row, ROTATE)
        scores += tl.sum(x.to(tl.float32) * tl.load(p_offset + c + o_chunk)[None, :], 1)
    return scores


@triton.jit
def prepare_rows(p_row, stride, p_offset, m_row, p_matrix, multiplier, K: tl.constexpr, ROTATE: tl.constexpr):
    """Queries as rows [rows, columns] of a product with key tiles, and in float16 what these rows leave out; what the
    products are to be multiplied by; what is then to be added."""
    factor = tl.full([p_row.shape[0]], 0.0, tl.float32) + multiplier
    bias = tl.zeros([p_row.shape[0]], tl.float32)
    if K.bits == 16:
        o_coordinate = tl.arange(0, K.columns)
        m = m_row[:, None] & (o_coordinate < K.dim)[None, :]
        x = tl.load(p_row[:, None] + o_coordinate[None, :] * stride, mask=m, other=0)
        return x.to(K.operand), x.to(K.operand), factor, bias
    else:
        y = rotate(p_row, stride, (None, None), None, m_row, p_matrix, whole_matrix(p_matrix, ROTATE), ROTATE)
        factor *= ROTATE.post
        if p_offset is not None:
            bias = offset_scores(p_row, stride, p_offset, m_row, ROTATE) * multiplier
        if K.operand == tl.float16:  # whatever its size, a query keeps float16's precision; factors are positive
            peak = tl.max(tl.abs(y), 1)
            peak = tl.where(peak > 0, peak, 1.0)
            y = y * (tl.where(factor < 0, -1.0, 1.0) / peak)[:, None]
            rough = y.to(tl.float16)
            factor = tl.abs(factor) * peak * (1.0 / K.unit)
            return rough, (y - rough.to(tl.float32)).to(tl.float16), factor, bias
        else:
            return y, y, factor, bias


@triton.jit(do_not_specialize=["n"])
def prepare_kernel(
    q,
    q_token,
    q_head,
    q_dim,
    offset,
    matrix,
    rotated,
    factors,
    n,
    multiplier,
    heads,
    G: tl.constexpr,
    K: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """n = tokens·heads queries of which program (kv head, block) prepares some; `factors` are (factor, bias)."""
    i_head = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # token·G + head of the group
    i_token = (o_row // G).to(tl.int64)
    head = i_head * G + o_row % G
    o_out = i_token * heads + head
    m_row = o_out < n
    p_offset = None
    if offset is not None:
        p_offset = offset + i_head * K.dim
    p_row = q + i_token * q_token + head * q_head
    y, rest, factor, bias = prepare_rows(p_row, q_dim, p_offset, m_row, matrix, multiplier, K, ROTATE)
    p_rotated = rotated + o_out[:, None] * (2 * K.columns) + tl.arange(0, K.columns)[None, :]
    tl.store(p_rotated, y, mask=m_row[:, None])
    if K.operand == tl.float16:
        tl.store(p_rotated + K.columns, rest, mask=m_row[:, None])
    tl.store(factors + o_out * 2, factor, mask=m_row)
    tl.store(factors + o_out * 2 + 1, bias, mask=m_row)


@triton.jit(do_not_specialize=["n"])
def prepare_integers_kernel(
    q,
    q_token,
    q_head,
    q_dim,
    offset,
    matrix,
    parts,
    factors,
    n,
    multiplier,
    step,
    heads,
    G: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Like prepare_kernel for keys whose levels are integers times a step, with queries as 16-bit integers in two int8
    parts [tokens·heads, 2, dim]; the matrix has natural columns, as many as coordinates."""
    i_head = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i_token = (o_row // G).to(tl.int64)
    head = i_head * G + o_row % G
    o_out = i_token * heads + head
    m_row = o_out < n
    p_row = q + i_token * q_token + head * q_head
    y = rotate(p_row, q_dim, (None, None), None, m_row, matrix, whole_matrix(matrix, ROTATE), ROTATE)
    bias = tl.zeros([ROWS], tl.float32)
    if offset is not None:
        bias = offset_scores(p_row, q_dim, offset + i_head * ROTATE.dim, m_row, ROTATE) * multiplier
    top = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # order of bits is order of sizes, NaN above all
    peak = tl.maximum(top.to(tl.float32, bitcast=True), 1e-30)
    factor = multiplier * step * ROTATE.post
    number = tl.extra.cuda.libdevice.rint(y * (tl.where(factor < 0, -LARGEST, LARGEST) / peak)[:, None]).to(tl.int32)
    factor = tl.maximum(tl.abs(factor) * (peak / LARGEST), 1e-37)
    factor = tl.where(top < 0x7F800000, factor, float("nan"))
    high = (number + 128) >> 8
    COLUMNS: tl.constexpr = ROTATE.columns
    p_parts = parts + o_out[:, None] * (2 * ROTATE.dim) + tl.arange(0, COLUMNS)[None, :]
    tl.store(p_parts, high.to(tl.int8), mask=m_row[:, None])
    tl.store(p_parts + ROTATE.dim, (number - high * 256).to(tl.int8), mask=m_row[:, None])
    tl.store(factors + o_out * 2, factor, mask=m_row)
    tl.store(factors + o_out * 2 + 1, bias, mask=m_row)

"""Attention of ragged queries over paged codes, or over dense vectors.

Rows of a program are (token, head of the group) pairs of one sequence and KV head, so stored vectors are decoded once
for all of them. Program (block, kv head, split) reads its share of the key tiles that its rows can see: first tiles
that all rows see whole, then those at the edges of masks.
In: q as given (FUSED: prepared here) or prepared by queries.prepare_kernel; pages as in Pages, or dense k, v [tokens,
kv_heads, dim]. Out: final results (FINAL), or `means` and `sums` for results.finish_kernel.
Constexprs: K, V (tables.Side); ROTATE (tables.Encoder of the keys); G heads per KV head; ROWS, KEYS the tile; PLACE
where keys lie: 0 one page per sequence, 1 a tile within a page, 2 anywhere in pages, 3 dense; PAGE tokens a page.
The launcher guarantees: one program per block of slots.find_block; PAGE % KEYS == 0 for PLACE 1; FINAL without splits.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .codes import load_level_pairs, load_levels
from .masks import key_spans, visible, whole_tiles
from .queries import prepare_rows
from .results import LN2, LOG2E, add_sink, unrotate_store
from .slots import find_block, page_bases

HEADROOM = tl.constexpr(16384.0)  # what weights times value scales are at most in float16
# These vary from call to call: no kernel of its own when one of them is 1 or a multiple of 16.
VARYING = ["tokens", "seqs", "key_tokens", "pages", "width", "capacity", "pinned", "window", "sinks", "first", "recent"]


@triton.jit
def tanh(x):
    """Accurate to float32 rounding, relative to its value."""
    x2 = x * x
    near = -5.70498872745e-3 * x2 + 2.06390887954e-2
    near = near * x2 - 5.37397155531e-2
    near = near * x2 + 1.33314422036e-1
    near = near * x2 - 3.33332819422e-1
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * x2 * near, tl.where(x < 0, -far, far))


@triton.jit
def load_raw(p_row, stride, m_row, SIDE: tl.constexpr):
    """Raw vectors at p_row [rows] as a tile [rows, columns]."""
    o_coordinate = tl.arange(0, SIDE.columns)
    m = m_row[:, None] & (o_coordinate < SIDE.dim)[None, :]
    return tl.load(p_row[:, None] + o_coordinate[None, :] * stride, mask=m, other=0).to(SIDE.operand)


@triton.jit
def load_tile(p_piece, codes, i_row, m_row, p_levels, BYTES: tl.constexpr, DTYPE: tl.constexpr, SIDE: tl.constexpr):
    """Rows i_row of pages' pieces whose codes begin at byte `codes`: levels or raw vectors [rows, columns]."""
    p_row = p_piece + codes + i_row * BYTES
    if SIDE.bits == 16:
        return load_raw(p_row.to(tl.pointer_type(DTYPE), bitcast=True), 1, m_row, SIDE)
    else:
        return load_levels(p_row, m_row, p_levels, SIDE)


@triton.jit
def load_scales(p_piece, scales, i_row, m_row, DTYPE: tl.constexpr):
    """Scales of rows i_row, which begin at byte `scales`; NaN where not finite."""
    p_scale = (p_piece + scales).to(tl.pointer_type(DTYPE), bitcast=True) + i_row
    scale = tl.load(p_scale, mask=m_row, other=0).to(tl.float32)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def place_keys(
    data,
    table,
    i_seq,
    i_head,
    t,
    o_key,
    m_key,
    shift,
    p_piece,
    pages,
    width,
    pinned,
    page_bytes,
    kv_heads,
    PLACE: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Rows of keys o_key = t … t + KEYS − 1 inside the pages' pieces that begin at the second result; or their rows in
    dense tensors."""
    if PLACE == 3:
        return (o_key + shift).to(tl.int64), p_piece
    elif PLACE == 0:
        return o_key.to(tl.int64), p_piece
    elif PLACE == 1:
        i_page = page_bases(table, i_seq, t // PAGE, True, pages, width, pinned, RING)
        return (t % PAGE + tl.arange(0, KEYS)).to(tl.int64), data + (i_page * kv_heads + i_head) * page_bytes
    else:
        i_pages = page_bases(table, i_seq, o_key // PAGE, m_key, pages, width, pinned, RING)
        return (o_key % PAGE).to(tl.int64), data + (i_pages * kv_heads + i_head) * page_bytes


@triton.jit
def attend_tile(
    b_q,
    b_rest,
    factor,
    bias,
    b_query,
    o_key,
    m_key,
    i_key,
    p_pieces,
    k,
    k_token,
    k_head,
    k_dim,
    v,
    v_token,
    v_head,
    v_dim,
    i_head,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    key_levels,
    value_levels,
    window,
    sinks,
    softcap,
    first,
    recent,
    threshold,
    top,
    total,
    acc,
    value_unit,
    damaged,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    PLACE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys added to the running results; not MASKED: every row sees every key."""
    FAST_KEYS: tl.constexpr = K.bits != 16 and K.operand == tl.float16
    FAST_VALUES: tl.constexpr = V.bits != 16 and V.operand == tl.float16
    LINEAR: tl.constexpr = FAST_KEYS and not CAP  # scores stay proportional to products
    if PLACE == 3:
        b_k = load_raw(k + i_key * k_token + i_head * k_head, k_dim, m_key, K)
    elif K.pairs:
        b_k, b_small = load_level_pairs(p_pieces + key_codes + i_key * K_BYTES, m_key, key_levels, K)
    else:
        b_k = load_tile(p_pieces, key_codes, i_key, m_key, key_levels, K_BYTES, K_DTYPE, K)
    if FAST_KEYS:
        s = tl.dot(b_rest, tl.trans(b_k))
        if K.pairs:
            s = tl.dot(b_q, tl.trans(b_small), s)
        s = tl.dot(b_q, tl.trans(b_k), s)
    else:
        s = tl.dot(b_q, tl.trans(b_k), input_precision=K.precision)
    if K.bits != 16:
        s = s * load_scales(p_pieces, key_scales, i_key, m_key, K_DTYPE)[None, :]
    if not LINEAR:
        s = s * factor[:, None] + bias[:, None]
        s = tl.where(tl.abs(s) < float("inf"), s, float("nan"))  # an infinite key damages, it is not a mask
    if CAP:
        s = softcap * tanh(s / softcap) * LOG2E
    if MASKED:
        seen = visible(b_query, o_key, window, sinks, first, recent, CAUSAL, WINDOW, EXACT) & m_key[None, :]
        s = tl.where(seen, s, float("-inf"))

    peak = tl.max(s, 1)
    if LINEAR:
        peak = tl.where(peak == float("-inf"), peak, peak * factor)
    new_top = tl.maximum(top, peak)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - base)
    if LINEAR:
        p = tl.exp2(s * factor[:, None] - base[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)  # −inf · 0
    else:
        p = tl.exp2(s - base[:, None])
    total = total * decay + tl.sum(p, 1)

    needed = True
    if SPARSE:  # a weight only shrinks from here on; NaN counts
        needed = tl.max((~(p < threshold * total[:, None])).to(tl.int32)) > 0
    if needed:
        if PLACE == 3:
            b_v = load_raw(v + i_key * v_token + i_head * v_head, v_dim, m_key, V)
        else:
            b_v = load_tile(p_pieces, value_codes, i_key, m_key, value_levels, V_BYTES, V_DTYPE, V)
        if V.bits == 16:
            bad = tl.max((~(tl.abs(b_v.to(tl.float32)) < float("inf"))).to(tl.int32), 1)
            b_v = tl.where((bad > 0)[:, None], 0.0, b_v).to(V.operand)
            if MASKED:
                damaged = tl.maximum(damaged, tl.max(tl.where(seen, bad[None, :], 0), 1))
            else:
                damaged = tl.maximum(damaged, tl.max(bad, 0))
        else:
            scale = load_scales(p_pieces, value_scales, i_key, m_key, V_DTYPE)
            if FAST_VALUES:  # in float16, stay below its limit and far from 0
                new_unit = tl.maximum(value_unit, tl.max(tl.where(scale == scale, tl.abs(scale), 0.0), 0))
                decay = decay * (value_unit / new_unit)
                value_unit = new_unit
                scale = scale * (HEADROOM / new_unit)
            p = p * scale[None, :]
            if MASKED:
                p = tl.where(seen, p, 0.0)  # a scale may be NaN
        acc = tl.dot(p.to(V.operand), b_v, acc * decay[:, None], input_precision=V.precision)
    else:
        acc = acc * decay[:, None]
    return new_top, total, acc, value_unit, damaged


@triton.jit(do_not_specialize=[*VARYING, "splits", "least"])
def attend_kernel(
    q,
    q_token,
    q_head,
    q_dim,
    rotated,
    factors,
    multiplier,
    key_offset,
    value_offset,
    key_matrix,
    value_matrix,
    key_levels,
    value_levels,
    data,
    table,
    lengths,
    k,
    k_token,
    k_head,
    k_dim,
    v,
    v_token,
    v_head,
    v_dim,
    key_starts,
    key_tokens,
    starts,
    ends,
    tokens,
    seqs,
    pages,
    width,
    capacity,
    pinned,
    page_bytes,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    window,
    sinks,
    softcap,
    first,
    recent,
    threshold,
    sink_logits,
    out,
    lse,
    means,
    sums,
    splits,
    least,
    kv_heads,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROTATE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    PLACE: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    SEQS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
    CAP: tl.constexpr,
    SPARSE: tl.constexpr,
    FUSED: tl.constexpr,
    FINAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    i_seq, i_first, i_from, i_to = find_block(starts, tokens, seqs, tl.program_id(0), G, ROWS, SEQS)
    rows = (i_to - i_from) * G
    if i_first >= rows:
        return
    o_row = i_first + tl.arange(0, ROWS)
    m_row = o_row < rows
    i_token = (i_from + o_row // G).to(tl.int64)
    head = i_head * G + o_row % G
    o_out = i_token * (kv_heads * G) + head

    end = tl.load(ends + i_seq)
    b_query = end - i_to + i_from + o_row // G
    lowest = end - i_to + i_from + i_first // G
    highest = end - i_to + i_from + (tl.minimum(i_first + ROWS, rows) - 1) // G
    p_piece = data
    if PLACE == 3:
        first_key = tl.minimum(tl.maximum(tl.load(key_starts + i_seq), 0), key_tokens)
        last_key = tl.minimum(tl.maximum(tl.load(key_starts + i_seq + 1), first_key), key_tokens)
        low = end - (last_key - first_key)
        length = end
    else:
        low = tl.full([], 0, tl.int32)
        length = tl.load(lengths + i_seq)
        if not RING:
            length = tl.minimum(length, capacity)
        first_key = low
        if PLACE == 0:
            i_page = page_bases(table, i_seq, 0, length > 0, pages, width, pinned, RING)
            p_piece = data + (i_page * kv_heads + i_head) * page_bytes

    a_start, a_stop, b_start, b_stop = key_spans(
        lowest, highest, low, length, window, sinks, first, recent, CAUSAL, WINDOW, EXACT
    )
    a_base = a_start
    b_base = b_start
    if PLACE != 3:  # tiles begin at multiples of their size: inside one page
        a_base = a_start // KEYS * KEYS
        b_base = b_start // KEYS * KEYS
    a_tiles = tl.where(a_stop > a_start, tl.cdiv(a_stop - a_base, KEYS), 0)
    tiles = a_tiles + tl.where(b_stop > b_start, tl.cdiv(b_stop - b_base, KEYS), 0)
    share = tl.maximum(tl.cdiv(tiles, splits), least)
    i_tile = tl.minimum(i_split * share, tiles)
    last_tile = tl.minimum(i_tile + share, tiles)

    if FUSED:
        p_offset = None
        if key_offset is not None:
            p_offset = key_offset + i_head * K.dim
        p_row = q + i_token * q_token + head * q_head
        b_q, b_rest, factor, bias = prepare_rows(p_row, q_dim, p_offset, m_row, key_matrix, multiplier, K, ROTATE)
    else:
        p_rotated = rotated + o_out[:, None] * (2 * K.columns) + tl.arange(0, K.columns)[None, :]
        b_q = tl.load(p_rotated, mask=m_row[:, None], other=0)
        b_rest = b_q
        if K.operand == tl.float16:
            b_rest = tl.load(p_rotated + K.columns, mask=m_row[:, None], other=0)
        factor = tl.load(factors + o_out * 2, mask=m_row, other=0)
        bias = tl.load(factors + o_out * 2 + 1, mask=m_row, other=0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    COLUMNS: tl.constexpr = V.columns
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    damaged = tl.zeros([ROWS], tl.int32)
    value_unit = tl.full([], 1e-30, tl.float32)  # largest value scale so far
    whole, edge = whole_tiles(b_base, b_start, b_stop, lowest, highest, window, recent, CAUSAL, WINDOW, EXACT, KEYS)
    whole = tl.minimum(tl.maximum(a_tiles + whole, i_tile), last_tile)
    edge = tl.minimum(tl.maximum(a_tiles + edge, whole), last_tile)
    for i in tl.range(whole, edge, num_stages=STAGES):
        t = b_base + (i - a_tiles) * KEYS
        o_key = t + tl.arange(0, KEYS)
        m_key = tl.full([KEYS], True, tl.int1)
        i_key, p_pieces = place_keys(
            data,
            table,
            i_seq,
            i_head,
            t,
            o_key,
            m_key,
            first_key - low,
            p_piece,
            pages,
            width,
            pinned,
            page_bytes,
            kv_heads,
            PLACE,
            PAGE,
            RING,
            KEYS,
        )
        top, total, acc, value_unit, damaged = attend_tile(
            b_q,
            b_rest,
            factor,
            bias,
            b_query,
            o_key,
            m_key,
            i_key,
            p_pieces,
            k,
            k_token,
            k_head,
            k_dim,
            v,
            v_token,
            v_head,
            v_dim,
            i_head,
            key_codes,
            key_scales,
            value_codes,
            value_scales,
            key_levels,
            value_levels,
            window,
            sinks,
            softcap,
            first,
            recent,
            threshold,
            top,
            total,
            acc,
            value_unit,
            damaged,
            K,
            V,
            K_BYTES,
            V_BYTES,
            K_DTYPE,
            V_DTYPE,
            PLACE,
            CAUSAL,
            WINDOW,
            EXACT,
            CAP,
            SPARSE,
            False,
        )
    for j in tl.range(0, (whole - i_tile) + (last_tile - edge), num_stages=1):
        i = tl.where(j < whole - i_tile, i_tile + j, edge + j - (whole - i_tile))
        in_a = i < a_tiles
        t = tl.where(in_a, a_base + i * KEYS, b_base + (i - a_tiles) * KEYS)
        o_key = t + tl.arange(0, KEYS)
        m_key = (o_key >= tl.where(in_a, a_start, b_start)) & (o_key < tl.where(in_a, a_stop, b_stop))
        i_key, p_pieces = place_keys(
            data,
            table,
            i_seq,
            i_head,
            t,
            o_key,
            m_key,
            first_key - low,
            p_piece,
            pages,
            width,
            pinned,
            page_bytes,
            kv_heads,
            PLACE,
            PAGE,
            RING,
            KEYS,
        )
        top, total, acc, value_unit, damaged = attend_tile(
            b_q,
            b_rest,
            factor,
            bias,
            b_query,
            o_key,
            m_key,
            i_key,
            p_pieces,
            k,
            k_token,
            k_head,
            k_dim,
            v,
            v_token,
            v_head,
            v_dim,
            i_head,
            key_codes,
            key_scales,
            value_codes,
            value_scales,
            key_levels,
            value_levels,
            window,
            sinks,
            softcap,
            first,
            recent,
            threshold,
            top,
            total,
            acc,
            value_unit,
            damaged,
            K,
            V,
            K_BYTES,
            V_BYTES,
            K_DTYPE,
            V_DTYPE,
            PLACE,
            CAUSAL,
            WINDOW,
            EXACT,
            CAP,
            SPARSE,
            True,
        )

    if K.bits != 16 and K.operand == tl.float16 and not CAP:
        top += bias
    mean = acc * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    if V.bits != 16 and V.operand == tl.float16:
        mean = mean * (value_unit * (1.0 / HEADROOM))
    if V.bits == 16:
        mean = tl.where((damaged > 0)[:, None], float("nan"), mean)
    if FINAL:
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.where(total == 0, 0.0, 1.0)
        if sink_logits is not None:
            base, total, weight = add_sink(top, total, tl.load(sink_logits + head, mask=m_row, other=0))
        p_offset = None
        if value_offset is not None:
            p_offset = value_offset + (head // G) * V.dim
        p_out = out + o_out * V.dim
        unrotate_store(p_out, m_row, mean, weight, value_matrix, p_offset, weight, UNIT, V, CHUNK)
        tl.store(lse + o_out, (base + tl.log2(total)) * LN2, mask=m_row)
    else:
        o_column = tl.arange(0, V.columns)
        o_part = o_out * splits + i_split
        tl.store(means + o_part[:, None] * V.columns + o_column[None, :], mean, mask=m_row[:, None])
        tl.store(sums + o_part, top + tl.log2(total), mask=m_row)

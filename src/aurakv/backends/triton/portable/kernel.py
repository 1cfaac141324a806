"""Attention of ragged queries over paged codes, or over dense vectors.

Rows of a program are (token, head of the group) pairs of one sequence and KV head, so stored vectors are decoded once
for all of them. Program (block, kv head, split) reads its share of the key tiles that its rows can see: first tiles
that all rows see whole, then those at the edges of masks.
In: q as given (CALL.fused: prepared here) or prepared by queries.prepare_kernel; pages as in Pages, or dense k, v
[tokens, kv_heads, dim]. Out: final results (CALL.final), or `means` and `sums` for results.finish_kernel.
Constexprs: K, V (tables.Side); ROTATE (tables.Encoder of the keys); CALL (tables.Call); G heads per KV head; ROWS, KEYS
the tile. The launcher guarantees: one program per block of slots.find_block; splits only where not CALL.final.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import load_level_pairs, load_levels
from ..common.masks import key_spans, visible, whole_tiles
from ..common.queries import prepare_rows
from ..common.results import LN2, LOG2E, add_sink, unrotate_store
from ..common.slots import find_block, page_bases

# Where keys lie (tables.Call.place): one page per sequence, a tile within a page, anywhere in pages, in dense tensors.
ONE_PAGE, WITHIN_PAGE, ANYWHERE, DENSE = (tl.constexpr(i) for i in range(4))
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
def load_vectors(p_row, stride, m_row, SIDE: tl.constexpr):
    """Raw vectors at p_row [rows] as a tile [rows, columns]."""
    o_coordinate = tl.arange(0, SIDE.columns)
    m = m_row[:, None] & (o_coordinate < SIDE.dim)[None, :]
    return tl.load(p_row[:, None] + o_coordinate[None, :] * stride, mask=m, other=0).to(SIDE.operand)


@triton.jit
def load_scales(p_piece, scales, i_row, m_row, SIDE: tl.constexpr):
    """Scales of rows i_row, which begin at byte `scales`; NaN where not finite."""
    p_scale = (p_piece + scales).to(tl.pointer_type(SIDE.dtype), bitcast=True) + i_row
    scale = tl.load(p_scale, mask=m_row, other=0).to(tl.float32)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def load_tile(place, at, m_key, SIDE: tl.constexpr, CALL: tl.constexpr):
    """Levels or 16-bit vectors [keys, columns] of keys or values; and what float16 levels leave out, if anything.

    place: rows and pieces of place_keys; at: the bytes where codes and scales begin, and the levels; or pointer and
    strides of dense vectors."""
    i_key, p_piece = place
    if CALL.place == DENSE:
        tile = load_vectors(at[0] + i_key * at[1], at[2], m_key, SIDE)
        return tile, tile
    else:
        p_row = p_piece + at[0] + i_key * SIDE.bytes
        if SIDE.bits == 16:
            tile = load_vectors(p_row.to(tl.pointer_type(SIDE.dtype), bitcast=True), 1, m_key, SIDE)
            return tile, tile
        elif SIDE.pairs:
            return load_level_pairs(p_row, m_key, at[2], SIDE)
        else:
            tile = load_levels(p_row, m_key, at[2], SIDE)
            return tile, tile


@triton.jit
def place_keys(source, t, o_key, m_key, CALL: tl.constexpr, KEYS: tl.constexpr):
    """Rows of keys o_key = t … t + KEYS − 1 inside the pages' pieces that begin at the second result; or their rows in
    dense tensors.

    source: the row of dense key 0; or the piece of the only page; or what is needed to find pages."""
    if CALL.place == DENSE:
        i_key = (o_key + source[0]).to(tl.int64)
        return i_key, i_key
    elif CALL.place == ONE_PAGE:
        return o_key.to(tl.int64), source[0]
    else:
        data, table, i_seq, pages, width, pinned, page_bytes, kv_heads, i_head = source
        if CALL.place == WITHIN_PAGE:
            i_page = page_bases(table, i_seq, t // CALL.page, True, pages, width, pinned, CALL.ring)
            i_row = t % CALL.page + tl.arange(0, KEYS)
        else:
            i_page = page_bases(table, i_seq, o_key // CALL.page, m_key, pages, width, pinned, CALL.ring)
            i_row = o_key % CALL.page
        return i_row.to(tl.int64), data + (i_page * kv_heads + i_head) * page_bytes


@triton.jit
def attend_tile(
    t, m_key, query, state, source, keys, values, rule,
    K: tl.constexpr, V: tl.constexpr, CALL: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys t … t + KEYS − 1 added to the running results; not MASKED: every row sees every key.

    query: prepare_rows and positions; source see place_keys; keys, values see load_tile."""
    FAST_KEYS: tl.constexpr = K.bits != 16 and K.operand == tl.float16
    FAST_VALUES: tl.constexpr = V.bits != 16 and V.operand == tl.float16
    LINEAR: tl.constexpr = FAST_KEYS and not CALL.cap  # scores stay proportional to products
    b_q, b_rest, factor, bias, b_query = query
    top, total, acc, value_unit, damaged = state
    window, sinks, softcap, first, recent, threshold = rule
    o_key = t + tl.arange(0, KEYS)
    place = place_keys(source, t, o_key, m_key, CALL, KEYS)
    b_k, b_small = load_tile(place, keys, m_key, K, CALL)
    if FAST_KEYS:
        s = tl.dot(b_rest, tl.trans(b_k))
        if K.pairs:
            s = tl.dot(b_q, tl.trans(b_small), s)
        s = tl.dot(b_q, tl.trans(b_k), s)
    else:
        s = tl.dot(b_q, tl.trans(b_k), input_precision=K.precision)
    if K.bits != 16:
        s = s * load_scales(place[1], keys[1], place[0], m_key, K)[None, :]
    if not LINEAR:
        s = s * factor[:, None] + bias[:, None]
        s = tl.where(tl.abs(s) < float("inf"), s, float("nan"))  # an infinite key damages, it is not a mask
    if CALL.cap:
        s = softcap * tanh(s / softcap) * LOG2E
    if MASKED:
        seen = visible(b_query, o_key, window, sinks, first, recent, CALL.causal, CALL.window, CALL.uncompressed)
        seen = seen & m_key[None, :]
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
    if CALL.sparse:  # a weight only shrinks from here on; NaN counts
        needed = tl.max((~(p < threshold * total[:, None])).to(tl.int32)) > 0
    if needed:
        b_v, _ = load_tile(place, values, m_key, V, CALL)
        if V.bits == 16:
            bad = tl.max((~(tl.abs(b_v.to(tl.float32)) < float("inf"))).to(tl.int32), 1)
            b_v = tl.where((bad > 0)[:, None], 0.0, b_v).to(V.operand)
            if MASKED:
                damaged = tl.maximum(damaged, tl.max(tl.where(seen, bad[None, :], 0), 1))
            else:
                damaged = tl.maximum(damaged, tl.max(bad, 0))
        else:
            scale = load_scales(place[1], values[1], place[0], m_key, V)
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


@triton.jit
def load_query(p_row, stride, p_offset, m_row, matrix, multiplier, rotated, factors, o_out, K: tl.constexpr,
               ROTATE: tl.constexpr, CALL: tl.constexpr):  # fmt: skip
    """prepare_rows of these rows, made here or earlier."""
    if CALL.fused:
        return prepare_rows(p_row, stride, p_offset, m_row, matrix, multiplier, K, ROTATE)
    else:
        p_rotated = rotated + o_out[:, None] * (2 * K.columns) + tl.arange(0, K.columns)[None, :]
        b_q = tl.load(p_rotated, mask=m_row[:, None], other=0)
        b_rest = b_q
        if K.operand == tl.float16:
            b_rest = tl.load(p_rotated + K.columns, mask=m_row[:, None], other=0)
        factor = tl.load(factors + o_out * 2, mask=m_row, other=0)
        return b_q, b_rest, factor, tl.load(factors + o_out * 2 + 1, mask=m_row, other=0)


@triton.jit
def store_results(state, bias, o_out, m_row, head, out, lse, means, sums, i_split, splits, matrix, offset, sink_logits,
                  UNIT: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
                  CALL: tl.constexpr):  # fmt: skip
    """Final results to `out` and `lse`, or a split's to `means` and `sums`."""
    top, total, acc, value_unit, damaged = state
    if K.bits != 16 and K.operand == tl.float16 and not CALL.cap:
        top += bias
    mean = acc * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    if V.bits != 16 and V.operand == tl.float16:
        mean = mean * (value_unit * (1.0 / HEADROOM))
    if V.bits == 16:
        mean = tl.where((damaged > 0)[:, None], float("nan"), mean)
    if CALL.final:
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.where(total == 0, 0.0, 1.0)
        if sink_logits is not None:
            base, total, weight = add_sink(top, total, tl.load(sink_logits + head, mask=m_row, other=0))
        p_offset = None
        if offset is not None:
            p_offset = offset + (head // G) * V.dim
        unrotate_store(out + o_out * V.dim, m_row, mean, weight, matrix, p_offset, weight, UNIT, V, CHUNK)
        tl.store(lse + o_out, (base + tl.log2(total)) * LN2, mask=m_row)
    else:
        o_column = tl.arange(0, V.columns)
        o_part = o_out * splits + i_split
        tl.store(means + o_part[:, None] * V.columns + o_column[None, :], mean, mask=m_row[:, None])
        tl.store(sums + o_part, top + tl.log2(total), mask=m_row)


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
    CALL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    i_seq, i_first, i_from, i_to = find_block(starts, tokens, seqs, tl.program_id(0), G, ROWS, CALL.seqs)
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
    if CALL.place == DENSE:
        first_key = tl.minimum(tl.maximum(tl.load(key_starts + i_seq), 0), key_tokens)
        last_key = tl.minimum(tl.maximum(tl.load(key_starts + i_seq + 1), first_key), key_tokens)
        low = end - (last_key - first_key)
        length = end
        source = (first_key - low,)
        keys = (k + i_head * k_head, k_token, k_dim)
        values = (v + i_head * v_head, v_token, v_dim)
    else:
        low = tl.full([], 0, tl.int32)
        length = tl.load(lengths + i_seq)
        if not CALL.ring:
            length = tl.minimum(length, capacity)
        source = (data, table, i_seq, pages, width, pinned, page_bytes, kv_heads, i_head)
        if CALL.place == ONE_PAGE:
            i_page = page_bases(table, i_seq, 0, length > 0, pages, width, pinned, CALL.ring)
            source = (data + (i_page * kv_heads + i_head) * page_bytes,)
        keys = (key_codes, key_scales)
        if K.bits != 16:
            keys = (key_codes, key_scales, key_levels)
        values = (value_codes, value_scales)
        if V.bits != 16:
            values = (value_codes, value_scales, value_levels)

    a_start, a_stop, b_start, b_stop = key_spans(
        lowest, highest, low, length, window, sinks, first, recent, CALL.causal, CALL.window, CALL.uncompressed
    )
    a_base = a_start
    b_base = b_start
    if CALL.place != DENSE:  # tiles begin at multiples of their size: inside one page
        a_base = a_start // KEYS * KEYS
        b_base = b_start // KEYS * KEYS
    a_tiles = tl.where(a_stop > a_start, tl.cdiv(a_stop - a_base, KEYS), 0)
    tiles = a_tiles + tl.where(b_stop > b_start, tl.cdiv(b_stop - b_base, KEYS), 0)
    part = tl.maximum(tl.cdiv(tiles, splits), least)
    i_tile = tl.minimum(i_split * part, tiles)
    last_tile = tl.minimum(i_tile + part, tiles)
    whole, edge = whole_tiles(
        b_base, b_start, b_stop, lowest, highest, window, recent, CALL.causal, CALL.window, CALL.uncompressed, KEYS
    )
    whole = tl.minimum(tl.maximum(a_tiles + whole, i_tile), last_tile)
    edge = tl.minimum(tl.maximum(a_tiles + edge, whole), last_tile)

    p_offset = None
    if key_offset is not None:
        p_offset = key_offset + i_head * K.dim
    p_row = q + i_token * q_token + head * q_head
    b_q, b_rest, factor, bias = load_query(
        p_row, q_dim, p_offset, m_row, key_matrix, multiplier, rotated, factors, o_out, K, ROTATE, CALL
    )
    query = (b_q, b_rest, factor, bias, b_query)
    rule = (window, sinks, softcap, first, recent, threshold)
    COLUMNS: tl.constexpr = V.columns
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),  # largest score
        tl.zeros([ROWS], tl.float32),  # sum of weights
        tl.zeros([ROWS, COLUMNS], tl.float32),
        tl.full([], 1e-30, tl.float32),  # largest value scale
        tl.zeros([ROWS], tl.int32),  # whether a value that is not finite was seen
    )
    for i in tl.range(whole, edge, num_stages=STAGES):
        t = b_base + (i - a_tiles) * KEYS
        m_key = tl.full([KEYS], True, tl.int1)
        state = attend_tile(t, m_key, query, state, source, keys, values, rule, K, V, CALL, KEYS, False)
    for j in tl.range(0, (whole - i_tile) + (last_tile - edge), num_stages=1):
        i = tl.where(j < whole - i_tile, i_tile + j, edge + j - (whole - i_tile))
        in_a = i < a_tiles
        t = tl.where(in_a, a_base + i * KEYS, b_base + (i - a_tiles) * KEYS)
        o_key = t + tl.arange(0, KEYS)
        m_key = (o_key >= tl.where(in_a, a_start, b_start)) & (o_key < tl.where(in_a, a_stop, b_stop))
        state = attend_tile(t, m_key, query, state, source, keys, values, rule, K, V, CALL, KEYS, True)
    store_results(
        state, bias, o_out, m_row, head, out, lse, means, sums, i_split, splits, value_matrix, value_offset,
        sink_logits, UNIT, G, K, V, CHUNK, CALL,
    )  # fmt: skip

"""Attention of many queries a sequence over paged codes, where there are no warp-group products (Gluon).

What `kernel` does on Hopper, with the products that every GPU from Ampere on has: a program's four warps decode a tile
of KEYS keys and values into shared memory once for all ROWS rows, meet, and attend, each with its share of the rows.
While they do, the codes of the next tile are under way. Several programs share a multiprocessor, so that one can
decode while another multiplies.

In, out, constexprs and what the launcher guarantees are those of `kernel`.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..common.gluon_names import meet, reinterpret
from .codes import codes_layout, load_codes
from .kernel import (
    HEADROOM,
    VARYING,
    find_damage,
    find_rows,
    in_planes,
    key_spans,
    seen_keys,
    tiles_of,
    whole_tiles,
)
from .tiles import LEAST_EXPONENT, find_page, find_piece, load_scales, store_keys, store_values, tile_start


@gluon.jit
def product(s_queries, s_keys, scores, STEP: gl.constexpr):
    """scores plus queries [rows, DIM] times keys [KEYS, DIM], STEP coordinates at a time."""
    MMA: gl.constexpr = scores.type.layout
    WIDTH: gl.constexpr = 4 // (s_keys.dtype.primitive_bitwidth // 8)
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=WIDTH)
    STEPS: gl.constexpr = s_keys.shape[1] // STEP
    for k in gl.static_range(STEPS):
        b_query = s_queries.slice(k * STEP, STEP, 1).load(A)
        b_key = s_keys.slice(k * STEP, STEP, 1).permute((1, 0)).load(B)
        scores = mma_v2(b_query, b_key, scores)
    return scores


@gluon.jit
def raw_scores(queries, s_keys, SCORES: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Products of both parts of the queries with the keys of a tile, added up."""
    if s_keys.dtype == gl.float16:
        s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        return product(queries[0], s_keys, product(queries[1], s_keys, s, 16), 16)
    else:
        s = gl.zeros([ROWS, KEYS], gl.int32, SCORES)
        s = product(queries[0], s_keys, s, 32) * 256
        return product(queries[1], s_keys, s, 32).to(gl.float32)


@gluon.jit
def add_values(weights, s_values, acc, KEYS: gl.constexpr):
    """acc plus weights [rows, KEYS] times values [KEYS, DIM], 16 keys at a time: more would not find registers."""
    SUMS: gl.constexpr = acc.type.layout
    if KEYS > 16:
        ROWS: gl.constexpr = weights.shape[0]
        first, last = gl.split(gl.permute(weights.reshape([ROWS, 2, KEYS // 2]), (0, 2, 1)))
        acc = add_values(first, s_values.slice(0, KEYS // 2, 0), acc, KEYS // 2)
        return add_values(last, s_values.slice(KEYS // 2, KEYS // 2, 0), acc, KEYS // 2)
    else:
        A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
        B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=2)
        return mma_v2(gl.convert_layout(weights, A, assert_trivial=True), s_values.load(B), acc)


@gluon.constexpr_function
def _times(count):
    """$0 …: count sums of two rows of a thread, in place, times $2·count …, unless that is 1 for all of the warp."""
    factors = [f"${2 * count + i}" for i in range(count)]
    lines = ["{ .reg .pred some;", f"setp.neu.f32 some, {factors[0]}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 some, {factors[2]}, 0f3F800000, some;"]  # elements 0 and 1 of a row, 2 and 3 of another
    lines += ["vote.sync.any.pred some, some, 0xffffffff;", "@!some bra.uni same;"]
    lines += [f"mul.rn.f32 ${i}, ${i}, {factors[i]};" for i in range(count)]
    return "\n".join([*lines, "same: }"])


@gluon.constexpr_function
def _times_operands(count):
    return ",".join([*["=r"] * count, *map(str, range(count)), *["r"] * count])


@gluon.jit
def rescale(acc, factor):
    """acc [rows, DIM] times factor [rows]; seldom anything but 1, which a warp then leaves out."""
    COUNT: gl.constexpr = acc.shape[1] // 2  # sums of a thread in 16 rows
    return gl.inline_asm_elementwise(
        _times(COUNT), _times_operands(COUNT), [acc, factor[:, None]], dtype=gl.float32, is_pure=False, pack=COUNT
    )


@gluon.jit
def load_side(words, codes, p_scale, row, left, BITS: gl.constexpr, CODES: gl.constexpr):
    """Codes of a tile, of which those of its page begin at word `codes`, and where its scales are. left: see
    `find_piece`."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    codes_at = gl.multiple_of(codes + row * (LANES * BITS), 4)
    return load_codes(words, codes_at, left, KEYS, LANES, BITS, CODES[0] > 0), p_scale + row


@gluon.jit
def load_tile(words, halves, place, at, t, page, CODES: gl.constexpr):
    """Codes and scales of the tile that begins with key t and lies in `page`: of keys; of values, whose scales come by
    row of the decoder and by lane of every warp."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    page_bytes, key_codes, key_scales, value_codes, value_scales = at
    piece, row, left = find_piece(place, page, t, page_bytes, CODES)
    keys, p_key = load_side(
        words, (piece + key_codes) // 4, halves + (piece + key_scales) // 2, row, left, CODES[4], CODES
    )
    values, p_value = load_side(
        words, (piece + value_codes) // 4, halves + (piece + value_scales) // 2, row, left, CODES[5], CODES
    )
    o_key = gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    o_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, codes_layout(KEYS, LANES, 1)))
    o_lane = gl.arange(0, KEYS, layout=gl.BlockedLayout([KEYS // 32], [32], [4], [0]))
    WHOLE: gl.constexpr = CODES[0] > 0
    key_scale, row_scale = load_scales(p_key, o_key, left, WHOLE), load_scales(p_value, o_row, left, WHOLE)
    lane_scale = load_scales(p_value, o_lane, left, WHOLE)
    return keys, key_scale, values, row_scale, lane_scale


@gluon.jit
def lane_sums(p):
    """Of weights [rows, KEYS] those of each thread: [rows, 4]."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def add_tile(
    i, state, loaded, factor, queries, shared, words, halves, place, at, tiles, length, step, rule,
    KEY: gl.constexpr, VALUE: gl.constexpr, CODES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Decode the i-th tile, whose codes were read, and attend to it; its successor's codes are read meanwhile.

    loaded: `load_tile`, the first key of this tile and of the next one, and the page of that."""
    KEYS: gl.constexpr = CODES[2]
    acc, top, total, damaged, unit = state
    s_keys, b_keys, s_values, b_values, s_scales = shared
    SUMS: gl.constexpr = acc.type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, SUMS)
    keys, key_scale, values, row_scale, lane_scale, t, next_t, page = loaded
    known = length - t
    size = gl.where(gl.arange(0, KEYS, layout=lane_scale.type.layout) < known, gl.abs(lane_scale.to(gl.float32)), 0.0)
    good = size < float("inf")
    new_unit = gl.maximum(unit, gl.max(gl.where(good, size, 0.0).to(gl.int32, bitcast=True), 0) >> 23)
    bad = gl.max((~good).to(gl.int32), 0)
    meet()  # the tile before is read
    store_keys(keys, key_scale, s_keys, s_scales, KEY, CODES)
    store_values(values, row_scale, known, new_unit, step, s_values, VALUE, CODES)
    meet()
    later_t = tile_start(i + 2, tiles, KEYS)
    loaded = load_tile(words, halves, place, at, next_t, page, CODES)
    loaded = loaded + (next_t, later_t, find_page(place, later_t, CODES))  # noqa: RUF005

    s = raw_scores(queries, b_keys, SUMS, acc.shape[0], KEYS) * s_scales.load(COLUMN)[None, :]
    if MASKED:
        seen, _ = seen_keys(i, tiles, rule, COLUMN, KEYS, MASK)
        s = gl.where(seen, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = gl.where(new_top == float("-inf"), 0.0, new_top) - HEADROOM
    decay = gl.where(top == float("-inf"), 0.0, gl.exp2(top - new_top))
    p = gl.exp2(s * factor[:, None] - base[:, None])
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout))[:, None] + lane_sums(p)
    acc = rescale(acc, decay * ((127 + unit - new_unit) << 23).to(gl.float32, bitcast=True))
    acc = add_values(p.to(gl.float16), b_values, acc, KEYS)
    damaged = find_damage(i, damaged, bad, halves, place, at, tiles, rule, COLUMN, CODES, MASK, MASKED)
    return (acc, new_top, total, damaged, new_unit), loaded


@gluon.jit(do_not_specialize=VARYING)
def extend_warps_kernel(
    parts,
    factors,
    words,
    halves,
    table,
    lengths,
    starts,
    ends,
    means,
    sums,
    tokens,
    seqs,
    kv_heads,
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
    first,
    recent,
    splits,
    least,
    step,
    G: gl.constexpr,
    DIM: gl.constexpr,
    KEY: gl.constexpr,
    VALUE: gl.constexpr,
    ORDER: gl.constexpr,
    PAGE: gl.constexpr,
    RING: gl.constexpr,
    SEQS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    UNCOMPRESSED: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):
    CODES: gl.constexpr = (PAGE, RING, KEYS, DIM // 32, KEY[0], VALUE[0])
    MASK: gl.constexpr = (CAUSAL, WINDOW, UNCOMPRESSED)
    i_head = gl.program_id(1)
    i_split = gl.program_id(2)
    i_block = gl.num_programs(0) - 1 - gl.program_id(0)  # the last blocks have most to do
    i_seq, i_first, i_from, i_to = find_rows(starts, tokens, seqs, i_block, G, ROWS, SEQS)
    rows = (i_to - i_from) * G
    end = gl.load(ends + i_seq)
    first_query = end - i_to + i_from
    lowest = first_query + i_first // G
    highest = first_query + (gl.minimum(i_first + ROWS, rows) - 1) // G
    length = gl.load(lengths + i_seq)
    if not RING:
        length = gl.minimum(length, capacity)
    a_start, a_stop, b_start, b_stop = key_spans(
        lowest, highest, length * 0, length, window, sinks, first, recent, CAUSAL, WINDOW, UNCOMPRESSED
    )
    a_base, a_tiles, b_base, all_tiles = tiles_of(a_start, a_stop, b_start, b_stop, KEYS)
    all_tiles = gl.where(i_first < rows, all_tiles, 0)
    share = gl.maximum(gl.cdiv(all_tiles, splits), least)
    i_tile = gl.minimum(i_split * share, all_tiles)
    last_tile = gl.minimum(i_tile + share, all_tiles)
    whole, edge = whole_tiles(
        b_base, b_start, b_stop, lowest, highest, window, recent, CAUSAL, WINDOW, UNCOMPRESSED, KEYS
    )
    whole = gl.minimum(gl.maximum(a_tiles + whole, i_tile), last_tile)
    edge = gl.minimum(gl.maximum(a_tiles + edge, whole), last_tile)

    WIDE: gl.constexpr = KEY[0] > 4
    PART: gl.constexpr = gl.float16 if WIDE else gl.int8
    ROW: gl.constexpr = 128 if WIDE else DIM  # bytes that are exchanged
    PARTS: gl.constexpr = gl.NVMMASharedLayout(ROW, 16 if WIDE else 8, rank=2)
    WORDS: gl.constexpr = DIM // 2 if WIDE else DIM // 4  # of a key
    s_queries = gl.allocate_shared_memory(PART, [2, ROWS, DIM], PARTS)
    s_keys = gl.allocate_shared_memory(gl.int32, [KEYS, WORDS], gl.NVMMASharedLayout(ROW, 32, rank=2))
    s_values = gl.allocate_shared_memory(gl.int32, [KEYS, DIM // 2], gl.NVMMASharedLayout(128, 32, rank=2))
    s_scales = gl.allocate_shared_memory(gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    b_keys = reinterpret(s_keys, PART, [KEYS, DIM], PARTS)
    b_values = reinterpret(s_values, gl.float16, [KEYS, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    shared = (s_keys, b_keys, s_values, b_values, s_scales)

    place = (table, i_seq, i_head, kv_heads, pages, width, pinned, capacity)
    at = (page_bytes, key_codes, key_scales, value_codes, value_scales)
    tiles = (whole - i_tile, edge - whole, last_tile - i_tile, i_tile, a_tiles, a_base, b_base)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    ROW_OF: gl.constexpr = gl.SliceLayout(1, SUMS)
    o_row = i_first + gl.arange(0, ROWS, layout=ROW_OF)
    m_row = o_row < rows
    o_out = (i_from + o_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + o_row % G
    rule = (first_query + o_row // G, window, sinks, first, recent, a_start, a_stop, b_start, b_stop)
    if tiles[2] > 0:
        t, next_t = tile_start(0, tiles, KEYS), tile_start(1, tiles, KEYS)
        loaded = load_tile(words, halves, place, at, t, find_page(place, t, CODES), CODES)
        loaded = loaded + (t, next_t, find_page(place, next_t, CODES))  # noqa: RUF005
        queries = (s_queries.index(0), s_queries.index(1))
        EACH: gl.constexpr = 8 if WIDE else 16  # coordinates of a thread: 16 bytes
        LOAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // DIM, DIM // EACH], [4, 1], [1, 0])
        q_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))
        q_out = (i_from + q_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + q_row % G
        p_parts = parts + (q_out * (2 * DIM))[:, None] + gl.arange(0, DIM, layout=gl.SliceLayout(0, LOAD))[None, :]
        queries[0].store(gl.load(p_parts, mask=(q_row < rows)[:, None], other=0))
        queries[1].store(gl.load(p_parts + DIM, mask=(q_row < rows)[:, None], other=0))
        factor = gl.load(factors + o_out * 2, mask=m_row, other=1.0)
        bias = gl.load(factors + o_out * 2 + 1, mask=m_row, other=0.0)
        state = (
            gl.zeros([ROWS, DIM], gl.float32, SUMS),
            gl.full([ROWS], float("-inf"), gl.float32, ROW_OF),
            lane_sums(gl.zeros([ROWS, KEYS], gl.float32, SUMS)),
            gl.zeros([ROWS], gl.int32, ROW_OF),
            length * 0 + LEAST_EXPONENT,
        )
        for i in range(0, tiles[1]):
            state, loaded = add_tile(
                i, state, loaded, factor, queries, shared, words, halves, place, at, tiles, length, step, rule,
                KEY, VALUE, CODES, MASK, False)  # fmt: skip
        for i in range(tiles[1], tiles[2]):
            state, loaded = add_tile(
                i, state, loaded, factor, queries, shared, words, halves, place, at, tiles, length, step, rule,
                KEY, VALUE, CODES, MASK, True)  # fmt: skip
        acc, top, total, damaged, unit = state
        total = gl.convert_layout(gl.sum(total, 1), ROW_OF)
        scale = 1.0 / gl.where(total == 0, 1.0, total) * ((unit + 1) << 23).to(gl.float32, bitcast=True)
        scale = gl.where(damaged > 0, float("nan"), scale)
        mean = in_planes(acc * scale[:, None], ORDER)
        OUT: gl.constexpr = mean.type.layout
        out_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        out_at = ((i_from + out_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + out_row % G) * splits + i_split
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
        gl.store(means + (out_at * DIM)[:, None] + column[None, :], mean, mask=(out_row < rows)[:, None])
        found = gl.where(total == 0, float("-inf"), top + bias + gl.log2(total) - HEADROOM)
        gl.store(sums + o_out * splits + i_split, found, mask=m_row)
    else:
        gl.store(sums + o_out * splits + i_split, gl.full([ROWS], float("-inf"), gl.float32, ROW_OF), mask=m_row)

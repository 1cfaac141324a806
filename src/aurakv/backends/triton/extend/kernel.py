"""Attention of many queries a sequence over paged codes, on Hopper's warp-group products (Gluon).

Rows of a program are ROWS (token, head of the group) pairs of one sequence and KV head. Program (block, kv head, split)
walks over its share of the tiles of KEYS keys. Two warp groups decode: codes of keys become int8 levels in shared
memory (wide ones, of more than 4 bits, float16), codes of values float16 numbers, in SLOTS slots each. Two more, with
half of the rows each, attend: the products of tile i + 1 with the queries and of the weights of tile i with the
values overlap with the making of weights.
Queries are integers of 16 bits in two int8 parts, or two float16 parts: scores are exact up to that.

In:  parts [rows, 2, DIM] int8 and factors [rows, 2] (queries.prepare_integers_kernel), or parts in float16
     (queries.prepare_kernel, columns in the order of the keys); the pages as int32 and as float16; table, lengths,
     starts, ends.
Out: `means` and `sums` for results.finish_kernel.
Constexprs: KEY, VALUE (bits, PTX); ORDER of the values' coordinates, see extend_decode; PAGE tokens a page, 0 for one
     page a sequence; SEQS a power of two ≥ seqs and 32; CAUSAL, WINDOW, UNCOMPRESSED see masks.
The launcher guarantees: pages of whole tiles, or one; scales in float16; DIM in (64, 128).
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import masks
from ..common.gluon_names import meet, reinterpret
from .tiles import (
    SCALE_SLOTS,
    SLOTS,
    decode_keys,
    decode_values,
    find_page,
    find_piece,
    keys_read,
    keys_there,
    load_scales,
    phase,
    tile_start,
    values_read,
    values_there,
)

HEADROOM = gl.constexpr(14.0)  # log2 of the largest weight in float16
VARYING = [
    "tokens", "seqs", "pages", "width", "pinned", "capacity", "window", "sinks", "first", "recent", "splits", "least",
]  # fmt: skip

key_spans = gluon.jit(masks.key_spans.fn)
tiles_of = gluon.jit(masks.tiles_of.fn)
whole_tiles = gluon.jit(masks.whole_tiles.fn)
visible = gluon.jit(masks.visible.fn)


@gluon.constexpr_function
def registers(key_bits, value_bits):
    """Of the threads that attend, decode keys, decode values; the first twice, 512 together. Wide keys need no second
    sum of scores, wide codes more to decode them."""
    if key_bits > 4:
        return [176, 80, 80] if value_bits > 4 else [184, 72, 72]
    return [184, 56, 88] if value_bits > 4 else [192, 56, 72]


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def find_rows(starts, tokens, seqs, i_block, G: gl.constexpr, ROWS: gl.constexpr, SEQS: gl.constexpr):
    """slots.find_block: the sequence of a block of rows, its first row inside that, the sequence's tokens."""
    o_seq = gl.arange(0, SEQS, layout=gl.BlockedLayout([max(1, SEQS // 32)], [32], [4], [0]))
    m_seq = o_seq < seqs
    b_from = gl.minimum(gl.maximum(gl.load(starts + o_seq, mask=m_seq, other=0), 0), tokens)
    b_to = gl.load(starts + o_seq + 1, mask=m_seq, other=0)
    b_to = gl.minimum(gl.maximum(b_to, b_from), tokens)
    b_blocks = ((b_to - b_from) * G + (ROWS - 1)) // ROWS
    before = gl.associative_scan(b_blocks, 0, add) <= i_block
    i_seq = gl.sum(before.to(gl.int32), 0)
    i_first = (i_block - gl.sum(gl.where(before, b_blocks, 0), 0)) * ROWS
    mine = o_seq == i_seq
    i_from = gl.sum(gl.where(mine, b_from, 0), 0)
    i_to = gl.sum(gl.where(mine, b_to, 0), 0)
    return gl.minimum(i_seq, seqs - 1), i_first, i_from, i_to


@gluon.jit
def seen_keys(i, tiles, rule, COLUMN: gl.constexpr, KEYS: gl.constexpr, MASK: gl.constexpr):
    """Which keys of the i-th tile each row sees, and the first of them."""
    CAUSAL: gl.constexpr = MASK[0]
    WINDOW: gl.constexpr = MASK[1]
    UNCOMPRESSED: gl.constexpr = MASK[2]
    b_query, window, sinks, first, recent, a_start, a_stop, b_start, b_stop = rule
    t = tile_start(i, tiles, KEYS)
    o_key = t + gl.arange(0, KEYS, layout=COLUMN)
    inside = ((o_key >= a_start) & (o_key < a_stop)) | ((o_key >= b_start) & (o_key < b_stop))
    seen = visible(b_query, o_key, window, sinks, first, recent, CAUSAL, WINDOW, UNCOMPRESSED)
    return seen & inside[None, :], t


@gluon.jit
def score(queries, b_key, scores):
    """Products of both parts of the queries with the keys of a tile, begun: [high, low], or their sum where wide."""
    high = warpgroup_mma(queries[0], b_key, scores, use_acc=False, is_async=True)
    if scores.dtype == gl.float32:
        return (warpgroup_mma(queries[1], b_key, high, is_async=True),)
    else:
        return high, warpgroup_mma(queries[1], b_key, scores, use_acc=False, is_async=True)


@gluon.jit
def weigh(i, raw, s_scales, factor, top, total, tiles, rule,
          KEYS: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Weights of the i-th tile times 2^HEADROOM, by how much earlier ones shrink, the new maximum and sum."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, raw[0].type.layout)
    s = raw[0]
    if len(raw) == 2:
        s = (raw[0] * 256 + raw[1]).to(gl.float32)
    s = s * s_scales.index(i & (SCALE_SLOTS - 1)).load(COLUMN)[None, :]
    if MASKED:
        seen, _ = seen_keys(i, tiles, rule, COLUMN, KEYS, MASK)
        s = gl.where(seen, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = gl.where(new_top == float("-inf"), 0.0, new_top) - HEADROOM
    decay = gl.where(top == float("-inf"), 0.0, gl.exp2(top - new_top))
    p = gl.exp2(s * factor[:, None] - base[:, None])
    return p.to(gl.float16), decay, new_top, total * decay + gl.sum(p, 1)


@gluon.jit
def read_note(s_notes, i):
    """The unit of the values of the i-th tile, and whether one of them is not finite."""
    note = gl.max(s_notes.index(i & (SLOTS - 1)).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    return note & 0xFFFF, note >> 16


@gluon.jit
def find_damage(i, damaged, bad, halves, place, at, tiles, rule,
                COLUMN: gl.constexpr, CODES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Mark the rows that see a value of the i-th tile that is not finite; `bad`: there are some."""
    KEYS: gl.constexpr = CODES[2]
    if MASKED:
        if bad > 0:
            seen, t = seen_keys(i, tiles, rule, COLUMN, KEYS, MASK)
            piece, row, left = find_piece(place, find_page(place, t, CODES), t, at[0], CODES)
            p_scale = halves + ((piece + at[4]) // 2 + row)
            size = load_scales(p_scale, gl.arange(0, KEYS, layout=COLUMN), left, CODES[0] > 0).to(gl.float32)
            wrong = ~(gl.abs(size) < float("inf"))
            damaged = gl.maximum(damaged, gl.max((seen & wrong[None, :]).to(gl.int32), 1))
    else:
        damaged = gl.maximum(damaged, bad)
    return damaged


@gluon.jit
def add_tile(i, state, factor, queries, shared, halves, place, at, tiles, rule,
             CODES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Add the values of the i-th tile, which are there and whose weights are known; find the weights of the next one,
    and wait for its values."""
    KEYS: gl.constexpr = CODES[2]
    weights, acc, top, total, damaged, unit, scores = state
    b_keys, b_values, s_scales, s_notes, bars = shared
    SUMS: gl.constexpr = acc.type.layout
    COLUMN: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    mbarrier.wait(keys_there(bars, i + 1), phase(i + 1))
    raw = score(queries, b_keys.index((i + 1) & (SLOTS - 1)).permute((1, 0)), scores)
    acc = warpgroup_mma(weights, b_values.index(i & (SLOTS - 1)), acc, is_async=True)

    raw = made_scores(1, raw)
    mbarrier.arrive(keys_read(bars, i + 1))
    p, decay, top, total = weigh(i + 1, raw, s_scales, factor, top, total, tiles, rule, KEYS, MASK, MASKED)
    weights = gl.convert_layout(p, weights.type.layout, assert_trivial=True)
    shrink = gl.convert_layout(decay, gl.SliceLayout(1, SUMS))
    mbarrier.wait(values_there(bars, i + 1), phase(i + 1))
    new_unit, bad = read_note(s_notes, i + 1)
    shrink = shrink * ((127 + unit - new_unit) << 23).to(gl.float32, bitcast=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_read(bars, i))
    acc = acc * shrink[:, None]
    damaged = find_damage(i + 1, damaged, bad, halves, place, at, tiles, rule, COLUMN, CODES, MASK, MASKED)
    return weights, acc, top, total, damaged, new_unit, raw[0]


@gluon.jit
def made_scores(pending: gl.constexpr, raw):
    """`raw` when no more than `pending` later products are under way."""
    if len(raw) == 2:
        high, low = warpgroup_mma_wait(pending, deps=[raw[0], raw[1]])
        return high, low
    else:
        return (warpgroup_mma_wait(pending, deps=[raw[0]]),)


@gluon.jit
def attend_rows(parts, factors, means, sums, halves, place, at, tiles, rule, block, queries, shared,
                HALF: gl.constexpr, G: gl.constexpr, DIM: gl.constexpr, ORDER: gl.constexpr, ROWS: gl.constexpr,
                CODES: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """A warp group that attends: rows HALF · ROWS … of the block."""
    KEYS: gl.constexpr = CODES[2]
    WIDE: gl.constexpr = CODES[4] > 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16 if WIDE else 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    b_keys, b_values, s_scales, s_notes, bars = shared
    i_first, i_from, rows, first_query, splits, i_split = block
    i_head, kv_heads = place[2], place[3]
    i_first += HALF * ROWS
    o_row = i_first + gl.arange(0, ROWS, layout=ROW)
    m_row = o_row < rows
    o_out = (i_from + o_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + o_row % G
    rule = (first_query + o_row // G, rule[0], rule[1], rule[2], rule[3], rule[4], rule[5], rule[6], rule[7])
    if tiles[2] > 0:
        s_high, s_low = queries.index(2 * HALF), queries.index(2 * HALF + 1)
        EACH: gl.constexpr = 8 if WIDE else 16  # coordinates of a thread: 16 bytes
        LOAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // DIM, DIM // EACH], [4, 1], [1, 0])
        q_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))
        q_out = (i_from + q_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + q_row % G
        p_parts = parts + (q_out * (2 * DIM))[:, None] + gl.arange(0, DIM, layout=gl.SliceLayout(0, LOAD))[None, :]
        s_high.store(gl.load(p_parts, mask=(q_row < rows)[:, None], other=0))
        s_low.store(gl.load(p_parts + DIM, mask=(q_row < rows)[:, None], other=0))
        fence_async_shared()
        meet()
        factor = gl.load(factors + o_out * 2, mask=m_row, other=1.0)
        bias = gl.load(factors + o_out * 2 + 1, mask=m_row, other=0.0)
        scores = gl.zeros([ROWS, KEYS], gl.float32 if WIDE else gl.int32, SCORES)
        b_queries = (s_high, s_low)
        mbarrier.wait(keys_there(bars, 0), 0)
        raw = made_scores(0, score(b_queries, b_keys.index(0).permute((1, 0)), scores))
        mbarrier.arrive(keys_read(bars, 0))
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        p, _, top, total = weigh(0, raw, s_scales, factor, top, total, tiles, rule, KEYS, MASK, True)
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
        mbarrier.wait(values_there(bars, 0), 0)
        unit, bad = read_note(s_notes, 0)
        damaged = gl.zeros([ROWS], gl.int32, ROW)
        damaged = find_damage(0, damaged, bad, halves, place, at, tiles, rule, COLUMN, CODES, MASK, True)
        acc = gl.zeros([ROWS, DIM], gl.float32, SUMS)
        state = (weights, acc, top, total, damaged, unit, scores)
        inside, count = tiles[1], tiles[2]
        for i in range(0, inside - 1):
            state = add_tile(i, state, factor, b_queries, shared, halves, place, at, tiles, rule, CODES, MASK, False)
        for i in range(gl.maximum(inside - 1, 0), count - 1):
            state = add_tile(i, state, factor, b_queries, shared, halves, place, at, tiles, rule, CODES, MASK, True)
        weights, acc, top, total, damaged, unit, scores = state
        last = count - 1
        acc = warpgroup_mma(weights, b_values.index(last & (SLOTS - 1)), acc)

        weight = gl.where(total == 0, 1.0, total)
        scale = gl.convert_layout(1.0 / weight, SUM_ROW) * ((unit + 1) << 23).to(gl.float32, bitcast=True)
        scale = gl.where(gl.convert_layout(damaged, SUM_ROW) > 0, float("nan"), scale)
        mean = in_planes(acc * scale[:, None], ORDER)
        OUT: gl.constexpr = mean.type.layout
        out_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        out_at = ((i_from + out_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + out_row % G) * splits + i_split
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
        gl.store(means + (out_at * DIM)[:, None] + column[None, :], mean, mask=(out_row < rows)[:, None])
        found = gl.where(total == 0, float("-inf"), top + bias + gl.log2(total) - HEADROOM)
        gl.store(sums + o_out * splits + i_split, found, mask=m_row)
    else:
        gl.store(sums + o_out * splits + i_split, gl.full([ROWS], float("-inf"), gl.float32, ROW), mask=m_row)


@gluon.jit
def in_planes(mean, ORDER: gl.constexpr):
    """Columns in the order of the values' coordinates by planes of every eight."""
    ROWS: gl.constexpr = mean.shape[0]
    DIM: gl.constexpr = mean.shape[1]
    if DIM == 128:  # see extend_decode.over_banks
        mean = gl.permute(mean.reshape([ROWS, 2, 4, 16]), (0, 2, 1, 3)).reshape([ROWS, DIM])
    if ORDER == "halves":  # 32 · a + 8 · b + c + 16 · d
        mean = gl.permute(mean.reshape([ROWS, DIM // 32, 2, 8, 2]), (0, 3, 1, 4, 2))
    elif ORDER == "bytes":  # 8 · a + 4 · b + c + 2 · d
        mean = gl.permute(mean.reshape([ROWS, DIM // 8, 2, 2, 2]), (0, 2, 4, 3, 1))
    else:
        mean = gl.permute(mean.reshape([ROWS, DIM // 8, 4, 2]), (0, 3, 2, 1) if ORDER == "fourth" else (0, 2, 3, 1))
    return mean.reshape([ROWS, DIM])


@gluon.jit(do_not_specialize=VARYING)
def extend_kernel(
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
    HALF_ROWS: gl.constexpr = ROWS // 2
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
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(PART, [4, HALF_ROWS, DIM], PARTS)
    s_keys = gl.allocate_shared_memory(gl.int32, [SLOTS, KEYS, WORDS], gl.NVMMASharedLayout(ROW, 32, rank=2))
    s_values = gl.allocate_shared_memory(gl.int32, [SLOTS, KEYS, DIM // 2], gl.NVMMASharedLayout(128, 32, rank=2))
    s_scales = gl.allocate_shared_memory(gl.float32, [SCALE_SLOTS, KEYS], FLAT)
    s_notes = gl.allocate_shared_memory(gl.int32, [SLOTS, 32], FLAT)
    b_keys = reinterpret(s_keys, PART, [SLOTS, KEYS, DIM], PARTS)
    b_values = reinterpret(s_values, gl.float16, [SLOTS, KEYS, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    bars = gl.allocate_shared_memory(gl.int64, [4 * SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(keys_there(bars, i), 1)
        mbarrier.init(keys_read(bars, i), 2)
        mbarrier.init(values_there(bars, i), 1)
        mbarrier.init(values_read(bars, i), 2)
    fence_async_shared()
    meet()

    place = (table, i_seq, i_head, kv_heads, pages, width, pinned, capacity)
    at = (page_bytes, key_codes, key_scales, value_codes, value_scales)
    tiles = (whole - i_tile, edge - whole, last_tile - i_tile, i_tile, a_tiles, a_base, b_base)
    rule = (window, sinks, first, recent, a_start, a_stop, b_start, b_stop)
    block = (i_first, i_from, rows, first_query, splits, i_split)
    made = (s_keys, s_values, s_scales, s_notes, bars)
    read = (b_keys, b_values, s_scales, s_notes, bars)
    gl.warp_specialize(
        [
            (attend_rows, (parts, factors, means, sums, halves, place, at, tiles, rule, block, queries, read,
                           0, G, DIM, ORDER, HALF_ROWS, CODES, MASK)),
            (attend_rows, (parts, factors, means, sums, halves, place, at, tiles, rule, block, queries, read,
                           1, G, DIM, ORDER, HALF_ROWS, CODES, MASK)),
            (decode_keys, (words, halves, place, at, tiles, made, KEY, CODES)),
            (decode_values, (words, halves, place, at, tiles, length, step, made, VALUE, CODES)),
        ],
        [4, 4, 4],
        registers(KEY[0], VALUE[0]),
    )  # fmt: skip

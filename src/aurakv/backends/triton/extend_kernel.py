"""Attention of many queries a sequence over paged codes, on Hopper's warp-group products (Gluon).

Rows of a program are ROWS (token, head of the group) pairs of one sequence and KV head. Program (block, kv head, split)
walks over its share of the tiles of KEYS keys. Around tile i: the codes of tile i + 1 become int8 levels in shared
memory, their products with the queries start; the weights of tile i are made; their products with the values start;
the codes of the values of tile i + 1 become float16 numbers in shared memory. So the tensor cores work beside
everything else. Queries are integers of 16 bits in two int8 parts: scores are exact up to that.

In:  parts [rows, 2, DIM] int8 and factors [rows, 2] (queries.prepare_integers_kernel); the pages as int32 and as
     float16; table, lengths, starts, ends. Out: `means` and `sums` for results.finish_kernel.
Constexprs: KEY, VALUE (bits, asm); FOURTH the order of the values' coordinates; PAGED, else one page a sequence;
     SEQS a power of two ≥ seqs and 32; CAUSAL, WINDOW, EXACT see masks.
The launcher guarantees: pages of whole tiles, or one; scales in float16; DIM in (64, 128).
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import masks
from .extend_decode import codes_layout, key_tile, load_codes, to_nibbles, value_tile

HEADROOM = gl.constexpr(14.0)  # log2 of the largest weight in float16
LEAST_EXPONENT = gl.constexpr(103)  # of a value scale: 2^-24, the smallest float16 number

key_spans = gluon.jit(masks.key_spans.fn)
whole_tiles = gluon.jit(masks.whole_tiles.fn)
visible = gluon.jit(masks.visible.fn)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def find_rows(starts, tokens, seqs, i_block, G: gl.constexpr, ROWS: gl.constexpr, SEQS: gl.constexpr):
    """slots.find_block: the sequence of a block of rows, its first row inside that, the sequence's tokens."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, SEQS // 32)], [32], [4], [0])
    o_seq = gl.arange(0, SEQS, layout=layout)
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
def tile_start(i, order, a_tiles, a_base, b_base, KEYS: gl.constexpr):
    """The first key of the tile that comes i-th: `order` is (tiles before the whole ones, those, all, the first)."""
    before, inside, count, first_tile = order
    i = gl.minimum(i, count - 1)
    tile = first_tile + gl.where(i < inside, before + i, gl.where(i < inside + before, i - inside, i))
    return gl.where(tile < a_tiles, a_base + tile * KEYS, b_base + (tile - a_tiles) * KEYS)


@gluon.jit
def find_page(place, t, CODES: gl.constexpr):
    """The page that holds key t."""
    PAGE: gl.constexpr = CODES[0]  # 0: one page a sequence
    table, i_seq, i_head, kv_heads, pages, width, pinned = place
    entry = t * 0
    if PAGE > 0:
        page = t // PAGE
        entry = gl.minimum(page, width - 1)
        if CODES[1]:
            entry = gl.where(page < pinned, page, pinned + (page - pinned) % gl.maximum(width - pinned, 1))
    return gl.load(table + i_seq.to(gl.int64) * width + entry)


@gluon.jit
def find_piece(place, page, t, page_bytes, CODES: gl.constexpr):
    """Byte offset of a head's piece of the page that holds key t, and the key's row in it."""
    PAGE: gl.constexpr = CODES[0]
    table, i_seq, i_head, kv_heads, pages, width, pinned = place
    row = t
    if PAGE > 0:
        row = t % PAGE
    page = gl.minimum(gl.maximum(page, 0), pages - 1)
    return (page.to(gl.int64) * kv_heads + i_head) * page_bytes, row


@gluon.jit
def load_tile(words, halves, place, at, order, bounds, i, page, CODES: gl.constexpr):
    """What is read of the i-th tile, which lies in `page`: codes of keys, their scales, codes of values, value scales by
    row of the decoder and by lane of every warp; and the next tile's page. Past the end the last tile comes again."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    KEY_BITS: gl.constexpr = CODES[4]
    VALUE_BITS: gl.constexpr = CODES[5]
    page_bytes, key_codes, key_scales, value_codes, value_scales = at
    t = tile_start(i, order, bounds[0], bounds[1], bounds[2], KEYS)
    piece, row = find_piece(place, page, t, page_bytes, CODES)
    next_page = find_page(place, tile_start(i + 1, order, bounds[0], bounds[1], bounds[2], KEYS), CODES)
    key_at = gl.multiple_of((piece + key_codes) // 4 + row * (LANES * KEY_BITS), 4)
    value_at = gl.multiple_of((piece + value_codes) // 4 + row * (LANES * VALUE_BITS), 4)
    p_key_scale = halves + ((piece + key_scales) // 2 + row)
    p_value_scale = halves + ((piece + value_scales) // 2 + row)
    o_key = gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    o_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, codes_layout(KEYS, LANES, 1)))
    o_lane = gl.arange(0, KEYS, layout=gl.BlockedLayout([KEYS // 32], [32], [4], [0]))
    k = load_codes(words, key_at, KEYS, LANES, KEY_BITS)
    v = load_codes(words, value_at, KEYS, LANES, VALUE_BITS)
    row_scale, lane_scale = gl.load(p_value_scale + o_row), gl.load(p_value_scale + o_lane)
    return k, gl.load(p_key_scale + o_key), v, row_scale, lane_scale, next_page


@gluon.jit
def store_keys(codes, scale, s_keys, s_scales, KEY: gl.constexpr, CODES: gl.constexpr):
    """Int8 levels of keys, and their scales in float32 with NaN for what is not finite."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = KEY[0]
    ASM: gl.constexpr = KEY[1]
    s_keys.store(key_tile(to_nibbles(codes, KEYS, LANES, BITS), ASM))
    scale = scale.to(gl.float32)
    s_scales.store(gl.where(gl.abs(scale) < float("inf"), scale, float("nan")))


@gluon.jit
def store_values(codes, scale, lane_scale, known, unit, step, s_values, VALUE: gl.constexpr, CODES: gl.constexpr):
    """Levels of values times their scales over 2^(unit − 126); the new unit; whether a scale is not finite.

    Keys from `known` on do not exist."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    o_lane = gl.arange(0, KEYS, layout=lane_scale.type.layout)
    size = gl.where(o_lane < known, gl.abs(lane_scale.to(gl.float32)), 0.0)
    good = size < float("inf")
    bits = gl.max(gl.where(good, size, 0.0).to(gl.int32, bitcast=True), 0)
    unit = gl.maximum(unit, bits >> 23)
    damaged = gl.max((~good).to(gl.int32), 0)
    o_row = gl.arange(0, KEYS, layout=scale.type.layout)
    scale = scale.to(gl.float32)
    scale = gl.where((gl.abs(scale) < float("inf")) & (o_row < known), scale, 0.0)
    scale = (scale * (((253 - unit) << 23).to(gl.float32, bitcast=True) * step)).to(gl.float16)
    twice = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    twice = twice | twice << 16
    layout: gl.constexpr = codes_layout(KEYS, LANES, 1)
    twice = gl.expand_dims(twice, 1) + gl.zeros([KEYS, LANES], gl.int32, layout)
    BITS: gl.constexpr = VALUE[0]
    ASM: gl.constexpr = VALUE[1]
    s_values.store(value_tile(to_nibbles(codes, KEYS, LANES, BITS), twice, ASM))
    return unit, damaged


@gluon.jit
def seen_keys(i, order, bounds, rule, COLUMN: gl.constexpr, KEYS: gl.constexpr, MASK: gl.constexpr):
    """Which keys of the i-th tile each row sees, and the first of them."""
    CAUSAL: gl.constexpr = MASK[0]
    WINDOW: gl.constexpr = MASK[1]
    EXACT: gl.constexpr = MASK[2]
    b_query, window, sinks, first, recent = rule
    a_tiles, a_base, b_base, a_start, a_stop, b_start, b_stop = bounds
    t = tile_start(i, order, a_tiles, a_base, b_base, KEYS)
    o_key = t + gl.arange(0, KEYS, layout=COLUMN)
    inside = ((o_key >= a_start) & (o_key < a_stop)) | ((o_key >= b_start) & (o_key < b_stop))
    seen = visible(b_query, o_key, window, sinks, first, recent, CAUSAL, WINDOW, EXACT)
    return seen & inside[None, :], t


@gluon.jit
def weigh(
    i, high, low, s_scales, factor, top, total, order, bounds, rule,
    KEYS: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of the i-th tile times 2^HEADROOM, by how much earlier ones shrink, the new maximum and sum."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, high.type.layout)
    s = (high * 256 + low).to(gl.float32) * s_scales.index(i & 1).load(COLUMN)[None, :]
    if MASKED:
        seen, _ = seen_keys(i, order, bounds, rule, COLUMN, KEYS, MASK)
        s = gl.where(seen, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * factor)
    base = gl.where(new_top == float("-inf"), 0.0, new_top) - HEADROOM
    decay = gl.where(top == float("-inf"), 0.0, gl.exp2(top - new_top))
    p = gl.exp2(s * factor[:, None] - base[:, None])
    return p.to(gl.float16), decay, new_top, total * decay + gl.sum(p, 1)


@gluon.jit
def find_damage(
    i, damaged, bad, halves, place, at, order, bounds, rule,
    COLUMN: gl.constexpr, CODES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Mark the rows that see a value of the i-th tile that is not finite; `bad`: there are some."""
    KEYS: gl.constexpr = CODES[2]
    if MASKED:
        if bad > 0:
            seen, t = seen_keys(i, order, bounds, rule, COLUMN, KEYS, MASK)
            piece, row = find_piece(place, find_page(place, t, CODES), t, at[0], CODES)
            size = gl.load(halves + ((piece + at[4]) // 2 + row) + gl.arange(0, KEYS, layout=COLUMN)).to(gl.float32)
            wrong = ~(gl.abs(size) < float("inf"))
            damaged = gl.maximum(damaged, gl.max((seen & wrong[None, :]).to(gl.int32), 1))
    else:
        damaged = gl.maximum(damaged, bad)
    return damaged


@gluon.jit
def add_tile(
    i, weights, acc, top, total, damaged, values, ahead, units, factor, shared, words, halves, place, at,
    order, bounds, rule, length, step, scores,
    KEY: gl.constexpr, VALUE: gl.constexpr, CODES: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the values of the i-th tile, whose weights are known, and find the weights of the next one.

    units: of the sums and of the values in shared memory."""
    KEYS: gl.constexpr = CODES[2]
    s_high, s_low, s_keys, b_keys, s_values, b_values, s_scales = shared
    this = i & 1
    other = this ^ 1
    SUMS: gl.constexpr = acc.type.layout
    fence_async_shared()
    gl.thread_barrier()
    b_key = b_keys.index(other).permute((1, 0))
    high = warpgroup_mma(s_high, b_key, scores, use_acc=False, is_async=True)
    low = warpgroup_mma(s_low, b_key, scores, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, b_values.index(this), acc, is_async=True)

    next_t = tile_start(i + 1, order, bounds[0], bounds[1], bounds[2], KEYS)
    unit, bad = store_values(
        values[0], values[1], values[2], length - next_t, units[1], step, s_values.index(other), VALUE, CODES
    )
    store_keys(ahead[0], ahead[1], s_keys.index(this), s_scales.index(this), KEY, CODES)
    values = (ahead[2], ahead[3], ahead[4])
    ahead = load_tile(words, halves, place, at, order, bounds, i + 3, ahead[5], CODES)

    high, low = warpgroup_mma_wait(1, deps=[high, low])
    p, decay, top, total = weigh(
        i + 1, high, low, s_scales, factor, top, total, order, bounds, rule, KEYS, MASK, MASKED
    )
    weights = gl.convert_layout(p, weights.type.layout, assert_trivial=True)
    shrink = gl.convert_layout(decay, gl.SliceLayout(1, SUMS))
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = acc * (shrink * ((127 + units[1] - unit) << 23).to(gl.float32, bitcast=True))[:, None]
    COLUMN: gl.constexpr = gl.SliceLayout(0, high.type.layout)
    damaged = find_damage(
        i + 1, damaged, bad, halves, place, at, order, bounds, rule, COLUMN, CODES, MASK, MASKED
    )
    return weights, acc, top, total, damaged, values, ahead, (units[1], unit), high


@gluon.jit(do_not_specialize=["tokens", "seqs", "pages", "width", "pinned", "capacity", "window", "sinks", "first", "recent", "splits", "least"])
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
    FOURTH: gl.constexpr,
    PAGE: gl.constexpr,
    RING: gl.constexpr,
    SEQS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    EXACT: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):
    LANES: gl.constexpr = DIM // 32
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    CODES: gl.constexpr = (PAGE, RING, KEYS, LANES, KEY[0], VALUE[0])
    i_head = gl.program_id(1)
    i_split = gl.program_id(2)
    i_block = gl.num_programs(0) - 1 - gl.program_id(0)  # the last blocks have most to do
    i_seq, i_first, i_from, i_to = find_rows(starts, tokens, seqs, i_block, G, ROWS, SEQS)
    rows = (i_to - i_from) * G
    if i_first >= rows:
        return
    o_row = i_first + gl.arange(0, ROWS, layout=ROW)
    m_row = o_row < rows
    o_out = (i_from + o_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + o_row % G

    end = gl.load(ends + i_seq)
    b_query = end - i_to + i_from + o_row // G
    lowest = end - i_to + i_from + i_first // G
    highest = end - i_to + i_from + (gl.minimum(i_first + ROWS, rows) - 1) // G
    length = gl.load(lengths + i_seq)
    if not RING:
        length = gl.minimum(length, capacity)
    a_start, a_stop, b_start, b_stop = key_spans(
        lowest, highest, length * 0, length, window, sinks, first, recent, CAUSAL, WINDOW, EXACT
    )
    a_base = a_start // KEYS * KEYS
    b_base = b_start // KEYS * KEYS
    a_tiles = gl.where(a_stop > a_start, gl.cdiv(a_stop - a_base, KEYS), 0)
    tiles = a_tiles + gl.where(b_stop > b_start, gl.cdiv(b_stop - b_base, KEYS), 0)
    share = gl.maximum(gl.cdiv(tiles, splits), least)
    i_tile = gl.minimum(i_split * share, tiles)
    last_tile = gl.minimum(i_tile + share, tiles)
    whole, edge = whole_tiles(b_base, b_start, b_stop, lowest, highest, window, recent, CAUSAL, WINDOW, EXACT, KEYS)
    whole = gl.minimum(gl.maximum(a_tiles + whole, i_tile), last_tile)
    edge = gl.minimum(gl.maximum(a_tiles + edge, whole), last_tile)

    BYTES: gl.constexpr = gl.NVMMASharedLayout(DIM, 8, rank=2)
    QUADS: gl.constexpr = gl.NVMMASharedLayout(DIM, 32, rank=2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_high = gl.allocate_shared_memory(gl.int8, [ROWS, DIM], BYTES)
    s_low = gl.allocate_shared_memory(gl.int8, [ROWS, DIM], BYTES)
    s_keys = gl.allocate_shared_memory(gl.int32, [2, KEYS, DIM // 4], QUADS)
    s_values = gl.allocate_shared_memory(gl.int32, [2, KEYS, DIM // 2], PAIRS)
    s_scales = gl.allocate_shared_memory(gl.float32, [2, KEYS], FLAT)
    b_keys = s_keys._reinterpret(gl.int8, [2, KEYS, DIM], gl.NVMMASharedLayout(DIM, 8, rank=2))
    b_values = s_values._reinterpret(gl.float16, [2, KEYS, DIM], TILE)

    if i_tile < last_tile:
        LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [512 // DIM, DIM // 16], [4, 1], [1, 0])
        q_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOAD))
        q_out = (i_from + q_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + q_row % G
        p_parts = parts + (q_out * (2 * DIM))[:, None] + gl.arange(0, DIM, layout=gl.SliceLayout(0, LOAD))[None, :]
        s_high.store(gl.load(p_parts, mask=(q_row < rows)[:, None], other=0))
        s_low.store(gl.load(p_parts + DIM, mask=(q_row < rows)[:, None], other=0))
        factor = gl.load(factors + o_out * 2, mask=m_row, other=1.0)
        bias = gl.load(factors + o_out * 2 + 1, mask=m_row, other=0.0)
        place = (table, i_seq, i_head, kv_heads, pages, width, pinned)
        at = (page_bytes, key_codes, key_scales, value_codes, value_scales)
        order = (whole - i_tile, edge - whole, last_tile - i_tile, i_tile)
        bounds = (a_tiles, a_base, b_base, a_start, a_stop, b_start, b_stop)
        rule = (b_query, window, sinks, first, recent)
        MASK: gl.constexpr = (CAUSAL, WINDOW, EXACT)
        shared = (s_high, s_low, s_keys, b_keys, s_values, b_values, s_scales)

        t = tile_start(0, order, a_tiles, a_base, b_base, KEYS)
        page = find_page(place, t, CODES)
        k, key_scale, v, row_scale, lane_scale, page = load_tile(
            words, halves, place, at, order, bounds, 0, page, CODES
        )
        store_keys(k, key_scale, s_keys.index(0), s_scales.index(0), KEY, CODES)
        unit = i_tile * 0 + LEAST_EXPONENT
        unit, bad = store_values(v, row_scale, lane_scale, length - t, unit, step, s_values.index(0), VALUE, CODES)
        ahead = load_tile(words, halves, place, at, order, bounds, 1, page, CODES)
        store_keys(ahead[0], ahead[1], s_keys.index(1), s_scales.index(1), KEY, CODES)
        fence_async_shared()
        gl.thread_barrier()
        scores = gl.zeros([ROWS, KEYS], gl.int32, SCORES)
        b_key = b_keys.index(0).permute((1, 0))
        high = warpgroup_mma(s_high, b_key, scores, use_acc=False)
        low = warpgroup_mma(s_low, b_key, scores, use_acc=False)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        p, _, top, total = weigh(0, high, low, s_scales, factor, top, total, order, bounds, rule, KEYS, MASK, True)
        weights = gl.convert_layout(p, WEIGHTS, assert_trivial=True)
        damaged = gl.zeros([ROWS], gl.int32, ROW)
        damaged = find_damage(0, damaged, bad, halves, place, at, order, bounds, rule, COLUMN, CODES, MASK, True)
        acc = gl.zeros([ROWS, DIM], gl.float32, SUMS)
        # codes of values one tile ahead and of keys two
        values = (ahead[2], ahead[3], ahead[4])
        ahead = load_tile(words, halves, place, at, order, bounds, 2, ahead[5], CODES)
        units = (unit, unit)
        for i in range(0, order[1] - 1):
            weights, acc, top, total, damaged, values, ahead, units, scores = add_tile(
                i, weights, acc, top, total, damaged, values, ahead, units, factor, shared, words, halves, place, at,
                order, bounds, rule, length, step, scores, KEY, VALUE, CODES, MASK, False,
            )  # fmt: skip
        for i in range(gl.maximum(order[1] - 1, 0), order[2] - 1):
            weights, acc, top, total, damaged, values, ahead, units, scores = add_tile(
                i, weights, acc, top, total, damaged, values, ahead, units, factor, shared, words, halves, place, at,
                order, bounds, rule, length, step, scores, KEY, VALUE, CODES, MASK, True,
            )  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()
        acc = warpgroup_mma(weights, b_values.index((order[2] - 1) & 1), acc)

        weight = gl.where(total == 0, 1.0, total)
        scale = gl.convert_layout(1.0 / weight, SUM_ROW) * ((units[1] + 1) << 23).to(gl.float32, bitcast=True)
        scale = gl.where(gl.convert_layout(damaged, SUM_ROW) > 0, float("nan"), scale)
        mean = (acc * scale[:, None]).reshape([ROWS, DIM // 8, 4, 2])
        mean = gl.permute(mean, (0, 3, 2, 1) if FOURTH else (0, 2, 3, 1)).reshape([ROWS, DIM])  # plane-major
        OUT: gl.constexpr = mean.type.layout
        out_row = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        out_at = ((i_from + out_row // G).to(gl.int64) * (kv_heads * G) + i_head * G + out_row % G) * splits + i_split
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
        gl.store(means + (out_at * DIM)[:, None] + column[None, :], mean, mask=(out_row < rows)[:, None])
        found = gl.where(total == 0, float("-inf"), top + bias + gl.log2(total) - HEADROOM)
        gl.store(sums + o_out * splits + i_split, found, mask=m_row)
    else:
        gl.store(sums + o_out * splits + i_split, gl.full([ROWS], float("-inf"), gl.float32, ROW), mask=m_row)

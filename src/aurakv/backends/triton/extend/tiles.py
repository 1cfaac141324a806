"""Decoded tiles of the extend kernel: their slots and barriers, and the warp groups that fill them.

A tile is KEYS keys or values. tiles: those before the ones that all rows see whole, these, all, the first; tiles of
span a, the first keys of the spans. place: table, sequence, head, KV heads, pages, width of the table, pinned
pages, tokens that a sequence has room for.
at: bytes of a page, where codes and scales of keys and of values begin in it. shared: keys, values, scales of keys,
notes about values, barriers. CODES: tokens a page (0 for one page a sequence), whether pages wrap, KEYS, lanes of a row
(32 codes each), bits of keys and of values. KEY, VALUE: bits, PTX.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common.gluon_names import meet
from ..common.gluon_slots import table_entry
from .codes import codes_layout, key_tile, load_codes, over_banks, to_nibbles, value_tile, wide_tile

SLOTS = gl.constexpr(4)  # decoded tiles, a power of two: so far the groups' times may differ
SCALE_SLOTS = gl.constexpr(8)  # scales are read after the slot of their keys is free again
LEAST_EXPONENT = gl.constexpr(103)  # of a value scale: 2^-24, the smallest float16 number


@gluon.jit
def keys_there(bars, i):
    """The barrier of the i-th tile."""
    return bars.index(i & (SLOTS - 1))


@gluon.jit
def keys_read(bars, i):
    return bars.index(SLOTS + (i & (SLOTS - 1)))


@gluon.jit
def values_there(bars, i):
    return bars.index(2 * SLOTS + (i & (SLOTS - 1)))


@gluon.jit
def values_read(bars, i):
    return bars.index(3 * SLOTS + (i & (SLOTS - 1)))


@gluon.jit
def phase(i):
    """Of the barriers of the i-th tile that say it is there; those that its slot is free are in the other one."""
    return (i & SLOTS) // SLOTS


@gluon.jit
def tile_start(i, tiles, KEYS: gl.constexpr):
    """The first key of the tile that comes i-th; past the end the last one comes again."""
    before, inside, count, first_tile, a_tiles, a_base, b_base = tiles
    i = gl.minimum(i, count - 1)
    tile = first_tile + gl.where(i < inside, before + i, gl.where(i < inside + before, i - inside, i))
    return gl.where(tile < a_tiles, a_base + tile * KEYS, b_base + (tile - a_tiles) * KEYS)


@gluon.jit
def find_page(place, t, CODES: gl.constexpr):
    """The page that holds key t."""
    PAGE: gl.constexpr = CODES[0]  # 0: one page a sequence
    table, i_seq, _, _, _, width, pinned, _ = place
    entry = t * 0
    if PAGE > 0:
        page = t // PAGE
        entry = gl.minimum(page, width - 1)
        if CODES[1]:
            entry = table_entry(page, width, pinned)
    return gl.load(table + i_seq.to(gl.int64) * width + entry)


@gluon.jit
def find_piece(place, page, t, page_bytes, CODES: gl.constexpr):
    """Byte offset of a head's piece of the page that holds key t, the key's row in it, and how many rows follow where
    it is the only one: other pages have whole tiles."""
    PAGE: gl.constexpr = CODES[0]
    _, _, i_head, kv_heads, pages, _, _, capacity = place
    row = t
    if PAGE > 0:
        row = t % PAGE
    page = gl.minimum(gl.maximum(page, 0), pages - 1)
    return (page.to(gl.int64) * kv_heads + i_head) * page_bytes, row, capacity - t


@gluon.jit
def load_scales(p_scale, o_row, left, WHOLE: gl.constexpr):
    """Of rows of a tile, of which memory has `left`; WHOLE: all."""
    if WHOLE:
        return gl.load(p_scale + o_row)
    else:
        return gl.load(p_scale + o_row, mask=o_row < left)


@gluon.jit
def load_codes_of(words, halves, place, side, tiles, i, page, BITS: gl.constexpr, CODES: gl.constexpr):
    """Codes of the keys or values of the i-th tile, which lies in `page`; where their scales lie; how many rows
    memory has there, see `find_piece`; the next tile's page.

    side: bytes of a page, where codes and scales begin in it."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    page_bytes, codes, scales = side
    piece, row, left = find_piece(place, page, tile_start(i, tiles, KEYS), page_bytes, CODES)
    next_page = find_page(place, tile_start(i + 1, tiles, KEYS), CODES)
    codes_at = gl.multiple_of((piece + codes) // 4 + row * (LANES * BITS), 4)
    p_scale = halves + ((piece + scales) // 2 + row)
    return load_codes(words, codes_at, left, KEYS, LANES, BITS, CODES[0] > 0), p_scale, left, next_page


@gluon.jit
def load_keys(words, halves, place, at, tiles, i, page, CODES: gl.constexpr):
    """What is read of the keys of the i-th tile, which lies in `page`: codes and scales; and the next tile's page."""
    codes, p_scale, left, page = load_codes_of(words, halves, place, at[:3], tiles, i, page, CODES[4], CODES)
    o_key = gl.arange(0, CODES[2], layout=gl.BlockedLayout([1], [32], [4], [0]))
    return codes, load_scales(p_scale, o_key, left, CODES[0] > 0), page


@gluon.jit
def load_values(words, halves, place, at, tiles, i, page, CODES: gl.constexpr):
    """Like `load_keys`: codes, scales by row of the decoder and by lane of every warp, the next tile's page."""
    KEYS: gl.constexpr = CODES[2]
    side = (at[0], at[3], at[4])
    codes, p_scale, left, page = load_codes_of(words, halves, place, side, tiles, i, page, CODES[5], CODES)
    o_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, codes_layout(KEYS, CODES[3], 1)))
    o_lane = gl.arange(0, KEYS, layout=gl.BlockedLayout([KEYS // 32], [32], [4], [0]))
    row_scale = load_scales(p_scale, o_row, left, CODES[0] > 0)
    return codes, row_scale, load_scales(p_scale, o_lane, left, CODES[0] > 0), page


@gluon.jit
def store_keys(codes, scale, s_keys, s_scales, KEY: gl.constexpr, CODES: gl.constexpr):
    """Int8 or float16 levels of keys, and their scales in float32 with NaN for what is not finite."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = KEY[0]
    ASM: gl.constexpr = KEY[1]
    if BITS > 4:
        s_keys.store(over_banks(wide_tile(codes, (), ASM, KEYS, LANES, BITS), LANES))
    else:
        s_keys.store(key_tile(to_nibbles(codes, KEYS, LANES, BITS), ASM))
    scale = scale.to(gl.float32)
    s_scales.store(gl.where(gl.abs(scale) < float("inf"), scale, float("nan")))


@gluon.jit
def store_values(codes, scale, known, unit, step, s_values, VALUE: gl.constexpr, CODES: gl.constexpr):
    """Levels of values times their scales over 2^(unit − 126); 0 where a scale is not finite.

    Keys from `known` on do not exist."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = VALUE[0]
    ASM: gl.constexpr = VALUE[1]
    o_row = gl.arange(0, KEYS, layout=scale.type.layout)
    scale = scale.to(gl.float32)
    scale = gl.where((gl.abs(scale) < float("inf")) & (o_row < known), scale, 0.0)
    scale = (scale * (((253 - unit) << 23).to(gl.float32, bitcast=True) * step)).to(gl.float16)
    twice = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    twice = twice | twice << 16
    twice = gl.expand_dims(twice, 1) + gl.zeros([KEYS, LANES], gl.int32, codes_layout(KEYS, LANES, 1))
    if BITS > 4:
        tile = wide_tile(codes, (twice,), ASM, KEYS, LANES, BITS)
    else:
        tile = value_tile(to_nibbles(codes, KEYS, LANES, BITS), twice, ASM)
    s_values.store(over_banks(tile, LANES))


@gluon.jit
def decode_keys(words, halves, place, at, tiles, shared, KEY: gl.constexpr, CODES: gl.constexpr):
    """The warp group that decodes keys."""
    s_keys, _, s_scales, _, bars = shared
    KEYS: gl.constexpr = CODES[2]
    count = tiles[2]
    if count > 0:
        page = find_page(place, tile_start(0, tiles, KEYS), CODES)
        loaded = load_keys(words, halves, place, at, tiles, 0, page, CODES)
        for i in range(0, count):
            codes, scale, page = loaded
            loaded = load_keys(words, halves, place, at, tiles, i + 1, page, CODES)
            mbarrier.wait(keys_read(bars, i), phase(i) ^ 1)
            s_tile, s_scale = s_keys.index(i & (SLOTS - 1)), s_scales.index(i & (SCALE_SLOTS - 1))
            store_keys(codes, scale, s_tile, s_scale, KEY, CODES)
            fence_async_shared()
            meet()
            mbarrier.arrive(keys_there(bars, i))


@gluon.jit
def decode_values(words, halves, place, at, tiles, length, step, shared, VALUE: gl.constexpr, CODES: gl.constexpr):
    """The warp group that decodes values."""
    _, s_values, _, s_notes, bars = shared
    KEYS: gl.constexpr = CODES[2]
    unit = length * 0 + LEAST_EXPONENT
    count = tiles[2]
    if count > 0:
        page = find_page(place, tile_start(0, tiles, KEYS), CODES)
        loaded = load_values(words, halves, place, at, tiles, 0, page, CODES)
        for i in range(0, count):
            codes, row_scale, lane_scale, page = loaded
            loaded = load_values(words, halves, place, at, tiles, i + 1, page, CODES)
            o_lane = gl.arange(0, KEYS, layout=lane_scale.type.layout)
            known = length - tile_start(i, tiles, KEYS)
            size = gl.where(o_lane < known, gl.abs(lane_scale.to(gl.float32)), 0.0)
            good = size < float("inf")
            unit = gl.maximum(unit, gl.max(gl.where(good, size, 0.0).to(gl.int32, bitcast=True), 0) >> 23)
            bad = gl.max((~good).to(gl.int32), 0)
            note = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + (unit + (bad << 16))
            mbarrier.wait(values_read(bars, i), phase(i) ^ 1)
            s_notes.index(i & (SLOTS - 1)).store(note)
            store_values(codes, row_scale, known, unit, step, s_values.index(i & (SLOTS - 1)), VALUE, CODES)
            fence_async_shared()
            meet()
            mbarrier.arrive(values_there(bars, i))

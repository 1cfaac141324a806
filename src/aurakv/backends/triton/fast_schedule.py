"""Which tiles a program reads, from the lengths on the device, and their copies into shared memory.

A cursor is (tiles left, sequence, KV head, tile, first tile and end of the sequence, table entry, tile in the page).
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def seen(seq, ends, lengths, scan, SCAN: gl.constexpr):
    """The keys lo ≤ t < hi that the query of a sequence sees, and the tiles t0 … t1 that hold them.

    SCAN: (ends clip the keys, there is a window, tokens of a tile); scan: (first, recent, window)."""
    TILE: gl.constexpr = SCAN[2]
    hi = gl.load(lengths + seq)
    end = gl.load(ends + seq)
    if SCAN[0]:
        hi = gl.minimum(hi, end - scan[1])
    lo = scan[0] + 0 * hi
    if SCAN[1]:
        lo = gl.maximum(lo, end - scan[2])
    hi = gl.maximum(hi, lo)
    t0 = lo // TILE
    t1 = gl.where(hi > lo, (hi + TILE - 1) // TILE, t0)
    return lo, hi, t0, t1


@gluon.jit
def split_pieces(total, program, programs):
    """The first tile of a program and how many it has."""
    each = total // programs
    extra = total - each * programs
    return program * each + gl.minimum(program, extra), each + (program < extra).to(gl.int32)


@gluon.jit
def next_entry(entry, width, pinned):
    return gl.where(entry + 1 < width, entry + 1, gl.minimum(pinned, width - 1))


@gluon.jit
def enter(tile, width, pinned, page_tiles):
    """The table entry where a tile of a sequence lies, and the tile inside that page."""
    page = tile // page_tiles
    wrapped = pinned + (page - pinned) % gl.maximum(width - pinned, 1)
    return gl.minimum(gl.where(page < pinned, page, wrapped), width - 1), tile - page * page_tiles


@gluon.jit
def look_up(cursor, table, width):
    """The page of the tile under the cursor; called well before `fetch` needs it."""
    return gl.load(table + cursor[1] * width + cursor[6])


@gluon.jit
def fetch(cursor, page, slot, units, scales, s_units, s_scales, bars, kv_heads, TILE: gl.constexpr, U: gl.constexpr):
    """Start the copy of the tile under the cursor into a slot of the ring."""
    piece = page * kv_heads + cursor[2]
    row = cursor[7] * TILE
    bar = bars.index(slot)
    mbarrier.expect(bar, TILE * (4 * U + 4))
    tma.async_copy_global_to_shared(units, [piece, 0, row * U // 64, 0], bar, s_units.index(slot))
    tma.async_copy_global_to_shared(scales, [piece, 0, row], bar, s_scales.index(slot))


@gluon.jit
def advance(cursor, lengths, ends, scan, kv_heads, width, pinned, page_tiles, SCAN: gl.constexpr):
    """The cursor (left, sequence, head, tile, first tile, end, entry, tile in page) one tile on."""
    left, seq, head, tile, t0, t1, entry, inside = cursor
    left -= 1
    tile += 1
    inside += 1
    if left > 0:
        if tile == t1:
            head += 1
            if head == kv_heads:
                head = 0
                t1 = t0
                while t1 == t0:
                    seq += 1
                    _, _, t0, t1 = seen(seq, ends, lengths, scan, SCAN)
            tile = t0
            entry, inside = enter(tile, width, pinned, page_tiles)
        elif inside == page_tiles:
            inside = 0
            entry = next_entry(entry, width, pinned)
    return left, seq, head, tile, t0, t1, entry, inside

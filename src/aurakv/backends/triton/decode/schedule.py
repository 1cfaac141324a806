"""Which tiles a program reads, from the lengths on the device, and their copies into shared memory.

The rows of a sequence and KV head are its (query, query head) pairs. They come in blocks of ROWS; a block of a KV head
is a job, and jobs of a sequence are numbered KV head first. The tiles that a job reads are numbered t0 … t1: the tiles
of the window from `edge` on, before them those of positional sinks, which lie `shift` tiles further.

scan: (first, recent, window, sinks), as in Scoring; SCAN.held: first is an address, of such a number for each sequence.
A cursor is (tiles left, sequence, job, tile, span, table entry, tile in the page).
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.gluon_slots import table_entry
from .lane_copies import copy_side_run, meet_lanes
from .shapes import flat
from .tile_ring import copy, copy_boxes, copy_side, places


class Scan(NamedTuple):
    """Constexpr: what the keys that are seen depend on."""

    clip: bool  # the positions of queries bound the keys
    window: bool
    sinks: bool  # positional ones, with a window
    several: bool  # several queries a sequence, or several jobs a KV head
    tile: int  # tokens
    group: int  # query heads of a KV head
    rows: int  # of a job
    held: bool  # how many first tokens are uncompressed differs from sequence to sequence
    pages: int  # of a tile, if they are smaller


@gluon.constexpr_function
def make_scan(clip, window, sinks, several, tile, group, rows, held, pages=1):
    return Scan(clip, window, sinks, several, tile, group, rows, held, pages)


@gluon.jit
def scan_in(scan, seq, SCAN: gl.constexpr):
    """The scan of one sequence, or of a block of them."""
    if SCAN.held:
        return gl.load(scan[0] + seq), scan[1], scan[2], scan[3]
    else:
        return scan


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def query_rows(seq, starts, tokens, SCAN: gl.constexpr):
    """The first query of a sequence, its number of queries, and the blocks of rows they make."""
    if SCAN.several:
        begin = gl.minimum(gl.maximum(gl.load(starts + seq), 0), tokens)
        count = gl.minimum(gl.maximum(gl.load(starts + seq + 1), begin), tokens) - begin
        return begin, count, (count * SCAN.group + SCAN.rows - 1) // SCAN.rows
    else:
        return seq, 0 * seq + 1, 0 * seq + 1


@gluon.jit
def find_job(number, o_seq, b_jobs, seqs, kv_heads, SCAN: gl.constexpr):
    """The sequence of a job, and its number there. b_jobs: how many jobs the sequences o_seq have."""
    if SCAN.several:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])  # one that can be scanned
        b_below = gl.associative_scan(gl.convert_layout(b_jobs, LINE), 0, add)
        seq = gl.minimum(gl.sum((b_below <= number).to(gl.int32), 0), seqs - 1)
        return seq, number - gl.sum(gl.where(o_seq < seq, b_jobs, 0), 0)
    else:
        seq = number // kv_heads
        return seq, number - seq * kv_heads


@gluon.jit
def seen(seq, count, ends, lengths, scan, SCAN: gl.constexpr):
    """(t0, t1, edge, shift) of the tiles that hold every key that the queries of a sequence see."""
    TILE: gl.constexpr = SCAN.tile
    scan = scan_in(scan, seq, SCAN)
    hi = gl.load(lengths + seq)
    end = gl.load(ends + seq)
    if SCAN.clip:
        hi = gl.minimum(hi, end - scan[1])
    lo = scan[0] + 0 * hi
    if SCAN.window:
        lo = gl.maximum(lo, end - (count - 1) - scan[2])
    hi = gl.maximum(hi, lo)
    t0 = lo // TILE
    t1 = gl.where(hi > lo, (hi + TILE - 1) // TILE, t0)
    if SCAN.several:
        t1 = gl.where(count > 0, t1, t0)
    if SCAN.sinks:
        s0 = gl.minimum(scan[0] // TILE, t0)
        s1 = gl.maximum(s0, gl.minimum((gl.minimum(scan[3], hi) + TILE - 1) // TILE, t0))
        s1 = gl.where(t1 > t0, s1, s0)
        return t0 - (s1 - s0), t1, t0, s0 - (t0 - (s1 - s0))
    else:
        return t0, t1, t0, 0 * t0


@gluon.jit
def row_bounds(row, count, end, length, scan, SCAN: gl.constexpr):
    """The keys lo ≤ t < hi that a row sees besides the sinks. scan: that of its sequence."""
    hi = length + 0 * row
    last = end + 0 * row
    if SCAN.several:
        last = end - (count - 1) + gl.minimum(row // SCAN.group, count - 1)
    if SCAN.clip:
        hi = gl.minimum(hi, last - scan[1])
    lo = scan[0] + 0 * row
    if SCAN.window:
        lo = gl.maximum(lo, last - scan[2])
    return lo, hi


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
def entry_after(entry, width, pinned, SCAN: gl.constexpr):
    """The first table entry of the tile that follows."""
    PAGES: gl.constexpr = SCAN.pages
    for _ in gl.static_range(PAGES):
        entry = next_entry(entry, width, pinned)
    return entry


@gluon.jit
def position_of(tile, span, SCAN: gl.constexpr):
    """The tile of the sequence that a job's tile is."""
    if SCAN.sinks:
        return gl.where(tile < span[2], tile + span[3], tile)
    else:
        return tile


@gluon.jit
def enter(tile, width, pinned, page_tiles, SCAN: gl.constexpr):
    """The (first) table entry where a tile of a sequence lies, and the tile inside that page."""
    page = tile // page_tiles
    return table_entry(page * SCAN.pages, width, pinned), tile - page * page_tiles


@gluon.jit
def look_up(cursor, table, width, pinned, SCAN: gl.constexpr):
    """The pages of the tile under the cursor; called well before `fetch` needs them."""
    PAGES: gl.constexpr = SCAN.pages
    entry = cursor[5]
    pages = (gl.load(table + cursor[1] * width + entry),)
    for _ in gl.static_range(PAGES - 1):
        entry = next_entry(entry, width, pinned)
        page = gl.load(table + cursor[1] * width + entry)
        pages = pages + (gl.maximum(page, 0),)  # noqa: RUF005 (there may be none behind the last token)
    return pages


@gluon.jit
def fetch(
    cursor, pages, slot, rows, ring, kv_heads, SLOT: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    BULK: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr, KEY_SCALES: gl.constexpr,
    VALUE_SCALES: gl.constexpr, DIM: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """Start the copy of the tile under the cursor into a slot of the ring.

    rows: codes, the sizes of a piece and of a page, and where the sides begin, as `decode_attention` has them."""
    TILE: gl.constexpr = SCAN.tile
    head = cursor[2] // cursor[4][4]
    row = cursor[6] * TILE
    codes, size, page_size, keys_at, values_at = rows
    box, rest, bar = places(ring, slot, SLOT, STAGES)
    if not BULK:
        keys_in = rest if flat(KEY_BITS, DIM) else box
        values_in = (rest if flat(VALUE_BITS, DIM) else box) + SLOT.values
        PAGES: gl.constexpr = SCAN.pages
        RUN: gl.constexpr = TILE // PAGES
        meet_lanes()
        for i in gl.static_range(PAGES):
            start = codes + (pages[i] * kv_heads + head).to(gl.int64) * (size * 8)
            copy_side_run(
                start + keys_at * 8, row, page_size, keys_in, rest + SLOT.key_scales, RUN, i, KEY_BITS, KEY_SCALES, DIM,
                WHOLE)  # fmt: skip
            copy_side_run(
                start + values_at * 8, row, page_size, values_in, rest + SLOT.value_scales, RUN, i, VALUE_BITS,
                VALUE_SCALES, DIM, WHOLE)  # fmt: skip
    else:
        piece = pages[0] * kv_heads + head
        if SLOT.box > 0:
            copy_boxes(piece, row, box, rest, bar, SLOT, KEY_BITS, VALUE_BITS, DIM, TILE)
        if not SLOT.boxed:
            count = TILE if WHOLE else gl.minimum(TILE, page_size - row)
            start = codes + piece.to(gl.int64) * (size * 8)
            if SLOT.copies == 1:
                copy(start, SLOT.rest, rest, bar)
            else:
                copy_side(
                    start + keys_at * 8, row, count, page_size, rest, rest + SLOT.key_scales, bar, KEY_BITS, KEY_SCALES,
                    DIM)  # fmt: skip
                copy_side(
                    start + values_at * 8, row, count, page_size, rest + SLOT.values, rest + SLOT.value_scales, bar,
                    VALUE_BITS, VALUE_SCALES, DIM)  # fmt: skip


@gluon.jit
def span_of(seq, starts, tokens, ends, lengths, scan, SCAN: gl.constexpr):
    """(t0, t1, edge, shift, blocks) of a sequence."""
    _, count, blocks = query_rows(seq, starts, tokens, SCAN)
    t0, t1, edge, shift = seen(seq, count, ends, lengths, scan, SCAN)
    return t0, t1, edge, shift, blocks


@gluon.jit
def next_sequence(seq, span, starts, tokens, ends, lengths, scan, SCAN: gl.constexpr):
    """The next sequence that has tiles, and its span."""
    t0, t1, edge, shift, blocks = span
    t1 = t0
    while t1 == t0:
        seq += 1
        t0, t1, edge, shift, blocks = span_of(seq, starts, tokens, ends, lengths, scan, SCAN)
    return seq, (t0, t1, edge, shift, blocks)


@gluon.jit
def advance(cursor, where, scan, kv_heads, width, pinned, page_tiles, SCAN: gl.constexpr):
    """The cursor one tile on. where: (starts, tokens, ends, lengths)."""
    left, seq, job, tile, span, entry, inside = cursor
    left -= 1
    tile += 1
    inside += 1
    if left > 0:
        if tile == span[1]:
            job += 1
            if job == kv_heads * span[4]:
                job = 0
                seq, span = next_sequence(seq, span, where[0], where[1], where[2], where[3], scan, SCAN)
            tile = span[0]
            entry, inside = enter(position_of(tile, span, SCAN), width, pinned, page_tiles, SCAN)
        elif tile == span[2]:  # from the sinks to the window; a job without sinks begins there
            entry, inside = enter(tile, width, pinned, page_tiles, SCAN)
        elif inside == page_tiles:
            inside = 0
            entry = entry_after(entry, width, pinned, SCAN)
    return left, seq, job, tile, span, entry, inside

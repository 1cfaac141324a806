"""Decode attention on codes of 2 to 8 bits: one warp a program (Gluon, Ampere and newer).

One warp is one program. Programs share all tiles of TILE tokens of all jobs (schedule) evenly: program p takes
tiles [p·total/N, (p+1)·total/N) in the order sequence, job, position; `total` is from lengths on the device. Tiles
travel by TMA or, not BULK, by `lane_copies` into a ring of STAGES buffers, across the borders of jobs and sequences.
What a program finds about one job is one piece (out normalised, log2 of the summed weights); `merge_pieces` puts pieces
together.

In:  keys, values: descriptors [pages · kv_heads, 1, lines of 128 bytes, 64] int16, or where both have rows of the same
     size one [pages · kv_heads, key or value, …]; where a side is flat (`tile_ring`), it and the scales come by
     bulk copies from `codes` int16, pieces of piece_size · 8 with the codes of the sides at
     keys_at · 8 and values_at · 8; scales: descriptor [pages · kv_heads, key or value, page_size] float16; q
     [tokens, heads, DIM], strided, divided by key_scale float32 [kv_heads, DIM] if KEY_SCALE; signs float32 [DIM]:
     key signs / √DIM, behind them the matrix of `rotated`; constants int32 [17, 32]: 4 rows for keys, 4 for values
     (levels), lanes of even columns, 4 more rows each for tables of any levels;
     offset float32 [kv_heads, DIM] if OFFSET, which soft caps need; starts [seqs + 1] if SEVERAL.
Out: pieces [2·programs + jobs, ROWS, DIM] float32 and their lses (base 2). Piece 2p: program p began inside the
     job; 2p + 1: it began the job and did not end it; 2·programs + job: all of the job. If ALONE, program and piece p
     are job p, and the program does what `merge_pieces` would, with its arguments.
Constexprs: ROWS of a job: GROUP, or 8 or 16 if SEVERAL (blocks or queries). KEY_LEVELS, VALUE_LEVELS: kinds of
     levels; KEY_SCALES, VALUE_SCALES: bytes of a scale; CLIP, WINDOW, SINKS see schedule; SEQS a power of two from seqs
     on; WHOLE: pages are whole tiles, 2: one, of two flat sides; EARLY: the merge is launched to overlap the end; PAGES
     of a tile, if they are smaller; THRESHOLD: values of a tile are not decoded if what a lane has of a head's
     weights is below 2^least, for all lanes and heads.
The launcher guarantees: ROWS ≤ 16, DIM in `shapes.DIMS`, tiles of whole pages, pages of whole tiles or one page a
sequence; BULK, PAGES is 1. The name of the kernel and its first three parameters, None if not BULK, are known to
`tile_ring`.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from ..common.gluon_names import meet
from . import levels
from .keys import both_parts, load_plane, place_query, query_planes, raw_scores, split_query
from .lane_copies import end_group, wait_for_groups
from .layouts import key_half_layout, key_layout, weight_layout
from .merge import merge_pieces
from .piece_queries import load_coordinates, natural, query_bytes
from .primitives import by_half, finite, lane_constant, prefetch, rotated
from .reads import octet_slice, read_scales, read_wide_scales
from .schedule import (
    add,
    advance,
    enter,
    fetch,
    find_job,
    look_up,
    make_scan,
    next_sequence,
    position_of,
    query_rows,
    row_bounds,
    scan_in,
    seen,
    span_of,
    split_pieces,
)
from .shapes import flat, in_pieces, padded
from .tile_ring import after_tiles, make_slot, open_ring, places, prefetch_descriptors, wait_for
from .values import add_values, empty_sums, output, parts_of, scaled_weights, store_part, times

LIMIT = gl.constexpr(8192.0)  # sums are rescaled when a weight or a weight times its value scale exceeds this
LOG2E = gl.constexpr(1.4426950408889634)
TABLE = gl.constexpr(levels.TABLE)


@gluon.jit
def load_query(
    q, key_scale, signs, offset, job, begin, count, blocks, q_stride,
    SCAN: gl.constexpr, OFFSET: gl.constexpr, KEY_SCALE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """The queries of a job [HEADS, DIM] and what they are multiplied with; called well before `rotate_query`."""
    GROUP: gl.constexpr = SCAN.group
    layout: gl.constexpr = gl.BlockedLayout([1, padded(DIM) // 32], [1, 32], [1, 1], [1, 0])
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    d = natural(gl.arange(0, padded(DIM), layout=gl.SliceLayout(0, layout)), DIM)
    m_d = (d < DIM) if padded(DIM) > DIM else (d >= 0)
    if SCAN.several:
        kv_head = job // gl.maximum(blocks, 1)  # a program without tiles may look at a sequence without queries
        row = (job - kv_head * blocks) * SCAN.rows + h
        at = (begin + row // GROUP) * q_stride + (kv_head * GROUP + row % GROUP) * DIM
        m_row = row < count * GROUP
    else:
        kv_head = job
        at = begin * q_stride + (job * GROUP + h) * DIM
        m_row = h < GROUP
    x = gl.load(q + at[:, None] + d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)
    query = (x, load_coordinates(signs, d, m_d, 0.0, DIM))
    if KEY_SCALE:
        query = query + (load_coordinates(key_scale + kv_head * DIM, d, m_d, 1.0, DIM),)  # noqa: RUF005
    if OFFSET:
        query = query + (load_coordinates(offset + kv_head * DIM, d, m_d, 0.0, DIM),)  # noqa: RUF005
    return query


@gluon.jit
def rotate_query(query, signs, OFFSET: gl.constexpr, KEY_SCALE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """The rotated queries [HEADS, padded DIM] and their products with the key offset."""
    x = query[0].to(gl.float32)
    if KEY_SCALE:
        x = x / query[2][None, :]
    y = rotated(x * query[1][None, :], signs + DIM, HEADS, DIM)
    if OFFSET:
        bias = gl.sum(x * query[2 + KEY_SCALE][None, :], 1)
    else:
        bias = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, x.type.layout))
    return y, bias


@gluon.jit
def capped(s, cap, SOFTCAP: gl.constexpr):
    """Scores in base 2; before a soft cap they come as 2·log2(e)/cap times the natural ones."""
    if SOFTCAP:
        return (cap * LOG2E) - (2 * cap * LOG2E) / (1.0 + gl.exp2(s))
    else:
        return s


@gluon.jit
def lane_weights(p, HEADS: gl.constexpr, TILE: gl.constexpr):
    """The weights of a tile, summed for each head and lane."""
    if HEADS == 4:
        return gl.sum(p.reshape([TILE // 8, 8, 4]), 0)
    else:
        return gl.sum(gl.sum(p.reshape([HEADS, TILE // 8, 4, 2]), 3), 1)


@gluon.jit
def needs(top, weights, floor, HEADS: gl.constexpr):
    """What a tile needs, by one reduction: 2: sums are rescaled; 0: the weights of each lane and head are below the
    head's floor, which NaN is not; 1: neither."""
    below = weights < gl.expand_dims(floor, 0 if HEADS == 4 else 1)
    small = gl.min(below.to(gl.int32).reshape([max(8, HEADS) // 8, 8, 4]), 0)
    small = gl.convert_layout(small.reshape([32]), top.type.layout, assert_trivial=True)
    return gl.max(gl.where(top > LIMIT, 2, 1 - small), 0)


@gluon.jit(do_not_specialize=["seqs", "tokens", "width", "programs"])  # they change from call to call
def decode_attention(
    keys, values, scales, codes, q, key_scale, signs, constants, offset, table, lengths, ends, starts, pieces, lses,
    out, lse_out, sink_logits, value_signs, value_offset, u_data, u_table, u_lengths, u_size, u_keys,
    u_values, r_data, r_table, r_lengths, r_size, r_keys, r_values, seqs, tokens, kv_heads, width, pinned, page_tiles,
    first, recent, window, sinks, cap,
    score_scale, bias_scale, value_scale, value_shift, q_stride, programs, piece_size, page_size, keys_at, values_at,
    least,
    GROUP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, KEY_BITS: gl.constexpr, VALUE_BITS: gl.constexpr,
    KEY_LEVELS: gl.constexpr, VALUE_LEVELS: gl.constexpr, TILE: gl.constexpr, SEQS: gl.constexpr, CLIP: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SOFTCAP: gl.constexpr, OFFSET: gl.constexpr, SEVERAL: gl.constexpr,
    STAGES: gl.constexpr, WHOLE: gl.constexpr, KEY_SCALE: gl.constexpr, ALONE: gl.constexpr, LOGITS: gl.constexpr,
    KEY_OFFSET: gl.constexpr, VALUE_OFFSET: gl.constexpr, UNCOMPRESSED: gl.constexpr, BULK: gl.constexpr,
    EARLY: gl.constexpr, PAGES: gl.constexpr, KEY_SCALES: gl.constexpr, VALUE_SCALES: gl.constexpr,
    THRESHOLD: gl.constexpr, RECENT: gl.constexpr,
):  # fmt: skip
    KU: gl.constexpr = DIM * KEY_BITS // 16
    IN_PIECES: gl.constexpr = in_pieces(KEY_BITS, DIM)
    HEADS: gl.constexpr = 4 if ROWS <= 4 else 8 if ROWS <= 8 else 16
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    B2: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    WEIGHTS: gl.constexpr = weight_layout(TILE)
    SCAN: gl.constexpr = make_scan(CLIP, WINDOW, SINKS, SEVERAL, TILE, GROUP, ROWS, UNCOMPRESSED, PAGES)
    scan = (first, recent, window, sinks)
    where = (starts, tokens, ends, lengths)

    SLOT: gl.constexpr = make_slot(KEY_BITS, VALUE_BITS, DIM, TILE, WHOLE == 2, KEY_SCALES, VALUE_SCALES)
    ring = open_ring(SLOT, STAGES, BULK, query_bytes(DIM, KEY_BITS, HEADS) if IN_PIECES else 0, WHOLE == 0)
    rows = (codes, piece_size, page_size, keys_at, values_at)
    if not IN_PIECES:
        PLANES: gl.constexpr = query_planes(KEY_BITS, DIM)
        QUERY: gl.constexpr = gl.float16 if KEY_BITS > 4 else gl.int8
        PHASES: gl.constexpr = min(8, DIM // PLANES // 8) if KEY_BITS > 4 else 8
        s_query = gl.allocate_shared_memory(
            QUERY, [PLANES * 2 * HEADS, DIM // PLANES],
            gl.SwizzledSharedLayout(8 if KEY_BITS > 4 else 4, 1, PHASES, [1, 0]),
        )  # fmt: skip
    # this program's tiles
    pid = gl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
    if BULK:
        prefetch_descriptors()
    line = pid * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    prefetch(table + line * 32, line * 32 < seqs * width)
    prefetch(q + line * 64, line * 64 < tokens * kv_heads * (GROUP * DIM))
    if flat(KEY_BITS, DIM):
        KEYS: gl.constexpr = octet_slice(TILE, 2 if KEY_BITS > 4 else 8, 3)
    elif KEY_BITS == 8:
        KEYS: gl.constexpr = gl.SliceLayout(0, key_half_layout(TILE, KU))
    else:
        KEYS: gl.constexpr = gl.SliceLayout(0, key_layout(TILE, KU))
    key0 = lane_constant(constants, 0, KEYS)[None, :]
    key1 = lane_constant(constants, 1, KEYS)[None, :]
    key2 = lane_constant(constants, 2, KEYS)[None, :]
    key3 = lane_constant(constants, 3, KEYS)[None, :]
    if flat(VALUE_BITS, DIM):
        VALUES: gl.constexpr = octet_slice(TILE, 2, 3)
    else:
        VALUES: gl.constexpr = gl.SliceLayout(0, B2 if VALUE_BITS == 2 and VALUE_LEVELS != TABLE else A2)
    value0 = lane_constant(constants, 4, VALUES)[None, :]
    value1 = lane_constant(constants, 5, VALUES)[None, :]
    value2 = lane_constant(constants, 6, VALUES)[None, :]
    value3 = lane_constant(constants, 7, VALUES)[None, :]
    even = lane_constant(
        constants, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WEIGHTS))))
    )
    even = even[None, None, None, None, :]
    key_constants = (key0, key1, key2, key3)
    value_constants = (value0, value1, value2, value3)
    if KEY_LEVELS == TABLE:
        for i in gl.static_range(4):
            key_constants = key_constants + (lane_constant(constants, 9 + i, KEYS)[None, :],)  # noqa: RUF005
    if VALUE_LEVELS == TABLE:
        for i in gl.static_range(4):
            value_constants = value_constants + (lane_constant(constants, 13 + i, VALUES)[None, :],)  # noqa: RUF005

    o_seq = gl.arange(0, SEQS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    b_seq = gl.minimum(o_seq, seqs - 1)
    _, b_count, b_blocks = query_rows(b_seq, starts, tokens, SCAN)
    if ALONE:
        b_jobs = gl.where(o_seq < seqs, b_blocks * kv_heads, 0)
        seq, job = find_job(pid, o_seq, b_jobs, seqs, kv_heads, SCAN)
        span = span_of(seq, starts, tokens, ends, lengths, scan, SCAN)
        tile = span[0]
        known = job < kv_heads * span[4]  # there may be fewer jobs than programs
        left = gl.where(known, span[1] - span[0], 0)
        job = gl.where(known, job, 0)
        jobs_below = 0
    else:
        b_t0, b_t1, _, _ = seen(b_seq, b_count, ends, lengths, scan, SCAN)
        below = gl.associative_scan(gl.where(o_seq < seqs, (b_t1 - b_t0) * b_blocks * kv_heads, 0), 0, add)
        total = gl.max(below, 0)
        start, left = split_pieces(total, pid, programs)
        seq = gl.minimum(
            gl.sum((below <= start).to(gl.int32), 0), seqs - 1
        )  # sequences that end at or before the start
        skipped = gl.max(gl.where(below <= start, below, 0), 0)
        span = span_of(seq, starts, tokens, ends, lengths, scan, SCAN)
        job = (start - skipped) // gl.maximum(span[1] - span[0], 1)
        tile = span[0] + start - skipped - job * (span[1] - span[0])
        jobs_below = seq * kv_heads  # jobs of sequences before this one
        if SEVERAL:
            jobs_below = gl.sum(gl.where(o_seq < seq, b_blocks * kv_heads, 0), 0)

    entry, inside = enter(position_of(tile, span, SCAN), width, pinned, page_tiles, SCAN)
    cursor = (left, seq, job, tile, span, entry, inside)
    begin, count, blocks = query_rows(seq, starts, tokens, SCAN)
    query = load_query(
        q, key_scale, signs, offset, job, begin, count, blocks, q_stride, SCAN, OFFSET, KEY_SCALE, HEADS, DIM
    )  # before the copies, behind which it would wait
    for i in range(gl.minimum(STAGES, left)):
        found = look_up(cursor, table, width, pinned, SCAN)
        fetch(cursor, found, i, rows, ring, kv_heads, SLOT, STAGES, WHOLE, BULK, KEY_BITS, VALUE_BITS, KEY_SCALES,
              VALUE_SCALES, DIM, SCAN)  # fmt: skip
        cursor = advance(cursor, where, scan, kv_heads, width, pinned, page_tiles, SCAN)
        if not BULK:
            end_group()
    if not BULK:
        for _ in range(left, STAGES):  # as many groups as slots, so that it is known which one a slot waits for
            end_group()
    slot = 0
    phase = 0

    if HEADS == 4:  # scores are [tokens, heads]: lane 4g + c has head c of tokens 8j + g
        scores, _ = gl.split(gl.zeros([TILE, 8], gl.int32, mma).reshape([TILE, 4, 2]))
        lane_sums = gl.sum(scores.reshape([TILE // 8, 8, 4]), 0)
    else:  # [heads, tokens]: lane 4g + c has head g (and g + 8) of tokens 8j + 2c, 8j + 2c + 1
        scores = both_parts(gl.zeros([2 * HEADS, TILE], gl.int32, mma))
        lane_sums = gl.sum(gl.sum(scores.reshape([HEADS, TILE // 8, 4, 2]), 3), 1)
    H_AXIS: gl.constexpr = 1 if HEADS == 4 else 0
    SCORES: gl.constexpr = scores.type.layout
    SUMS: gl.constexpr = lane_sums.type.layout
    HEAD: gl.constexpr = gl.SliceLayout(1 - H_AXIS, SCORES)
    TOKEN: gl.constexpr = gl.SliceLayout(H_AXIS, SCORES)
    token = gl.arange(0, TILE, layout=TOKEN)
    o_head = gl.arange(0, HEADS, layout=HEAD)
    FOURS: gl.constexpr = HEADS == 4 and VALUE_SCALES == 2
    SCALE: gl.constexpr = gl.SliceLayout(1, WEIGHTS) if FOURS else TOKEN
    SCALE_SHAPE: gl.constexpr = [TILE // 16, 2, 4, 2] if FOURS else [TILE]
    # bounds of the exponent of value scales: weights times scales are float16, and weights beside float16 scales
    LEAST: gl.constexpr = -9 if VALUE_SCALES == 2 else -90
    MOST: gl.constexpr = 10 if VALUE_SCALES == 2 else 90

    while left > 0:
        n = gl.minimum(span[1] - tile, left)
        y, bias = rotate_query(query, signs, OFFSET, KEY_SCALE, HEADS, DIM)
        if IN_PIECES:
            queries = ring + after_tiles(SLOT.box + SLOT.rest, STAGES)
            step = place_query(y, score_scale, queries, KEY_BITS, HEADS, DIM)
        else:
            parts, step = split_query(y, score_scale, KEY_BITS, HEADS, DIM)
            s_query.store(parts)
            queries = ()
            for i in gl.static_range(PLANES):
                queries = queries + (load_plane(s_query, i, KEY_BITS, HEADS, mma),)  # noqa: RUF005
        sums = empty_sums(VALUE_BITS, VALUE_LEVELS, DIM, HEADS, mma)
        total_weight = gl.zeros([max(8, HEADS), 4], gl.float32, SUMS)
        step = gl.convert_layout(step, HEAD)
        bias = gl.convert_layout(bias * bias_scale, HEAD)
        reference = gl.full([HEADS], -1e30, gl.float32, HEAD)
        room = gl.full([HEADS], LEAST, gl.float32, HEAD)  # log2 of the value scales' reference, the same for all heads
        if THRESHOLD:
            o_row = gl.arange(0, HEADS, layout=gl.SliceLayout(1 - H_AXIS, SUMS))
            # where a product has more rows than the job, the rest, all of whose scores are 0, need no values
            own_row = ((job % blocks) * ROWS + o_row < count * GROUP) if SEVERAL else (o_row < ROWS)
            floor = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1 - H_AXIS, SUMS))  # of weights that count
        # what the rows see: each its own keys, whole tiles between the largest first and the smallest last of them
        length, end = gl.load(lengths + seq), gl.load(ends + seq)
        here = scan_in(scan, seq, SCAN)
        lo, hi = row_bounds((job % blocks) * ROWS + o_head, count, end, length, here, SCAN)
        least_lo, whole_hi = row_bounds(0, count, end, length, here, SCAN)
        whole_lo, most_hi = row_bounds(GROUP * (count - 1), count, end, length, here, SCAN)

        for i in range(n):
            found = look_up(cursor, table, width, pinned, SCAN)
            box, rest, bar = places(ring, slot, SLOT, STAGES)
            if BULK:
                wait_for(bar, phase)
            else:
                wait_for_groups(STAGES - 1)
            keys_in = rest if flat(KEY_BITS, DIM) else box
            values_in = (rest if flat(VALUE_BITS, DIM) else box) + SLOT.values
            score = raw_scores(keys_in, queries, key_constants, KEY_BITS, KEY_LEVELS, TILE, DIM, HEADS, mma)
            if KEY_SCALES == 2:
                token_scale = read_scales(rest + SLOT.key_scales, [TILE], TOKEN, TILE, HEADS, HEADS == 4)
            else:
                token_scale = read_wide_scales(rest + SLOT.key_scales, TOKEN, TILE, HEADS)
            if VALUE_SCALES == 2:
                b_scale = read_scales(rest + SLOT.value_scales, SCALE_SHAPE, SCALE, TILE, HEADS, False)
            else:
                b_scale = read_wide_scales(rest + SLOT.value_scales, TOKEN, TILE, HEADS)
            token_scale = finite(token_scale) if KEY_SCALES == 2 else token_scale + 0.0 * token_scale
            each_step = gl.expand_dims(token_scale, H_AXIS) * gl.expand_dims(step, 1 - H_AXIS)
            if SOFTCAP:
                score = capped(score * each_step + gl.expand_dims(bias, 1 - H_AXIS), cap, SOFTCAP)
                each_step = 1.0
            d = score * each_step - gl.expand_dims(reference, 1 - H_AXIS)
            at_tile = position_of(tile + i, span, SCAN)
            if (at_tile * TILE < whole_lo) | ((at_tile + 1) * TILE > whole_hi):
                at = gl.expand_dims(at_tile * TILE + token, H_AXIS)
                lows, highs = gl.expand_dims(lo, 1 - H_AXIS), gl.expand_dims(hi, 1 - H_AXIS)
                visible = (at >= lows) & (at < highs)
                at = at_tile * TILE + gl.convert_layout(token.reshape(b_scale.shape), SCALE)
                some = (at >= least_lo) & (at < most_hi)
                if SINKS:
                    at = gl.expand_dims(at_tile * TILE + token, H_AXIS)
                    visible = visible | ((at >= first) & (at < gl.minimum(sinks, highs)))
                    at = at_tile * TILE + gl.convert_layout(token.reshape(b_scale.shape), SCALE)
                    some = some | ((at >= first) & (at < gl.minimum(sinks, most_hi)))
                d = gl.where(visible, d, -float("inf"))
                b_scale = gl.where(some, b_scale, 0.0)  # what was never written may be NaN
            p = gl.exp2(d)
            w, top = scaled_weights(p, b_scale, HEADS, WEIGHTS, SEVERAL, VALUE_SCALES == 4)
            if THRESHOLD:
                tile_weight = lane_weights(p, HEADS, TILE)
                need = needs(top, tile_weight, floor, HEADS)
                need = gl.where(i == 0, 2, need)
                rescale = need > 1
            else:
                rescale = gl.max((top > LIMIT).to(gl.int32), 0) | (i == 0).to(gl.int32)
            if rescale:
                if FOURS:
                    widest = gl.max(gl.max(gl.max(gl.max(gl.abs(b_scale), 3), 2), 1), 0).to(gl.float32)
                else:
                    widest = gl.max(gl.abs(b_scale), 0).to(gl.float32)
                exponent = (widest.to(gl.int32, bitcast=True) >> 23) - 126
                new_room = gl.maximum(room, gl.minimum(exponent, MOST).to(gl.float32))
                x = gl.where(d == -float("inf"), d, score * each_step)  # hidden keys stay hidden
                new = gl.maximum(reference - room, gl.max(x, 1 - H_AXIS)) + new_room
                factor = gl.exp2(reference - new)
                d = x - gl.expand_dims(new, 1 - H_AXIS)
                reference = new
                room = new_room
                p = gl.exp2(d)
                w, top = scaled_weights(p, b_scale, HEADS, WEIGHTS, SEVERAL, VALUE_SCALES == 4)
                row = gl.convert_layout(factor, gl.SliceLayout(1 - H_AXIS, SUMS))
                total_weight = total_weight * gl.expand_dims(row, 1 - H_AXIS)
                columns = gl.join(factor, factor).reshape([8]) if HEADS == 4 else factor
                sums = times(sums, gl.convert_layout(columns, gl.SliceLayout(0, mma))[None, :])
                if THRESHOLD:  # some weight of 1, or 2^-room here, was seen: that is the least of their sum
                    tile_weight = lane_weights(p, HEADS, TILE)
                    lane_room = gl.convert_layout(room, gl.SliceLayout(1 - H_AXIS, SUMS))
                    floor = gl.where(own_row, gl.exp2(least - lane_room), float("inf"))
            if THRESHOLD:
                total_weight += tile_weight
            else:
                total_weight += lane_weights(p, HEADS, TILE)
            if HEADS == 4:
                w0, w1 = by_half(w, even)
                w = gl.permute(gl.join(w0, w1), (0, 5, 3, 4, 1, 2)).reshape([TILE, 8])
            else:
                w = gl.permute(w, (1, 0))
            w = gl.convert_layout(w, B2, assert_trivial=True)
            if THRESHOLD:
                if need > 0:
                    sums = add_values(values_in, w, sums, value_constants, VALUE_BITS, VALUE_LEVELS, DIM, mma)
            else:
                sums = add_values(values_in, w, sums, value_constants, VALUE_BITS, VALUE_LEVELS, DIM, mma)
            if cursor[0] > 0:
                fetch(
                    cursor, found, slot, rows, ring, kv_heads, SLOT, STAGES, WHOLE, BULK, KEY_BITS, VALUE_BITS,
                    KEY_SCALES, VALUE_SCALES, DIM, SCAN)  # fmt: skip
                cursor = advance(cursor, where, scan, kv_heads, width, pinned, page_tiles, SCAN)
            if not BULK:
                end_group()
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1

        if ALONE:
            piece = pid
        else:
            piece = gl.where(tile == span[0], 2 * pid + 1, 2 * pid)
            piece = gl.where((tile == span[0]) & (tile + n == span[1]), 2 * programs + jobs_below + job, piece)
        weight = gl.convert_layout(gl.sum(total_weight, 1 - H_AXIS), HEAD)
        gl.store(lses + piece * ROWS + o_head, reference + gl.log2(weight), mask=o_head < ROWS)
        inverse = gl.where(weight == 0.0, 0.0, value_scale / weight)  # a row may see nothing of these tiles
        for part in gl.static_range(parts_of(VALUE_BITS, DIM)):
            result = output(sums, value_shift, HEADS, VALUE_BITS, VALUE_LEVELS, DIM, part)
            store_part(pieces + piece * (ROWS * DIM), result, inverse, VALUE_BITS, ROWS, DIM, part)

        left -= n
        tile += n
        if not ALONE:  # noqa: SIM102 (known when this is compiled, the other is not)
            if left > 0:
                job += 1
                if job == kv_heads * blocks:
                    job = 0
                    jobs_below += kv_heads * blocks
                    old = seq
                    seq, span = next_sequence(seq, span, starts, tokens, ends, lengths, scan, SCAN)
                    if SEVERAL:
                        jobs_below += gl.sum(gl.where((o_seq > old) & (o_seq < seq), b_blocks * kv_heads, 0), 0)
                    else:
                        jobs_below += (seq - old - 1) * kv_heads
                tile = span[0]
                begin, count, blocks = query_rows(seq, starts, tokens, SCAN)
                query = load_query(
                    q,
                    key_scale,
                    signs,
                    offset,
                    job,
                    begin,
                    count,
                    blocks,
                    q_stride,
                    SCAN,
                    OFFSET,
                    KEY_SCALE,
                    HEADS,
                    DIM,
                )

    if ALONE:
        meet()  # the piece is there for all lanes
        MEMBERS: gl.constexpr = 1 if ROWS == 1 else 2 if ROWS == 2 else HEADS
        merge_pieces(
            pieces, lses, out, lse_out, sink_logits, value_signs, q, key_scale, offset, value_offset, lengths, ends,
            starts, u_data, u_table, u_lengths, u_size, u_keys, u_values, r_data, r_table, r_lengths, r_size, r_keys,
            r_values, seqs, tokens, kv_heads,
            first, recent, window, sinks, bias_scale, q_stride, 0, kv_heads * (GROUP * DIM), GROUP, ROWS, DIM, TILE,
            SEQS, CLIP, WINDOW, SINKS, SEVERAL, LOGITS, KEY_OFFSET, VALUE_OFFSET, UNCOMPRESSED, KEY_SCALE, 1, MEMBERS,
            1, True, False, RECENT,
        )  # fmt: skip

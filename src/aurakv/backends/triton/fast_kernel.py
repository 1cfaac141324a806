"""Decode attention on 4-bit codes, one query a sequence: the kernel of the fast path (Gluon, Hopper and newer).

One warp is one program. Programs share all tiles of TILE tokens of all (sequence, KV head) pairs evenly: program p
takes tiles [p·total/N, (p+1)·total/N) in the order sequence, KV head, position; `total` is from lengths on the device.
Tiles travel by TMA into a ring of STAGES buffers, across the borders of heads and sequences. What a program finds about
one head is one piece (out normalised, log2 of the summed weights); `fast_merge` puts pieces together.

In:  units: descriptor [pages · kv_heads, key or value, lines of 128 bytes, 64] int16; scales: descriptor [pages ·
     kv_heads, key or value, page_size] float16; q [seqs, heads, DIM], strided; signs float32 [DIM]: key signs / √DIM;
     constants int32 [10, 32]: key levels (4 rows), −1, the cubic's coefficients (4), lanes of even columns.
Out: pieces [2·programs + seqs·kv_heads, GROUP, DIM] float32 and their lses (base 2). Piece 2p: program p began inside
     the head; 2p + 1: it began the head and did not end it; 2·programs + seq·kv_heads + head: all of the head.
Constexprs: LEVELS (how values are decoded); CLIP, WINDOW see `seen`; SEQS a power of two from seqs on.
The launcher guarantees: GROUP ≤ 8, DIM in (64, 128, 256), pages of whole tiles or one page a sequence. The name of the
kernel and its first two parameters are known to `prefetch_descriptors`.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from .fast_layouts import key_layout, key_unit_layout, shared_unit_layout, weight_layout
from .fast_primitives import (
    by_half,
    finite,
    hadamard,
    half_pairs,
    key_levels4,
    lane_constant,
    larger,
    larger_size,
    prefetch,
    prefetch_descriptors,
    times_pairs,
    transpose_weights,
    value_levels_cubic,
    value_levels_minifloat,
)
from .fast_schedule import add, advance, enter, fetch, look_up, seen, split_pieces

LIMIT = gl.constexpr(8192.0)  # sums are rescaled when a weight or a weight times its value scale exceeds this
MINIFLOAT = gl.constexpr(0)
CUBIC = gl.constexpr(1)


@gluon.jit
def load_query(q, signs, scale, GROUP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Rotate the queries of a KV head and split them into two int8 parts: [4 planes, 2·HEADS, DIM/4] in the order of
    the key units (2 planes of 32 for DIM = 64), and what one step is worth for each head."""
    layout: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [1, 1], [1, 0])
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    x = gl.load(q + h[:, None] * DIM + d[None, :], mask=(h < GROUP)[:, None] & (d >= 0)[None, :], other=0.0)
    y = hadamard(x.to(gl.float32) * gl.load(signs + d)[None, :], HEADS, DIM)
    top = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # order of bits is order of magnitudes, NaN above all
    peak = gl.maximum(top.to(gl.float32, bitcast=True), 1e-30)
    step = gl.where(top >= 0x7F800000, float("nan"), peak * (scale / 32500.0))
    n = (y * (32500.0 / peak)[:, None] + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000
    high = (n + 128) >> 8
    parts = gl.join(high.to(gl.int8), (n - high * 256).to(gl.int8))
    if DIM == 64:
        parts = parts.reshape([HEADS, 1, 4, 2, 2, 4, 2])  # head, k-step, lane, plane, half, code, part
        parts = gl.permute(parts, (0, 1, 2, 4, 3, 5, 6))
    else:
        parts = parts.reshape([HEADS, DIM // 128, 4, 2, 4, 4, 2])  # head, k-step, lane, half, plane, code, part
    parts = gl.permute(parts, (4, 0, 6, 1, 3, 2, 5) if HEADS == 4 else (4, 6, 0, 1, 3, 2, 5))
    PLANES: gl.constexpr = 2 if DIM == 64 else 4
    return parts.reshape([PLANES * 2 * HEADS, DIM // PLANES]), step


@gluon.jit
def load_plane(parts, plane: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr):
    rows = parts.slice(plane * 2 * HEADS, 2 * HEADS)
    return rows.permute((1, 0)).load(layout) if HEADS == 4 else rows.load(layout)


@gluon.jit
def multiply(keys, q, s, HEADS: gl.constexpr, mma: gl.constexpr):
    """s plus keys [TILE, k], or two halves [TILE, k/2, 2], times a plane of the queries."""
    if len(keys.shape) == 3:
        keys = gl.permute(keys, (0, 2, 1)).reshape([keys.shape[0], 32])
    if HEADS == 4:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
        return mma_v2(gl.convert_layout(keys, layout, assert_trivial=True), q, s)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=4)
        return mma_v2(q, gl.convert_layout(gl.permute(keys, (1, 0)), layout, assert_trivial=True), s)


@gluon.jit
def raw_scores(codes, queries, levels, TILE: gl.constexpr, U: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    """Products of the two query parts with the integer levels of a tile of keys, as the tensor cores leave them:
    [TILE, 2 · head + part] for 4 heads, [part · 8 + head, TILE] for 8."""
    keys = codes.load(key_unit_layout(TILE, U))
    if U > 16:
        keys = gl.permute(keys.reshape([TILE, U // 32, 4, 2, 4]), (0, 1, 3, 2, 4)).reshape([TILE, U])
    keys = gl.convert_layout(keys, key_layout(TILE, U), assert_trivial=True)
    k0, k1, k2, k3, m0, m1, m2, m3 = key_levels4(keys, levels[0], levels[1], levels[2], levels[3])
    q0, q1, q2, q3 = queries
    s = gl.zeros([TILE, 8] if HEADS == 4 else [16, TILE], gl.int32, mma)
    if U == 16:
        s = multiply(gl.join(k0, k1), q0, s, HEADS, mma)
        s = multiply(gl.join(m0, m1), q0, s, HEADS, mma)
        s = multiply(gl.join(k2, k3), q1, s, HEADS, mma)
        s = multiply(gl.join(m2, m3), q1, s, HEADS, mma)
    else:
        s = multiply(k0, q0, s, HEADS, mma)
        s = multiply(m0, q0, s, HEADS, mma)
        s = multiply(k1, q1, s, HEADS, mma)
        s = multiply(m1, q1, s, HEADS, mma)
        s = multiply(k2, q2, s, HEADS, mma)
        s = multiply(m2, q2, s, HEADS, mma)
        s = multiply(k3, q3, s, HEADS, mma)
        s = multiply(m3, q3, s, HEADS, mma)
    return s


@gluon.jit
def add_values(codes, w, sums, constants, LEVELS: gl.constexpr, mma: gl.constexpr):
    """Add weights [rows, 8] times the levels of the values: one sum [U, 8] for each of the four codes of a unit."""
    values = codes.permute((1, 0)).load(gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2))
    a0, a1, a2, a3 = sums
    if LEVELS == MINIFLOAT:
        v0, v1, v2, v3, u0, u1, u2, u3 = value_levels_minifloat(values, constants[0])
    else:
        v0, v1, v2, v3 = value_levels_cubic(values, constants[1], constants[2], constants[3], constants[4])
    a0 = mma_v2(v0, w, a0)
    a1 = mma_v2(v1, w, a1)
    a2 = mma_v2(v2, w, a2)
    a3 = mma_v2(v3, w, a3)
    if LEVELS == MINIFLOAT:
        a0 = mma_v2(u0, w, a0)
        a1 = mma_v2(u1, w, a1)
        a2 = mma_v2(u2, w, a2)
        a3 = mma_v2(u3, w, a3)
    return a0, a1, a2, a3


@gluon.jit
def scaled_weights(p, scale, HEADS: gl.constexpr, WEIGHTS: gl.constexpr):
    """Weights times value scales in float16, and for each lane the largest of both."""
    if HEADS == 4:
        M: gl.constexpr = p.shape[0] // 16
        p = gl.permute(p.reshape([M, 2, 4, 2, 4]), (0, 2, 3, 4, 1))
        p = half_pairs(gl.convert_layout(p, WEIGHTS, assert_trivial=True))
        w = transpose_weights(p, scale[:, None, :, :, :])
        top = gl.permute(larger_size(w, p), (1, 2, 3, 0, 4)).reshape([32, M, 2])  # [lane, register, pair]
    else:
        p = half_pairs(p)
        w = times_pairs(p, scale[None, :])
        N: gl.constexpr = p.shape[1] // 8
        top = gl.permute(larger_size(w, p).reshape([8, N, 4, 2]), (0, 2, 1, 3)).reshape([32, N, 2])
    for _ in gl.static_range((top.shape[1] - 1).bit_length()):
        a, b = gl.split(gl.permute(top.reshape([32, top.shape[1] // 2, 2, 2]), (0, 1, 3, 2)))
        top = larger(a, b)
    a, b = gl.split(top.reshape([32, 2]))
    return w, gl.maximum(a, b)


@gluon.jit
def fast_decode(
    units, scales, q, signs, constants, table, lengths, ends, pieces, lses,
    seqs, kv_heads, width, pinned, page_tiles, first, recent, window, score_scale, value_scale, q_stride, programs,
    GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, LEVELS: gl.constexpr, SEQS: gl.constexpr,
    CLIP: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    UNITS_LAYOUT: gl.constexpr, SCALES_LAYOUT: gl.constexpr,
):  # fmt: skip
    U: gl.constexpr = DIM // 4
    PLANES: gl.constexpr = 2 if DIM == 64 else 4
    HEADS: gl.constexpr = 4 if GROUP <= 4 else 8
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    A4: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    B4: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=4)
    A2: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    B2: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    WEIGHTS: gl.constexpr = weight_layout(TILE)
    SCAN: gl.constexpr = (CLIP, WINDOW, TILE)
    scan = (first, recent, window)

    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    s_units = gl.allocate_shared_memory(gl.int16, [STAGES, 1, 2, TILE * U // 64, 64], UNITS_LAYOUT)
    s_scales = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 2, TILE], SCALES_LAYOUT)
    s_query = gl.allocate_shared_memory(
        gl.int8, [PLANES * 2 * HEADS, DIM // PLANES], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)

    # this program's tiles
    pid = gl.program_id(0)
    gdc_launch_dependents()
    prefetch_descriptors()
    line = pid * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    prefetch(table + line * 32, line * 32 < seqs * width)
    prefetch(q + line * 64, line * 64 < seqs * kv_heads * (GROUP * DIM))
    o_seq = gl.arange(0, SEQS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    _, _, b_t0, b_t1 = seen(gl.minimum(o_seq, seqs - 1), ends, lengths, scan, SCAN)
    below = gl.associative_scan(gl.where(o_seq < seqs, (b_t1 - b_t0) * kv_heads, 0), 0, add)
    total = gl.max(below, 0)
    start, left = split_pieces(total, pid, programs)
    seq = gl.minimum(gl.sum((below <= start).to(gl.int32), 0), seqs - 1)  # sequences that end at or before the start
    skipped = gl.max(gl.where(below <= start, below, 0), 0)
    lo, hi, t0, t1 = seen(seq, ends, lengths, scan, SCAN)
    head = (start - skipped) // gl.maximum(t1 - t0, 1)
    tile = t0 + start - skipped - head * (t1 - t0)

    entry, inside = enter(tile, width, pinned, page_tiles)
    cursor = (left, seq, head, tile, t0, t1, entry, inside)
    for i in range(gl.minimum(STAGES, left)):
        page = look_up(cursor, table, width)
        fetch(cursor, page, i, units, scales, s_units, s_scales, bars, kv_heads, TILE, U)
        cursor = advance(cursor, lengths, ends, scan, kv_heads, width, pinned, page_tiles, SCAN)
    slot = 0
    phase = 0

    KEYS: gl.constexpr = key_layout(TILE, U)
    key0 = lane_constant(constants, 0, gl.SliceLayout(0, KEYS))[None, :]
    key1 = lane_constant(constants, 1, gl.SliceLayout(0, KEYS))[None, :]
    key2 = lane_constant(constants, 2, gl.SliceLayout(0, KEYS))[None, :]
    key3 = lane_constant(constants, 3, gl.SliceLayout(0, KEYS))[None, :]
    minus_one = lane_constant(constants, 4, gl.SliceLayout(0, A2))[None, :]
    c0 = lane_constant(constants, 5, gl.SliceLayout(0, A2))[None, :]
    c1 = lane_constant(constants, 6, gl.SliceLayout(0, A2))[None, :]
    c2 = lane_constant(constants, 7, gl.SliceLayout(0, A2))[None, :]
    c3 = lane_constant(constants, 8, gl.SliceLayout(0, A2))[None, :]
    even = lane_constant(
        constants, 9, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WEIGHTS))))
    )
    even = even[None, None, None, None, :]
    levels = (key0, key1, key2, key3)
    value_constants = (minus_one, c0, c1, c2, c3)

    if HEADS == 4:  # scores are [tokens, heads]: lane 4g + c has head c of tokens 8j + g
        scores, low = gl.split(gl.zeros([TILE, 8], gl.int32, mma).reshape([TILE, 4, 2]))
        lane_sums = gl.sum(scores.reshape([TILE // 8, 8, 4]), 0)
    else:  # [heads, tokens]: lane 4g + c has head g of tokens 8j + 2c, 8j + 2c + 1
        scores = gl.sum(gl.zeros([16, TILE], gl.int32, mma).reshape([2, 8, TILE]), 0)
        lane_sums = gl.sum(gl.sum(scores.reshape([8, TILE // 8, 4, 2]), 3), 1)
    H_AXIS: gl.constexpr = 1 if HEADS == 4 else 0
    SCORES: gl.constexpr = scores.type.layout
    SUMS: gl.constexpr = lane_sums.type.layout
    HEAD: gl.constexpr = gl.SliceLayout(1 - H_AXIS, SCORES)
    TOKEN: gl.constexpr = gl.SliceLayout(H_AXIS, SCORES)
    token = gl.arange(0, TILE, layout=TOKEN)
    SCALE: gl.constexpr = gl.SliceLayout(1, WEIGHTS) if HEADS == 4 else TOKEN

    while left > 0:
        n = gl.minimum(t1 - tile, left)
        parts, step = load_query(q + seq * q_stride + head * (GROUP * DIM), signs, score_scale, GROUP, HEADS, DIM)
        s_query.store(parts)
        q0 = load_plane(s_query, 0, HEADS, B4 if HEADS == 4 else A4)
        q1 = load_plane(s_query, 1, HEADS, B4 if HEADS == 4 else A4)
        q2 = load_plane(s_query, 2 % PLANES, HEADS, B4 if HEADS == 4 else A4)
        q3 = load_plane(s_query, 3 % PLANES, HEADS, B4 if HEADS == 4 else A4)
        queries = (q0, q1, q2, q3)
        zero = gl.zeros([U, 8], gl.float32, mma)
        sums = (zero, zero, zero, zero)
        total_weight = gl.zeros([8, 4], gl.float32, SUMS)
        step = gl.convert_layout(step, HEAD)
        reference = gl.full([HEADS], -1e30, gl.float32, HEAD)
        room = gl.full([HEADS], -9.0, gl.float32, HEAD)  # log2 of the value scales' reference, the same for all heads

        for i in range(n):
            page = look_up(cursor, table, width)
            mbarrier.wait(bars.index(slot), phase)
            codes = s_units.index(slot)._reinterpret(gl.int16, [2, TILE, U], shared_unit_layout(TILE, U))
            factors = s_scales.index(slot)._reinterpret(gl.float16, [2, TILE], FLAT)
            raw = raw_scores(codes.index(0), queries, levels, TILE, U, HEADS, mma)
            key_scale = finite(factors.index(0).load(TOKEN))
            each_step = gl.expand_dims(key_scale, H_AXIS) * gl.expand_dims(step, 1 - H_AXIS)
            if HEADS == 4:
                high, low = gl.split(raw.reshape([TILE, 4, 2]))
                score = (high * 256 + low).to(gl.float32)
            else:
                part = gl.arange(0, 16, layout=gl.SliceLayout(1, mma)) // 8
                score = gl.sum((raw * gl.where(part == 0, 256, 1)[:, None]).reshape([2, 8, TILE]), 0).to(gl.float32)
            d = score * each_step - gl.expand_dims(reference, 1 - H_AXIS)
            if ((tile + i) * TILE < lo) | ((tile + i + 1) * TILE > hi):
                at = (tile + i) * TILE + token
                visible = (at >= lo) & (at < hi)
                d = gl.where(gl.expand_dims(visible, H_AXIS), d, -float("inf"))
                factors.index(1).store(gl.where(visible, factors.index(1).load(TOKEN), 0.0))  # garbage may be NaN
            if HEADS == 4:
                b_scale = (
                    s_scales.index(slot)._reinterpret(gl.float16, [2, TILE // 16, 2, 4, 2], CUBE).index(1).load(SCALE)
                )
            else:
                b_scale = factors.index(1).load(SCALE)
            p = gl.exp2(d)
            w, top = scaled_weights(p, b_scale, HEADS, WEIGHTS)
            if gl.max((top > LIMIT).to(gl.int32), 0) | (i == 0).to(gl.int32):
                if HEADS == 4:
                    widest = gl.max(gl.max(gl.max(gl.max(gl.abs(b_scale), 3), 2), 1), 0).to(gl.float32)
                else:
                    widest = gl.max(gl.abs(b_scale), 0).to(gl.float32)
                exponent = (widest.to(gl.int32, bitcast=True) >> 23) - 126
                new_room = gl.maximum(room, gl.minimum(exponent, 10).to(gl.float32))
                x = gl.where(d == -float("inf"), d, score * each_step)  # hidden keys stay hidden
                new = gl.maximum(reference - room, gl.max(x, 1 - H_AXIS)) + new_room
                factor = gl.exp2(reference - new)
                d = x - gl.expand_dims(new, 1 - H_AXIS)
                reference = new
                room = new_room
                p = gl.exp2(d)
                w, top = scaled_weights(p, b_scale, HEADS, WEIGHTS)
                row = gl.convert_layout(factor, gl.SliceLayout(1 - H_AXIS, SUMS))
                total_weight = total_weight * gl.expand_dims(row, 1 - H_AXIS)
                columns = gl.join(factor, factor).reshape([8]) if HEADS == 4 else factor
                columns = gl.convert_layout(columns, gl.SliceLayout(0, mma))[None, :]
                sums = (sums[0] * columns, sums[1] * columns, sums[2] * columns, sums[3] * columns)
            if HEADS == 4:
                total_weight += gl.sum(p.reshape([TILE // 8, 8, 4]), 0)
                w0, w1 = by_half(w, even)
                w = gl.permute(gl.join(w0, w1), (0, 5, 3, 4, 1, 2)).reshape([TILE, 8])
            else:
                total_weight += gl.sum(gl.sum(p.reshape([8, TILE // 8, 4, 2]), 3), 1)
                w = gl.permute(w, (1, 0))
            w = gl.convert_layout(w, B2, assert_trivial=True)
            sums = add_values(codes.index(1), w, sums, value_constants, LEVELS, mma)
            if cursor[0] > 0:
                fetch(cursor, page, slot, units, scales, s_units, s_scales, bars, kv_heads, TILE, U)
                cursor = advance(cursor, lengths, ends, scan, kv_heads, width, pinned, page_tiles, SCAN)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1

        piece = gl.where(tile == t0, 2 * pid + 1, 2 * pid)
        piece = gl.where((tile == t0) & (tile + n == t1), 2 * programs + seq * kv_heads + head, piece)
        weight = gl.convert_layout(gl.sum(total_weight, 1 - H_AXIS), HEAD)
        o_head = gl.arange(0, HEADS, layout=HEAD)
        gl.store(lses + piece * GROUP + o_head, reference + gl.log2(weight), mask=o_head < GROUP)
        out = gl.permute(gl.join(gl.join(sums[0], sums[1]), gl.join(sums[2], sums[3])), (0, 1, 3, 2)).reshape([U, 8, 4])
        if HEADS == 4:
            out = gl.sum(gl.permute(out.reshape([U, 4, 2, 4]), (0, 1, 3, 2)), 3)
        OUT: gl.constexpr = out.type.layout
        h = gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
        u = gl.arange(0, U, layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
        e = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
        inverse = gl.convert_layout(value_scale / weight, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
        gl.store(pieces + (piece * GROUP + h) * DIM + (4 * u + e), out * inverse, mask=(h < GROUP) & (u + e >= 0))

        left -= n
        tile += n
        if left > 0:
            head += 1
            if head == kv_heads:
                head = 0
                t1 = t0
                while t1 == t0:
                    seq += 1
                    lo, hi, t0, t1 = seen(seq, ends, lengths, scan, SCAN)
            tile = t0

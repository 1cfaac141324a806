"""Scores of a tile: queries rotated and split in two parts, times the levels of keys.

2 to 4 bits: queries as two int8 parts of 16 bits, levels as int8. 5 to 8 bits: queries as two float16 parts, levels as
float16 numbers or (CUBIC) sums of two. The coordinates of a row are in the order in which lanes hold the codes; queries
follow.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from . import levels
from .codes import in_order3, key_levels2, key_levels3, key_levels4, key_levels_cubic8, levels_poly7, row_levels_poly7
from .lane_copies import meet_lanes
from .layouts import key_half_layout, key_layout
from .piece_queries import load_operand, store_parts
from .pieces import first_of, halves, key_bytes, lane_of, piece_count
from .reads import in_octets, lane_rows, read_keys
from .shapes import in_pieces

POLY7 = gl.constexpr(levels.POLY7)
TABLE = gl.constexpr(levels.TABLE)


@gluon.constexpr_function
def query_planes(bits, dim):
    """Parts that `raw_scores` multiplies separately."""
    four = 2 if dim == 64 else 4
    return {2: dim // 32, 3: dim // 32, 4: four, 5: dim // 16, 6: dim // 16, 8: 2}[bits]


@gluon.jit
def query_parts(y, scale, BITS: gl.constexpr):
    """Two parts of rotated queries [HEADS, DIM] (float16 numbers, or integers of 8 bits) and what one step is worth for
    each head."""
    top = gl.max(y.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # order of bits is order of magnitudes, NaN above all
    peak = gl.maximum(top.to(gl.float32, bitcast=True), 1e-30)
    damaged = top >= 0x7F800000
    if BITS > 4:
        step = gl.where(damaged, float("nan"), peak * scale)
        x = y * (1.0 / peak)[:, None]
        high = x.to(gl.float16)
        return high, (x - high.to(gl.float32)).to(gl.float16), step
    else:
        step = gl.where(damaged, float("nan"), peak * (scale / 32500.0))
        n = (y * (32500.0 / peak)[:, None] + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000
        high = (n + 128) >> 8
        return high, n - high * 256, step


@gluon.jit
def place_query(y, scale, at, BITS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """The parts of rotated queries to where `piece_queries` has them. What one step is worth for each head."""
    high, low, step = query_parts(y, scale, BITS)
    if BITS > 4:
        high = high.to(gl.int16, bitcast=True).to(gl.int32)
        low = low.to(gl.int16, bitcast=True).to(gl.int32)
    meet_lanes()  # all have read those of the job before
    store_parts(high, low, at, BITS, HEADS, DIM)
    meet_lanes()
    return step


@gluon.jit
def split_query(y, scale, BITS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Rotated queries [HEADS, DIM] as rows [planes · 2 · HEADS, DIM / planes] and what one step is worth for each head.

    In a plane rows are head · 2 + part for 4 heads, part · 8 + head for each 8 of more."""
    PLANES: gl.constexpr = query_planes(BITS, DIM)
    high, low, step = query_parts(y, scale, BITS)
    if BITS > 4:
        parts = gl.join(high, low)
        if BITS == 8:  # head, k-step, lane, register, unit, plane, part
            parts = parts.reshape([HEADS, DIM // 64, 4, 4, 2, 2, 2])
            parts = gl.permute(parts, (5, 0, 6, 1, 3, 2, 4) if HEADS == 4 else (5, 6, 0, 1, 3, 2, 4))
        else:  # head, block, lane, half, plane, register, part: block and plane make the plane
            parts = parts.reshape([HEADS, DIM // 128, 4, 2, 8, 2, 2])
            parts = gl.permute(parts, (1, 4, 0, 6, 5, 2, 3) if HEADS == 4 else (1, 4, 6, 0, 5, 2, 3))
    else:
        parts = gl.join(high.to(gl.int8), low.to(gl.int8))
        if BITS == 2 and DIM == 128:  # head, lane, plane, code, half, part
            parts = parts.reshape([HEADS, 4, 4, 4, 2, 2])
            parts = gl.permute(parts, (2, 0, 5, 4, 1, 3) if HEADS == 4 else (2, 5, 0, 4, 1, 3))
        elif BITS == 3:  # head, block, lane, half, code, plane, part
            parts = parts.reshape([HEADS, DIM // 128, 4, 2, 4, 4, 2])
            parts = gl.permute(parts, (1, 5, 0, 6, 3, 2, 4) if HEADS == 4 else (1, 5, 6, 0, 3, 2, 4))
        elif BITS == 2:  # head, lane, half, unit, code, odd, part: unit and odd make the plane
            parts = parts.reshape([HEADS, 4, 2, 4, 4, 2, 2])
            parts = gl.permute(parts, (3, 5, 0, 6, 2, 1, 4) if HEADS == 4 else (3, 5, 6, 0, 2, 1, 4))
        elif DIM == 64:  # head, lane, plane, half, code, part
            parts = parts.reshape([HEADS, 4, 2, 2, 4, 2])
            parts = gl.permute(parts, (2, 0, 5, 3, 1, 4) if HEADS == 4 else (2, 5, 0, 3, 1, 4))
        else:  # head, k-step, lane, half, plane, code, part
            parts = parts.reshape([HEADS, DIM // 128, 4, 2, 4, 4, 2])
            parts = gl.permute(parts, (4, 0, 6, 1, 3, 2, 5) if HEADS == 4 else (4, 6, 0, 1, 3, 2, 5))
    if HEADS == 16:
        parts = gl.permute(parts.reshape([PLANES, 2, 2, 8, DIM // PLANES]), (0, 2, 1, 3, 4))
    return parts.reshape([PLANES * 2 * HEADS, DIM // PLANES]), step


@gluon.jit
def load_plane(parts, plane: gl.constexpr, BITS: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    WIDTH: gl.constexpr = 4 // (parts.dtype.primitive_bitwidth // 8)
    rows = parts.slice(plane * 2 * HEADS, 2 * HEADS)
    if HEADS == 4:
        queries = rows.permute((1, 0)).load(gl.DotOperandLayout(operand_index=1, parent=mma, k_width=WIDTH))
    else:
        queries = rows.load(gl.DotOperandLayout(operand_index=0, parent=mma, k_width=WIDTH))
    return in_order3(queries, HEADS) if BITS == 3 else queries


@gluon.jit
def multiply(keys, q, s, HEADS: gl.constexpr, mma: gl.constexpr):
    """s plus keys [TILE, k], or two halves [TILE, k/2, 2], times a plane of the queries."""
    if len(keys.shape) == 3:
        keys = gl.permute(keys, (0, 2, 1)).reshape([keys.shape[0], 32])
    WIDTH: gl.constexpr = 4 // (keys.dtype.primitive_bitwidth // 8)
    if HEADS == 4:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=WIDTH)
        return mma_v2(gl.convert_layout(keys, layout, assert_trivial=True), q, s)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=WIDTH)
        return mma_v2(q, gl.convert_layout(gl.permute(keys, (1, 0)), layout, assert_trivial=True), s)


@gluon.jit
def scores4(keys, queries, constants, s, U: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    planes = key_levels4(keys, constants[0], constants[1], constants[2], constants[3])
    if U == 16:
        for i in gl.static_range(2):
            s = multiply(gl.join(planes[2 * i], planes[2 * i + 1]), queries[i], s, HEADS, mma)
            s = multiply(gl.join(planes[2 * i + 4], planes[2 * i + 5]), queries[i], s, HEADS, mma)
    else:
        for i in gl.static_range(4):
            s = multiply(planes[i], queries[i], s, HEADS, mma)
            s = multiply(planes[i + 4], queries[i], s, HEADS, mma)
    return s


@gluon.jit
def scores2(keys, queries, constants, s, U: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    planes = key_levels2(keys, constants[0])
    if U == 16:
        for i in gl.static_range(4):
            s = multiply(gl.join(planes[2 * i], planes[2 * i + 1]), queries[i], s, HEADS, mma)
    else:
        for i in gl.static_range(8):
            s = multiply(planes[i], queries[i], s, HEADS, mma)
    return s


@gluon.jit
def scores3(tile, queries, constants, s, DIM: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    low, high = in_octets(constants[0]), in_octets(constants[1])
    for block in gl.static_range(DIM // 128):
        planes = key_levels3(lane_rows(tile, block, 3, DIM, TILE, 8), low, high)
        for i in gl.static_range(4):
            s = multiply(in_columns(planes[i], TILE), queries[4 * block + i], s, HEADS, mma)
    return s


@gluon.jit
def scores_of_rows(
    tile, queries, constants, s, BITS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Of 5 or 6 bits."""
    b, c, d = in_octets(constants[0]), in_octets(constants[1]), in_octets(constants[2])
    for block in gl.static_range(DIM // 128):
        planes = row_levels_poly7(lane_rows(tile, block, BITS, DIM, TILE, 2), b, c, d, BITS, False)
        for i in gl.static_range(8):
            keys = gl.permute(gl.join(planes[2 * i], planes[2 * i + 1]), (0, 1, 4, 2, 3)).reshape([TILE, 16])
            s = multiply(keys, queries[8 * block + i], s, HEADS, mma)
    return s


@gluon.jit
def scores_of_pieces(
    tile, queries, constants, s, BITS: gl.constexpr, LEVELS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr,
    HEADS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Of rows that `pieces` reads. queries: their address."""
    for n in gl.static_range(piece_count(DIM)):
        if BITS > 4:
            planes = halves(tile, constants, n, BITS, LEVELS, DIM, TILE, False)
            for i in gl.static_range(lane_of(DIM, n) // 4):
                q = load_operand(queries, first_of(DIM, n) // 16 + i, BITS, HEADS, mma)
                keys = gl.permute(gl.join(planes[2 * i], planes[2 * i + 1]), (0, 1, 4, 2, 3)).reshape([TILE, 16])
                s = multiply(keys, q, s, HEADS, mma)
        else:
            planes = key_bytes(tile, constants, n, BITS, DIM, TILE)
            for i in gl.static_range(lane_of(DIM, n) // 8):
                q = load_operand(queries, first_of(DIM, n) // 32 + i, BITS, HEADS, mma)
                s = multiply(in_columns(planes[i], TILE), q, s, HEADS, mma)
                if BITS == 4:
                    s = multiply(in_columns(planes[lane_of(DIM, n) // 8 + i], TILE), q, s, HEADS, mma)
    return s


@gluon.jit
def in_columns(plane, TILE: gl.constexpr):
    """Eight codes of each lane [octets, 8, 4, 8] as columns of a product."""
    return gl.permute(plane.reshape([TILE, 4, 2, 4]), (0, 2, 1, 3)).reshape([TILE, 32])


@gluon.jit
def scores8(keys, queries, constants, s, LEVELS: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    if LEVELS == POLY7:
        z0, z1 = levels_poly7(keys, constants[0], constants[1], constants[2])
    else:
        z0, z1, g0, g1 = key_levels_cubic8(keys, constants[0], constants[1], constants[2], constants[3])
        s = multiply(g0, queries[0], s, HEADS, mma)
        s = multiply(g1, queries[1], s, HEADS, mma)
    s = multiply(z0, queries[0], s, HEADS, mma)
    return multiply(z1, queries[1], s, HEADS, mma)


@gluon.jit
def both_parts(s):
    """[2 · HEADS, TILE] in the order of `split_query`, the parts added: [HEADS, TILE]."""
    HEADS: gl.constexpr = s.shape[0] // 2
    return gl.sum(s.reshape([HEADS // 8, 2, 8, s.shape[1]]), 1).reshape([HEADS, s.shape[1]])


@gluon.jit
def raw_scores(
    at, queries, constants, BITS: gl.constexpr, LEVELS: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
    HEADS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Products of the queries with the levels of a tile of keys, in steps: [TILE, 4] or [HEADS, TILE], float32.

    at: the address of the keys."""
    score = products(at, queries, constants, BITS, LEVELS, TILE, DIM, HEADS, mma)
    if LEVELS == TABLE:  # the upper bytes of levels, then their lower bytes
        lower = (constants[4], constants[5], constants[6], constants[7])
        score = score * 256.0 + products(at, queries, lower, BITS, LEVELS, TILE, DIM, HEADS, mma)
    return score


@gluon.jit
def products(
    at, queries, constants, BITS: gl.constexpr, LEVELS: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr,
    HEADS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The same of one table of bytes or of one polynomial."""
    U: gl.constexpr = DIM * BITS // 16
    DTYPE: gl.constexpr = gl.float32 if BITS > 4 else gl.int32
    s = gl.zeros([TILE, 8] if HEADS == 4 else [2 * HEADS, TILE], DTYPE, mma)
    if in_pieces(BITS, DIM):
        s = scores_of_pieces(at, queries, constants, s, BITS, LEVELS, DIM, TILE, HEADS, mma)
    elif BITS == 3:
        s = scores3(at, queries, constants, s, DIM, TILE, HEADS, mma)
    elif BITS == 5 or BITS == 6:
        s = scores_of_rows(at, queries, constants, s, BITS, DIM, TILE, HEADS, mma)
    elif BITS == 8:
        keys = read_keys(at, TILE, U)
        keys = gl.permute(keys.reshape([TILE, U // 32, 4, 4, 2]), (0, 1, 3, 2, 4)).reshape([TILE, U])
        keys = gl.convert_layout(keys, key_half_layout(TILE, U), assert_trivial=True)
        s = scores8(keys, queries, constants, s, LEVELS, HEADS, mma)
    else:
        keys = read_keys(at, TILE, U)
        if U > 16:
            keys = gl.permute(keys.reshape([TILE, U // 32, 4, 2, 4]), (0, 1, 3, 2, 4)).reshape([TILE, U])
        keys = gl.convert_layout(keys, key_layout(TILE, U), assert_trivial=True)
        if BITS == 4:
            s = scores4(keys, queries, constants, s, U, HEADS, mma)
        else:
            s = scores2(keys, queries, constants, s, U, HEADS, mma)
    HIGH: gl.constexpr = 1 if BITS > 4 else 256
    if HEADS == 4:
        high, low = gl.split(s.reshape([TILE, 4, 2]))
        return (high * HIGH + low).to(gl.float32)
    else:
        part = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, mma)) // 8 % 2
        if BITS <= 4:
            s = s * gl.where(part == 0, 256, 1)[:, None]
        return both_parts(s).to(gl.float32)

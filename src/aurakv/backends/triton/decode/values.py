"""Weights of a tile times the levels of values.

A unit of 16 bits holds 16 / VALUE_BITS codes. One sum [units, 8], of 16 heads [units, 16], for each of them; `output`
puts them together. Of flat rows there are eight such sums of 16 units for every 128 codes, of codes i and i + 8 of 16;
of pieces of 64 and 32 codes four of codes i and i + 4 of 8, two of codes i and i + 2 of 4.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from . import levels
from .codes import (
    complement3,
    levels_poly7,
    row_levels_poly7,
    value_bits,
    value_levels_cubic,
    value_levels_cubic3,
    value_levels_cubic8,
    value_levels_minifloat,
    value_levels_minifloat3,
    value_line,
)
from .pieces import first_of, halves, lane_of, piece_count, reach
from .primitives import (
    half_pairs,
    larger,
    larger_size,
    times_constant,
    times_pairs,
    transpose_pairs,
    transpose_weights,
    where_seen,
)
from .reads import in_octets, lane_rows, read_values
from .shapes import flat, in_pieces, padded
from .tables import value_table2, value_table4

MINIFLOAT = gl.constexpr(levels.MINIFLOAT)
LINE = gl.constexpr(levels.LINE)
AS_BITS = gl.constexpr(levels.BITS)
POLY7 = gl.constexpr(levels.POLY7)
TABLE = gl.constexpr(levels.TABLE)
SMALL = gl.constexpr(2.0**-80)  # of a weight beside its product with a float32 scale


@gluon.jit
def scaled_weights(p, scale, HEADS: gl.constexpr, WEIGHTS: gl.constexpr, HIDE: gl.constexpr, WIDE: gl.constexpr):
    """Weights times value scales in float16, and for each lane the largest of both. WIDE: scales of float32, one for
    each token, which the weights are multiplied with before they are rounded; they may be larger themselves."""
    if WIDE:
        product = p * gl.expand_dims(scale, 1 if HEADS == 4 else 0)
        if HIDE:
            product = gl.where(p > 0.0, product, 0.0)  # a hidden key's scale may be NaN
        p = p * SMALL
    if HEADS == 4:
        M: gl.constexpr = p.shape[0] // 16
        p = in_fours(p, WEIGHTS)
        w = transpose_pairs(in_fours(product, WEIGHTS)) if WIDE else transpose_weights(p, scale[:, None, :, :, :])
        top = gl.permute(larger_size(w, p), (1, 2, 3, 0, 4)).reshape([32, M, 2])  # [lane, register, pair]
    else:
        if WIDE:
            w = half_pairs(product)
            p = half_pairs(p)
        else:
            p = half_pairs(p)
            w = times_pairs(p, scale[None, :])
            if HIDE:
                w = where_seen(w, p)
        N: gl.constexpr = p.shape[1] // 8
        top = gl.permute(larger_size(w, p).reshape([HEADS // 8, 8, N, 4, 2]), (1, 3, 0, 2, 4))
        top = top.reshape([32, HEADS // 8 * N, 2])
    for _ in gl.static_range((top.shape[1] - 1).bit_length()):
        a, b = gl.split(gl.permute(top.reshape([32, top.shape[1] // 2, 2, 2]), (0, 1, 3, 2)))
        top = larger(a, b)
    a, b = gl.split(top.reshape([32, 2]))
    return w, gl.maximum(a, b)


@gluon.jit
def in_fours(p, WEIGHTS: gl.constexpr):
    """Weights of 4 heads [tokens, 4] in float16, as `transpose_weights` takes them."""
    p = gl.permute(p.reshape([p.shape[0] // 16, 2, 4, 2, 4]), (0, 2, 3, 4, 1))
    return half_pairs(gl.convert_layout(p, WEIGHTS, assert_trivial=True))


@gluon.constexpr_function
def _count(bits, kind, dim):
    """Sums: one for each code of a unit, and for 2 bits as bits that of the weights; of flat rows one for each 16
    coordinates."""
    return reach(dim) // 16 if flat(bits, dim) else 9 if kind in (AS_BITS.value, LINE.value) else 16 // bits


@gluon.jit
def empty_sums(BITS: gl.constexpr, LEVELS: gl.constexpr, DIM: gl.constexpr, HEADS: gl.constexpr, mma: gl.constexpr):
    ROWS: gl.constexpr = 16 if flat(BITS, DIM) else DIM * BITS // 16
    sums = ()
    for _ in gl.static_range(_count(BITS, LEVELS, DIM)):
        sums = sums + (gl.zeros([ROWS, max(8, HEADS)], gl.float32, mma),)  # noqa: RUF005
    return sums


@gluon.jit
def times(sums, columns):
    scaled = ()
    for i in gl.static_range(len(sums)):
        scaled = scaled + (sums[i] * columns,)  # noqa: RUF005
    return scaled


@gluon.jit
def add_values(at, w, sums, constants, BITS: gl.constexpr, LEVELS: gl.constexpr, DIM: gl.constexpr, mma: gl.constexpr):
    """Add weights [tokens, 8 or 16] times the levels of the values at an address."""
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    if not flat(BITS, DIM):
        U: gl.constexpr = sums[0].shape[0]
        values = gl.convert_layout(read_values(at, w.shape[0], U), A, assert_trivial=True)
    if flat(BITS, DIM):
        if in_pieces(BITS, DIM) or LEVELS == TABLE:
            return add_pieces(at, w, sums, constants, BITS, LEVELS, DIM, A)
        else:
            return add_flat_values(at, w, sums, constants, BITS, LEVELS, A)
    elif LEVELS == TABLE:
        planes = value_table2(values, constants) if BITS == 2 else value_table4(values, constants)
        new = ()
        for i in gl.static_range(16 // BITS):
            new = new + (mma_v2(planes[i], w, sums[i]),)  # noqa: RUF005
        return new
    elif BITS == 2:
        ones = gl.full(values.shape, 1.0, gl.float16, A)
        new = ()
        if LEVELS == LINE:
            planes = value_line(values)
            for i in gl.static_range(8):
                new = new + (mma_v2(planes[i], w, sums[i]),)  # noqa: RUF005
        else:
            planes = value_bits(values)
            w2 = times_constant(w, constants[0])
            for i in gl.static_range(8):
                new = new + (mma_v2(planes[8 + i], w2, mma_v2(planes[i], w, sums[i])),)  # noqa: RUF005
        return new + (mma_v2(ones, w, sums[8]),)  # noqa: RUF005
    elif LEVELS == MINIFLOAT and BITS == 4:
        planes = value_levels_minifloat(values, constants[0])
        a0 = mma_v2(planes[0], w, sums[0])
        a1 = mma_v2(planes[1], w, sums[1])
        a2 = mma_v2(planes[2], w, sums[2])
        a3 = mma_v2(planes[3], w, sums[3])
        a0 = mma_v2(planes[4], w, a0)
        a1 = mma_v2(planes[5], w, a1)
        a2 = mma_v2(planes[6], w, a2)
        a3 = mma_v2(planes[7], w, a3)
        return a0, a1, a2, a3
    elif BITS == 4:
        v0, v1, v2, v3 = value_levels_cubic(values, constants[0])
        return mma_v2(v0, w, sums[0]), mma_v2(v1, w, sums[1]), mma_v2(v2, w, sums[2]), mma_v2(v3, w, sums[3])
    else:
        if LEVELS == POLY7:
            v0, v1 = levels_poly7(values, constants[0], constants[1], constants[2])
        else:
            v0, v1 = value_levels_cubic8(values, constants[0], constants[1], constants[2], constants[3])
        return mma_v2(v0, w, sums[0]), mma_v2(v1, w, sums[1])


@gluon.jit
def add_flat_values(tile, w, sums, constants, BITS: gl.constexpr, LEVELS: gl.constexpr, A: gl.constexpr):
    constant = in_octets(constants[0])
    new = ()
    for block in gl.static_range(len(sums) // 8):
        at = lane_rows(tile, block, BITS, len(sums) * 16, w.shape[0], 2)
        if LEVELS == POLY7:
            planes = row_levels_poly7(at, constant, in_octets(constants[1]), in_octets(constants[2]), BITS, True)
        else:
            planes = value_levels_minifloat3(at) if LEVELS == MINIFLOAT else value_levels_cubic3(at, constant)
        for i in gl.static_range(8):
            total = mma_v2(side_by_side(planes[i], planes[i + 8], A), w, sums[8 * block + i])
            if LEVELS == MINIFLOAT:
                first, last = complement3(planes[i], constant), complement3(planes[i + 8], constant)
                total = mma_v2(side_by_side(first, last, A), w, total)
            new = new + (total,)  # noqa: RUF005
    return new


@gluon.jit
def add_pieces(tile, w, sums, constants, BITS: gl.constexpr, LEVELS: gl.constexpr, DIM: gl.constexpr, A: gl.constexpr):
    new = ()
    for n in gl.static_range(piece_count(DIM)):
        planes = halves(tile, constants, n, BITS, LEVELS, DIM, w.shape[0], True)
        for i in gl.static_range(lane_of(DIM, n) // 4):
            both = side_by_side(planes[i], planes[i + lane_of(DIM, n) // 4], A)
            new = new + (mma_v2(both, w, sums[first_of(DIM, n) // 16 + i]),)  # noqa: RUF005
    return new


@gluon.jit
def side_by_side(a, b, layout: gl.constexpr):
    """Coordinates g and 8 + g of tokens [octets, g, 4, 2] as an operand of 16 rows."""
    both = gl.permute(gl.join(a, b), (4, 1, 0, 2, 3)).reshape([16, 8 * a.shape[0]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def eighths(s0, s1, s2, s3, s4, s5, s6, s7):
    """Eight tensors side by side in a new last dimension, in order."""
    a = gl.join(gl.join(s0, s4), gl.join(s2, s6))
    b = gl.join(gl.join(s1, s5), gl.join(s3, s7))
    return gl.join(a, b).reshape([s0.shape[0], s0.shape[1], 8])


@gluon.constexpr_function
def parts_of(bits, dim):
    """Parts of the results that are stored at once: each piece of a row, or all."""
    return piece_count(dim) if in_pieces(bits, dim) else 1


@gluon.jit
def output(
    sums, shift, HEADS: gl.constexpr, BITS: gl.constexpr, LEVELS: gl.constexpr, DIM: gl.constexpr, PART: gl.constexpr
):
    """The sums of a part as [units, HEADS, codes of a unit], see `coordinates`. shift: what the sum of the weights is
    to be multiplied by."""
    U: gl.constexpr = sums[0].shape[0]
    FIRST: gl.constexpr = first_of(DIM, PART) // 16
    COUNT: gl.constexpr = lane_of(DIM, PART) // 4 if in_pieces(BITS, DIM) else 0
    if COUNT == 2:
        out = gl.join(sums[FIRST], sums[FIRST + 1])
    elif COUNT == 4:
        out = fourths(sums[FIRST], sums[FIRST + 1], sums[FIRST + 2], sums[FIRST + 3])
    elif COUNT == 8:
        out = eighths(sums[FIRST], sums[FIRST + 1], sums[FIRST + 2], sums[FIRST + 3], sums[FIRST + 4], sums[FIRST + 5],
                      sums[FIRST + 6], sums[FIRST + 7])  # fmt: skip
    elif BITS == 8:
        out = gl.join(sums[0], sums[1])
    elif BITS == 4:
        out = fourths(sums[0], sums[1], sums[2], sums[3])
    elif flat(BITS, DIM) or LEVELS == TABLE:
        out = eighths(sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7])
        if len(sums) == 16:
            more = eighths(sums[8], sums[9], sums[10], sums[11], sums[12], sums[13], sums[14], sums[15])
            out = gl.join(out, more).reshape([U, sums[0].shape[1], 16])
    else:
        s1, s2, s3, s4 = sums[1] * 2.0**-2, sums[2] * 2.0**-4, sums[3] * 2.0**-6, sums[4] * 2.0**-8
        out = eighths(sums[0], s1, s2, s3, s4, sums[5], sums[6] * 2.0**-2, sums[7] * 2.0**-4)
        out += gl.expand_dims(gl.convert_layout(sums[8] * shift, gl.SliceLayout(2, out.type.layout)), 2)
    if HEADS == 4:
        out = gl.sum(gl.permute(out.reshape([U, 4, 2, out.shape[2]]), (0, 1, 3, 2)), 3)
    return out


@gluon.jit
def store_part(to, result, factor, BITS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, PART: gl.constexpr):
    """Results of `output` times a factor of each head to [ROWS, DIM]."""
    OUT: gl.constexpr = result.type.layout
    h = gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    u = gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
    e = gl.arange(0, result.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
    d = coordinates(u, e, BITS, result.shape[2], DIM, PART)
    inside = (d < DIM) if padded(DIM) > DIM else (d >= 0)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
    gl.store(to + h * DIM + d, result * factor, mask=(h < ROWS) & inside)


@gluon.jit
def fourths(s0, s1, s2, s3):
    """Four tensors side by side in a new last dimension, in order."""
    out = gl.join(gl.join(s0, s1), gl.join(s2, s3))
    return gl.permute(out, (0, 1, 3, 2)).reshape([s0.shape[0], s0.shape[1], 4])


@gluon.jit
def coordinates(u, e, BITS: gl.constexpr, CODES: gl.constexpr, DIM: gl.constexpr, PART: gl.constexpr):
    """Of code e of unit u of `output`, which has CODES a unit."""
    if in_pieces(BITS, DIM):
        return first_of(DIM, PART) + (u % 8) * (2 * CODES) + (u // 8) * CODES + e
    elif flat(BITS, DIM):
        BLOCKS: gl.constexpr = CODES // 8
        return e % BLOCKS * 128 + (u % 8) * 16 + (u // 8) * 8 + e // BLOCKS
    else:
        return CODES * u + e

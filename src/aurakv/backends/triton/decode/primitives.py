"""What the decode kernels do across lanes or with register pairs: weights, rotations, constants, prefetches."""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.codes import LANE_LOAD
from .shapes import order, padded

# Weights of tokens t, t + 8 for head c are columns 2c, 2c + 1 of an 8×8 matrix with the tokens as rows; transposed,
# lane 4g + c holds head g // 2 of tokens 2c, 2c + 1 of the half g % 2. $2: value scales in that order.
_TRANSPOSE = gl.constexpr("{ .reg .b32 t; movmatrix.sync.aligned.m8n8.trans.b16 t, $1; mul.rn.f16x2 $0, t, $2; }")


@gluon.constexpr_function
def _butterfly(bit):
    """One stage of the Hadamard transform across lanes that differ in a bit: x + y where it is 0, else y − x. $2: 1 or
    −1 for that."""
    return f"{{ .reg .b32 t; shfl.sync.bfly.b32 t, $1, {1 << bit}, 0x1f, 0xffffffff; fma.rn.f32 $0, $1, $2, t; }}"


_SIGN = gl.constexpr("{ .reg .b32 t; mov.u32 t, %laneid; shr.u32 t, t, $1; bfi.b32 $0, t, 0x3f800000, 31, 1; }")


@gluon.jit
def hadamard(x, ROWS: gl.constexpr, DIM: gl.constexpr):
    """H x over rows x [ROWS, DIM] of which lane l holds coordinates l·DIM/32 …; not scaled."""
    E: gl.constexpr = DIM // 32
    layout: gl.constexpr = x.type.layout
    y = x.reshape([ROWS, 32, E])
    for _ in gl.static_range(
        (E - 1).bit_length()
    ):  # the bits of the coordinate inside a lane; each round turns them by one
        a, b = gl.split(y.reshape([ROWS, 32, E // 2, 2]))
        y = gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2)).reshape([ROWS, 32, E])
    y = doubled(y, 0)
    return gl.convert_layout(y.reshape([ROWS, DIM]), layout)


@gluon.jit
def doubled(y, FIRST: gl.constexpr):
    """The stages of the Hadamard transform across lanes, from this bit of their number on."""
    for bit in gl.static_range(FIRST, 5):
        one = gl.full([1, 1, 1], bit, gl.int32, y.type.layout)
        sign = gl.inline_asm_elementwise(_SIGN, "=r,r", [one], dtype=gl.float32, is_pure=True, pack=1)
        y = gl.inline_asm_elementwise(_butterfly(bit), "=r,r,r", [y, sign], dtype=gl.float32, is_pure=False, pack=1)
    return y


@gluon.constexpr_function
def _from_lane(lane, lanes):
    """What a lane of each run of so many lanes has."""
    return f"shfl.sync.idx.b32 $0, $1, {lane}, {32 - lanes << 8 | 0x1F}, 0xffffffff;"


@gluon.jit
def rotated(x, matrix, ROWS: gl.constexpr, DIM: gl.constexpr):
    """H x over rows x [ROWS, padded DIM], not scaled; H is doubled from a matrix of `order` m. Runs of m coordinates
    are padded to a power of two. matrix: its columns, each padded so with zeros, float32."""
    RUN: gl.constexpr = order(DIM)
    if RUN == 1:
        return hadamard(x, ROWS, DIM)
    else:
        PAD: gl.constexpr = padded(DIM) // (DIM // RUN)
        E: gl.constexpr = padded(DIM) // 32
        gl.static_assert(E == 4, "a lane has four coordinates")
        layout: gl.constexpr = x.type.layout
        d = gl.arange(0, padded(DIM), layout=gl.SliceLayout(0, layout))
        even, odd = gl.split(x.reshape([ROWS, 32, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        mine = (x0, x1, x2, x3)
        y = gl.zeros([ROWS, padded(DIM)], gl.float32, layout)
        for i in gl.static_range(RUN):
            column = gl.load(matrix + i * PAD + d % PAD)
            one = gl.inline_asm_elementwise(
                _from_lane(i // E, PAD // E), "=r,r", [mine[i % E]], dtype=gl.float32, is_pure=False, pack=1
            )
            y += column[None, :] * spread(one, layout)
        y = doubled(y.reshape([ROWS, 32, E]), (PAD // E - 1).bit_length())
        return gl.convert_layout(y.reshape([ROWS, padded(DIM)]), layout)


@gluon.jit
def spread(x, layout: gl.constexpr):
    """A number of each row and lane [ROWS, 32] for all four coordinates of the lane."""
    two = gl.join(x, x)
    return gl.convert_layout(gl.join(two, two).reshape([x.shape[0], 128]), layout)


@gluon.jit
def lane_constant(table, row: gl.constexpr, layout: gl.constexpr):
    """Row `row` of an int32 table [rows, 32 equal entries]: a number that ptxas cannot prove uniform. Uniform registers
    cost a copy for every PRMT."""
    address = gl.arange(0, 1, layout=layout).to(gl.int64) + (table + 32 * row).to(gl.int64)
    return gl.inline_asm_elementwise(LANE_LOAD, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def transpose_weights(p, scale):
    return gl.inline_asm_elementwise(_TRANSPOSE, "=r,r,r", [p, scale], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def transpose_pairs(p):
    """The same of weights that are multiplied already."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def by_half(w, even):
    """The B operand of 16 tokens from columns that belong to one half of them: rows 0-7 are zero in odd columns, rows
    8-15 in even ones."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $2, $3;\nlop3.b32 $1, $2, $3, $3, 0x30;", "=&r,=r,r,r,r", [w, even],
        dtype=(gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def half_pairs(p):
    """float32 to float16, two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def times_pairs(p, scale):
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [p, scale], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def larger(a, b):
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def larger_size(a, b):
    """max(|a|, b), two at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; abs.f16x2 t, $1; max.f16x2 $0, t, $2; }",
        "=r,r,r",
        [a, b],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def finite(scale):
    """Scales as float32, infinities turned into NaN: an infinite key is damage, not a mask."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 z, t; .reg .b16 a, b;
mov.b32 z, 0;
fma.rn.f16x2 t, $2, z, $2;
mov.b32 {a, b}, t;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b; }""", "=r,=r,r", [scale], dtype=gl.float32, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def prefetch(pointer, mask):
    """Ask for the cache lines at the pointers, without waiting."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
        [pointer, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def where_seen(w, p):
    """w where the weight p ≥ 0 is not zero, else zero, two at a time: a hidden key's scale may be NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; add.u32 t, $2, 0x7fff7fff; prmt.b32 t, t, t, 0xbb99; and.b32 $0, t, $1; }", "=r,r,r", [w, p],
        dtype=gl.float16, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def times_constant(w, factor):
    """w times a register of two equal halves."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r,r", [w, factor], dtype=gl.float16, is_pure=True, pack=2
    )

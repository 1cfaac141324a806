"""Decode primitives of the fast decode kernel: packed codes to tensor-core operands, in registers.

Keys. A row is 16-bit units of four 4-bit codes; a unit is a PRMT selector as it stands. With the 16 integer levels as
bytes, `prmt(low, w)` gives the level of codes below 8 (and −1 for the others: PRMT replicates the sign of a byte whose
selector has bit 3 set), `prmt(high + 1, w ^ 0x8888)` gives level + 1 of the codes from 8 on and 0 for the others. Their
sum is the level; a second integer MMA does the addition.

Values. `ldmatrix.trans` on 16-bit units gives registers [token t: 4 codes | token t+1: 4 codes]; code i of both halves
is one half2. MINIFLOAT: the code at bits 8-11 of a half is a small float f(code); level = f(code) − f(15 − code), by
two MMAs.
CUBIC: 1024 + code by the exponent trick, then a cubic in half2 arithmetic.

inline assembly here moves data between lanes or changes the meaning of the index; the callers' layouts say how.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fast_levels import MINIFLOAT_TAIL, half2

# $0-$3: levels of units 0-3 where code < 8, else −1. $4-$7: level + 1 where code ≥ 8, else 0. $8 $9: the four units.
_KEY4 = gl.constexpr("""{
.reg .b32 w1, w3, x0, x1, x2, x3;
shr.u32 w1, $8, 16;
shr.u32 w3, $9, 16;
xor.b32 x0, $8, 0x88888888;
xor.b32 x2, $9, 0x88888888;
shr.u32 x1, x0, 16;
shr.u32 x3, x2, 16;
prmt.b32 $0, $10, $14, $8;
prmt.b32 $1, $10, $14, w1;
prmt.b32 $2, $10, $14, $9;
prmt.b32 $3, $10, $14, w3;
prmt.b32 $4, $18, $22, x0;
prmt.b32 $5, $18, $22, x1;
prmt.b32 $6, $18, $22, x2;
prmt.b32 $7, $18, $22, x3;
}""")

# $0-$7: levels of the even codes of unit 0, of its odd codes, of the even codes of unit 1, … $8 $9: the four units.
_KEY2 = gl.constexpr("""{
.reg .b32 e0, e1, e2, e3, o0, o1, o2, o3;
and.b32 e0, $8, 0x33333333;
shr.u32 o0, $8, 2;
and.b32 o0, o0, 0x33333333;
and.b32 e2, $9, 0x33333333;
shr.u32 o2, $9, 2;
and.b32 o2, o2, 0x33333333;
shr.u32 e1, e0, 16;
shr.u32 o1, o0, 16;
shr.u32 e3, e2, 16;
shr.u32 o3, o2, 16;
prmt.b32 $0, $10, $10, e0;
prmt.b32 $1, $10, $10, o0;
prmt.b32 $2, $10, $10, e1;
prmt.b32 $3, $10, $10, o1;
prmt.b32 $4, $10, $10, e2;
prmt.b32 $5, $10, $10, o2;
prmt.b32 $6, $10, $10, e3;
prmt.b32 $7, $10, $10, o3;
}""")


def _bytes_to_halves() -> list[str]:
    """y0, y1: (code − 128) / 128 of the first and of the second byte of both units in w."""
    lines = [f"mov.b32 magic, 0x64646464; mov.b32 unit, {half2(1 / 128)}; mov.b32 middle, {half2(-9.0)};"]
    for i, picks in enumerate(("0x4240", "0x4341")):  # 1024 + code
        lines += [f"prmt.b32 y{i}, w, magic, {picks};", f"fma.rn.f16x2 y{i}, y{i}, unit, middle;"]
    return lines


def _key_cubic() -> str:
    """$0 $1: z of codes 0 and 1; $2 $3: A3·z³ + A2·z² + A1·z + A0. $4: two units. $5 $7 $9 $11: A0 … A3, twice each."""
    lines = ["{", ".reg .b32 w, magic, unit, middle, y0, y1, t;", "mov.b32 w, $4;", *_bytes_to_halves()]
    for i in range(2):
        lines += [f"fma.rn.f16x2 t, y{i}, $11, $9;", f"fma.rn.f16x2 t, t, y{i}, $7;"]
        lines += [f"fma.rn.f16x2 ${i + 2}, t, y{i}, $5;", f"mov.b32 ${i}, y{i};"]
    return "\n".join([*lines, "}"])


def _value_cubic8() -> str:
    """$0 $1: c3·z³ + c2·z² + c1·z + c0 of codes 0 and 1. $2: two units. $3 $5 $7 $9: c0 … c3 in both halves."""
    lines = ["{", ".reg .b32 w, magic, unit, middle, y0, y1, t;", "mov.b32 w, $2;", *_bytes_to_halves()]
    for i in range(2):
        lines += [f"fma.rn.f16x2 t, y{i}, $9, $7;", f"fma.rn.f16x2 t, t, y{i}, $5;", f"fma.rn.f16x2 ${i}, t, y{i}, $3;"]
    return "\n".join([*lines, "}"])


def _value_bits() -> str:
    """$0-$7: codes 0-7 as tiny floats, code · 4^i · 2^-24 with i = 0 1 2 3 4 0 1 2; $8-$15: their upper bits."""
    lines = ["{", ".reg .b32 r;", "shr.u32 r, $16, 10;"]
    for i in range(8):
        source, at = ("$16", i) if i < 5 else ("r", i - 5)
        for first, mask in ((0, 0x00030003), (8, 0x00020002)):
            lines.append(f"and.b32 ${first + i}, {source}, {mask << 2 * at};")
    return "\n".join([*lines, "}"])


def _value_minifloat() -> str:
    """$0-$3: f(code) of codes 0-3; $4-$7: −f(15 − code), by integer subtraction of the bits. $9 is −1."""
    mask, tail = 0x0F000F00, MINIFLOAT_TAIL << 16 | MINIFLOAT_TAIL
    lines = ["{", ".reg .b32 a, b, c;", "shl.b32 a, $8, 8;", "shl.b32 b, $8, 4;", "shr.u32 c, $8, 4;"]
    for i, source in enumerate(("a", "b", "$8", "c")):
        lines.append(f"lop3.b32 ${i}, {source}, {mask}, {tail}, 0xEA;")  # (source & mask) | tail
        lines.append(f"mad.lo.s32 ${i + 4}, ${i}, $9, {(mask + 2 * tail) ^ 0x80008000};")
    return "\n".join([*lines, "}"])


def _value_cubic() -> str:
    """$0-$3: c3·y³ + c2·y² + c1·y + c0 of codes 0-3 with y = code − 8. $5 $7 $9 $11: c0 … c3 in both halves."""
    lines = ["{", ".reg .b32 r, y, t, low, high, sixteenth;"]
    for name, x in (("low", -1032.0), ("high", -72.0), ("sixteenth", 1 / 16)):
        lines.append(f"mov.b32 {name}, {half2(x)};")
    lines.append("shr.u32 r, $4, 8;")
    for i, (source, mask) in enumerate((("$4", 0x000F000F), ("$4", 0x00F000F0), ("r", 0x000F000F), ("r", 0x00F000F0))):
        lines.append(f"lop3.b32 y, {source}, {mask}, 0x64006400, 0xEA;")  # 1024 + code, or 1024 + 16·code
        lines.append("add.rn.f16x2 y, y, low;" if i % 2 == 0 else "fma.rn.f16x2 y, y, sixteenth, high;")
        lines.append("fma.rn.f16x2 t, y, $11, $9;")
        lines.append("fma.rn.f16x2 t, t, y, $7;")
        lines.append(f"fma.rn.f16x2 ${i}, t, y, $5;")
    return "\n".join([*lines, "}"])


_VALUE_MINIFLOAT = gl.constexpr(_value_minifloat())
_VALUE_CUBIC = gl.constexpr(_value_cubic())
_VALUE_CUBIC8 = gl.constexpr(_value_cubic8())
_VALUE_BITS = gl.constexpr(_value_bits())
_KEY_CUBIC = gl.constexpr(_key_cubic())

# Weights of tokens t, t + 8 for head c are columns 2c, 2c + 1 of an 8×8 matrix with the tokens as rows; transposed,
# lane 4g + c holds head g // 2 of tokens 2c, 2c + 1 of the half g % 2. $2: value scales in that order.
_TRANSPOSE = gl.constexpr("{ .reg .b32 t; movmatrix.sync.aligned.m8n8.trans.b16 t, $1; mul.rn.f16x2 $0, t, $2; }")


_LANE_LOAD = gl.constexpr(
    "{ .reg .b64 a; .reg .b32 t; mov.u32 t, %laneid; mul.wide.u32 a, t, 4; add.s64 a, a, $1; ld.global.b32 $0, [a]; }"
)


def _butterfly(bit: int) -> str:
    """One stage of the Hadamard transform across lanes that differ in a bit: x + y where it is 0, else y − x."""
    return f"""{{
.reg .b32 t, s;
shfl.sync.bfly.b32 t, $1, {1 << bit}, 0x1f, 0xffffffff;
mov.u32 s, %laneid;
and.b32 s, s, {1 << bit};
shl.b32 s, s, {31 - bit};
xor.b32 s, s, $1;
add.rn.f32 $0, s, t;
}}"""


_BUTTERFLY0, _BUTTERFLY1, _BUTTERFLY2, _BUTTERFLY3, _BUTTERFLY4 = (gl.constexpr(_butterfly(bit)) for bit in range(5))


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
    y = gl.inline_asm_elementwise(_BUTTERFLY0, "=r,r", [y], dtype=gl.float32, is_pure=False, pack=1)
    y = gl.inline_asm_elementwise(_BUTTERFLY1, "=r,r", [y], dtype=gl.float32, is_pure=False, pack=1)
    y = gl.inline_asm_elementwise(_BUTTERFLY2, "=r,r", [y], dtype=gl.float32, is_pure=False, pack=1)
    y = gl.inline_asm_elementwise(_BUTTERFLY3, "=r,r", [y], dtype=gl.float32, is_pure=False, pack=1)
    y = gl.inline_asm_elementwise(_BUTTERFLY4, "=r,r", [y], dtype=gl.float32, is_pure=False, pack=1)
    return gl.convert_layout(y.reshape([ROWS, DIM]), layout)


@gluon.jit
def lane_constant(table, row: gl.constexpr, layout: gl.constexpr):
    """Row `row` of an int32 table [rows, 32 equal entries]: a number that ptxas cannot prove uniform. Uniform registers
    cost a copy for every PRMT."""
    address = gl.arange(0, 1, layout=layout).to(gl.int64) + (table + 32 * row).to(gl.int64)
    return gl.inline_asm_elementwise(_LANE_LOAD, "=r,l", [address], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def key_levels4(units, low0, low1, high0, high1):
    """Units of 4 codes -> 4 + 4 int8 tensors whose sums are the levels; tensor e holds the codes of units e mod 4."""
    return gl.inline_asm_elementwise(
        _KEY4, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [units, low0, low1, high0, high1],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def key_levels2(units, levels):
    """Units of 8 codes -> 8 int8 tensors of levels."""
    return gl.inline_asm_elementwise(
        _KEY2, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [units, levels],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4)  # fmt: skip


@gluon.jit
def key_levels8(units, c0, c1, c2, c3):
    """Units of 2 codes -> 2 + 2 float16 tensors whose sums are the levels."""
    return gl.inline_asm_elementwise(
        _KEY_CUBIC, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [units, c0, c1, c2, c3],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_levels_cubic8(units, c0, c1, c2, c3):
    return gl.inline_asm_elementwise(
        _VALUE_CUBIC8, "=&r,=&r,r,r,r,r,r,r,r,r,r", [units, c0, c1, c2, c3],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_bits(units):
    return gl.inline_asm_elementwise(
        _VALUE_BITS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [units],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_levels_minifloat(units, minus_one):
    return gl.inline_asm_elementwise(
        _VALUE_MINIFLOAT, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [units, minus_one],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_levels_cubic(units, c0, c1, c2, c3):
    return gl.inline_asm_elementwise(
        _VALUE_CUBIC, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [units, c0, c1, c2, c3],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def transpose_weights(p, scale):
    return gl.inline_asm_elementwise(_TRANSPOSE, "=r,r,r", [p, scale], dtype=gl.float16, is_pure=True, pack=2)


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
def prefetch_descriptors():
    """Ask for the three TMA descriptors of `fast_decode`, its first parameters (with 4, 4 and 3 sizes and strides)."""
    gl.inline_asm_elementwise(
        """{ .reg .b64 a, b, c;
mov.b64 a, fast_decode_param_0;
mov.b64 b, fast_decode_param_9;
mov.b64 c, fast_decode_param_18;
cvta.param.u64 a, a;
cvta.param.u64 b, b;
cvta.param.u64 c, c;
prefetch.tensormap [a];
prefetch.tensormap [b];
prefetch.tensormap [c];
mov.b32 $0, $1; }""", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


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

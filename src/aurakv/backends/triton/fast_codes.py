"""Packed codes to tensor-core operands, in registers: one primitive for each width and kind of table.

Keys of 4 bits. A row is 16-bit units of four codes; a unit is a PRMT selector as it stands. With the 16 integer levels
as bytes, `prmt(low, w)` gives the level of codes below 8 (and −1 for the others: PRMT replicates the sign of a byte
whose selector has bit 3 set), `prmt(high + 1, w ^ 0x8888)` gives level + 1 of the codes from 8 on and 0 for the others.
Their sum is the level; a second integer MMA does the addition. Of 2 bits: codes under masks are selectors, one MMA. Of
3 bits: 12 bytes of a row belong to a lane; codes are spread to nibbles. Of 8 bits: a cubic in float16, `_key_cubic`.

Values. `ldmatrix.trans` on 16-bit units gives registers [token t: a unit | token t+1: the same unit]; code i of both
halves is one half2. MINIFLOAT: a 4-bit code at bits 8-11 of a half (3 bits: 9-11) is a small float f(code); level =
f(code) − f(last code − code), by two MMAs. CUBIC: 1024 + code by the exponent trick, then a cubic in half2 arithmetic.
BITS: 2-bit codes under a mask are tiny floats; a second MMA adds what the upper bit has too much. Of 3 bits: 6 bytes
belong to a lane, so lanes exchange their units first.

Inline assembly here moves data between lanes or changes the meaning of the index; the callers' layouts say how.
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
    mask, tail = 0x0F000F00, MINIFLOAT_TAIL[4] << 16 | MINIFLOAT_TAIL[4]
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


def _key3() -> str:
    """$0-$7: levels of codes 0-3, 4-7, … of a lane's 32. $8 $12 $16: its three words; $20 $28: levels."""
    lines = ["{", ".reg .b32 x, h, t;"]
    groups = ("mov.b32 x, $8;", "shf.r.wrap.b32 x, $8, $12, 24;", "shf.r.wrap.b32 x, $12, $16, 16;")
    for s, group in enumerate((*groups, "shr.u32 x, $16, 8;")):  # 8 codes: 24 bits to 8 nibbles
        lines += [group] + (["and.b32 x, x, 0x00ffffff;"] if s < 3 else [])
        lines += ["and.b32 h, x, 0x00fff000;", "mad.lo.u32 x, h, 15, x;"]
        lines += ["and.b32 h, x, 0x0fc00fc0;", "mad.lo.u32 x, h, 3, x;"]
        lines += ["and.b32 h, x, 0x38383838;", "add.u32 x, x, h;", "shr.u32 t, x, 16;"]
        lines += [f"prmt.b32 ${2 * s}, $20, $28, x;", f"prmt.b32 ${2 * s + 1}, $20, $28, t;"]
    return "\n".join([*lines, "}"])


def _exchange3() -> list[str]:
    """p0 p1 p2: units 3g, 3g + 1, 3g + 2 from $16-$18, which are units g, g + 8, g + 16."""
    lines = [".reg .b32 l, g, a, s0, s1, s2, p0, p1, p2, t;"]
    # unit 3g + j is in lane (3g + j) mod 8 = g', which sends its unit number (g' + 2j) mod 3
    lines += [".reg .pred one, two;", "mov.u32 l, %laneid;", "shr.u32 g, l, 2;", "mul.lo.u32 a, g, 11;"]
    lines += ["shr.u32 a, a, 5;", "mul.lo.u32 a, a, 3;", "sub.u32 a, g, a;"]
    lines += ["setp.eq.u32 one, a, 1;", "setp.eq.u32 two, a, 2;"]
    for j, (zero, first, second) in enumerate((("$16", "$17", "$18"), ("$18", "$16", "$17"), ("$17", "$18", "$16"))):
        lines += [f"selp.b32 s{j}, {first}, {zero}, one;", f"selp.b32 s{j}, {second}, s{j}, two;"]
    lines += ["and.b32 l, l, 3;", "mad.lo.u32 l, g, 12, l;"]
    for j in range(3):
        lines += [f"add.u32 t, l, {4 * j};", "and.b32 t, t, 31;", f"shfl.sync.idx.b32 p{j}, s{j}, t, 0x1f, 0xffffffff;"]
    return lines


def _value_cubic3() -> str:
    """$0-$15: x + b·x³ of codes 0-15 of the 48 bits that are lane g's, x = code − 3.5. $16-$18: units g, g + 8, g + 16.
    $19 $21: 1 and b in both halves."""
    lines = ["{", *_exchange3(), ".reg .b32 q0, q1, q2, x, magic, unit, middle;"]
    lines += ["mov.b32 magic, 0x64006400;", "shr.u32 q0, p0, 8;", "shr.u32 q1, p1, 7;", "shr.u32 q2, p2, 9;"]
    lines += ["shl.b32 p0, p0, 1;"]  # a code's place is at least bit 1, so that its middle is a float16 number
    places = (("p0", 1), ("p0", 4), ("p0", 7), ("q0", 1), ("q0", 4), None, ("p1", 2), ("p1", 5), ("q1", 1), ("q1", 4),
              None, ("p2", 1), ("p2", 4), ("p2", 7), ("q2", 1), ("q2", 4))  # fmt: skip
    for i, place in enumerate(places):
        if place is None:  # two words share the code; its place is bit 7
            low, high, shift, mask = ("q0", "p1", 8, 0x0080) if i == 5 else ("q1", "p2", 9, 0x0180)
            rest = 0x0380 ^ mask
            lines += [f"lop3.b32 x, {low}, {mask << 16 | mask}, magic, 0xEA;", f"shl.b32 t, {high}, {shift};"]
            lines.append(f"lop3.b32 x, t, {rest << 16 | rest}, x, 0xEA;")
        else:
            mask = 7 << place[1]
            lines.append(f"lop3.b32 x, {place[0]}, {mask << 16 | mask}, magic, 0xEA;")
        k = 7 if place is None else place[1]
        lines += [f"mov.b32 unit, {half2(2.0**-k)};", f"mov.b32 middle, {half2(-(1024 * 2.0**-k + 3.5))};"]
        lines += ["fma.rn.f16x2 x, x, unit, middle;", "mul.rn.f16x2 t, x, x;", "fma.rn.f16x2 t, t, $21, $19;"]
        lines.append(f"mul.rn.f16x2 ${i}, t, x;")
    return "\n".join([*lines, "}"])


def _value_minifloat3() -> str:
    """$0-$15: f(code) of codes 0-15 of lane g's 48 bits, the code at bits 9-11 of each half. $16-$18 as above."""
    mask, tail = 0x0E000E00, MINIFLOAT_TAIL[3] << 16 | MINIFLOAT_TAIL[3]

    def moved(word: str, left: int) -> list[str]:
        return [f"shl.b32 t, {word}, {left};" if left > 0 else f"shr.u32 t, {word}, {-left};"]

    lines = ["{", *_exchange3()]
    for i in range(16):
        word, at = divmod(3 * i, 16)
        some = mask if at <= 13 else 0x02000200 if at == 15 else 0x06000600  # a code may go on in the next word
        lines += moved(f"p{word}", 9 - at)
        lines.append(f"lop3.b32 ${i}, t, {some}, {tail}, 0xEA;")  # (t & mask) | tail
        if some != mask:
            lines += moved(f"p{word + 1}", 25 - at)
            lines.append(f"lop3.b32 ${i}, t, {mask ^ some}, ${i}, 0xEA;")
    return "\n".join([*lines, "}"])


def _complement3() -> str:
    """$0: −f(7 − code) from f(code) in $1, by integer subtraction of the bits. $2 is −1."""
    mask, tail = 0x0E000E00, MINIFLOAT_TAIL[3] << 16 | MINIFLOAT_TAIL[3]
    return f"mad.lo.s32 $0, $1, $2, {(mask + 2 * tail) ^ 0x80008000};"


_KEY3 = gl.constexpr(_key3())
_VALUE_CUBIC3 = gl.constexpr(_value_cubic3())
_VALUE_MINIFLOAT3 = gl.constexpr(_value_minifloat3())
_COMPLEMENT3 = gl.constexpr(_complement3())


_KEY3_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 28))
_VALUE3_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 7))
_MINIFLOAT3_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 3))


@gluon.jit
def key_levels3(a, b, c, low, high):
    """A lane's three words of a row, each four times -> 4 int8 tensors: levels of 8 codes each."""
    return gl.inline_asm_elementwise(
        _KEY3, _KEY3_OPERANDS, [a, b, c, low, high],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=8)  # fmt: skip


@gluon.jit
def value_levels_cubic3(a, b, c, one, bend):
    """Units 0-7, 8-15, 16-23 -> 16 float16 tensors: levels of the codes of each lane's 6 bytes."""
    return gl.inline_asm_elementwise(
        _VALUE_CUBIC3, _VALUE3_OPERANDS, [a, b, c, one, bend],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def value_levels_minifloat3(a, b, c):
    """The same for minifloat tables, level = f(code) − f(7 − code): f of the codes."""
    return gl.inline_asm_elementwise(
        _VALUE_MINIFLOAT3, _MINIFLOAT3_OPERANDS, [a, b, c],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def complement3(plane, minus_one):
    return gl.inline_asm_elementwise(
        _COMPLEMENT3, "=r,r,r,r", [plane, minus_one], dtype=gl.float16, is_pure=True, pack=2
    )


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

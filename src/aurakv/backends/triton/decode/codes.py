"""Packed codes to tensor-core operands, in registers: one primitive for each width and kind of table.

Keys of 4 bits. A row is 16-bit units of four codes; a unit is a PRMT selector as it stands. With the 16 integer levels
as bytes, `prmt(low, w)` gives the level of codes below 8 (and −1 for the others: PRMT replicates the sign of a byte
whose selector has bit 3 set), `prmt(high + 1, w ^ 0x8888)` gives level + 1 of the codes from 8 on and 0 for the others.
Their sum is the level; a second integer MMA does the addition. Of 2 bits: codes under masks are selectors, one MMA. Of
3 bits: 12 bytes of a row belong to a lane. Codes 4k + r lie 12 bits apart, so that in the three words, laid over each
other, each has a nibble of its own; queries follow that order. Of 5, 6 and 8 bits: polynomials in float16.

Values. `ldmatrix.trans` on 16-bit units gives registers [token t: a unit | token t+1: the same unit]; code i of both
halves is one half2. MINIFLOAT: a 4-bit code at bits 8-11 of a half (3 bits: 9-11) is a small float f(code); level =
f(code) − f(last code − code), by two MMAs. CUBIC: 1024 + code by the exponent trick, then a cubic in half2 arithmetic.
POLY7: as the table says. BITS: 2-bit codes under a mask are tiny floats; a second MMA adds what the upper bit has too
much. LINE: it has nothing too much.

Rows of 3, 5 and 6 bits have no codes in units of their own. A lane reads the words of 32 codes of a token, twice as
many units as a code has bits. Keys of 5 and 6 bits are pairs of codes i and i + 16 of one token, in the halves of a
register; values are pairs of tokens: `movmatrix` transposes the units, after which lane g has 16 codes.

Inline assembly here moves data between lanes or changes the meaning of the index; the callers' layouts say how.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .levels import MINIFLOAT_TAIL, half2

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


def _odd_bytes() -> list[str]:
    """x0, x1: (code − 127.5) / 128 of the first and of the second byte of both units in w."""
    lines = [f"mov.b32 unit, {half2(1 / 128)}; mov.b32 middle, {half2(-5.0)};"]
    lines += ["shl.b32 x0, w, 1;", "shr.u32 x1, w, 7;"]
    for i in range(2):  # 512 + (2·code + 1) / 2
        lines += [f"lop3.b32 x{i}, x{i}, 0x01FE01FE, 0x60016001, 0xEA;", f"fma.rn.f16x2 x{i}, x{i}, unit, middle;"]
    return lines


def _poly7(to: str, x: str, bits: int, b: str, c: str, d: str) -> list[str]:
    """x + b·x³ + c·x⁵ + d·x⁷, rounded as the table `poly7` says; of 5 bits d is 0. s and u are overwritten."""
    lines = [f"mul.rn.f16x2 s, {x}, {x};"]
    if bits > 5:
        lines.append(f"fma.rn.f16x2 u, s, {d}, {c};")
    lines.append(f"fma.rn.f16x2 u, s, {'u' if bits > 5 else c}, {b};")
    return [*lines, f"mul.rn.f16x2 s, s, {x};", f"fma.rn.f16x2 {to}, s, u, {x};"]


BYTE_REGISTERS = ".reg .b32 w, unit, middle, x0, x1, s, u;"


def byte_levels(to: Sequence[str], b: str, c: str, d: str) -> list[str]:
    """Levels over their step of the first and of the second byte of both units in w."""
    lines = _odd_bytes()
    for i in range(2):
        lines += _poly7(to[i], f"x{i}", 8, b, c, d)
    return lines


def _poly7_of_8() -> str:
    """$0 $1: levels of codes 0 and 1 over their step. $2: two units. $3 $5 $7: b, c, d in both halves."""
    lines = ["{", BYTE_REGISTERS, "mov.b32 w, $2;", *byte_levels(("$0", "$1"), "$3", "$5", "$7")]
    return "\n".join([*lines, "}"])


def _value_cubic8() -> str:
    """$0 $1: c3·z³ + c2·z² + c1·z + c0 of codes 0 and 1. $2: two units. $3 $5 $7 $9: c0 … c3 in both halves."""
    lines = ["{", ".reg .b32 w, magic, unit, middle, y0, y1, t;", "mov.b32 w, $2;", *_bytes_to_halves()]
    for i in range(2):
        lines += [f"fma.rn.f16x2 t, y{i}, $9, $7;", f"fma.rn.f16x2 t, t, y{i}, $5;", f"fma.rn.f16x2 ${i}, t, y{i}, $3;"]
    return "\n".join([*lines, "}"])


def _value_bits(masks: Sequence[int]) -> str:
    """$0-$7: codes 0-7 as tiny floats, code · 4^i · 2^-24 with i = 0 1 2 3 4 0 1 2; $8-$15: their upper bits, if a
    second mask asks for them."""
    units = f"${8 * len(masks)}"
    lines = ["{", ".reg .b32 r;", f"shr.u32 r, {units}, 10;"]
    for i in range(8):
        source, at = (units, i) if i < 5 else ("r", i - 5)
        for j, mask in enumerate(masks):
            lines.append(f"and.b32 ${8 * j + i}, {source}, {mask << 2 * at};")
    return "\n".join([*lines, "}"])


def _value_minifloat() -> str:
    """$0-$3: f(code) of codes 0-3; $4-$7: −f(15 − code), by integer subtraction of the bits. $9 is −1."""
    mask, tail = 0x0F000F00, MINIFLOAT_TAIL[4] << 16 | MINIFLOAT_TAIL[4]
    lines = ["{", ".reg .b32 a, b, c;", "shl.b32 a, $8, 8;", "shl.b32 b, $8, 4;", "shr.u32 c, $8, 4;"]
    for i, source in enumerate(("a", "b", "$8", "c")):
        lines.append(f"lop3.b32 ${i}, {source}, {mask}, {tail}, 0xEA;")  # (source & mask) | tail
        lines.append(f"mad.lo.s32 ${i + 4}, ${i}, $9, {(mask + 2 * tail) ^ 0x80008000};")
    return "\n".join([*lines, "}"])


CENTRE = (".reg .b32 x, magic, unit, middle;", "mov.b32 magic, 0x64006400;")  # 1024, a code under it


def _centred(word: str, at: int, bits: int) -> list[str]:
    """x: (code − middle) / 2^(bits − 1) of the codes at a place in both halves of a word.

    A place is at least bit 1, so that the middle is a float16 number, and at most 10 − bits."""
    last, half = (1 << bits) - 1, 2.0 ** (bits - 1)
    return [
        f"lop3.b32 x, {word}, {0x00010001 * last << at}, magic, 0xEA;",
        f"mov.b32 unit, {half2(2.0**-at / half)};",
        f"mov.b32 middle, {half2(-(1024 * 2.0**-at + last / 2) / half)};",
        "fma.rn.f16x2 x, x, unit, middle;",
    ]


def odd_cubics(places: Sequence[tuple[str, int]], bits: int, r: str, first: int = 0) -> list[str]:
    """$first …: x·(x² + r) of the codes at these places, in registers of CENTRE and y."""
    lines = []
    for i, (word, at) in enumerate(places, first):
        lines += [*_centred(word, at, bits), f"fma.rn.f16x2 y, x, x, {r};", f"mul.rn.f16x2 ${i}, x, y;"]
    return lines


def _value_cubic() -> str:
    """$0-$3: levels of codes 0-3 over their step. $4: two units. $5: r in both halves."""
    return "\n".join(["{", *CENTRE, ".reg .b32 y, low, high;", *four_cubics("$4", 4, "$5"), "}"])


def four_cubics(word: str, bits: int, r: str, first: int = 0) -> list[str]:
    """The same of the four nibbles of both halves of a word."""
    places = (("low", 1), (word, 4), ("high", 1), ("high", 5))
    return [f"shl.b32 low, {word}, 1;", f"shr.u32 high, {word}, 7;", *odd_cubics(places, bits, r, first)]


_VALUE_MINIFLOAT = gl.constexpr(_value_minifloat())
_VALUE_CUBIC = gl.constexpr(_value_cubic())
_VALUE_CUBIC8 = gl.constexpr(_value_cubic8())
_VALUE_BITS = gl.constexpr(_value_bits((0x00030003, 0x00020002)))
_VALUE_LINE = gl.constexpr(_value_bits((0x00030003,)))
_KEY_CUBIC = gl.constexpr(_key_cubic())
_POLY7_OF_8 = gl.constexpr(_poly7_of_8())


def _words(bits: int, at: str) -> list[str]:
    """w0 …: the words of 32 codes of one token, which are as many as a code has bits."""
    lines = [f".reg .b32 {', '.join(f'w{i}' for i in range(bits))};"]
    if bits % 2:
        return [*lines, *(f"ld.shared.b32 w{i}, [{at}+{4 * i}];" for i in range(bits))]
    return [*lines, *(f"ld.shared.v2.b32 {{w{i}, w{i + 1}}}, [{at}+{4 * i}];" for i in range(0, bits, 2))]


def _key3() -> str:
    """$0-$7: levels of a lane's 32 codes at $8; registers 2r and 2r + 1 those of codes 4k + r, k in the order 0 3 6 1
    and 4 7 2 5. $16 $24: levels."""
    lines = ["{", ".reg .b32 x, t;", *_words(3, "$8")]
    for r in range(4):
        # codes 12 bits apart in three words: none is where another is modulo 32, and each in a nibble of its own
        masks = [sum(1 << bit % 32 for i in range(r, 32, 4) for bit in range(3 * i, 3 * i + 3) if bit // 32 == w)
                 for w in range(3)]  # fmt: skip
        lines += [f"and.b32 x, w0, {masks[0]};", f"lop3.b32 x, w1, {masks[1]}, x, 0xEA;"]
        lines += [f"lop3.b32 x, w2, {masks[2]}, x, 0xEA;"]
        lines += [f"shf.r.wrap.b32 t, x, x, {3 * r + 16};"]
        lines += [f"shf.r.wrap.b32 x, x, x, {3 * r};"] if r else []
        lines += [f"prmt.b32 ${2 * r}, $16, $24, x;", f"prmt.b32 ${2 * r + 1}, $16, $24, t;"]
    return "\n".join([*lines, "}"])


def units(bits: int, turned: bool, codes: int = 32, word: str = "w") -> list[str]:
    """p0 …: units 0 … of the first half of a lane's codes in words w0 … (lower halves), and those of the second half.
    If turned, lane g has the g-th half of codes of tokens 2c and 2c + 1. q0 …: what begins in the middle of p0 …."""
    half = codes * bits // 2  # bits
    count = -(-half // 16)
    names = [f"p{i}" for i in range(count)] + [f"q{i}" for i in range(count - 1)]
    lines = [f".reg .b32 t, {', '.join(names)};"]
    if half % 16:  # the second half begins inside a unit
        first, last = half // 32, (codes * bits - 1) // 32
        for i in range(-(-count // 2)):
            low, high = min(first + i, last), min(first + i + 1, last)
            lines += [f".reg .b32 u{i};", f"shf.r.wrap.b32 u{i}, {word}{low}, {word}{high}, {half % 32};"]
    for i in range(count):
        j = i + half // 16
        second = f"u{i // 2}" if half % 16 else f"{word}{j // 2}"
        picks = (0x7600 if (i if half % 16 else j) % 2 else 0x5400) | (0x32 if i % 2 else 0x10)
        lines.append(f"prmt.b32 {'t' if turned else f'p{i}'}, {word}{i // 2}, {second}, {picks};")
        if turned:  # columns 2c and 2c + 1 of an 8×8 matrix become rows
            lines.append(f"movmatrix.sync.aligned.m8n8.trans.b16 p{i}, t;")
    return [*lines, *(f"prmt.b32 q{i}, p{i}, p{i + 1}, 0x6341;" for i in range(count - 1))]


def _poly7_of_rows(bits: int, turned: bool) -> str:
    """$0-$15: levels of `row_levels`. $16: the lane's address. $18 $20 $22: b, c, d in both halves."""
    return "\n".join(["{", *_words(bits, "$16"), *row_levels(bits, turned, "$18", "$20", "$22"), "}"])


def row_levels(bits: int, turned: bool, b: str, c: str, d: str, codes: int = 32) -> list[str]:
    """$0 …: levels over their step of codes i of a lane's words w0 … in the lower halves and i + codes / 2 in the upper
    ones; if turned, of codes i of tokens 2c and 2c + 1."""
    lines = [*units(bits, turned, codes), *CENTRE, ".reg .b32 s, u;"]
    count = -(-codes * bits // 32)
    starts = {f"p{i}": 16 * i for i in range(count)}
    if bits < 8:
        starts |= {f"q{i}": 16 * i + 8 for i in range(count - 1)}
    for i in range(codes // 2):
        found = {word: bits * i - start for word, start in starts.items() if 0 <= bits * i - start <= 16 - bits}
        word, at = min(found.items(), key=lambda place: (not 1 <= place[1] <= 10 - bits, place[1]))
        if at < 1:
            lines.append(f"shl.b32 t, {word}, 1;")
            word, at = "t", 1
        elif at > 10 - bits:
            lines.append(f"shr.u32 t, {word}, {at - 1};")
            word, at = "t", 1
        lines += [*_centred(word, at, bits), *_poly7(f"${i}", "x", bits, b, c, d)]
    return lines


def _value_cubic3() -> str:
    """$0-$15: levels of codes 0-15 of the 48 bits that are lane g's, over their step. $16: the lane's address.
    $18: r in both halves."""
    lines = ["{", *_words(3, "$16"), *units(3, True), ".reg .b32 r0, r1, r2;"]
    lines += ["shl.b32 r0, p0, 1;", "shr.u32 r1, p1, 1;", "shr.u32 r2, p2, 9;"]
    places = (("r0", 1), ("r0", 4), ("r0", 7), ("q0", 1), ("q0", 4), ("q0", 7), ("p1", 2), ("p1", 5), ("r1", 7),
              ("q1", 3), ("q1", 6), ("p2", 1), ("p2", 4), ("p2", 7), ("r2", 1), ("r2", 4))  # fmt: skip
    return "\n".join([*lines, *CENTRE, ".reg .b32 y;", *odd_cubics(places, 3, "$18"), "}"])


def _value_minifloat3() -> str:
    """$0-$15: f(code) of codes 0-15 of lane g's 48 bits, the code at bits 9-11 of each half. $16 as above."""
    mask, tail = 0x0E000E00, MINIFLOAT_TAIL[3] << 16 | MINIFLOAT_TAIL[3]
    lines = ["{", *_words(3, "$16"), *units(3, True)]
    starts = {"p0": 0, "p1": 16, "p2": 32, "q0": 8, "q1": 24}  # of the 48 bits
    for i in range(16):
        left = {word: 9 - (3 * i - start) for word, start in starts.items() if 0 <= 3 * i - start <= 13}
        word = "q1" if i == 11 else next(iter(left))  # which has code 11 in its place
        moved = f"shl.b32 t, {word}, {left[word]};" if left[word] > 0 else f"shr.u32 t, {word}, {-left[word]};"
        lines += [moved] if left[word] else []
        lines.append(f"lop3.b32 ${i}, {'t' if left[word] else word}, {mask}, {tail}, 0xEA;")  # (t & mask) | tail
    return "\n".join([*lines, "}"])


def _complement3() -> str:
    """$0: −f(7 − code) from f(code) in $1, by integer subtraction of the bits. $2 is −1."""
    mask, tail = 0x0E000E00, MINIFLOAT_TAIL[3] << 16 | MINIFLOAT_TAIL[3]
    return f"mad.lo.s32 $0, $1, $2, {(mask + 2 * tail) ^ 0x80008000};"


_KEY3 = gl.constexpr(_key3())
_VALUE_CUBIC3 = gl.constexpr(_value_cubic3())
_VALUE_MINIFLOAT3 = gl.constexpr(_value_minifloat3())
_COMPLEMENT3 = gl.constexpr(_complement3())
_KEY_ROWS = gl.constexpr((_poly7_of_rows(5, False), _poly7_of_rows(6, False)))
_VALUE_ROWS = gl.constexpr((_poly7_of_rows(5, True), _poly7_of_rows(6, True)))


_KEY3_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 24))
_CUBIC3_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 4))
_MINIFLOAT3_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 2))
_POLY7_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


@gluon.jit
def key_levels3(at, low, high):
    """Where each lane has 32 codes (`lane_rows`) -> 4 int8 tensors: levels of 8 codes each."""
    return gl.inline_asm_elementwise(
        _KEY3, _KEY3_OPERANDS, [at, low, high],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=False, pack=8)  # fmt: skip


_TURN4 = gl.constexpr("prmt.b32 $0, $2, $3, 0x1630;\nprmt.b32 $1, $2, $3, 0x5274;")
_TURN8 = gl.constexpr("""prmt.b32 $0, $4, $6, 0x1630;
prmt.b32 $1, $5, $7, 0x1630;
prmt.b32 $2, $4, $6, 0x5274;
prmt.b32 $3, $5, $7, 0x5274;""")


@gluon.jit
def in_order3(queries, HEADS: gl.constexpr):
    """Coordinates of a plane of the queries in the order in which `key_levels3` leaves codes."""
    if HEADS == 4:
        return gl.inline_asm_elementwise(_TURN4, "=&r,=&r,r,r", [queries], dtype=gl.int8, is_pure=True, pack=8)
    else:
        return gl.inline_asm_elementwise(
            _TURN8, "=&r,=&r,=&r,=&r,r,r,r,r", [queries], dtype=gl.int8, is_pure=True, pack=16
        )


@gluon.jit
def value_levels_cubic3(at, r):
    """Where each lane has 32 codes (`lane_rows`) -> 16 float16 tensors: levels of the codes of each lane's 6 bytes."""
    return gl.inline_asm_elementwise(
        _VALUE_CUBIC3, _CUBIC3_OPERANDS, [at, r],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False, pack=2)  # fmt: skip


@gluon.jit
def value_levels_minifloat3(at):
    """The same for minifloat tables, level = f(code) − f(7 − code): f of the codes."""
    return gl.inline_asm_elementwise(
        _VALUE_MINIFLOAT3, _MINIFLOAT3_OPERANDS, [at],
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
def key_levels_cubic8(units, c0, c1, c2, c3):
    """Units of 2 codes -> 2 + 2 float16 tensors whose sums are the levels."""
    return gl.inline_asm_elementwise(
        _KEY_CUBIC, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [units, c0, c1, c2, c3],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def levels_poly7(units, b, c, d):
    """Units of 2 codes, of keys or of values -> 2 float16 tensors of levels."""
    return gl.inline_asm_elementwise(
        _POLY7_OF_8, "=&r,=&r,r,r,r,r,r,r,r", [units, b, c, d],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def row_levels_poly7(at, b, c, d, BITS: gl.constexpr, TURNED: gl.constexpr):
    """Where each lane has 32 codes (`lane_rows`) -> 16 float16 tensors of levels, see `_poly7_of_rows`."""
    ASM: gl.constexpr = _VALUE_ROWS[BITS - 5] if TURNED else _KEY_ROWS[BITS - 5]
    return gl.inline_asm_elementwise(
        ASM, _POLY7_OPERANDS, [at, b, c, d],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=False, pack=2)  # fmt: skip


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
def value_line(units):
    return gl.inline_asm_elementwise(
        _VALUE_LINE, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [units],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_levels_minifloat(units, minus_one):
    return gl.inline_asm_elementwise(
        _VALUE_MINIFLOAT, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [units, minus_one],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_levels_cubic(units, r):
    return gl.inline_asm_elementwise(
        _VALUE_CUBIC, "=&r,=&r,=&r,=&r,r,r,r", [units, r],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip

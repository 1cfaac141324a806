"""Decode primitives of the extend kernel: 32 codes of a row, as a thread holds them, to the bytes of tensor-core tiles.

Codes of up to 4 bits come as four words of eight nibbles each. Keys become int8 levels in natural order. Values become
float16 levels times the row's scale, in pairs of coordinates: (0, 1), (2, 3) … in ORDER "natural", (0, 4), (1, 5),
(2, 6), (3, 7) of every eight in ORDER "fourth".

Wider codes come in as many words as they have bits. Keys become float16 levels, values such times the row's scale, in
ORDER "halves" (5 and 6 bits) or "bytes" (8) of `tables.coordinates`. See also `over_banks`.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..decode.codes import BYTE_REGISTERS, byte_levels, row_levels
from ..decode.levels import MINIFLOAT_TAIL, half2
from ..decode.shapes import flat


def key_asm(integers: list[int], bits: int) -> str:
    """PTX for $0-$7: the int8 levels of the codes in $8-$11, four in a register.

    `prmt` looks four nibbles up in a table of eight bytes. At 4 bits there are two tables: nibbles of the other one
    give 0, because `prmt` copies the sign of a byte where bit 3 of the selector is set and tables hold the low 7 bits
    of levels. Levels are negative below code 8 alone, so the sign bit is the complement of the code's top bit.
    """
    lines = ["{", ".reg .b32 s, x, y, u, p, q;"]
    octets = [n & 127 if bits == 4 else n & 255 for n in integers] + [0] * (8 - len(integers))
    tables = [sum(octets[at + i] << 8 * i for i in range(4)) for at in range(0, len(octets), 4)]
    for word in range(4):
        source = f"${8 + word}"
        lines.append(f"shr.u32 s, {source}, 16;")
        for half, selector in enumerate((source, "s")):
            out = f"${2 * word + half}"
            if bits < 4:
                lines.append(f"prmt.b32 {out}, {tables[0]}, {tables[1]}, {selector};")
                continue
            if half == 0:
                lines += [f"xor.b32 x, {source}, 0x88888888;", "shr.u32 y, x, 16;", f"shl.b32 u, {source}, 4;"]
            lines += [
                f"prmt.b32 p, {tables[0]}, {tables[1]}, {selector};",
                f"prmt.b32 q, {tables[2]}, {tables[3]}, {'xy'[half]};",
                "or.b32 p, p, q;",
                f"prmt.b32 q, u, {source}, {'0x5140' if half == 0 else '0x7362'};",  # bit 7: top bits of codes
                f"lop3.b32 {out}, p, q, 0x80808080, 0xF2;",  # p | (~q & 0x80…)
            ]
    return "\n".join([*lines, "}"])


def value_asm(kind: str, numbers: tuple[float, ...]) -> str:
    """PTX for $0-$15: levels of the codes in $16-$19 times $20, two float16 numbers in a register.

    table: `numbers` are up to 8 levels. cubic: (a, b) of a·y + b·y³ with y = code − 7.5. minifloat: $20 holds the unit.
    """
    lines = ["{", ".reg .b32 s, t, h, l, y, a, b, middle;"]
    if kind == "cubic":
        lines += [
            f"mov.b32 {name}, {half2(x)};" for name, x in zip(("a", "b", "middle"), (*numbers, -71.5), strict=True)
        ]
        lines += ["mul.rn.f16x2 a, $20, a;", "mul.rn.f16x2 b, $20, b;"]
    if kind == "table":
        entries = np.zeros(8, np.float16)
        entries[: len(numbers)] = numbers
        octets = entries.view(np.uint8).reshape(8, 2)
        high, low = ([int(x) for x in octets[:, part].copy().view(np.uint32)] for part in (1, 0))
    for word in range(4):
        source, first = f"${16 + word}", 4 * word
        if kind == "table":
            for half in range(2):
                if half:
                    lines.append(f"shr.u32 s, {source}, 16;")
                    source = "s"
                lines += [
                    f"prmt.b32 h, {high[0]}, {high[1]}, {source};",
                    f"prmt.b32 l, {low[0]}, {low[1]}, {source};",
                    "prmt.b32 t, l, h, 0x5140;",
                    f"mul.rn.f16x2 ${first + 2 * half}, t, $20;",
                    "prmt.b32 t, l, h, 0x7362;",
                    f"mul.rn.f16x2 ${first + 2 * half + 1}, t, $20;",
                ]
            continue
        shifts = (4, 0, -4, -8) if kind == "cubic" else (8, 4, 0, -4)
        for i, shift in enumerate(shifts):
            at = source
            if shift:
                lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 s, {source}, {abs(shift)};")
                at = "s"
            if kind == "cubic":  # the code at bits 4-7 of 64.0 is 64 + code
                lines += [
                    f"lop3.b32 y, {at}, 0x00F000F0, 0x54005400, 0xEA;",
                    "add.rn.f16x2 y, y, middle;",
                    "mul.rn.f16x2 t, y, y;",
                    "fma.rn.f16x2 t, t, b, a;",
                    f"mul.rn.f16x2 ${first + i}, t, y;",
                ]
            else:  # a code at bits 8-11 of a half is a small float f(code); the level is f(code) − f(15 − code)
                mask, tail = 0x0F000F00, MINIFLOAT_TAIL[4] << 16 | MINIFLOAT_TAIL[4]
                lines += [
                    f"lop3.b32 y, {at}, {mask}, {tail}, 0xEA;",
                    f"sub.s32 t, {mask + 2 * tail}, y;",
                    "sub.rn.f16x2 t, y, t;",
                    f"mul.rn.f16x2 ${first + i}, t, $20;",
                ]
    return "\n".join([*lines, "}"])


def wide_asm(bits: int, numbers: tuple[float, ...], scaled: bool) -> str:
    """PTX for $0-$15: levels of the table `poly7` over its factor of the codes in $16 …, two float16 numbers in a
    register; if scaled, times the operand behind the codes. `numbers`: b, c, d of the table."""
    lines = ["{", ".reg .b32 b, c, d;"]
    lines += [f"mov.b32 {name}, {half2(x)};" for name, x in zip("bcd", numbers, strict=True)]
    if bits == 8:
        lines.append(BYTE_REGISTERS)
        for i in range(8):
            lines += [f"mov.b32 w, ${16 + i};", *byte_levels((f"${2 * i}", f"${2 * i + 1}"), "b", "c", "d")]
    else:
        lines.append(f".reg .b32 {', '.join(f'w{i}' for i in range(bits))};")
        lines += [f"mov.b32 w{i}, ${16 + i};" for i in range(bits)]
        lines += row_levels(bits, False, "b", "c", "d")
    if scaled:
        lines += [f"mul.rn.f16x2 ${i}, ${i}, ${16 + bits};" for i in range(16)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _wide_operands(inputs):
    return ",".join(["=&r"] * 16 + ["r"] * inputs)


@gluon.constexpr_function
def codes_layout(keys, lanes, words):
    """[keys, lanes · words] words of codes: a thread holds the words of 32 codes of a row."""
    return gl.BlockedLayout([1, words], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def load_rows(p, i_row, left, WHOLE: gl.constexpr):
    """Words of rows of a tile, of which memory has `left`; WHOLE: all."""
    if WHOLE:
        return gl.load(p)
    else:
        return gl.load(p, mask=(i_row < left)[:, None])


@gluon.jit
def load_codes(words, at, left, KEYS: gl.constexpr, LANES: gl.constexpr, BITS: gl.constexpr, WHOLE: gl.constexpr):
    """Rows of codes, KEYS · LANES · BITS words from `at` (a multiple of 4) on, for `to_nibbles` or `wide_tile`.

    left: how many rows memory has there; WHOLE: all."""
    if flat(BITS):
        layout: gl.constexpr = codes_layout(KEYS, LANES, 1)
        i_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        i_lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, layout))
        p = words + at + (i_row * (LANES * BITS))[:, None] + (i_lane * BITS)[None, :]
        found = ()
        for i in gl.static_range(BITS):
            found = found + (load_rows(p + i, i_row, left, WHOLE),)  # noqa: RUF005
        return found
    else:
        layout: gl.constexpr = codes_layout(KEYS, LANES, BITS)
        i_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        i_word = gl.arange(0, LANES * BITS, layout=gl.SliceLayout(0, layout))
        p = words + at + (i_row * (LANES * BITS))[:, None] + i_word[None, :]
        return (load_rows(p, i_row, left, WHOLE),)


@gluon.jit
def to_nibbles(codes, KEYS: gl.constexpr, LANES: gl.constexpr, BITS: gl.constexpr):
    """Four words [KEYS, LANES] of eight codes each, one in every nibble."""
    layout: gl.constexpr = codes_layout(KEYS, LANES, 1)
    if BITS == 4:
        even, odd = gl.split(codes[0].reshape([KEYS, LANES, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
    elif BITS == 2:
        x, y = gl.split(codes[0].reshape([KEYS, LANES, 2]))
        a = spread_pairs(x)
        b = spread_pairs(x >> 16)
        c = spread_pairs(y)
        d = spread_pairs(y >> 16)
    else:
        x, y, z = codes
        a = spread_triples(x)
        b = spread_triples(shift_right(x, y, 24))
        c = spread_triples(shift_right(y, z, 16))
        d = spread_triples(z >> 8)
    a = gl.convert_layout(a, layout, assert_trivial=True)
    b = gl.convert_layout(b, layout, assert_trivial=True)
    c = gl.convert_layout(c, layout, assert_trivial=True)
    d = gl.convert_layout(d, layout, assert_trivial=True)
    return a, b, c, d


@gluon.jit
def shift_right(low, high, N: gl.constexpr):
    """Bits N … of high:low."""
    return gl.inline_asm_elementwise(
        f"shf.r.wrap.b32 $0, $1, $2, {N};", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def spread_pairs(w):
    """Eight codes of 2 bits, one in each nibble."""
    w = (w & 0xFF) | (w & 0xFF00) << 8
    w = (w | w << 4) & 0x0F0F0F0F
    return (w | w << 2) & 0x33333333


@gluon.jit
def spread_triples(w):
    """Eight codes of 3 bits, one in each nibble."""
    w = (w & 0xFFF) | (w & 0xFFF000) << 4
    w = (w & 0x003F003F) | (w & 0x0FC00FC0) << 2
    return (w & 0x07070707) | (w & 0x38383838) << 1


@gluon.jit
def key_tile(words, ASM: gl.constexpr):
    """Int8 levels [keys, 8 · lanes] words of four, from four words of nibbles."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words[0], words[1], words[2], words[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1)  # fmt: skip
    x = stack8(a, b, c, d, e, f, g, h)
    return x.reshape([x.shape[0], x.shape[1] * 8])


@gluon.jit
def value_tile(words, scale, ASM: gl.constexpr):
    """Float16 levels times scale (twice in an int32 [keys, lanes]): [keys, 16 · lanes] words of two."""
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words[0], words[1], words[2], words[3], scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
               gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1)  # fmt: skip
    return stack16(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q)


@gluon.jit
def apart(codes, KEYS: gl.constexpr, LANES: gl.constexpr):
    """The eight words of a thread's bytes."""
    layout: gl.constexpr = codes_layout(KEYS, LANES, 1)
    even, odd = gl.split(codes[0].reshape([KEYS, LANES, 4, 2]))
    even0, even1 = gl.split(even.reshape([KEYS, LANES, 2, 2]))
    odd0, odd1 = gl.split(odd.reshape([KEYS, LANES, 2, 2]))
    a, e = gl.split(even0)
    c, g = gl.split(even1)
    b, f = gl.split(odd0)
    d, h = gl.split(odd1)
    words = ()
    for word in gl.static_range(8):
        x = (a, b, c, d, e, f, g, h)[word]
        words = words + (gl.convert_layout(x, layout, assert_trivial=True),)  # noqa: RUF005
    return words


@gluon.jit
def wide_tile(codes, rest, ASM: gl.constexpr, KEYS: gl.constexpr, LANES: gl.constexpr, BITS: gl.constexpr):
    """Float16 levels [keys, 16 · lanes] words of two. rest: (), or (scale twice in an int32 [keys, lanes],)."""
    words = codes + rest if BITS < 8 else apart(codes, KEYS, LANES) + rest
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = gl.inline_asm_elementwise(
        ASM, _wide_operands(BITS + len(rest)), words,
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32,
               gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1)  # fmt: skip
    return stack16(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q)


@gluon.jit
def stack16(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q):
    """[…, 16 · …]"""
    x, y = stack8(a, b, c, d, e, f, g, h), stack8(i, j, k, m, n, o, p, q)
    x = gl.permute(gl.join(x, y), (0, 1, 3, 2))
    return x.reshape([x.shape[0], x.shape[1] * 16])


@gluon.jit
def stack8(a, b, c, d, e, f, g, h):
    """[…, 8]"""
    x = gl.join(gl.join(gl.join(a, e), gl.join(c, g)), gl.join(gl.join(b, f), gl.join(d, h)))
    return x.reshape([a.shape[0], a.shape[1], 8])


@gluon.jit
def over_banks(x, LANES: gl.constexpr):
    """Words [keys, 16 · lanes] of float16 numbers as they are stored: of rows of 256 bytes first the first halves of
    all lanes, then the second ones, so that no two of eight threads that store together meet in a bank."""
    if LANES == 4:
        x = gl.permute(x.reshape([x.shape[0], 4, 2, 8]), (0, 2, 1, 3)).reshape(x.shape)
    return x

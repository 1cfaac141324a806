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

from .fast_codes import BYTE_REGISTERS, byte_levels, row_levels
from .fast_levels import MINIFLOAT_TAIL, half2
from .fast_ring import flat

LEAST_EXPONENT = gl.constexpr(103)  # of a value scale: 2^-24, the smallest float16 number


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
def load_codes(words, at, KEYS: gl.constexpr, LANES: gl.constexpr, BITS: gl.constexpr):
    """Rows of codes, KEYS · LANES · BITS words from `at` (a multiple of 4) on, for `to_nibbles` or `wide_tile`."""
    if flat(BITS):
        layout: gl.constexpr = codes_layout(KEYS, LANES, 1)
        i_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        i_lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, layout))
        p = words + at + (i_row * (LANES * BITS))[:, None] + (i_lane * BITS)[None, :]
        found = ()
        for i in gl.static_range(BITS):
            found = found + (gl.load(p + i),)  # noqa: RUF005
        return found
    else:
        layout: gl.constexpr = codes_layout(KEYS, LANES, BITS)
        i_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        i_word = gl.arange(0, LANES * BITS, layout=gl.SliceLayout(0, layout))
        return (gl.load(words + at + (i_row * (LANES * BITS))[:, None] + i_word[None, :]),)


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


@gluon.jit
def tile_start(i, tiles, KEYS: gl.constexpr):
    """The first key of the tile that comes i-th; past the end the last one comes again.

    tiles: those before the ones that all rows see whole, these, all, the first; tiles of span a, the first keys of the
    spans."""
    before, inside, count, first_tile, a_tiles, a_base, b_base = tiles
    i = gl.minimum(i, count - 1)
    tile = first_tile + gl.where(i < inside, before + i, gl.where(i < inside + before, i - inside, i))
    return gl.where(tile < a_tiles, a_base + tile * KEYS, b_base + (tile - a_tiles) * KEYS)


@gluon.jit
def find_page(place, t, CODES: gl.constexpr):
    """The page that holds key t."""
    PAGE: gl.constexpr = CODES[0]  # 0: one page a sequence
    table, i_seq, _, _, _, width, pinned = place
    entry = t * 0
    if PAGE > 0:
        page = t // PAGE
        entry = gl.minimum(page, width - 1)
        if CODES[1]:
            entry = gl.where(page < pinned, page, pinned + (page - pinned) % gl.maximum(width - pinned, 1))
    return gl.load(table + i_seq.to(gl.int64) * width + entry)


@gluon.jit
def find_piece(place, page, t, page_bytes, CODES: gl.constexpr):
    """Byte offset of a head's piece of the page that holds key t, and the key's row in it."""
    PAGE: gl.constexpr = CODES[0]
    _, _, i_head, kv_heads, pages, _, _ = place
    row = t
    if PAGE > 0:
        row = t % PAGE
    page = gl.minimum(gl.maximum(page, 0), pages - 1)
    return (page.to(gl.int64) * kv_heads + i_head) * page_bytes, row


@gluon.jit
def load_keys(words, halves, place, at, tiles, i, page, CODES: gl.constexpr):
    """What is read of the keys of the i-th tile, which lies in `page`: codes and scales; and the next tile's page."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = CODES[4]
    page_bytes, key_codes, key_scales, _, _ = at
    piece, row = find_piece(place, page, tile_start(i, tiles, KEYS), page_bytes, CODES)
    next_page = find_page(place, tile_start(i + 1, tiles, KEYS), CODES)
    codes_at = gl.multiple_of((piece + key_codes) // 4 + row * (LANES * BITS), 4)
    p_scale = halves + ((piece + key_scales) // 2 + row)
    o_key = gl.arange(0, KEYS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return load_codes(words, codes_at, KEYS, LANES, BITS), gl.load(p_scale + o_key), next_page


@gluon.jit
def load_values(words, halves, place, at, tiles, i, page, CODES: gl.constexpr):
    """Like `load_keys`: codes, scales by row of the decoder and by lane of every warp, the next tile's page."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = CODES[5]
    page_bytes, _, _, value_codes, value_scales = at
    piece, row = find_piece(place, page, tile_start(i, tiles, KEYS), page_bytes, CODES)
    next_page = find_page(place, tile_start(i + 1, tiles, KEYS), CODES)
    codes_at = gl.multiple_of((piece + value_codes) // 4 + row * (LANES * BITS), 4)
    p_scale = halves + ((piece + value_scales) // 2 + row)
    o_row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, codes_layout(KEYS, LANES, 1)))
    o_lane = gl.arange(0, KEYS, layout=gl.BlockedLayout([KEYS // 32], [32], [4], [0]))
    codes = load_codes(words, codes_at, KEYS, LANES, BITS)
    return codes, gl.load(p_scale + o_row), gl.load(p_scale + o_lane), next_page


@gluon.jit
def store_keys(codes, scale, s_keys, s_scales, KEY: gl.constexpr, CODES: gl.constexpr):
    """Int8 or float16 levels of keys, and their scales in float32 with NaN for what is not finite."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = KEY[0]
    ASM: gl.constexpr = KEY[1]
    if BITS > 4:
        s_keys.store(over_banks(wide_tile(codes, (), ASM, KEYS, LANES, BITS), LANES))
    else:
        s_keys.store(key_tile(to_nibbles(codes, KEYS, LANES, BITS), ASM))
    scale = scale.to(gl.float32)
    s_scales.store(gl.where(gl.abs(scale) < float("inf"), scale, float("nan")))


@gluon.jit
def store_values(codes, scale, known, unit, step, s_values, VALUE: gl.constexpr, CODES: gl.constexpr):
    """Levels of values times their scales over 2^(unit − 126); 0 where a scale is not finite.

    Keys from `known` on do not exist."""
    KEYS: gl.constexpr = CODES[2]
    LANES: gl.constexpr = CODES[3]
    BITS: gl.constexpr = VALUE[0]
    ASM: gl.constexpr = VALUE[1]
    o_row = gl.arange(0, KEYS, layout=scale.type.layout)
    scale = scale.to(gl.float32)
    scale = gl.where((gl.abs(scale) < float("inf")) & (o_row < known), scale, 0.0)
    scale = (scale * (((253 - unit) << 23).to(gl.float32, bitcast=True) * step)).to(gl.float16)
    twice = scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    twice = twice | twice << 16
    twice = gl.expand_dims(twice, 1) + gl.zeros([KEYS, LANES], gl.int32, codes_layout(KEYS, LANES, 1))
    if BITS > 4:
        tile = wide_tile(codes, (twice,), ASM, KEYS, LANES, BITS)
    else:
        tile = value_tile(to_nibbles(codes, KEYS, LANES, BITS), twice, ASM)
    s_values.store(over_banks(tile, LANES))

"""Flat rows of any width and dimension, in pieces of 128, 64 or 32 codes: from shared memory to operands.

Four lanes share a piece: lane 4g + c reads 32, 16 or 8 codes of token g of eight. The last piece of a row may reach
beyond it: queries are zero there, and what values give there is not stored. Eight codes of up to 4 bits become eight
nibbles, which are PRMT selectors of keys; wider ones, and values, pairs in the halves of a register as in `codes`:
keys of codes i and i + half of the lane's; values, turned, of tokens 2c and 2c + 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import levels
from .codes import CENTRE, four_cubics, row_levels, units
from .reads import in_octets, octets_of
from .shapes import CODE_BITS, DIMS, flat, in_pieces
from .tables import REGISTERS, looked_up

INTEGER, CUBIC, POLY7, TABLE = levels.INTEGER, levels.CUBIC, levels.POLY7, levels.TABLE


class Piece(NamedTuple):
    start: int  # its first code in the row
    codes: int  # of a lane


@gluon.constexpr_function
def cut(dim):
    """The pieces of a row."""
    found, at = [], 0
    while at < dim:
        size = next(size for size in (128, 64, 32) if size <= max(dim - at, 32))
        found.append(Piece(at, size // 4))
        at += size
    return tuple(found)


@gluon.constexpr_function
def piece_count(dim):
    return len(cut(dim))


@gluon.constexpr_function
def first_of(dim, n):
    """The first code of piece n."""
    return cut(dim)[n].start


@gluon.constexpr_function
def lane_of(dim, n):
    """The codes of it that a lane has."""
    return cut(dim)[n].codes


@gluon.constexpr_function
def reach(dim):
    """Codes that the pieces of a row have, with those beyond it."""
    last = cut(dim)[-1]
    return last.start + 4 * last.codes


def aligned(piece: Piece, bits: int, dim: int) -> int:
    """What the addresses of a lane's codes are multiples of."""
    return math.gcd(dim * bits // 8, piece.start * bits // 8, piece.codes * bits // 8, 16)


def _load(bits: int, codes: int, aligned: int, at: str) -> list[str]:
    """w0 …: the codes of a lane from bit 0 on."""
    size = codes * bits // 8
    count = -(-size // 4)
    lines = [f".reg .b32 {', '.join(f'w{i}' for i in range(count))};"]
    if aligned >= 4:
        wide = next(n for n in (4, 2, 1) if count % n == 0 and aligned >= 4 * n)
        for i in range(0, count, wide):
            names = ", ".join(f"w{n}" for n in range(i, i + wide))
            lines.append(f"ld.shared.v{wide}.b32 {{{names}}}, [{at}+{4 * i}];" if wide > 1
                         else f"ld.shared.b32 w{i}, [{at}+{4 * i}];")  # fmt: skip
        return lines
    loaded = -(-(size + 4 - aligned) // 4)  # words in which they are, wherever they begin
    lines += [f".reg .b32 begin, turn, {', '.join(f'r{i}' for i in range(loaded))};"]
    lines += [f"and.b32 begin, {at}, {0xFFFFFFFC};", f"shl.b32 turn, {at}, 3;"]  # eight bits a byte, modulo 32
    lines += [f"ld.shared.b32 r{i}, [begin+{4 * i}];" for i in range(loaded)]
    return lines + [f"shf.r.wrap.b32 w{i}, r{i}, r{min(i + 1, loaded - 1)}, turn;" for i in range(count)]


@gluon.constexpr_function
def needs(word, kind, bits):
    """Whether the arithmetic needs this of the words of `levels`."""
    if kind == TABLE:
        return word % 4 < 1 << bits - 2
    return word < (1 if kind == CUBIC else 1 << bits - 2 if bits < 5 else 3)


def _nibbles(bits: int, codes: int) -> list[str]:
    """n0 …: eight nibbles each, from the codes of 2 to 4 bits in w0 …."""
    count = codes // 8
    lines = [f".reg .b32 a, b, {', '.join(f'n{i}' for i in range(count))};"]
    for i in range(count):
        word, at = divmod(8 * bits * i, 32)
        if at + 8 * bits > 32:
            lines.append(f"shf.r.wrap.b32 a, w{word}, w{word + 1}, {at};")
        else:
            lines.append(f"shr.u32 a, w{word}, {at};" if at else f"mov.b32 a, w{word};")
        if bits == 4:
            lines.append(f"mov.b32 n{i}, a;")
            continue
        for size, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
            # of twice as many codes, the upper ones move to where their nibbles are
            lines += [f"shl.b32 b, a, {size * (4 - bits)};", f"lop3.b32 a, a, b, {mask}, 0xE4;"]  # a in the mask
        lines.append(f"and.b32 n{i}, a, {0x11111111 * ((1 << bits) - 1)};")
    return lines


def key_bytes_asm(bits: int, codes: int, aligned: int) -> str:
    """$0 …: int8 levels of a lane's codes of up to 4 bits, four in a register. Of 4 bits as in `codes`: as many again,
    to be added. Then its address, eight times, and the words of levels, eight times each."""
    count = codes // 4
    at = count * (2 if bits == 4 else 1)
    level = [f"${at + 8 * (i + 1)}" for i in range(4)]
    eight = f"{level[0]}, {level[bits > 2]}"
    lines = ["{", *_load(bits, codes, aligned, f"${at}"), *_nibbles(bits, codes), ".reg .b32 s;"]
    for i in range(codes // 8):
        lines += [f"prmt.b32 ${2 * i}, {eight}, n{i};", f"shr.u32 s, n{i}, 16;", f"prmt.b32 ${2 * i + 1}, {eight}, s;"]
        if bits == 4:
            lines += [f"xor.b32 s, n{i}, 0x88888888;", f"prmt.b32 ${count + 2 * i}, {level[2]}, {level[3]}, s;"]
            lines += ["shr.u32 s, s, 16;", f"prmt.b32 ${count + 2 * i + 1}, {level[2]}, {level[3]}, s;"]
    return "\n".join([*lines, "}"])


def halves_asm(bits: int, codes: int, aligned: int, kind: int, turned: bool) -> str:
    """$0 …: float16 levels over their step of half of a lane's codes, see the top. Then its address, twice, and the
    words of the arithmetic, twice each."""
    count = codes // 2
    words = [n for n in range(8) if needs(n, kind, bits)]
    word = {n: f"${count + 2 * (i + 1)}" for i, n in enumerate(words)}
    lines = ["{", *_load(bits, codes, aligned, f"${count}")]
    if bits > 4:
        return "\n".join([*lines, *row_levels(bits, turned, word[0], word[1], word[2], codes), "}"])
    lines += [*_nibbles(bits, codes), *units(4, turned, codes, "n")]
    lines += [*CENTRE, ".reg .b32 y, low, high;"] if kind == CUBIC else [REGISTERS]
    for i in range(codes // 8):
        if kind == CUBIC:
            lines += four_cubics(f"p{i}", bits, word[0], 4 * i)
        else:
            lines += looked_up(f"p{i}", bits, [f"${4 * i + n}" for n in range(4)], word)
    return "\n".join([*lines, "}"])


def _all() -> dict[tuple[int, int, int, int, bool], str]:
    """The assembly of piece n of every shape that is read so: (dim, n, bits, kind, turned)."""
    found = {}
    for dim, bits in itertools.product(DIMS, CODE_BITS):
        if not flat(bits, dim):
            continue
        for n, piece in enumerate(cut(dim)):
            given = (bits, piece.codes, aligned(piece, bits, dim))
            if bits < 5:
                found[dim, n, bits, TABLE, True] = halves_asm(*given, TABLE, True)
            if not in_pieces(bits, dim):
                continue
            if bits > 4:
                found |= {(dim, n, bits, POLY7, turned): halves_asm(*given, POLY7, turned) for turned in (False, True)}
            else:
                found[dim, n, bits, INTEGER, False] = key_bytes_asm(*given)
            if bits in (3, 4):
                found[dim, n, bits, CUBIC, True] = halves_asm(*given, CUBIC, True)
    return found


_ALL = gl.constexpr(_all())
_INTEGER = gl.constexpr(INTEGER)


@gluon.constexpr_function
def _assembly(dim, n, bits, kind, turned):
    return _ALL.value[dim, n, bits, kind, turned]


@gluon.constexpr_function
def _operands(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.jit
def lane_codes(tile, NUMBER: gl.constexpr, BITS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, N: gl.constexpr):
    """Where each lane has its codes of a piece of each octet of tokens, N times: [octets, 8, 4, N]."""
    FIRST: gl.constexpr = first_of(DIM, NUMBER) * BITS // 8
    return octets_of(tile + FIRST, lane_of(DIM, NUMBER) * BITS // 8, DIM * BITS // 8, TILE, N)


@gluon.jit
def given_words(at, words, KIND: gl.constexpr, BITS: gl.constexpr):
    """The operands of the assembly here."""
    given = (at,)
    for i in gl.static_range(8):
        if needs(i, KIND, BITS):
            given = given + (in_octets(words[i]),)  # noqa: RUF005
    return given


@gluon.jit
def key_bytes(tile, words, NUMBER: gl.constexpr, BITS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr):
    """Of a piece of a row int8 tensors [octets, 8, 4, 8] of eight codes each, at 4 bits twice as many: see
    `key_bytes_asm`."""
    KIND: gl.constexpr = _INTEGER
    ASM: gl.constexpr = _assembly(DIM, NUMBER, BITS, KIND, False)
    COUNT: gl.constexpr = lane_of(DIM, NUMBER) // 8 * (2 if BITS == 4 else 1)
    given = given_words(lane_codes(tile, NUMBER, BITS, DIM, TILE, 8), words, KIND, BITS)
    OPERANDS: gl.constexpr = _operands(2 * COUNT, 8 * len(given))
    return gl.inline_asm_elementwise(
        ASM, OPERANDS, given, dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8)[:COUNT],
        is_pure=False, pack=8)  # fmt: skip


@gluon.jit
def halves(tile, words, NUMBER: gl.constexpr, BITS: gl.constexpr, KIND: gl.constexpr, DIM: gl.constexpr,
           TILE: gl.constexpr, TURNED: gl.constexpr):  # fmt: skip
    """Of a piece of a row float16 tensors [octets, 8, 4, 2], one for each of half of a lane's codes: `halves_asm`."""
    ASM: gl.constexpr = _assembly(DIM, NUMBER, BITS, KIND, TURNED)
    COUNT: gl.constexpr = lane_of(DIM, NUMBER) // 2
    given = given_words(lane_codes(tile, NUMBER, BITS, DIM, TILE, 2), words, KIND, BITS)
    OPERANDS: gl.constexpr = _operands(COUNT, 2 * len(given))
    return gl.inline_asm_elementwise(
        ASM, OPERANDS, given,
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16)[:COUNT],
        is_pure=False, pack=2)  # fmt: skip

"""Values of up to 4 bits by any table: float16 levels looked up with PRMT, their lower and upper bytes apart.

A word has four nibbles of a token in its lower half and those of the next token in its upper half. Bytes 0 and 2 of it
are a selector: two codes of both tokens. PRMT with the lower bytes of eight levels and with the upper ones gives two
words, whose bytes in turn are the levels. Of sixteen levels each half is looked up, and a third PRMT takes what bit 3
of the code says.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

REGISTERS = ".reg .b32 y, m, low, high, some, more;"


def looked_up(word: str, bits: int, to: Sequence[str], words: Sequence[str]) -> list[str]:
    """to[i]: the levels of nibble i of both halves of a word. words: four of lower bytes, four of upper bytes, of which
    2 and 3 bits need the first or the first two. Overwrites REGISTERS."""
    lines = [f"prmt.b32 y, {word}, {word}, 0x3120;"]
    if bits == 4:  # m: byte i of the lower eight levels or of the upper ones
        lines += ["shr.u32 m, y, 1;", f"lop3.b32 m, m, {0x44444444}, {0x32103210}, 0xEA;", "and.b32 y, y, 0x77777777;"]
    for pair in range(2):
        if pair:
            lines += ["shr.u32 y, y, 16;", *(["shr.u32 m, m, 16;"] if bits == 4 else [])]
        for name, at in (("low", 0), ("high", 4)):
            eight = f"{words[at]}, {words[at + (bits > 2)]}"
            if bits < 4:
                lines.append(f"prmt.b32 {name}, {eight}, y;")
            else:
                lines += [f"prmt.b32 some, {eight}, y;", f"prmt.b32 more, {words[at + 2]}, {words[at + 3]}, y;"]
                lines.append(f"prmt.b32 {name}, some, more, m;")
        lines += [f"prmt.b32 {to[2 * pair]}, low, high, 0x6240;", f"prmt.b32 {to[2 * pair + 1]}, low, high, 0x7351;"]
    return lines


def _units4() -> str:
    """$0-$3: levels of codes 0-3. $4: two units. $5 $7 …: the words of `looked_up`."""
    words = [f"${5 + 2 * i}" for i in range(8)]
    return "\n".join(["{", REGISTERS, *looked_up("$4", 4, ["$0", "$1", "$2", "$3"], words), "}"])


def _units2() -> str:
    """$0-$7: levels of codes 0-7. $8: two units. $9 $11: lower and upper bytes."""
    words = ["$9"] * 4 + ["$11"] * 4
    lines = ["{", REGISTERS, ".reg .b32 even, odd;", "and.b32 even, $8, 0x33333333;", "shr.u32 odd, $8, 2;"]
    lines.append("and.b32 odd, odd, 0x33333333;")
    for i, name in enumerate(("even", "odd")):
        lines += looked_up(name, 2, [f"${n}" for n in range(i, 8, 2)], words)
    return "\n".join([*lines, "}"])


_UNITS4 = gl.constexpr(_units4())
_UNITS2 = gl.constexpr(_units2())
_OPERANDS4 = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 17))
_OPERANDS2 = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 5))


@gluon.jit
def value_table4(units, words):
    return gl.inline_asm_elementwise(
        _UNITS4, _OPERANDS4,
        [units, words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def value_table2(units, words):
    return gl.inline_asm_elementwise(
        _UNITS2, _OPERANDS2, [units, words[0], words[4]],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True, pack=2)  # fmt: skip

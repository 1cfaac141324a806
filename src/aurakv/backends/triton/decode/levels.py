"""How the decode kernel makes the levels of a format: which arithmetic, and its constants."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ....format.codec import Codec, Format
from ....format.levels import Levels as Table
from ....format.levels import float16
from ..common.arithmetic import integers, poly7_numbers
from .shapes import in_pieces

MINIFLOAT_TAIL = {3: 190, 4: 88}  # bits under a minifloat code, which lies at bits 9-11 or 8-11 of a float16 number

KEY_LARGEST = 32000  # of levels of keys as 16-bit integers
KEY_ERROR = 2e-4  # of a leading coefficient in float16, relative
MOST = 65504.0  # in float16

INTEGER, MINIFLOAT, CUBIC, POLY7, BITS, LINE, TABLE = range(7)  # how codes become levels


class KeyLevels(NamedTuple):
    """A key level is a number that the kernel makes from the code and these words, times `step`."""

    kind: int
    step: float
    words: tuple[int, ...]


class ValueLevels(NamedTuple):
    """The same for values; `shift` times the sum of the weights is added to the sums."""

    kind: int
    step: float
    shift: float
    words: tuple[int, ...]


class Levels(NamedTuple):
    key: KeyLevels
    value: ValueLevels

    @property
    def words(self) -> tuple[int, ...]:
        """32-bit words: 4 for keys, 4 for values, 4 more for keys, 4 more for values."""
        key, value = ((*side.words, *[0] * 8)[:8] for side in (self.key, self.value))
        return (*key[:4], *value[:4], *key[4:], *value[4:])


@functools.cache
def levels(format: Format) -> Levels | None:
    """None if the kernel has no arithmetic for the tables."""
    key, value = _key_levels(format.key), _value_levels(format.value)
    return None if key is None or value is None else Levels(key, value)


def half2(x: float) -> int:
    """x as the two halves of a register."""
    (bits,) = struct.unpack("<H", struct.pack("<e", x))
    return int(bits) << 16 | int(bits)


def _halves(*numbers: float) -> tuple[int, ...] | None:
    """`half2` of each; None if float16 has no such number."""
    return tuple(half2(x) for x in numbers) if max(map(abs, numbers)) <= MOST else None


def _key_levels(codec: Codec) -> KeyLevels | None:
    if codec.bits > 4:
        poly = _poly7(codec.levels)
        if poly is not None:
            return KeyLevels(POLY7, *poly)
        return _key_cubic(codec.levels) if codec.bits == 8 and not in_pieces(codec.bits, codec.dim) else None
    found = integers(codec.levels)
    if found is not None:
        table, step = found
        # see codes: codes under 8 are negative, the upper eight are stored plus one
        if codec.bits < 4 or (table[7] < 0 <= table[8] and table[-1] <= 126):
            return KeyLevels(INTEGER, step, _octets(table[:8] + [n + 1 for n in table[8:]]))
    return _key_table(codec.levels)


def _octets(numbers: Sequence[int]) -> tuple[int, ...]:
    """Bytes as words."""
    return tuple(
        sum((n & 255) << 8 * i for i, n in enumerate(numbers[at : at + 4])) for at in range(0, len(numbers), 4)
    )


def _key_table(levels: Table) -> KeyLevels:
    """Any levels as 16-bit integers: level = step · (256 · upper + lower), each part a table of bytes."""
    step = max(map(abs, levels)) / KEY_LARGEST or 1.0
    numbers = [round(x / step) for x in levels]
    parts = [(n + 128) // 256 for n in numbers], [(n + 128) % 256 - 128 for n in numbers]
    return KeyLevels(TABLE, step, tuple(word for part in parts for word in (*_octets(_beside(part)), 0, 0, 0)[:4]))


def _beside(table: Sequence[int]) -> list[int]:
    """What is stored of sixteen bytes, so that what the lower eight give for a code and what the upper eight give for
    it add up to its byte: for a code of the other eight, a table gives −1 where its byte is negative, else 0."""
    if len(table) < 16:
        return list(table)
    pairs = [_pair(min(low, 126), min(high, 126)) for low, high in zip(table[:8], table[8:], strict=True)]
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _pair(low: int, high: int) -> tuple[int, int]:
    """a, b with a + (−1 if b < 0 else 0) = low and b + (−1 if a < 0 else 0) = high."""
    return next((a, b) for a in (low, low + 1) for b in (high, high + 1) if a - (b < 0) == low and b - (a < 0) == high)


def _key_cubic(levels: Table) -> KeyLevels | None:
    """level = step · (z + A0 + A1·z + A2·z² + A3·z³) with z = (code − 128)/128, for an odd cubic in code − 127.5."""
    found = _bend(levels)
    if found is None:
        return None
    unit, bend = found
    first = bend * 128 * 128
    words = _halves((0.5 + bend / 8) / 128, 0.75 * bend, 1.5 * bend * 128, first)
    if words is None or abs(float16(first) - first) > KEY_ERROR * abs(first) + 1e-6:
        return None
    return KeyLevels(CUBIC, unit * 128, words)


def _poly7(levels: Table) -> tuple[float, tuple[int, ...]] | None:
    """Step and words of the table `poly7`."""
    poly = poly7_numbers(levels)
    return None if poly is None else (poly[0], tuple(half2(x) for x in poly[1:]))


def _bend(levels: Table) -> tuple[float, float] | None:
    """(a, b) with level = a·x·(1 + b·x²), x = code − (n − 1)/2, if that is exact but for rounding."""
    n = len(levels)
    x = [i - (n - 1) / 2 for i in range(n)]
    if levels[-1] <= 0:
        return None
    far = x[-1]
    ratio = levels[n // 2] * 2 * far / levels[-1]  # (1 + b/4) / (1 + b·far²)
    below = far * far * ratio - 0.25
    bend = (1 - ratio) / below if below > 0 else 0.0
    unit = levels[-1] / (far * (1 + bend * far * far))
    exact = all(
        abs(unit * y * (1 + bend * y * y) - level) <= 2e-6 * levels[-1] for y, level in zip(x, levels, strict=True)
    )
    return (unit, bend) if exact else None


def _value_levels(codec: Codec) -> ValueLevels | None:
    known = not in_pieces(codec.bits, codec.dim)
    if codec.bits == 2:
        return (_value_bits(codec.levels) if known else None) or _value_table(codec.levels)
    if codec.bits in MINIFLOAT_TAIL and known:
        step = minifloat_step(codec.levels)
        if step is not None:
            return ValueLevels(MINIFLOAT, step, 0.0, (0xFFFFFFFF,))
    poly = _poly7(codec.levels)
    if poly is not None:
        return ValueLevels(POLY7, poly[0], 0.0, poly[1])
    found = None if codec.bits in (5, 6) or (codec.bits == 8 and not known) else _bend(codec.levels)
    if found is None:
        return _value_table(codec.levels) if codec.bits < 5 else None
    unit, bend = found
    if codec.bits < 8:
        return _odd_cubic(codec.levels, bend)
    z = 128.0  # the kernel's variable is (code − 128) / z
    words = _halves((0.5 + bend / 8) / z, 1 + 0.75 * bend, 1.5 * bend * z, bend * z * z)
    return None if words is None else ValueLevels(CUBIC, unit * z, 0.0, words)


def _value_table(levels: Table) -> ValueLevels:
    """Any levels as float16 numbers: words of their lower bytes and of their upper bytes."""
    step = max(map(abs, levels)) or 1.0
    bits = [half2(x / step) for x in levels]
    parts = [x & 255 for x in bits], [x >> 8 & 255 for x in bits]
    return ValueLevels(TABLE, step, 0.0, tuple(word for part in parts for word in (*_octets(part), 0, 0, 0)[:4]))


def _odd_cubic(levels: Table, bend: float) -> ValueLevels:
    """level = step · x · (x² + r) with x = (code − middle) / (n / 2), in float16; a large r makes a straight line."""
    n, most = len(levels), 60000.0
    x = [(2 * i - n + 1) / n for i in range(n)]
    bend *= n * n / 4
    r = float16(1 / bend if abs(bend) * most > 1 else most)
    made = [y * (y * y + r) for y in x]
    step = sum(x * level for x, level in zip(made, levels, strict=True)) / sum(x * x for x in made)
    return ValueLevels(CUBIC, step, 0.0, (half2(r),))


def _value_bits(levels: Table) -> ValueLevels | None:
    """Four symmetric levels are sums over bits: level = step · (code + rho · upper bit) + shift."""
    inner, outer = levels[2], levels[3]
    if levels[1] != -inner or levels[0] != -outer or not outer > inner > 0:
        return None
    step = outer - inner
    rho = 2 * inner / step - 1  # from code 1 to code 2 the level grows by 2·inner
    words = _halves(rho / 2)
    kind = LINE if abs(rho) < 1e-6 else BITS
    return None if words is None else ValueLevels(kind, step * 2.0**24, -outer, words)


def minifloat_step(levels: Table) -> float | None:
    """A level is this times f(code) − f(last code − code), f = `minifloat`; None if the levels are something else."""
    last, bits = len(levels) - 1, len(levels).bit_length() - 1
    small = [minifloat(n, bits) - minifloat(last - n, bits) for n in range(last + 1)]
    step = levels[-1] / small[-1]
    same = all(abs(t * step - x) <= 2e-6 * abs(levels[-1]) for t, x in zip(small, levels, strict=True))
    return step if same and step > 0 else None


def minifloat(n: int, bits: int) -> float:
    """What code n at bits 12 − bits … 11 of a float16 number is, with MINIFLOAT_TAIL below it."""
    (x,) = struct.unpack("<e", struct.pack("<H", n << 12 - bits | MINIFLOAT_TAIL[bits]))
    return float(x)

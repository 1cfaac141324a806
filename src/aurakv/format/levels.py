"""Level tables: the 2^bits values that codes stand for, for coordinates distributed as N(0, 1).

A table is part of the format: every backend decodes the same code to the same float32 level. `lloyd-max` is solved
here; the other named tables are pinned constants, each the best of its kind (the tests repeat the search).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import InputError, short

CODE_BITS = (2, 3, 4, 5, 6, 8)

Levels = tuple[float, ...]  # ascending; every entry is exactly a float32

# The positive half of Lloyd-Max times a divisor, rounded to integers that fit int8: (divisor, integers).
_INT8: dict[int, tuple[float, Sequence[int]]] = {
    2: (59.59, (27, 90)),
    3: (40.91, (10, 31, 55, 88)),
    4: (38.14, (5, 15, 25, 36, 48, 62, 79, 104)),
    5: (29.62, (2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97)),
    6: (28.75, (*range(1, 31, 2), 32, 34, 37, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108)),
}

# level = a·x·(1 + b·x²) with x = code − (2^bits − 1)/2: (a, b).
CUBIC: dict[int, tuple[float, float]] = {
    2: (0.8928869, 0.05677371),
    3: (0.4714552, 0.02457252),
    4: (0.2405073, 0.008721277),
    5: (0.1218272, 0.002764242),
    6: (0.06170596, 0.0008242487),
    8: (0.0158595, 6.633752e-05),
}

# level = a·r, r = x + b·x³ + c·x⁵ + d·x⁷ in float16 arithmetic, with x = (2·code + 1)/2^bits − 1: (a, b, c, d), of
# which b, c, d are float16 numbers. The levels are float16 numbers but for a factor.
POLY7: dict[int, tuple[float, float, float, float]] = {
    5: (2.197586, -0.1068115234375, 0.69970703125, 0.0),  # a longer one would gain 0.9%
    6: (2.079480, 0.7275390625, -1.3974609375, 1.5517578125),
    8: (2.085509, 1.0517578125, -2.353515625, 2.451171875),
}

# level = distance · (code − (2^bits − 1)/2).
UNIFORM = {2: 0.9956867, 3: 0.5860194, 4: 0.3352006, 5: 0.1881388, 6: 0.104063, 8: 0.03076239}

# Codes read as floats of 2 exponent bits and bits − 2 mantissa bits: (scale, what lies below the last mantissa bit).
_MINIFLOAT: dict[int, tuple[float, float]] = {3: (0.16478, 190 / 512), 4: (0.09141, 88 / 256)}


def float32(x: float) -> float:
    """x rounded to float32."""
    with np.errstate(over="ignore"):  # beyond the range is inf, which check_levels refuses
        return float(np.float32(x))


def float16(x: float) -> float:
    """x rounded to float16."""
    return float(np.float16(x))


def mse(levels: Sequence[float]) -> float:
    """Mean squared error of nearest-level quantisation of N(0, 1)."""
    edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    total = 0.0
    for level, lo, hi in zip(levels, edges, edges[1:], strict=False):
        mass, first, second = _moments(lo, hi)
        total += second - 2 * level * first + level * level * mass
    return total


def lloyd_max(bits: int) -> Levels:
    """The MSE-optimal levels: each is the mean of its cell, and cells end halfway between levels."""
    half = _solve_lloyd_max(2 ** (bits - 1))
    return _mirror(half)


def table(name: str, bits: int) -> Levels:
    """The named table as exact float32 values, ascending."""
    if name == "lloyd-max":
        return lloyd_max(bits)
    if name == "int8" and bits in _INT8:
        divisor, integers = _INT8[bits]
        return _mirror([i / divisor for i in integers])
    if name == "cubic" and bits in CUBIC:
        a, b = CUBIC[bits]
        steps = [i + 0.5 for i in range(2 ** (bits - 1))]
        return _mirror([a * x * (1 + b * x * x) for x in steps])
    if name == "uniform" and bits in UNIFORM:
        return _mirror([UNIFORM[bits] * (i + 0.5) for i in range(2 ** (bits - 1))])
    if name == "poly7" and bits in POLY7:
        a, b, c, d = POLY7[bits]
        half = []
        for x in ((2 * i + 1) / 2**bits for i in range(2 ** (bits - 1))):
            s = float16(x * x)
            u = float16(s * float16(s * d + c) + b)
            half.append(a * float16(float16(s * x) * u + x))
        return _mirror(half)
    if name == "minifloat" and bits in _MINIFLOAT:
        scale, codes = _MINIFLOAT[bits][0], 2**bits
        return _mirror(
            [scale * (minifloat(n, bits) - minifloat(codes - 1 - n, bits)) for n in range(codes // 2, codes)]
        )
    if name in TABLES:
        raise InputError(f"level table {short(name)} exists for {widths(name)} bits, got {bits}")
    raise InputError(f"level table must be one of {list(TABLES)} or a list of levels, got {short(name)}")


TABLES = ("lloyd-max", "int8", "cubic", "poly7", "minifloat", "uniform")


def widths(name: str) -> list[int]:
    """The widths for which a named table is defined."""
    known: dict[str, Iterable[int]] = {
        "lloyd-max": CODE_BITS, "int8": _INT8, "cubic": CUBIC, "poly7": POLY7, "minifloat": _MINIFLOAT,
        "uniform": UNIFORM,
    }  # fmt: skip
    return list(known[name])


def check_levels(levels: Sequence[float], bits: int) -> Levels:
    """A user's own table: 2^bits finite numbers in ascending order."""
    try:
        values = tuple(float32(x) for x in levels)
    except (TypeError, ValueError):
        raise InputError(f"a level table is one of {list(TABLES)} or a list of numbers, got {levels!r:.80}") from None
    if len(values) != 2**bits:
        raise InputError(f"a level table for {bits} bits needs {2**bits} levels, got {len(values)}")
    if not all(map(math.isfinite, values)):
        raise InputError("levels must be finite float32 numbers")
    if any(a > b for a, b in itertools.pairwise(values)):
        raise InputError("levels must be sorted in ascending order")
    return values


def boundaries(levels: Levels) -> Levels:
    """Midpoints between neighbours in float32; the code of x is the number of boundaries strictly below x."""
    return tuple(float32((a + b) / 2) for a, b in itertools.pairwise(levels))


def _mirror(half: Sequence[float]) -> Levels:
    positive = tuple(float32(x) for x in half)
    return tuple(-x for x in reversed(positive)) + positive


def minifloat(n: int, bits: int) -> float:
    """A code read as a float: 2-bit exponent, mantissa of the other bits; in units of the smallest last place."""
    one = 1 << bits - 2
    exponent, mantissa = n // one, n % one + _MINIFLOAT[bits][1]
    return mantissa if exponent == 0 else (one + mantissa) * float(1 << exponent - 1)


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def _moments(lo: float, hi: float) -> tuple[float, float, float]:
    """Mass, first and second moment of N(0, 1) on [lo, hi]."""
    if hi > 0:  # the difference of upper tails keeps its precision far out; the left side mirrors it
        mass = (math.erfc(lo / math.sqrt(2)) - math.erfc(hi / math.sqrt(2))) / 2
    else:
        mass = (math.erfc(-hi / math.sqrt(2)) - math.erfc(-lo / math.sqrt(2))) / 2
    first = _density(lo) - _density(hi)
    edge = sum(sign * x * _density(x) for sign, x in ((1, lo), (-1, hi)) if math.isfinite(x))
    return mass, first, mass + edge


@functools.cache
def _solve_lloyd_max(n: int) -> tuple[float, ...]:
    """The n positive levels by Newton's method on `level − mean of its cell = 0`."""
    wide = statistics.NormalDist(sigma=math.sqrt(3))  # the asymptotically optimal density of levels
    level = np.array([wide.inv_cdf((n + i + 0.5) / (2 * n)) for i in range(n)])
    for _ in range(50):
        edge = np.concatenate([[0.0], (level[1:] + level[:-1]) / 2, [math.inf]])
        mass, first, _second = np.array([_moments(a, b) for a, b in itertools.pairwise(edge)]).T
        mean, density = first / mass, np.array([_density(x) for x in edge])
        upper, lower = np.zeros(n), np.zeros(n)  # d mean / d neighbour; the edges at 0 and infinity do not move
        upper[:-1] = (edge[1:-1] - mean[:-1]) * density[1:-1] / mass[:-1] / 2
        lower[1:] = (mean[1:] - edge[1:-1]) * density[1:-1] / mass[1:] / 2
        jacobian = np.diag(1 - upper - lower) - np.diag(upper[:-1], 1) - np.diag(lower[1:], -1)
        step = np.linalg.solve(jacobian, mean - level)
        level = level + step
        if np.abs(step).max() < 1e-12:
            return tuple(float(x) for x in level)
    raise AssertionError(f"Newton did not converge for {2 * n} levels")

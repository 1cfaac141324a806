"""Level tables as arithmetic: polynomials, integers, float16 numbers, and PTX that looks up nibbles."""

from __future__ import annotations

import functools

import numpy as np

from ....format.levels import POLY7, Levels, table

FAST_ERROR = 3e-5  # of a level, relative: below what rounding to float16 costs
KEY_ERROR = 1.5e-4  # of a key's level in float16, relative
MAX_TERMS = 8


@functools.cache
def float16_unit(levels: Levels) -> float:
    """A factor that takes the levels closest to float16 numbers; 0.0 if none takes them close enough."""
    poly = poly7_numbers(levels)
    if poly is not None:
        return 1 / poly[0]
    if len(levels) > 16:
        return 0.0
    table = np.abs(np.array([x for x in levels if x != 0]))
    whole = np.outer(1 / table, np.arange(1, 129)).ravel()  # takes some level to a small whole number
    units = np.concatenate([whole, np.linspace(1, 2, 1 << 17)])
    units = np.float32(units / 2.0 ** np.floor(np.log2(units))).astype(np.float64)
    error = np.zeros(len(units))
    for level in table:
        error = np.maximum(error, np.abs(np.float16(level * units).astype(np.float64) / (level * units) - 1))
    best = int(error.argmin())
    return float(units[best]) if error[best] <= KEY_ERROR else 0.0


@functools.cache
def curve(levels: Levels) -> tuple[float, ...]:
    """An arithmetic for the levels, within FAST_ERROR: as `polynomial`, or (0, c0, c1, …) with level = x·(c0 + c1·t +
    c2·t² + …), t = log2(1 + 1/n − x²): the best levels for a normal distribution follow its quantiles, which grow like
    that. () if there is none short enough.
    """
    coef = polynomial(levels)
    if coef or not symmetric(levels):
        return coef
    n, half = len(levels), np.array(levels[len(levels) // 2 :])
    if half[0] <= 0:
        return ()
    x = (np.arange(len(half)) + 0.5) / len(half)
    for terms in range(3, min(len(half), MAX_TERMS) + 1):
        powers = np.stack([x * np.log2(1 + 1 / n - x * x) ** i for i in range(terms)], 1)
        weight = 1 / half
        for _ in range(40):  # reweighted least squares approach the smallest maximum
            found = np.linalg.lstsq(powers * weight[:, None], half * weight, rcond=None)[0]
            error = np.abs(powers @ np.float32(found) - half) / half
            if error.max() <= FAST_ERROR:
                return (0, *(float(np.float32(c)) for c in found))
            weight = weight * (0.3 + error / error.max())
    return ()


@functools.cache
def polynomial(levels: Levels) -> tuple[float, ...]:
    """With x = (2·code + 1)/n − 1, (2, a, b) if level = x·(a + b·x²) but for rounding; (7, a, b, c, d) for the table
    `poly7`, which has these numbers; else ()."""
    poly = poly7_numbers(levels)
    if poly is not None:
        return (7, *poly)
    if not symmetric(levels):
        return ()
    half = np.array(levels[len(levels) // 2 :])
    x = (np.arange(len(half)) + 0.5) / len(half)
    found = np.linalg.lstsq(np.stack([x, x**3], 1) / x[:, None], half / x, rcond=None)[0]
    exact = np.abs(np.stack([x, x**3], 1) @ found - half) <= 1e-7 * half
    return (2, *(float(np.float32(c)) for c in found)) if exact.all() else ()


@functools.cache
def poly7_numbers(levels: Levels) -> tuple[float, float, float, float] | None:
    """a, b, c, d if the levels are the table `poly7`."""
    bits = len(levels).bit_length() - 1
    return POLY7[bits] if bits in POLY7 and levels == table("poly7", bits) else None


@functools.cache
def integers(levels: Levels) -> tuple[list[int], float] | None:
    """The levels as integers from −128 to 127 times a step, if they are that but for rounding."""
    largest = max(abs(x) for x in levels)
    for top in range(1, 128) if largest > 0 else ():
        step = largest / top
        found = [round(x / step) for x in levels]
        if all(abs(n * step - x) <= 1e-6 * largest for n, x in zip(found, levels, strict=True)):
            return found, step
    return None


def symmetric(levels: Levels) -> bool:
    return all(a == -b for a, b in zip(levels, reversed(levels), strict=True))


def _nibble_words(levels: Levels, factor: float) -> list[int]:
    """The table of nibble_asm: high bytes of eight float16 entries, then low bytes. [] if it cannot hold the levels.

    Up to 3 bits the entries are the levels themselves; at 4 bits the magnitudes of a symmetric table.
    """
    if len(levels) > 16 or (len(levels) == 16 and not symmetric(levels)):
        return []
    chosen = (np.array(levels[8:] if len(levels) == 16 else levels) * factor).astype(np.float16)
    if not np.isfinite(chosen).all():
        return []
    entries = np.zeros(8, np.float16)
    entries[: len(chosen)] = chosen
    octets = entries.view(np.uint8).reshape(8, 2)
    return [int(x) for part in (1, 0) for x in octets[:, part].copy().view(np.int32)]


@functools.cache
def nibble_asm(levels: Levels, bits: int, factor: float) -> str:
    """PTX for two words of 8 nibbles each: $j gets the float16 levels of nibble j of $8 and of $9. "" if it cannot be.

    `prmt` selects four bytes of eight at once. At 4 bits the code's top bit gives the sign.
    """
    words = _nibble_words(levels, factor)
    if not words:
        return ""
    lines = [".reg .b32 a,b,xe,xo,te,to,s,t,h,l;"]
    if bits == 4:  # a, b: 7 − n below 8, n − 8 above
        for source, name in (("$8", "a"), ("$9", "b")):
            lines += [
                f"and.b32 s, {source}, 0x88888888;",
                "shr.b32 t, s, 3;",
                "sub.s32 s, s, t;",
                f"lop3.b32 {name}, {source}, s, 0x77777777, 0x82;",  # ~(word ^ s) & 7…
            ]
        lines += ["prmt.b32 te, $8, $9, 0x5140;", "prmt.b32 to, $8, $9, 0x7362;"]
    else:
        lines += ["mov.b32 a, $8;", "mov.b32 b, $9;"]
    lines += [  # selectors: nibbles of a and b in turn, even ones in xe, odd ones in xo
        "shl.b32 t, b, 4;",
        "lop3.b32 xe, a, t, 0x0F0F0F0F, 0xE4;",
        "shr.b32 t, a, 4;",
        "lop3.b32 xo, t, b, 0x0F0F0F0F, 0xE4;",
    ]
    for half, signs_of in enumerate(("te", "to")):
        for parity, selector in enumerate(("xe", "xo")):
            if half:
                lines.append(f"shr.b32 {selector}, {selector}, 16;")
            lines += [
                f"prmt.b32 h, {words[0]}, {words[1]}, {selector};",
                f"prmt.b32 l, {words[2]}, {words[3]}, {selector};",
            ]
            if bits == 4:
                source = signs_of
                if parity == 0:
                    lines.append(f"shl.b32 s, {signs_of}, 4;")
                    source = "s"
                lines.append(f"lop3.b32 h, {source}, 0x80808080, h, 0xAE;")  # (~word & sign bits) | h
            first = 4 * half + parity
            lines += [f"prmt.b32 ${first}, l, h, 0x5140;", f"prmt.b32 ${first + 2}, l, h, 0x7362;"]
    return "{\n" + "\n".join(lines) + "\n}"


def float32_bits(x: float) -> str:
    """A float32 constant of PTX."""
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"

"""How lanes load codes: 16 bytes at a time wherever tokens that lie side by side have whole pieces of 16 bytes.

A lane works on units of 16 channels, 2·bits bytes. Pieces of 16 bytes go to the lanes whose units are in them by
shuffles, where rows have whole pieces; where only several rows together have them, through threadgroup memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...format.codec import Codec, Format

PIECE = 16  # bytes that a lane loads at once
BLOCK = 32  # tokens that a simdgroup reads at a time
GROUP_BYTES = 32768  # of threadgroup memory

Fits = tuple[bool, bool]  # whether pages hold whole spans of keys, of values


def units(codec: Codec) -> int:
    return -(-codec.dim // 16)


def lanes(codec: Codec, shares: int = 1) -> int:
    """How many lanes read a row together: one per unit or share of one, rounded up to a power of two, at most all."""
    return min(32, 1 << (shares * units(codec) - 1).bit_length())


def shares(codec: Codec, group: int) -> int:
    """Lanes that share a unit in `attend_rows`: two where queries and sums of so many heads would otherwise take 48
    registers or more a side. A thread has 128, and lanes must be left to take the shares."""
    return 2 if group >= 3 and units(codec) <= 16 else 1


def span(codec: Codec) -> int:
    """The fewest tokens side by side whose codes are whole pieces."""
    return PIECE // math.gcd(PIECE, codec.row_bytes)


def fits(format: Format, page_size: int) -> Fits:
    return page_size % span(format.key) == 0, page_size % span(format.value) == 0


class RowLoads(NamedTuple):
    """Of one side in `attend_rows`: the constants of rows.metal."""

    lanes: int
    shares: int
    taken: int
    staged: bool
    span: int
    grain: int


def row_loads(codec: Codec, group: int, fits: bool) -> RowLoads:
    parts = shares(codec, group)
    whose = lanes(codec, parts), parts
    together = 8 // math.gcd(8, codec.bits)  # units in the fewest whole pieces
    if codec.coded and units(codec) % together == 0:
        return RowLoads(*whose, together, False, 1, PIECE)
    if codec.coded and fits:
        return RowLoads(*whose, 1, True, span(codec), PIECE)
    return RowLoads(*whose, 1, False, 1, math.gcd(PIECE, codec.row_bytes))  # the parts of a page are at multiples of 16


def staged_pieces(format: Format, fits: Fits) -> int:
    """What a simdgroup of `attend_rows` stages at most, in pieces; at least one, for the array to be there."""
    sides = zip((format.key, format.value), fits, strict=True)
    return max(1, *(BLOCK * codec.row_bytes // PIECE for codec, fit in sides if row_loads(codec, 1, fit).staged), 0)


def teams(format: Format, fits: Fits) -> int:
    """Simdgroups of a threadgroup of `attend_rows`: 4, or as many as there is memory for."""
    return next(n for n in (4, 2, 1) if n * staged_pieces(format, fits) * PIECE <= GROUP_BYTES)


def reach(format: Format, fits: Fits) -> int:
    """Bytes of pages in which `attend_rows` can name every row by 32 bits: 8 GiB or more, 64 GiB of most formats."""
    sides = zip((format.key, format.value), fits, strict=True)
    return min(row_loads(codec, 1, fit).grain for codec, fit in sides) << 32


class TileLoads(NamedTuple):
    """Of one side in `attend_tiles`: the constants of tiles.metal."""

    chunk: int  # channels that are expanded at a time
    paired: bool  # a thread loads two units at once
    staged: bool
    span: int
    part: int  # bytes of a span that are staged at a time
    whole: bool  # which are whole rows

    @property
    def pieces(self) -> int:
        return BLOCK // self.span * self.part // PIECE if self.staged else 0


def tile_loads(codec: Codec, chunk: int, fits: bool) -> TileLoads:
    if not codec.coded or codec.bits == 8:
        return TileLoads(chunk, False, False, 1, 0, False)
    if codec.bits == 4 and units(codec) % 2 == 0:
        return TileLoads(chunk, True, False, 1, 0, False)
    part = chunk * codec.bits // 8
    if codec.row_bytes % PIECE == 0 and part % PIECE == 0:
        return TileLoads(chunk, False, True, 1, part, False)
    if fits:
        return TileLoads(chunk, False, True, span(codec), span(codec) * codec.row_bytes, True)
    return TileLoads(chunk, False, False, 1, 0, False)


def tiles(format: Format, simds: int, fits: Fits) -> tuple[TileLoads, TileLoads]:
    """The widest chunks of keys and values for which there is threadgroup memory: at most 128 channels, or 64 where
    fewer simdgroups share them, so that more groups run at a time."""
    for most in (128, 96, 64, 48, 32, 16):
        key, value = (
            tile_loads(codec, _chunk(codec, most), fit)
            for codec, fit in zip((format.key, format.value), fits, strict=True)
        )
        expanded = 4 * BLOCK * (max(key.chunk, value.chunk) + 4)
        others = simds * 4 * (8 * BLOCK + 64) + 5 * 4 * BLOCK + 4  # scores, diagonals, factors and places of keys
        staged = PIECE * max(1, key.pieces, value.pieces)
        if most <= (128 if simds >= 4 else 64) and expanded + others + staged <= GROUP_BYTES - PIECE:
            return key, value
    raise AssertionError(f"no threadgroup memory for {format}")


def _chunk(codec: Codec, most: int) -> int:
    """The widest equal pieces of a vector's channels, padded to 16, that are at most so wide and hold pairs of units
    where there are."""
    together = 2 if units(codec) % 2 == 0 and most >= 32 else 1
    return 16 * max(n for n in range(together, most // 16 + 1, together) if units(codec) % n == 0)

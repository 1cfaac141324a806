"""How coordinates find their codes: grids with at most one boundary of a table in a cell, and PTX that uses them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....format.levels import Levels, boundaries
from ..common.arithmetic import float32_bits, integers, symmetric

CELLS = 32  # of a grid in registers: the lanes of a warp


class Cells(NamedTuple):
    """A grid over a table's boundaries: z belongs to cell rint((len(bounds) − 2) · clamp(slope·z + start, 0, 1))."""

    slope: float
    start: float
    bounds: tuple[float, ...]  # the boundary inside each cell, +inf where there is none
    below: tuple[int, ...]  # how many boundaries are below those


@functools.cache
def cells(levels: Levels, count: int = CELLS) -> Cells | None:
    """None where no grid of this many cells has at most one boundary in each, none of them next to the cell's edge."""
    edges = np.array(boundaries(levels), np.float64)
    if len(levels) > count // 2 or not np.all(np.diff(edges) > 0):
        return None
    for widening in np.linspace(0.01, 0.5, 50):
        first, last = edges[0], edges[-1]
        margin = widening * (last - first) if last > first else 1.0
        slope = float(np.float32(1 / (last - first + margin)))
        start = float(np.float32(0.5 - slope * (first + last) / 2))
        place = (count - 2) * (slope * edges + start)
        cell = np.rint(place).astype(int)
        if len(set(cell)) == len(cell) and np.abs(place - cell).max() < 0.49:
            bounds = np.full(count, np.inf)
            bounds[cell] = edges
            below = np.searchsorted(cell, np.arange(count))
            return Cells(slope, start, tuple(float(x) for x in bounds), tuple(int(n) for n in below))
    return None


@functools.cache
def wide_cells(levels: Levels) -> Cells | None:
    """The smallest grid for a table in shared memory, if there is one of up to 1024 cells."""
    found = (cells(levels, 1 << bits) for bits in range(5, 11))
    return next((grid for grid in found if grid), None)


@functools.cache
def grid_tensor(levels: Levels, device: torch.device) -> Tensor:
    """Boundaries by cell, then the numbers of those below them."""
    grid = wide_cells(levels)
    assert grid is not None
    with torch.inference_mode(False):
        return torch.tensor([grid.bounds, grid.below], dtype=torch.float32, device=device)


@functools.cache
def cell_tensor(levels: Levels, squared: bool, device: torch.device) -> Tensor:
    """32 times the bits of: boundaries by cell with the number of those below in their lowest bits; levels by code, or
    with integer squares the first word of `_square_words`, for ptxas copies what it knows to be the same in all lanes.
    """
    grid = cells(levels)
    assert grid is not None
    marked = np.array(grid.bounds, np.float32).view(np.int32) & ~15 | np.array(grid.below, np.int32)
    known = np.resize(np.array(levels, np.float32), CELLS).view(np.int32)
    if squared:
        known = np.full(CELLS, _square_words(levels)[0], np.int32)
    with torch.inference_mode(False):
        return torch.from_numpy(np.stack([marked, known])).to(device)


@functools.cache
def groups_asm(levels: Levels, lsq: bool) -> str:
    """PTX for a group of 8 coordinates y $3 … $10: $0 their codes, packed; $1 the sum of the squares of the levels and
    $15; $2 that of their products with y and $16 (lsq). $11 is the inverse of the size $12 that y is divided by; lane i
    holds the marked boundary of cell i in $13 and the level of code i mod n in $14.

    The low bits of 2^23 + n are n, and a shuffle reads no others. The sign of a difference is the comparison. Codes are
    pushed into the word from above, so that the bits above them are lost. Marks move boundaries by up to 2e-6 of them
    (and infinity to NaN, which nothing exceeds either)."""
    grid, bits = cells(levels), len(levels).bit_length() - 1
    if grid is None:
        return ""
    slope, start, last, magic = (float32_bits(x) for x in (grid.slope, grid.start, CELLS - 2.0, 2.0**23))
    squares = [] if lsq else _squares_asm(levels)
    lines = [".reg .f32 a, d, l, p, s; .reg .b32 e, n, t, w;", f"mul.rn.f32 a, $11, {slope};"]
    lines += ["mov.b32 w, 0; mov.b32 e, $15; mov.f32 p, $16;"]
    for y in (f"${i}" for i in range(3, 11)):
        lines += [f"fma.rn.sat.f32 s, {y}, a, {start};", f"fma.rn.f32 s, s, {last}, {magic};", "mov.b32 n, s;"]
        lines += ["shfl.sync.idx.b32 n, $13, n, 31, 0xffffffff;", "mov.b32 s, n;"]
        lines += [f"neg.f32 d, {y};", "fma.rn.f32 s, s, $12, d;", "mov.b32 t, s;", "shr.u32 t, t, 31;"]
        lines += ["add.u32 n, n, t;", f"shf.r.wrap.b32 w, w, n, {bits};"]
        if not squares:
            lines += ["shfl.sync.idx.b32 l, $14, n, 31, 0xffffffff;", "fma.rn.f32 e, l, l, e;"]
        if lsq:
            lines.append(f"fma.rn.f32 p, {y}, l, p;")
    lines.append(f"shr.u32 w, w, {32 - 8 * bits};")
    return "\n".join(["{", *lines, *squares, "mov.b32 $0, w; mov.b32 $1, e; mov.f32 $2, p;", "}"])


def square_table(levels: Levels) -> tuple[list[int], float] | None:
    """The positive levels of 4 bits as integers, and their step; None where levels are no integers times a step, or not
    the same on both sides."""
    found = integers(levels) if len(levels) == 16 and symmetric(levels) else None
    return None if found is None else (found[0][8:], found[1])


def _square_words(levels: Levels) -> list[int]:
    """The integers of `square_table` as bytes of two words; [] where there are none."""
    found = square_table(levels)
    return [sum(n << 8 * i for i, n in enumerate(found[0][at : at + 4])) for at in (0, 4)] if found else []


def _squares_asm(levels: Levels) -> list[str]:
    """PTX: e plus the squares of the integers that are the levels of the 8 codes of w, without a shuffle; $14 has the
    first of _square_words. [] where there are none."""
    words = _square_words(levels)
    if not words:
        return []
    return [
        "not.b32 n, w;", "and.b32 n, n, 0x88888888;", "shr.u32 t, n, 3;", "sub.u32 n, n, t;",  # 7 for codes under 8
        "lop3.b32 n, w, n, 0x77777777, 0x28;",  # (w ^ n) & 7…: the place in the upper half of the table
        f"prmt.b32 t, $14, {words[1]}, n;", "dp4a.u32.u32 e, t, t, e;",
        "shr.u32 n, n, 16;", f"prmt.b32 n, $14, {words[1]}, n;", "dp4a.u32.u32 e, n, n, e;",
    ]  # fmt: skip

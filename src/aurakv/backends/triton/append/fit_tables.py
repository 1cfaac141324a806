"""What kernels for fitted codes read: a fit unpacked, and levels by cells."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....format.codec import Codec
from ....format.fit import AT_ONCE, MOST_AT_ONCE, split
from ....format.levels import Levels
from ..common.arithmetic import float32_bits, integers, poly7_numbers
from .grids import wide_cells

BLOCK = 16  # coordinates, see fit.py


class Unpacked(NamedTuple):
    """A fit as kernels read it."""

    matrix: Tensor  # float16 [kv_heads, dim, dim]: A, with ones on its diagonal
    near: Tensor  # float32 [kv_heads, dim, BLOCK]: of each row what lies in its own block up to the diagonal, there d


class Fours(NamedTuple):
    """A fit of which AT_ONCE neighbours do not make up for each other, as fit_fours.py reads it."""

    matrix: Tensor  # float16 [kv_heads, 2, dim, dim]: A, and its `tiles`
    costs: Tensor  # float32 [kv_heads, dim]: d, `in_lanes`


_unpacked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # fits are constant: each is read once
_fours: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def unpacked(fit: Tensor, dim: int) -> Unpacked:
    found: Unpacked | None = _unpacked.get(fit)
    if found is None:
        with torch.inference_mode(False):
            lower, cost = split(fit, dim, torch.float32)
            row = torch.arange(dim, device=fit.device)[:, None]
            column = row // BLOCK * BLOCK + torch.arange(BLOCK, device=fit.device)
            near = lower.gather(2, column.expand(lower.shape[0], -1, -1))
            near = torch.where(column == row, cost[..., None], near)
            found = Unpacked(lower.to(torch.float16), near.contiguous())
        if not _capturing(fit):  # else filled by replays only
            _unpacked[fit] = found
    return found


def fours(fit: Tensor, dim: int) -> Fours | None:
    """None: a fit of another kind, or of too many coordinates; in a graph also where it was not read before."""
    if fit not in _fours:
        if dim > MOST_AT_ONCE or _capturing(fit):
            return None
        with torch.inference_mode(False):
            lower, cost = split(fit, dim, torch.float32)
            found = None
            if _is_apart(lower):
                both = torch.stack([lower.to(torch.float16), tiles(lower)], 1)
                found = Fours(both, in_lanes(cost).contiguous())
        _fours[fit] = found
    read: Fours | None = _fours[fit]
    return read


def _capturing(fit: Tensor) -> bool:
    return fit.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_apart(lower: Tensor) -> bool:
    """Whether A [kv_heads, dim, dim] has zeros between AT_ONCE neighbours."""
    n = lower.shape[1] // AT_ONCE
    inside = lower.unflatten(2, (n, AT_ONCE)).unflatten(1, (n, AT_ONCE)).diagonal(dim1=1, dim2=3)
    return int(inside.count_nonzero()) == lower.shape[0] * lower.shape[1]


def in_lanes(x: Tensor) -> Tensor:
    """[…, dim] in the order of the lanes of fit_fours: of every 16 coordinates 0 4 8 12, 1 5 …"""
    return x.unflatten(-1, (-1, 4, 4)).transpose(-1, -2).flatten(-3)


def tiles(lower: Tensor) -> Tensor:
    """A [kv_heads, dim, dim] as second factors of products, float16 of that shape. Of each 16 columns, from their own
    16 rows on, the two words of a lane for each half of 16 rows; rows before those are zero, and come last.

    Sum 2c + i of a half h is that of coordinate 8h + 4i + c of the rows; a word has columns c and 4 + c, or 8 more."""
    heads, dim = lower.shape[:2]
    count = dim // BLOCK
    parts = lower.view(heads, count, 2, 2, 4, count, 2, 2, 4)  # head, tile, h, i, c; tile, word, half, c
    # head; tiles of columns, of rows; lane: 8 rows, 4 columns; h, word, half
    order = parts.permute(0, 5, 1, 4, 3, 8, 2, 6, 7)
    column, further = torch.arange(count, device=lower.device)[:, None], torch.arange(count, device=lower.device)
    return order[:, column, (column + further) % count].reshape(heads, dim, dim).to(torch.float16)


def level_unit(levels: Levels) -> tuple[float, int]:
    """A factor, and of how many float16 numbers a level over that is the sum, but for rounding to float32."""
    poly, whole = poly7_numbers(levels), integers(levels)
    if poly is not None or whole is not None:
        return (poly[0] if poly is not None else whole[1]), 1  # type: ignore[index]
    largest = max(abs(x) for x in levels)
    return (float(2.0 ** np.ceil(np.log2(largest))) if largest > 0 else 1.0), 2


def cell_asm(levels: Levels) -> str:
    """PTX: $0 is 2^23 + the cell that $1, over level_unit, lies in, as the bits of a float32 number; of NaN the first
    one. "" where there are no cells."""
    grid = wide_cells(levels)
    if grid is None:
        return ""
    numbers = grid.slope * level_unit(levels)[0], grid.start, len(grid.bounds) - 2.0, 2.0**23
    slope, start, last, magic = (float32_bits(x) for x in numbers)
    return f"fma.rn.sat.f32 $0, $1, {slope}, {start}; fma.rn.f32 $0, $0, {last}, {magic};"


@functools.cache
def _level_cells(levels: Levels, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both forms of `level_cells`, made at the same time: a graph may be captured before the second one is needed."""
    grid, unit = wide_cells(levels), level_unit(levels)[0]
    bounds, below = ([], []) if grid is None else (grid.bounds, grid.below)
    known = (np.array(levels) / unit).astype(np.float32)
    high = known.astype(np.float16)
    halves = np.stack([high, (known - high.astype(np.float32)).astype(np.float16)], 1).view(np.float32)[:, 0]
    first = [(np.array(bounds) / unit).astype(np.float32), np.array(below, np.int32).view(np.float32)]
    at = [np.minimum(np.array(below, np.int64) + n, len(known) - 1) for n in (0, 1)]
    with torch.inference_mode(False):
        whole, in_halves = (torch.from_numpy(np.stack([*first, *(x[i] for i in at)], 1)) for x in (known, halves))
        return whole.to(device), in_halves.to(device)


def level_cells(codec: Codec, in_halves: bool, device: torch.device) -> Tensor:
    """float32 [cells, 4]: the boundary inside a cell, the number of those below as bits, the levels on both
    sides; but for that number over level_unit. in_halves: levels as two float16 numbers, the larger one in the lower
    half of a word. No cells where a table has no grid."""
    return _level_cells(codec.levels, device)[in_halves]

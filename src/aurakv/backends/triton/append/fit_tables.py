"""What kernels for fitted codes read: a fit unpacked, and levels by cells."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....format.codec import Codec
from ....format.fit import split
from ....format.levels import Levels
from ..common.arithmetic import integers, poly7_numbers
from .grids import wide_cells

BLOCK = 16  # coordinates, see fit.py


class Unpacked(NamedTuple):
    """A fit as kernels read it."""

    matrix: Tensor  # float16 [kv_heads, dim, dim]: A, with ones on its diagonal
    near: Tensor  # float32 [kv_heads, dim, BLOCK]: of each row what lies in its own block up to the diagonal, there d


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # fits are constant: each is unpacked once


def unpacked(fit: Tensor, dim: int) -> Unpacked:
    found: Unpacked | None = _known.get(fit)
    if found is None:
        with torch.inference_mode(False):
            lower, cost = split(fit, dim, torch.float32)
            row = torch.arange(dim, device=fit.device)[:, None]
            column = row // BLOCK * BLOCK + torch.arange(BLOCK, device=fit.device)
            near = lower.gather(2, column.expand(lower.shape[0], -1, -1))
            near = torch.where(column == row, cost[..., None], near)
            found = Unpacked(lower.to(torch.float16), near.contiguous())
        if fit.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else filled by replays only
            _known[fit] = found
    return found


def level_unit(levels: Levels) -> tuple[float, int]:
    """A factor, and of how many float16 numbers a level over that is the sum, but for rounding to float32."""
    poly, whole = poly7_numbers(levels), integers(levels)
    if poly is not None or whole is not None:
        return (poly[0] if poly is not None else whole[1]), 1  # type: ignore[index]
    largest = max(abs(x) for x in levels)
    return (float(2.0 ** np.ceil(np.log2(largest))) if largest > 0 else 1.0), 2


@functools.cache
def _level_cells(levels: Levels, device: torch.device) -> Tensor | None:
    grid = wide_cells(levels)
    if grid is None:
        return None
    below = np.array(grid.below, np.int32)
    unit = level_unit(levels)[0]
    known = (np.array(levels) / unit).astype(np.float32)
    table = [(np.array(grid.bounds) / unit).astype(np.float32), below.view(np.float32)]
    table += [known[np.minimum(below + n, len(known) - 1)] for n in (0, 1)]
    with torch.inference_mode(False):
        return torch.from_numpy(np.stack(table, 1)).to(device)


def level_cells(codec: Codec, device: torch.device) -> Tensor | None:
    """float32 [cells, 4]: the boundary inside a cell, the number of those below as bits, the levels on both
    sides; but for that number over level_unit."""
    return _level_cells(codec.levels, device)

"""Appends and encode where codes of a side are fitted with weights: how they are cut, and the launch of encode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....format.codec import Codec
from ....format.fit import MOST_AT_ONCE, SCALES
from ....storage.pages import Pages
from ..common import specialise
from ..common.codes import INTERPRETED
from ..common.target import multiprocessors
from .cut import Cut
from .fit import VECTORS, scratch_size
from .fit_kernels import encode_fitted_kernel
from .fit_tables import fours, level_cells, unpacked

WARPS = 8  # of a multiprocessor, for each side
IN_FOURS = 2  # of a program: a decode has one vector of a sequence and head, which one warp rounds

Side = tuple[Codec, torch.dtype, bool]  # what `specialise.writer` takes first


def cut(pages: Pages, sides: tuple[Side, Side], few: tuple[int, int], blocks: int, device: torch.device) -> Cut:
    """few: rows of a block of a side without weights, and their number. blocks: number of blocks of VECTORS tokens of a
    head."""
    codecs, fits = (pages.format.key, pages.format.value), (pages.key_fit, pages.value_fit)
    key, value = _writers(sides, fits)
    warps = _warps(key, value)
    most = max(blocks if side.fitted else few[1] for side in (key, value))
    programs = min(most, WARPS // warps * multiprocessors(device))
    of_sides = (_fit(*each) for each in zip(codecs, (key, value), fits, strict=True))
    return Cut(
        key, value, few[0], (programs, 2), few[1], {"num_warps": warps, "num_stages": 1},
        fits=tuple(x for side in of_sides for x in side), fitted_blocks=blocks, together=_together(warps, key, value),
        scratch=programs * (key.fitted + value.fitted) * _scratch(warps, key, value),
    )  # fmt: skip


def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor, data: Tensor, scale: Tensor) -> None:
    """x [tokens, heads, dim] into data and scale."""
    tokens, heads = x.shape[:2]
    (how,) = _writers([(codec, x.dtype, offset is not None)], [fit])
    warps = _warps(how)
    programs = min(-(-tokens // VECTORS.value) * heads, WARPS // warps * multiprocessors(x.device))
    encode_fitted_kernel[(programs,)](
        x,
        *x.stride(),
        offset,
        *specialise.constants(codec, how, x.device),
        *_fit(codec, how, fit),
        torch.empty(programs * _scratch(warps, how), dtype=torch.float32, device=x.device),
        data,
        scale,
        codec.row_bytes,
        tokens,
        heads,
        specialise.DTYPES[codec.dtype],
        how,
        _together(warps, how),
        num_warps=warps,
        num_stages=1,
    )


def _writers(sides: Sequence[Side], fits: Sequence[Tensor | None]) -> list[specialise.Writer]:
    """A program has as many warps for its keys as for its values, so neighbours are rounded at once on all sides with a
    fit, or on none."""
    kinds = [specialise.fit_of(fit) for fit in fits]
    at_once = not INTERPRETED.value and all(
        kind != "weights" or fours(fit, side[0].dim) is not None  # type: ignore[arg-type]  # with weights there is a fit
        for side, fit, kind in zip(sides, fits, kinds, strict=True)
    )
    for i, (side, kind) in enumerate(zip(sides, kinds, strict=True)):
        if at_once and kind and side[0].dim <= MOST_AT_ONCE:
            kinds[i] = "fours" if kind == "weights" else "scales in fours"
    return [specialise.writer(*side, fit=kind, few_warps=True) for side, kind in zip(sides, kinds, strict=True)]


def _fit(codec: Codec, how: specialise.Writer, fit: Tensor | None) -> tuple[Tensor | None, ...]:
    if not how.fitted or fit is None:
        return None, None, None
    if how.equal:
        return None, None, level_cells(codec, how.fours, fit.device)
    read = fours(fit, codec.dim) if how.fours else unpacked(fit, codec.dim)
    return *read, level_cells(codec, how.fours, fit.device)  # type: ignore[misc]  # how says that it is in fours


def _scratch(warps: int, *sides: specialise.Writer) -> int:
    """float32 numbers that a program needs for a side."""
    at_once = any(side.fours for side in sides)
    size: int = scratch_size(max(side.how.dim for side in sides), _together(warps, *sides), len(SCALES), at_once)
    return size


def _warps(*sides: specialise.Writer) -> int:
    """What registers hold of 16 vectors. A side without weights that looks cells up does so in shared memory, which
    takes several warps: one alone would hold the whole table in its registers."""
    if any(side.grid and not side.fitted for side in sides):
        return 4
    if any(side.fours for side in sides):
        return IN_FOURS
    return min(4, max(1, *(side.how.columns // 128 for side in sides)))


def _together(warps: int, *sides: specialise.Writer) -> int:
    """Vectors that are rounded together: with all scales one for each lane, or two for each warp."""
    return 2 * warps if any(side.fours for side in sides) else 32 * warps // len(SCALES)

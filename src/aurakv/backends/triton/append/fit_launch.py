"""Appends and encode where codes are fitted with weights: how they are cut, and the launch of encode."""

from __future__ import annotations

import torch
from torch import Tensor

from ....format.codec import Codec
from ....format.fit import SCALES
from ....storage.pages import Pages
from ..common import specialise
from ..common.target import multiprocessors
from .cut import Cut
from .fit import VECTORS, scratch_size
from .fit_kernels import encode_fitted_kernel
from .fit_tables import level_cells, unpacked

WARPS = 8  # of a multiprocessor, for each side

Side = tuple[Codec, torch.dtype, bool]  # what `specialise.writer` takes first


def cut(pages: Pages, sides: tuple[Side, Side], few: tuple[int, int], blocks: int, device: torch.device) -> Cut:
    """few: rows of a block of a side without weights, and their number. blocks: number of blocks of VECTORS tokens of a
    head."""
    codecs, fits = (pages.format.key, pages.format.value), (pages.key_fit, pages.value_fit)
    key, value = (
        specialise.writer(*side, fit=specialise.fit_of(fit), few_warps=True)
        for side, fit in zip(sides, fits, strict=True)
    )
    warps = _warps(key, value)
    most = max(blocks if side.weights else few[1] for side in (key, value))
    programs = min(most, WARPS // warps * multiprocessors(device))
    of_sides = (_fit(*each) for each in zip(codecs, (key, value), fits, strict=True))
    return Cut(
        key, value, few[0], (programs, 2), few[1], {"num_warps": warps, "num_stages": 1},
        fits=tuple(x for side in of_sides for x in side), fitted_blocks=blocks, together=_together(warps),
        scratch=programs * (key.weights + value.weights) * _scratch(max(x.dim for x in codecs), warps),
    )  # fmt: skip


def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor, data: Tensor, scale: Tensor) -> None:
    """x [tokens, heads, dim] into data and scale."""
    tokens, heads = x.shape[:2]
    how = specialise.writer(codec, x.dtype, offset is not None, fit=specialise.fit_of(fit), few_warps=True)
    warps = _warps(how)
    programs = min(-(-tokens // VECTORS.value) * heads, WARPS // warps * multiprocessors(x.device))
    encode_fitted_kernel[(programs,)](
        x,
        *x.stride(),
        offset,
        *specialise.constants(codec, how, x.device),
        *_fit(codec, how, fit),
        torch.empty(programs * _scratch(codec.dim, warps), dtype=torch.float32, device=x.device),
        data,
        scale,
        codec.row_bytes,
        tokens,
        heads,
        specialise.DTYPES[codec.dtype],
        how,
        _together(warps),
        num_warps=warps,
        num_stages=1,
    )


def _fit(codec: Codec, how: specialise.Writer, fit: Tensor | None) -> tuple[Tensor | None, ...]:
    if not how.weights or fit is None:
        return None, None, None
    return *unpacked(fit, codec.dim), level_cells(codec, fit.device)


def _scratch(dim: int, warps: int) -> int:
    """float32 numbers that a program needs for a side."""
    size: int = scratch_size(dim, _together(warps) * len(SCALES))
    return size


def _warps(*sides: specialise.Writer) -> int:
    """What registers hold of 16 vectors. A side without weights that looks cells up does so in shared memory, which
    takes several warps: one alone would hold the whole table in its registers."""
    if any(side.grid and not side.weights for side in sides):
        return 4
    return min(4, max(1, *(side.how.columns // 128 for side in sides)))


def _together(warps: int) -> int:
    """Vectors that are rounded together: with all scales one for each lane."""
    return 32 * warps // len(SCALES)

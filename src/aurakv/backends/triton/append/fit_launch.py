"""Launchers of append and encode where codes are fitted with weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....format.codec import Codec
from ....format.fit import SCALES
from ....storage.pages import Pages
from ..common import specialise
from ..common.launcher import Launch
from ..common.target import multiprocessors
from .fit import VECTORS, scratch_size
from .fit_kernels import append_fitted_kernel, encode_fitted_kernel
from .fit_tables import level_cells, unpacked

WARPS = 8  # of a multiprocessor, for each side


def prepare_append(
    pages: Pages,
    k: Tensor,
    v: Tensor,
    key_scale: Tensor | None,
    place: tuple[Any, ...],
    first: tuple[Any, ...],
    sequences: tuple[int, int, int],
    counted: bool,
    few: tuple[int, int],
    blocks: int,
) -> Launch:
    """launch.prepare_append. place, first, sequences: as its kernel takes them. few: rows of a block of a side without
    weights, and their number. blocks: number of blocks of VECTORS tokens of a head."""
    key, value = pages.format.key, pages.format.value
    changed = key_scale is not None or pages.key_offset is not None
    k_how = specialise.writer(key, k.dtype, changed, fit=specialise.fit_of(pages.key_fit), few_warps=True)
    v_how = specialise.writer(
        value, v.dtype, pages.value_offset is not None, fit=specialise.fit_of(pages.value_fit), few_warps=True
    )
    k_matrix, k_levels, k_bounds = specialise.constants(key, k_how, k.device)
    v_matrix, v_levels, v_bounds = specialise.constants(value, v_how, v.device)
    counts = [blocks if how.weights else few[1] for how in (k_how, v_how)]
    warps = _warps(k_how, v_how)
    programs = min(max(counts), WARPS // warps * multiprocessors(k.device))
    return Launch(
        append_fitted_kernel,
        (programs, 2),
        None,
        *k.stride(),
        None,
        *v.stride(),
        key_scale,
        pages.key_offset,
        pages.value_offset,
        k_matrix,
        v_matrix,
        k_levels,
        v_levels,
        k_bounds,
        v_bounds,
        *_fit(key, k_how, pages.key_fit),
        *_fit(value, v_how, pages.value_fit),
        _scratch(programs * (k_how.weights + v_how.weights), max(key.dim, value.dim), warps, k.device),
        *place,
        *counts,
        *first,
        pages.kv_heads,
        k_how,
        v_how,
        key.row_bytes,
        value.row_bytes,
        specialise.DTYPES[key.dtype],
        specialise.DTYPES[value.dtype],
        counted,
        pages.ring,
        *sequences,
        few[0],
        _together(warps),
        num_warps=warps,
        num_stages=1,
    )


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
        _scratch(programs, codec.dim, warps, x.device),
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


def _scratch(programs: int, dim: int, warps: int, device: torch.device) -> Tensor:
    size = scratch_size(dim, _together(warps) * len(SCALES))
    return torch.empty(programs, size, dtype=torch.float32, device=device)


def _warps(*sides: specialise.Writer) -> int:
    """What registers hold of 16 vectors. A side without weights that looks cells up does so in shared memory, which
    takes several warps: one alone would hold the whole table in its registers."""
    if any(side.grid and not side.weights for side in sides):
        return 4
    return min(4, max(1, *(side.how.columns // 128 for side in sides)))


def _together(warps: int) -> int:
    """Vectors that are rounded together: with all scales one for each lane."""
    return 32 * warps // len(SCALES)

"""Launchers of encode, append, append_codes and decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ....attention.step import Copies, Rows
from ....format.codec import Codec, Codes
from ....storage.pages import Pages
from ..common import specialise
from ..common.launcher import Launch, most_seqs
from ..common.target import multiprocessors
from . import fit_launch
from .cut import Cut
from .encode import encode_kernel
from .fit import VECTORS
from .kernels import append_codes_kernel, append_kernel

FEW_ROWS, MANY_ROWS = 16, 64  # vectors encoded at a time
MANY_VECTORS = 16384
ALONE, REGISTERS = 12, 168  # warps on their own that fit on a multiprocessor, and what they have then


def blocks(tokens: int, seqs: int, rows: int, block: int) -> int:
    """At most how many blocks of slots.find_block there are, whatever tokens each sequence has."""
    return min((tokens * rows + seqs * (block - 1)) // block, tokens * -(-rows // block))


def seqs_constant(rows: Rows) -> int:
    """SEQS of slots.find_block: 0 where the host knows that each sequence has one token."""
    return 0 if rows.single else most_seqs(rows.starts.shape[0] - 1)


def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes:
    data = x.new_empty((*x.shape[:-1], codec.row_bytes), dtype=torch.uint8)
    scale = x.new_empty(x.shape[:-1], dtype=codec.dtype) if codec.coded else None
    flat = x.reshape(-1, *x.shape[-2:])
    n, heads = flat.shape[0] * flat.shape[1], flat.shape[1]
    if n and fit is not None and scale is not None and fit.shape[1]:
        fit_launch.encode(flat, codec, offset, fit, data, scale)
    elif n:
        how = specialise.writer(codec, x.dtype, offset is not None, fit=specialise.fit_of(fit))
        rows = _rows(n, how)
        encode_kernel[(triton.cdiv(n, rows),)](
            flat,
            *flat.stride(),
            offset,
            *specialise.constants(codec, how, x.device),
            data,
            scale,
            codec.row_bytes,
            n,
            heads,
            specialise.DTYPES[codec.dtype],
            how,
            rows,
        )
    return Codes(data, scale)


def append(pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
    if k.shape[0]:
        prepare_append(pages, k, v, rows)(k=k, v=v)


def prepare_append(
    pages: Pages,
    k: Tensor,
    v: Tensor,
    where: Rows,
    key_scale: Tensor | None = None,
    counted: bool = False,
    first_tokens: Copies | None = None,
    recent_tokens: Copies | None = None,
) -> Callable[..., None]:
    """`append` of tensors like k and v, which it takes by name.

    key_scale: float32 [kv_heads, dim], what keys are multiplied by, contiguous. The rest: see `Step`."""
    tokens, key, value = k.shape[0], pages.format.key, pages.format.value
    sequences = _sequences(pages, where, counted)
    cut = _cut(pages, k, v, key_scale is not None, alone=sequences[0] == 0)
    k_matrix, k_levels, k_bounds = specialise.constants(key, cut.key, k.device)
    v_matrix, v_levels, v_bounds = specialise.constants(value, cut.value, v.device)
    launch = Launch(
        append_kernel, cut.grid,
        None, *k.stride(), None, *v.stride(), key_scale, pages.key_offset, pages.value_offset,
        k_matrix, v_matrix, k_levels, v_levels, k_bounds, v_bounds, *cut.fits, None,
        *_place(pages, where, tokens), cut.blocks, cut.fitted_blocks, *_copies(first_tokens),
        *_copies(recent_tokens),
        pages.kv_heads, cut.key, cut.value, key.row_bytes, value.row_bytes, specialise.DTYPES[key.dtype],
        specialise.DTYPES[value.dtype], cut.own, cut.long, counted, pages.ring, *sequences, cut.rows, cut.together,
        **cut.options,
    )  # fmt: skip
    if not cut.scratch:
        return launch

    def with_scratch(k: Tensor, v: Tensor) -> None:  # of each call, as a step is kept for every layer of a model
        launch(k=k, v=v, scratch=torch.empty(cut.scratch, dtype=torch.float32, device=k.device))

    return with_scratch


def _cut(pages: Pages, k: Tensor, v: Tensor, key_scale: bool, alone: bool) -> Cut:
    """alone: the host knows that each sequence has one token."""
    tokens, heads, seqs = k.shape[0], pages.kv_heads, pages.seqs
    sides = (
        (pages.format.key, k.dtype, key_scale or pages.key_offset is not None),
        (pages.format.value, v.dtype, pages.value_offset is not None),
    )
    fits, n = (specialise.fit_of(pages.key_fit), specialise.fit_of(pages.value_fit)), tokens * heads
    if "weights" in fits:
        few = FEW_ROWS, blocks(tokens, seqs, heads, FEW_ROWS)
        return fit_launch.cut(pages, sides, few, blocks(tokens, seqs, 1, VECTORS.value) * heads, k.device)
    key, value = (specialise.writer(*side, fit=fit) for side, fit in zip(sides, fits, strict=True))
    rows = _rows(n, key, value)
    long = n > MANY_VECTORS and tokens >= rows * seqs and pages.page_size >= FEW_ROWS
    options, programs = {"num_warps": 4, **_resources(rows == MANY_ROWS, key, value)}, 4  # of a multiprocessor
    single_warps = long and rows == MANY_ROWS and not any(fits)
    if single_warps and all(specialise.factored(*side) for side in sides) and _aligned(k) and _aligned(v):
        key, value = (specialise.writer(*side, alone=True) for side in sides)
        rows, programs = FEW_ROWS, 2 * ALONE  # values take longer than keys
        options = {"num_warps": 1, "num_stages": 1, "maxnreg": REGISTERS}
    count = blocks(tokens, seqs, 1, rows) * heads if long else blocks(tokens, seqs, heads, rows)
    own = alone and heads <= rows and n <= MANY_VECTORS
    most = count if n <= MANY_VECTORS else min(count, programs * multiprocessors(k.device) // 2)
    return Cut(key, value, rows, (tokens,) if own else (most, 2), count, options, own, long)


def _aligned(x: Tensor) -> bool:
    """Whether 8 neighbouring coordinates of 16 bits can be read at a time."""
    return x.stride(2) == 1 and not (x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8)


def append_codes(pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
    tokens, format = keys.data.shape[0], pages.format
    if tokens == 0:
        return
    count = blocks(tokens, pages.seqs, pages.kv_heads, FEW_ROWS)
    append_codes_kernel[(count,)](
        *(None if x is None else x.contiguous() for x in (*keys, *values)),
        *_place(pages, rows, tokens),
        count,
        pages.kv_heads,
        format.key.row_bytes,
        format.value.row_bytes,
        128,
        pages.ring,
        *_sequences(pages, rows),
        FEW_ROWS,
    )


def _place(pages: Pages, rows: Rows, tokens: int) -> tuple[Any, ...]:
    """What slots and page layout need, in the order of the kernels."""
    layout = pages.format.layout(pages.page_size)
    return (
        pages.data,
        pages.table,
        pages.lengths,
        pages.overflow,
        rows.starts,
        tokens,
        pages.seqs,
        pages.data.shape[0],
        pages.table.shape[1],
        pages.page_size,
        pages.pinned,
        pages.data.shape[2],
        layout.key_codes,
        layout.key_scales,
        layout.value_codes,
        layout.value_scales,
    )


def _copies(copies: Copies | None) -> tuple[Any, ...]:
    """What the kernels take as `first` and `recent`."""
    if copies is None:
        return (None,) * 6
    pages = copies.pages
    data = pages.data.view(pages.format.key.dtype)
    values = pages.format.layout(pages.page_size).value_codes // data.element_size()
    return data, pages.table, pages.lengths, copies.before, data.shape[2], values


def _sequences(pages: Pages, rows: Rows, counted: bool = False) -> tuple[int, int, int]:
    """SEQS, and the shape of the table pieces that advance_lengths checks, which counted lengths do not need."""
    at_once = 64 if counted else min(64, triton.next_power_of_2(pages.seqs))
    return seqs_constant(rows), at_once, 1024 // at_once


def _resources(many: bool, *sides: specialise.Writer) -> dict[str, int]:
    """Many warps without stages of shared memory where codes take few registers; searching boundaries takes many."""
    if all(side.how.bits == 16 or side.groups for side in sides):
        narrow = all(side.how.columns <= 128 for side in sides)
        return {"num_stages": 1, "maxnreg": 128} if many and narrow else {"num_stages": 1}
    return {"num_stages": 3 if all(side.how.chunk == side.how.dim for side in sides) else 1}  # what shared memory holds


def _rows(n: int, *sides: specialise.Writer) -> int:
    """Few vectors spread over many programs; many share the rotation matrix, as far as registers allow."""
    light = all(
        side.how.columns <= 256 and (side.how.bits == 16 or specialise.single_product(side.how)) for side in sides
    )
    return MANY_ROWS if n > MANY_VECTORS and light else FEW_ROWS

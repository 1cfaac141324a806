"""Launcher of unpack: which formats it serves, and how a call is cut."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....format.codec import Codec, Format
from ....storage.pages import Pages
from ..common import specialise
from ..common.launcher import on
from ..common.target import multiprocessors, warp_groups
from .kernel import unpack_kernel

TOKENS = 64  # of a tile
REGISTERS = 168  # of a thread on Hopper: three programs share a multiprocessor
MAX_SEQS = 128  # of a call
PROGRAMS = 4  # of a multiprocessor, at least, while there are heads to share
LEVELS = 2.0**-6, 2.0**15  # the largest of a table: as float16 numbers the others are good enough then
BEHIND = 4  # tiles of zeros behind the last sequence: more than the keys that attention kernels take at a time
WHOLE_DIM = 128  # up to this the matrix that rotates back is loaded once


@functools.cache
def why_not_format(format: Format) -> str | None:
    """Why the kernel cannot read a format, in one sentence."""
    if format.key.dim != format.value.dim:
        return f"keys and values must have the same dim, got {format.key.dim} and {format.value.dim}"
    for codec in (format.key, format.value):
        if codec.coded and not codec.rotates:
            return "it rotates back itself"
        if codec.coded and not LEVELS[0] <= max(map(abs, codec.levels)) <= LEVELS[1]:
            return f"the largest level of a table must be {LEVELS[0]} to {LEVELS[1]}, got {max(map(abs, codec.levels))}"
    return None


def tiles(counts: list[int]) -> int:
    """Of sequences of so many tokens."""
    return sum(-(-count // TOKENS) for count in counts)


def unpack(
    pages: Pages,
    first: int,
    begins: Tensor,
    starts: Tensor,
    tiles: int,
    keys: Tensor,
    values: Tensor,
    key_scale: Tensor | None = None,
    offset: bool = True,
) -> None:
    """Tokens of sequences first, first + 1 … of the pages, from positions begins [n] on, into rows starts [n + 1] of
    keys and values [room, kv_heads, dim], and zeros behind them. All int32 on the device; the host knows at most how
    many `tiles` these are.

    key_scale: float32 [kv_heads, dim], what stored keys were multiplied by. offset: whether keys get theirs back:
    without it all scores of a query change by the same number."""
    key, value, heads, device = pages.format.key, pages.format.value, pages.kv_heads, pages.data.device
    layout, hopper = pages.format.layout(pages.page_size), warp_groups(device)
    parts = max(1, min(heads, -(-PROGRAMS * multiprocessors(device) // tiles)))
    each = -(-heads // parts)
    (key_matrix, key_levels), (value_matrix, value_levels) = _constants(key, device), _constants(value, device)
    on(unpack_kernel, (tiles + BEHIND, -(-heads // each)))(
        pages.data,
        pages.table,
        begins,
        starts,
        keys,
        values,
        key_scale,
        pages.key_offset if offset else None,
        pages.value_offset,
        key_matrix,
        value_matrix,
        key_levels,
        value_levels,
        first,
        begins.shape[0],
        pages.data.shape[0],
        pages.table.shape[1],
        pages.page_size,
        keys.shape[0],
        each,
        pages.data.shape[2],  # an engine's blocks may be padded
        layout.key_codes,
        layout.key_scales,
        layout.value_codes,
        layout.value_scales,
        heads,
        _side(key),
        _side(value),
        _back(key, hopper),
        _back(value, hopper),
        MAX_SEQS,
        TOKENS,
        num_warps=4,
        num_stages=1,
        **({"maxnreg": REGISTERS} if hopper else {}),
    )


def _constants(codec: Codec, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The matrix that rotates back, and the levels."""
    if not codec.coded:
        return None, None
    matrix = specialise.matrix(codec, torch.float16, device, transposed=True)
    return matrix, codec.level_tensor(torch.float32, device)


def _side(codec: Codec) -> specialise.Side:
    """Levels in float16, 16-bit vectors in float32: results have 16 bits."""
    return specialise.side(codec, not codec.coded, torch.float32)


def _back(codec: Codec, hopper: bool) -> tuple[float, int]:
    """What a product with the matrix is multiplied by, and how many coordinates are rotated back at a time: all where
    products read the matrix from shared memory, which then stays there."""
    if not codec.coded:
        return 1.0, codec.dim
    power = codec.dim & -codec.dim
    whole = hopper and power == codec.dim and codec.dim <= WHOLE_DIM
    return specialise.unit(codec), codec.dim if whole else min(power, 64)

"""Many queries a sequence: which calls the extend kernels serve, Hopper's and that of other GPUs, and their launch.

Accuracy ("fast" precision): queries enter the scores as 16-bit integers per head, or with keys of more than 4 bits as
two float16 numbers; weights and values are float16, sums are float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ....attention.partial import Partial
from ....attention.scoring import Scoring
from ....attention.step import Rows
from ....format.codec import Codec, Format
from ....storage.pages import Pages
from ..append.launch import blocks
from ..common import specialise
from ..common.arithmetic import integers, poly7_numbers, polynomial
from ..common.launcher import most_seqs, on
from ..common.queries import prepare_integers_kernel, prepare_kernel
from ..common.results import LOG2E, finish
from ..common.target import LEAST_CAPABILITY, OWN_SHARED, capability, multiprocessors, target_of, warp_groups
from ..decode.levels import minifloat_step
from .codes import key_asm, value_asm, wide_asm
from .kernel import extend_kernel
from .warps import extend_warps_kernel

ROWS = 128  # of a program
FEW_ROWS = 64  # of one, if shared memory does not hold two of ROWS
KEYS = 64  # of a tile
WARP_KEYS = 32  # of one where warps multiply: more would not find registers
LEAST_ROWS = 65  # a sequence; fewer are the decode kernel's or the portable kernel's
MOST_LEVEL = 32768.0  # of values: they are float16 numbers
DIMS = (64, 128)
MAX_SEQS = 4096
MAX_SPLITS = 16
LEAST_KEYS = 512  # a split reads at least this many
PREPARED = 64  # queries rotated by a program


class Arithmetic(NamedTuple):
    """How the kernel makes the levels of a format."""

    key: tuple[int, str]  # bits, PTX
    key_step: float  # up to 4 bits a key level is an integer times this
    value: tuple[int, str]
    value_step: float
    order: str  # of values' coordinates, see extend_decode


def why_not_call(q: Tensor, pages: Pages, scoring: Scoring, precision: str) -> str | None:
    """None if `launch` serves this call, else one sentence that says why not."""
    device = pages.data.device
    if capability(device) < LEAST_CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    return why_not_shape(q, pages, scoring, precision)


def why_not_shape(q: Tensor, pages: Pages, scoring: Scoring, precision: str) -> str | None:
    """The part of why_not_call that does not depend on whether there is a device."""
    if precision != "fast":
        return f"its precision is 'fast', got {precision!r}"
    if q.shape[0] * q.shape[1] < LEAST_ROWS * pages.seqs * pages.kv_heads or pages.seqs > MAX_SEQS:
        return "it takes many queries of few sequences"
    if scoring.softcap is not None:
        return "it knows no soft cap"
    keys = _keys(pages.data.device)
    if pages.page_size % keys and (pages.table.shape[1] > 1 or pages.ring):
        return f"pages must be multiples of {keys} tokens, got {pages.page_size}"
    return why_not_format(pages.format)


def kernel_of(pages: Pages) -> str:
    """What serves calls over these pages, in a few words."""
    return f"extend kernel, products of {'warp groups' if warp_groups(pages.data.device) else 'single warps'}"


@functools.cache
def why_not_format(format: Format) -> str | None:
    """Why the kernel cannot read a format."""
    key, value = format.key, format.value
    if key.dim != value.dim or key.dim not in DIMS:
        return f"keys and values must have the same dim, one of {list(DIMS)}, got {key.dim} and {value.dim}"
    if 16 in (key.bits, value.bits) or key.dtype != torch.float16 or value.dtype != torch.float16:
        return f"it reads codes with float16 scales, got {format}"
    return None if arithmetic(format) is not None else f"it has no arithmetic for the level tables of {format}"


@functools.cache
def arithmetic(format: Format) -> Arithmetic | None:
    key, value = _key(format.key), _value(format.value)
    return None if key is None or value is None else Arithmetic(key[0], key[1], *value)


def _key(codec: Codec) -> tuple[tuple[int, str], float] | None:
    """Bits and PTX, and what an integer level is worth."""
    if codec.bits > 4:
        wide = _wide(codec, scaled=False)
        return None if wide is None else (wide[0], 1.0)
    found = integers(codec.levels)
    if found is None or (codec.bits == 4 and not found[0][7] < 0 <= found[0][8]):
        return None
    return (codec.bits, key_asm(found[0], codec.bits)), found[1]


def _value(codec: Codec) -> tuple[tuple[int, str], float, str] | None:
    """Bits and PTX, what scales are to be multiplied by, the order of coordinates."""
    levels = codec.levels
    if codec.bits > 4:
        wide = _wide(codec, scaled=True)
        return None if wide is None else (*wide, _order(codec))
    if max(map(abs, levels)) > MOST_LEVEL:
        return None
    if codec.bits < 4:
        return (codec.bits, value_asm("table", levels)), 1.0, "natural"
    if coef := polynomial(levels):  # of the distance from the middle over 8
        return (4, value_asm("cubic", (coef[1] / 8, coef[2] / 512))), 1.0, "fourth"
    found = minifloat_step(levels)
    return None if found is None or found > 0.9 * 65536 else ((4, value_asm("minifloat", ())), found, "fourth")


def _wide(codec: Codec, scaled: bool) -> tuple[tuple[int, str], float] | None:
    """Bits and PTX, and the factor of the table `poly7`."""
    poly = poly7_numbers(codec.levels)
    return None if poly is None else ((codec.bits, wide_asm(codec.bits, poly[1:], scaled)), poly[0])


def _order(codec: Codec) -> specialise.Order:
    """Of the coordinates of wide codes."""
    return "bytes" if codec.bits == 8 else "halves"


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    return sum(_sizes(pages, tokens, heads, _splits(pages, tokens, heads, splits)))


def attend(
    q: Tensor,
    pages: Pages,
    rows: Rows,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    splits: int | None,
    workspace: Tensor | None,
) -> Partial:
    """`reference.attend` for the calls that `why_not_call` lets pass. Reads no device memory on the host."""
    tokens, heads = q.shape[:2]
    key, value, n, group = pages.format.key, pages.format.value, tokens * heads, heads // pages.kv_heads
    how = arithmetic(pages.format)
    assert how is not None
    chosen = _splits(pages, tokens, heads, splits)
    sizes = _sizes(pages, tokens, heads, chosen)
    if workspace is None:
        workspace = torch.empty(sum(sizes), dtype=torch.uint8, device=q.device)
    means, sums, factors, parts = (piece.view(dtype) for piece, dtype in zip(
        workspace[: sum(sizes)].split(sizes), (torch.float32, torch.float32, torch.float32, _part(key)), strict=True
    ))  # fmt: skip
    out = q.new_empty(tokens, heads, value.dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    rotate = specialise.encoder(key, q.dtype, False)
    dtype = next(dtype for dtype, name in specialise.DTYPES.items() if name == rotate.operand)
    grid = (pages.kv_heads, triton.cdiv(tokens * group, PREPARED))
    multiplier = scoring.multiplier(key.dim) * LOG2E.value
    if key.bits > 4:
        matrix = specialise.matrix(key, dtype, q.device, order=_order(key))
        side = specialise.side(key, False, q.dtype, key=True)
        on(prepare_kernel, grid)(
            q, *q.stride(), pages.key_offset, matrix, parts, factors, n, multiplier, heads, group, side, rotate,
            PREPARED,
        )  # fmt: skip
    else:
        matrix = specialise.matrix(key, dtype, q.device, order="natural")
        on(prepare_integers_kernel, grid)(
            q, *q.stride(), pages.key_offset, matrix, parts, factors, n, multiplier, how.key_step, heads, group, rotate,
            PREPARED,
        )  # fmt: skip
    layout = pages.format.layout(pages.page_size)
    paged = pages.table.shape[1] > 1 or pages.ring
    block, tile = _rows(pages), _keys(q.device)
    kernel = extend_kernel if warp_groups(q.device) else extend_warps_kernel
    on(kernel, (blocks(tokens, pages.seqs, group, block), pages.kv_heads, chosen))(
        parts,
        factors,
        pages.data.view(torch.int32),
        pages.data.view(torch.float16),
        pages.table,
        pages.lengths,
        rows.starts,
        ends,
        means,
        sums,
        tokens,
        pages.seqs,
        pages.kv_heads,
        pages.data.shape[0],
        pages.table.shape[1],
        pages.table.shape[1] * pages.page_size,
        pages.pinned,
        pages.data.shape[2],
        *layout[:4],
        scoring.window or 0,
        scoring.sinks,
        scoring.first,
        scoring.recent,
        chosen,
        1 if splits is not None else LEAST_KEYS // tile,
        how.value_step,
        group,
        key.dim,
        how.key,
        how.value,
        how.order,
        pages.page_size if paged else 0,
        pages.ring,
        most_seqs(pages.seqs),
        scoring.causal,
        scoring.window is not None,
        2 if scoring.only_uncompressed else 1 if scoring.first or scoring.recent else 0,
        block,
        tile,
        num_warps=4,
        maxnreg=None if kernel is extend_kernel else 255,
    )
    finish(means, sums, value, False, pages.value_offset, sink_logits, out, lse, pages.kv_heads, chosen)
    return Partial(out, lse)


def _keys(device: torch.device) -> int:
    """Of a tile."""
    return KEYS if warp_groups(device) else WARP_KEYS


def _rows(pages: Pages) -> int:
    """Of a program."""
    return ROWS if warp_groups(pages.data.device) or _residents(pages, ROWS) > 1 else FEW_ROWS


def _residents(pages: Pages, rows: int) -> int:
    """Programs that share a multiprocessor, up to two."""
    if warp_groups(pages.data.device):
        return 1
    dim, part = pages.format.key.dim, _part(pages.format.key).itemsize
    shared = (2 * rows + WARP_KEYS) * dim * part + WARP_KEYS * dim * 2 + 2 * OWN_SHARED
    return max(1, min(2, target_of(pages.data.device).shared // shared))


def _splits(pages: Pages, tokens: int, heads: int, given: int | None) -> int:
    """As many as fill the multiprocessors best; from shapes alone."""
    if given is not None:
        return given
    block = _rows(pages)
    rows = -(-tokens // pages.seqs) * (heads // pages.kv_heads)
    programs = pages.seqs * -(-rows // block) * pages.kv_heads
    places = multiprocessors(pages.data.device) * _residents(pages, block)
    most = max(1, min(MAX_SPLITS, pages.table.shape[1] * pages.page_size // LEAST_KEYS))
    return min(range(1, most + 1), key=lambda n: (-(-programs * n // places)) / n * (1 + 0.02 * n))


def _sizes(pages: Pages, tokens: int, heads: int, splits: int) -> tuple[int, int, int, int]:
    """Bytes of means, sums, factors and parts of queries."""
    n, format = tokens * heads, pages.format
    parts = n * 2 * format.key.dim * _part(format.key).itemsize
    return n * splits * format.value.dim * 4, -(-n * splits // 4) * 16, n * 8, parts


def _part(key: Codec) -> torch.dtype:
    """Of a query."""
    return torch.float16 if key.bits > 4 else torch.int8

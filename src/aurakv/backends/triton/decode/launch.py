"""Decode: which calls its kernels serve, and their launch. Everything else is the portable kernel's.

Accuracy ("fast" precision): queries enter the scores as 16-bit integers per head, or with keys of more than 4 bits as
two float16 numbers; weights times value scales are float16, sums are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....attention.partial import Partial
from ....attention.scoring import Scoring
from ....attention.step import Rows
from ....format.codec import Codec, Format
from ....format.rotation import base_order, hadamard
from ....storage.pages import Pages
from ..common.launcher import Launch, most_seqs
from ..common.target import LEAST_CAPABILITY, OWN_SHARED, Target, capability, multiprocessors, target_of
from .kernel import decode_attention
from .levels import MINIFLOAT, TABLE, Levels
from .levels import levels as level_arithmetic
from .merge import merge_pieces
from .piece_queries import query_bytes
from .shapes import CODE_BITS, DIMS, MOST_ROWS, flat, in_pieces, padded

MAX_SEQS = 1024
MAX_JOBS = 4  # of a KV head on average: each reads the keys anew
MOST_JOBS = 16  # where no other kernel knows which uncompressed tokens a sequence has, as in steps with many drafts
MAX_UNCOMPRESSED = 16  # first tokens that `merge_pieces` scores
STAGES = 2
ALONE_TILES = 3  # jobs of up to this many are a program each, which finishes its own rows: one launch
ALONE_TILES_OF_MANY = 8  # where jobs alone keep every multiprocessor busy
MANY = 3  # jobs for each of them
LEAST_TILE = 16  # tokens
MOST_TILES = 47 * 1024  # bytes of tiles and queries: a kernel declares at most 48 KiB itself


def why_not_call(q: Tensor, pages: Pages, scoring: Scoring, precision: str, jobs: int = MAX_JOBS) -> str | None:
    """None if `attend` serves this call, else one sentence that says why not. jobs: of a KV head, at most."""
    device, group = pages.data.device, q.shape[1] // pages.kv_heads
    if capability(device) < LEAST_CAPABILITY:
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"queries are float16, bfloat16 or float32, got {q.dtype}"
    if precision != "fast":
        return f"its precision is 'fast', got {precision!r}"
    if not 1 <= pages.seqs <= MAX_SEQS:
        return f"it takes 1 to {MAX_SEQS} sequences, got {pages.seqs}"
    if (reason := why_not_format(pages.format)) is not None:
        return reason
    most = jobs * max_rows(pages.format)
    if not 1 <= q.shape[0] * group <= most * pages.seqs:
        return f"it takes up to {most} queries times heads of a group, got {q.shape[0] * group}"
    if pages.page_size != 16 and (pages.page_size < 32 or (pages.page_size % 32 and pages.table.shape[1] > 1)):
        return f"pages must be of 16 or multiples of 32 tokens, or one of at least 32 a sequence, got {pages.page_size}"
    if scoring.only_uncompressed:
        return "it does not score uncompressed tokens"
    return None


@functools.cache
def why_not_format(format: Format) -> str | None:
    """Why the kernel cannot read a format."""
    key, value = format.key, format.value
    if key.dim != value.dim:
        return f"keys and values must have the same dim, got {key.dim} and {value.dim}"
    if not (key.rotates and value.rotates):
        return "it rotates queries and results itself"
    for side in (key, value):
        if side.bits not in CODE_BITS or side.dim not in DIMS:
            return f"it reads codes of {list(CODE_BITS)} bits and dims {list(DIMS)}, got {format} of {side.dim}"
    if level_arithmetic(format) is None:
        return f"it has no arithmetic for the level tables of {format}"
    if STAGES * LEAST_TILE * format.bytes_per_token + _query_bytes(format, 8) > MOST_TILES:
        return f"tiles of {format} of {key.dim} and their queries take more shared memory than a kernel may declare"
    return None


def kernel_of(pages: Pages) -> str:
    """What serves calls over these pages, in a few words."""
    return f"decode kernel, tiles by {'TMA' if _bulk(pages) else 'copies of 16 bytes'}"


def max_rows(format: Format) -> int:
    """Of a job."""
    return MOST_ROWS[format.key.dim]


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    """Enough for every call of this size: whether there is one query a sequence is known only then."""
    group = heads // pages.kv_heads
    plans = [
        _plan(pages, tokens, group, several, splits)
        for several in (True, False)
        if several or group <= max_rows(pages.format)
    ]
    return max(plan.slots * plan.rows for plan in plans) * (pages.format.value.dim + 1) * 4


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
    return prepare(q, pages, rows, ends, scoring, sink_logits, splits, None, None)(q, workspace)


def prepare(
    q: Tensor,
    pages: Pages,
    where: Rows,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    splits: int | None,
    uncompressed: Pages | None,
    key_scale: Tensor | None,
    recent: Pages | None = None,
) -> Callable[..., Partial]:
    """A function of queries like q, a workspace and where results go (each or None), which attends.

    uncompressed: pages of 16-bit vectors of the first tokens, if `serves_uncompressed`: they are scored, too, as far as
    pages.lengths go. recent: likewise, of the last tokens, which lie beyond these lengths.
    key_scale: float32, what q is divided by."""
    tokens, heads, dim = q.shape
    format, device, group, seqs = pages.format, q.device, heads // pages.kv_heads, pages.seqs
    levels = level_arithmetic(format)
    assert levels is not None
    several = not where.single or group > max_rows(format)
    rows, jobs, programs, slots = _plan(pages, tokens, group, several, splits)
    bulk, tile = _bulk(pages), _tile(pages, rows)
    scattered = q.stride(2) != 1 or q.stride(1) != dim or q.stride(0) < heads * dim
    stride = heads * dim if scattered else q.stride(0)
    ends = ends.contiguous()
    sinks = scoring.sinks if scoring.window is not None else 0
    held = scoring.first if uncompressed is None else uncompressed.lengths  # a sequence may have fewer there, or none
    scan = (held, scoring.recent, scoring.window or 0, sinks)
    flags = {
        "GROUP": group,
        "ROWS": rows,
        "DIM": dim,
        "TILE": tile,
        "EARLY": target_of(device).bulk,
        "SEQS": most_seqs(seqs),
        "CLIP": scoring.causal or scoring.recent > 0,
        "WINDOW": scoring.window is not None,
        "SINKS": sinks > 0,
        "SEVERAL": several,
    }
    cap = scoring.softcap
    multiplier = scoring.multiplier(dim) * math.log2(math.e) * (2 / cap if cap else 1)
    keys, values, scales = _descriptors(pages, tile) if bulk else (None, None, None)
    layout = format.layout(pages.page_size)
    key_signs, value_signs = _signs(format.key, False, device), _signs(format.value, True, device)

    def given(x: Tensor | None) -> Tensor:
        return key_signs if x is None else x  # an address that is not read

    many = jobs >= MANY * multiprocessors(device)
    seen = _seen_tiles(pages, scoring, 1 if where.single else tokens, rows)
    alone = splits is None and seen <= (ALONE_TILES_OF_MANY if many else ALONE_TILES)
    logits, value_offset = given(sink_logits), given(pages.value_offset)
    vectors = *_vectors(uncompressed, key_signs, ends), *_vectors(recent, key_signs, ends)
    ends_with = {
        "LOGITS": sink_logits is not None,
        "KEY_OFFSET": pages.key_offset is not None and cap is None,
        "VALUE_OFFSET": pages.value_offset is not None,
        "UNCOMPRESSED": uncompressed is not None,
        "RECENT": recent is not None,
    }
    unread = (*[key_signs] * 5, *_vectors(None, key_signs, ends) * 2)  # what `merge_pieces` gets otherwise
    decode = Launch(
        decode_attention, (jobs if alone else programs,),
        keys, values, scales, pages.data.view(torch.int16), None, given(key_scale), key_signs,
        _constants(levels, device), given(pages.key_offset), pages.table, pages.lengths, ends, where.starts, None, None,
        *((None, None, logits, value_signs, value_offset, *vectors) if alone else unread),
        seqs, tokens, pages.kv_heads, pages.table.shape[1], pages.pinned, _page_tiles(pages, rows), *scan, cap or 0.0,
        multiplier * levels.key.step, multiplier, levels.value.step, levels.value.shift / levels.value.step,
        stride, programs, pages.data.shape[2] // 16, pages.page_size, layout.key_codes // 16, layout.value_codes // 16,
        math.log2(scoring.threshold or 1.0),
        KEY_BITS=format.key.bits, VALUE_BITS=format.value.bits, KEY_LEVELS=levels.key.kind,
        VALUE_LEVELS=levels.value.kind, SOFTCAP=cap is not None,
        OFFSET=cap is not None and pages.key_offset is not None, STAGES=STAGES,
        WHOLE=_whole(pages, rows), KEY_SCALE=key_scale is not None, ALONE=alone,
        BULK=bulk, PAGES=_pages_of_a_tile(pages, rows),
        KEY_SCALES=format.key.scale_bytes, VALUE_SCALES=format.value.scale_bytes,
        THRESHOLD=scoring.threshold > 0,
        **{key: on and (alone or key == "UNCOMPRESSED") for key, on in ends_with.items()}, **flags,
        num_warps=1, maxnreg=_registers_of(target_of(device), format, rows, tile),
    )  # fmt: skip
    size = slots * rows * (dim + 1) * 4
    chunk, together, across = _merge_plan(jobs, rows, programs, padded(dim), several, device)
    merge = Launch(
        merge_pieces, (jobs, -(-rows // together)),
        None, None, None, None, logits, value_signs, None, given(key_scale), given(pages.key_offset), value_offset,
        pages.lengths, ends, where.starts, *vectors,
        seqs, tokens, pages.kv_heads, *scan, multiplier, stride, programs, heads * dim,
        KEY_SCALE=key_scale is not None, CHUNK=chunk, HEADS=together, ACROSS=across, ALONE=False, **ends_with, **flags,
        num_warps=max(across, min(4, together)), launch_pdl=flags["EARLY"],
    )  # fmt: skip

    def run(q: Tensor, workspace: Tensor | None = None, out: Tensor | None = None) -> Partial:
        q = q.contiguous() if scattered else q
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if workspace is None else workspace[:size]
        pieces = workspace.view(torch.float32)
        lses = pieces[slots * rows * dim :]
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
        if alone:
            decode(q=q, pieces=pieces, lses=lses, out=out, lse_out=lse)
        else:
            decode(q=q, pieces=pieces, lses=lses)
            merge(pieces=pieces, lses=lses, out=out, lse_out=lse, q=q)
        return Partial(out, lse)

    return run


def serves_uncompressed(uncompressed: Pages, scoring: Scoring) -> bool:
    """Whether `prepare` scores a few uncompressed tokens by the way, first or recent ones."""
    key, value = uncompressed.format.key, uncompressed.format.value
    same = (
        uncompressed.table.shape[1] == 1 and not uncompressed.ring and key.dim == value.dim and key.dtype == value.dtype
    )
    small = key.dtype != torch.float32 and scoring.first <= MAX_UNCOMPRESSED
    return same and small and not scoring.recent and scoring.window is None and scoring.softcap is None


def _vectors(uncompressed: Pages | None, floats: Tensor, numbers: Tensor) -> tuple[Tensor | int, ...]:
    """What `merge_pieces` needs to know about them; without them, addresses that are not read."""
    if uncompressed is None:
        return floats, numbers, numbers, 0, 0, 0
    layout = uncompressed.format.layout(uncompressed.page_size)
    data = uncompressed.data.view(uncompressed.format.key.dtype)
    return data, uncompressed.table, uncompressed.lengths, data.shape[2], layout.key_codes // 2, layout.value_codes // 2


class DecodePlan(NamedTuple):
    """How a call is cut: from shapes and the device alone, so that a captured graph stays right."""

    rows: int  # of a job
    jobs: int  # at most
    programs: int  # that share the tiles
    slots: int  # for pieces


def _plan(pages: Pages, tokens: int, group: int, several: bool, splits: int | None) -> DecodePlan:
    rows = group
    if several:
        rows = 8 if -(-tokens // pages.seqs) * group <= 8 else max_rows(pages.format)
    jobs = pages.kv_heads * (pages.seqs + (tokens * group // rows if several else 0))
    most, device = jobs * _all_tiles(pages, rows), pages.data.device
    units, residents = multiprocessors(device), _residents(target_of(device), pages.format, rows, _tile(pages, rows))
    while (
        residents > 4 and most < residents * units * residents
    ):  # where tiles are few, fewer programs have less overhead
        residents -= 4
    programs = max(1, min(most, units * residents)) if splits is None else jobs * splits
    return DecodePlan(rows, jobs, programs, 2 * programs + jobs)


def _seen_tiles(pages: Pages, scoring: Scoring, queries: int, rows: int) -> int:
    """At most, of a job of a sequence with so many queries."""
    tile, all = _tile(pages, rows), _all_tiles(pages, rows)
    if scoring.window is None:
        return all
    return min(all, 1 + -(-(scoring.window + queries - 2) // tile) + -(-scoring.sinks // tile))


def _merge_plan(
    jobs: int, rows: int, programs: int, dim: int, several: bool, device: torch.device
) -> tuple[int, int, int]:
    """CHUNK, HEADS and ACROSS of `merge_pieces`: few warps that each have up to 4096 numbers of one row. Calls of
    several queries a sequence vary more, and each choice is a kernel of its own: they have fewer."""
    chunk = min(256, max(4, triton.next_power_of_2(programs // jobs + 2)))
    if several:
        chunk *= 2 if chunk in (8, 32, 128) else 1
        return chunk, *((triton.next_power_of_2(rows), 1) if chunk < 64 else (1, max(2, chunk * dim // 4096)))
    together = 1 if jobs * rows <= 4 * multiprocessors(device) else triton.next_power_of_2(rows)
    return chunk, together, max(2, chunk * dim // 4096) if together == 1 else 1


def _bulk(pages: Pages) -> bool:
    """Whether tiles travel by TMA, which takes 32 tokens or more of a page."""
    return target_of(pages.data.device).bulk and pages.page_size >= 32


def _tile(pages: Pages, rows: int) -> int:
    """Tokens of a tile: whole pages or a part of one; the programs of a multiprocessor fit it with two tiles each."""
    format, target, size = pages.format, target_of(pages.data.device), pages.page_size
    parted = pages.table.shape[1] > 1 and size % 64 and (_bulk(pages) or 64 % size)
    wide = format.key.bits in (5, 6) and format.key.dim > 96  # these keys need many registers
    large = format.bytes_per_token > 190 or wide
    if parted or rows > 8 or large:
        return 32 if STAGES * 32 * format.bytes_per_token + _query_bytes(format, rows) <= MOST_TILES else LEAST_TILE
    return 64 if _fitting(target, format, rows, 64) >= min(8, _wanted(format, rows)) else 32


def _pages_of_a_tile(pages: Pages, rows: int) -> int:
    return max(1, _tile(pages, rows) // pages.page_size) if pages.table.shape[1] > 1 else 1


def _page_tiles(pages: Pages, rows: int) -> int:
    return -(-pages.page_size // _tile(pages, rows))


def _all_tiles(pages: Pages, rows: int) -> int:
    """That a sequence can have."""
    return -(-pages.table.shape[1] * _page_tiles(pages, rows) // _pages_of_a_tile(pages, rows))


def _whole(pages: Pages, rows: int) -> int:
    """0: a tile may reach beyond its page. 2: a page of flat rows is a tile, and one copy."""
    tile = _tile(pages, rows)
    if pages.page_size % tile and _pages_of_a_tile(pages, rows) == 1:
        return 0
    both = all(flat(side.bits, side.dim) for side in (pages.format.key, pages.format.value))
    return 2 if pages.page_size == tile and both else 1


def _residents(target: Target, format: Format, rows: int, tile: int) -> int:
    """Programs that share a multiprocessor: as many for each of its four parts, if shared memory holds their tiles.

    Of 4 to 8, 6 were faster than 5 or 4, and 8 of which 7 fit faster than 6 (docs/lab/gpu.md)."""
    residents, most = _wanted(format, rows), _fitting(target, format, rows, tile)
    if residents <= most or (residents, most) == (8, 7):
        return residents
    return most // 4 * 4 if most >= 8 else most // 2 * 2 if most >= 4 else max(1, most)


def _registers_of(target: Target, format: Format, rows: int, tile: int) -> int:
    """Of a thread: more for wide keys and those of two tables, where shared memory leaves room for fewer programs than
    would help."""
    levels = level_arithmetic(format)
    many = format.key.bits > 4 or (levels is not None and levels.key.kind == TABLE)
    fewer = _residents(target, format, rows, tile) < _wanted(format, rows)
    return 255 if fewer and many and rows <= 4 else _registers(format, rows)


def _wanted(format: Format, rows: int) -> int:
    """Programs that help: two to four for each part of a multiprocessor, by registers and by what bounds them."""
    few = format.value.bits == 4 and format.key.dim == 128 and format.key.bits <= 4  # reading bounds these: 8 do
    return 8 if few or _registers(format, rows) > 168 else 16 if _registers(format, rows) <= 128 else 12


def _fitting(target: Target, format: Format, rows: int, tile: int) -> int:
    """Programs whose shared memory a multiprocessor has: their tiles and the parts of their queries."""
    within = in_pieces(format.key.bits, format.key.dim)  # queries are part of the ring
    ring, queries = STAGES * tile * format.bytes_per_token, _query_bytes(format, rows)
    ring += (8 * STAGES if target.bulk or within else 0) + (queries if within else 0)
    size = -(-ring // 128) * 128 + (64 if within else queries + 4 * _heads(rows))  # the last is Triton's
    return target.shared // (size + OWN_SHARED)


def _query_bytes(format: Format, rows: int) -> int:
    """Of the parts of a job's queries, in shared memory."""
    size: int = query_bytes(format.key.dim, format.key.bits, _heads(rows))
    return size


def _heads(rows: int) -> int:
    """That a product has, for the rows of a job."""
    return 4 if rows <= 4 else 8 if rows <= 8 else 16


def _registers(format: Format, rows: int) -> int:
    """Registers of a thread: as many as the programs that share a multiprocessor leave, and help."""
    key, value = format.key, format.value
    levels = level_arithmetic(format)
    assert levels is not None
    large = key.dim >= 256 or (key.dim == 128 and levels.key.kind == TABLE)
    if rows > 8 or large or value.bits == 8 or (key.bits == 8 and value.bits < 4):
        return 255
    looked_up = TABLE in (levels.key.kind, levels.value.kind)
    if key.dim == 64 and key.bits == value.bits == 4 and rows <= 4 and not looked_up:
        return 128
    minifloat = value.bits == 4 and levels.value.kind == MINIFLOAT
    if (key.bits == 3 and minifloat) or (key.bits <= 4 and value.bits in (5, 6)):
        return 216
    return 168 if key.dim == 64 or key.bits > 4 or rows <= 4 or (value.bits == 4 and not minifloat) else 216


def _descriptors(pages: Pages, tile: int) -> tuple[TensorDescriptor, ...]:
    """What TMA needs to know about codes and scales: [pages · kv_heads, …]; kept with the pages."""
    name = f"descriptors of {tile}"
    known: tuple[TensorDescriptor, ...] | None = pages.memo.get(name)
    if known is None:
        layout = pages.format.layout(pages.page_size)
        words = pages.data.view(torch.int16)  # [pages, kv_heads, bytes / 2]
        pieces, size = words.shape[0] * words.shape[1], words.shape[2]
        swizzled = gl.NVMMASharedLayout(128, 16, rank=4)  # lines of 128 bytes, the widest that TMA swizzles
        key, value = pages.format.key, pages.format.value
        both = 2 if key.bits == value.bits and not flat(key.bits, key.dim) else 1

        def codes(at: int, codec: Codec) -> TensorDescriptor:
            start = words.storage_offset() + at // 2
            if flat(codec.bits, codec.dim):  # not used: `tile_ring` copies these
                row = codec.row_bytes // 16 * 8
                view = words.as_strided((pieces, 1, pages.page_size, row), (size, size, row, 1), start)
                return TensorDescriptor.from_tensor(view, [1, 1, tile, 32], gl.NVMMASharedLayout(64, 16, rank=4))
            lines = -(-pages.page_size * codec.row_bytes // 128)
            view = words.as_strided((pieces, both, lines, 64), (size, layout.value_codes // 2, 64, 1), start)
            return TensorDescriptor.from_tensor(view, [1, both, tile * codec.row_bytes // 128, 64], swizzled)

        between = (layout.value_scales - layout.key_scales) // 2
        at = words.storage_offset() + layout.key_scales // 2
        scales = words.as_strided((pieces, 2, pages.page_size), (size, between, 1), at).view(torch.float16)
        known = (
            codes(layout.key_codes, key),
            codes(0 if both == 2 else layout.value_codes, value),
            TensorDescriptor.from_tensor(scales, [1, 2, tile], gl.NVMMASharedLayout(0, 16, rank=3)),
        )
        pages.memo[name] = known
    return known


@functools.cache
def _signs(codec: Codec, turned: bool, device: torch.device) -> Tensor:
    """Signs / √dim, and behind them the columns (turned: rows) of the matrix that is doubled, padded with zeros."""
    run = base_order(codec.dim)
    with torch.inference_mode(False):
        signs = torch.tensor(codec.sign_list(), dtype=torch.float32) / math.sqrt(codec.dim)
        matrix = torch.zeros(run, triton.next_power_of_2(run))
        least = hadamard(codec.dim)[:run, :run]
        matrix[:, :run] = least if turned else least.T
        return torch.cat([signs, matrix.flatten()]).to(device)


@functools.cache
def _constants(levels: Levels, device: torch.device) -> Tensor:
    """One row of 32 equal words for each constant, the ninth: the lanes whose column of the weights is even."""
    rows = [[word - (1 << 32) if word >> 31 else word] * 32 for word in levels.words]
    even = [-1 if lane // 4 % 2 == 0 else 0 for lane in range(32)]
    with torch.inference_mode(False):
        return torch.tensor([*rows[:8], even, *rows[8:]], dtype=torch.int32, device=device)

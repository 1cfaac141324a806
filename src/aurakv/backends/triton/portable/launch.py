"""Launchers of the portable attention kernel, on pages and on dense vectors: tile sizes, splits, workspace."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....attention.partial import Partial
from ....attention.scoring import Scoring
from ....attention.step import Rows
from ....errors import InputError
from ....format.codec import Codec, Format
from ....storage.pages import Pages
from ..append.launch import blocks, seqs_constant
from ..common import specialise
from ..common.launcher import on
from ..common.queries import prepare_kernel
from ..common.results import LOG2E, finish
from ..common.target import multiprocessors
from .kernel import attend_kernel

LEAST_KEYS = 256  # a split reads at least this many
WARPS_PER_SM = 8  # of programs that run at the same time
MAX_SPLITS = 256
FUSED_ROWS = 32  # a program of up to this many rows and …
FUSED_WIDTH = 256  # … this many columns and …
FUSED_KEYS = 1024  # … keys rotates its own queries and results: one launch


class AttendPlan(NamedTuple):
    """How one call is cut into programs; from shapes alone."""

    rows: int  # of queries in a tile
    keys: int  # in a tile
    blocks: int  # of rows
    splits: int
    least: int  # tiles per split
    prepared: bool  # queries are rotated by a kernel of their own
    finished: bool  # results are merged and rotated back by a kernel of their own
    warps: int
    stages: int


def make_plan(
    format: Format, shape: tuple[int, int, int, int], keys: int, splits: int | None, single: bool, sms: int
) -> AttendPlan:
    """shape: tokens, seqs, kv_heads, group. keys: the most that a query can see. single: see `_in_float32`."""
    tokens, seqs, kv_heads, group = shape
    width = max(specialise.columns(format.key), specialise.columns(format.value))
    pairs = format.key.coded and format.key.bits > 4  # levels looked up, two numbers each
    most = 32 if single or width > 128 else 64 if pairs else 128
    if width > 256 or (single and width > 128):
        most = 16
    rows = min(most, max(16, triton.next_power_of_2(-(-tokens // seqs) * group)))
    tile = specialise.LEAST_TILE if single or width > 128 or rows <= 32 else 64
    if single and width > 256:  # float32 tiles fill shared memory
        tile //= 2
    warps = max(1, rows * width // 2048)
    if max(format.key.bits, format.value.bits) > 4:  # more of a tile is in registers at a time
        warps *= 2
    warps = 8 if rows == 128 else 4 if single or rows == 64 or width > 256 else min(4, warps)
    stages = 3 if rows == 128 or (rows == 16 and width <= 128) else 2
    if width > 256 or pairs or (single and width > 128):
        stages = 1
    count = blocks(tokens, seqs, group, rows)
    least = 1
    if splits is None:
        least = LEAST_KEYS // tile
        busy = seqs * -(-(-(-tokens // seqs) * group) // rows)  # blocks if all sequences have equally many queries
        wanted = WARPS_PER_SM // warps * sms // (busy * kv_heads)
        splits = max(1, min(wanted, -(-keys // LEAST_KEYS), MAX_SPLITS))
    alone = splits == 1 and rows <= FUSED_ROWS and keys <= FUSED_KEYS and width <= FUSED_WIDTH
    return AttendPlan(
        rows,
        tile,
        count,
        splits,
        least,
        format.key.coded and not alone,
        splits > 1 or (format.value.coded and not alone),
        max(4, warps) if alone else warps,
        stages,
    )


class Workspace(NamedTuple):
    """Byte offsets of what lies in the workspace between kernels."""

    means: int
    sums: int
    rotated: int
    factors: int
    bytes: int


def make_workspace(plan: AttendPlan, format: Format, n: int) -> Workspace:
    sizes = [
        n * plan.splits * specialise.columns(format.value) * 4 * plan.finished,
        n * plan.splits * 4 * plan.finished,
        n * specialise.columns(format.key) * 8 * plan.prepared,
        n * 8 * plan.prepared,
    ]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 16) * 16)
    return Workspace(*offsets)


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    if tokens == 0:
        return 0
    shape = (tokens, pages.seqs, pages.kv_heads, heads // pages.kv_heads)
    plans = [
        make_plan(pages.format, shape, _capacity(pages), splits, single, multiprocessors(pages.data.device))
        for single in (False, True)
    ]
    return max(make_workspace(plan, pages.format, tokens * heads).bytes for plan in plans)


def attend(
    q: Tensor,
    pages: Pages,
    rows: Rows,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    splits: int | None,
    precision: str,
    workspace: Tensor | None,
) -> Partial:
    keys = _capacity(pages)
    if scoring.window is not None:
        keys = min(keys, scoring.window + scoring.sinks + q.shape[0])
    shape = (q.shape[0], pages.seqs, pages.kv_heads, q.shape[1] // pages.kv_heads)
    float32 = precision == "float32"
    single = _in_float32(pages.format, float32, q.dtype)
    plan = make_plan(pages.format, shape, keys, splits, single, multiprocessors(q.device)) if q.shape[0] else None
    place = 0 if pages.table.shape[1] == 1 and not pages.ring else 1
    if plan is not None and place == 1 and pages.page_size % plan.keys:
        place = 2
    layout = pages.format.layout(pages.page_size)
    source = (
        pages.key_offset,
        pages.value_offset,
        pages.data,
        pages.table,
        pages.lengths,
        *(None, 0, 0, 0) * 2,
        None,
        0,
        pages.data.shape[0],
        pages.table.shape[1],
        _capacity(pages),
        pages.pinned,
        pages.data.shape[2],
        *layout[:4],
    )
    where = (place, 1 if place == 0 else pages.page_size, pages.ring)
    return _attend(q, pages.format, plan, source, where, rows, ends, scoring, sink_logits, float32, workspace)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    key_starts: Tensor,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
) -> Partial:
    format = Format(Codec(k.shape[2], 16, dtype=k.dtype), Codec(v.shape[2], 16, dtype=v.dtype))
    shape = (q.shape[0], rows.starts.shape[0] - 1, k.shape[1], q.shape[1] // k.shape[1])
    single = _in_float32(format, False, q.dtype)
    plan = make_plan(format, shape, k.shape[0], None, single, multiprocessors(q.device)) if q.shape[0] else None
    dense = (k, *k.stride(), v, *v.stride(), key_starts, k.shape[0])
    source = (None, None, None, None, None, *dense, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return _attend(q, format, plan, source, (3, 1, False), rows, ends, scoring, sink_logits, False, None)


def _in_float32(format: Format, float32: bool, query: torch.dtype) -> bool:
    """Whether tiles hold float32 numbers, which fill shared memory sooner."""
    sides = specialise.side(format.key, float32, query, key=True), specialise.side(format.value, float32, query)
    return any(side.operand == tl.float32 for side in sides)


def _attend(
    q: Tensor,
    format: Format,
    plan: AttendPlan | None,
    source: tuple[Any, ...],
    where: tuple[int, int, bool],
    rows: Rows,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    float32: bool,
    workspace: Tensor | None,
) -> Partial:
    tokens, heads = q.shape[:2]
    key, value = format.key, format.value
    out = q.new_empty(tokens, heads, value.dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    if plan is None:
        return Partial(out, lse)
    kv_heads = source[2].shape[1] if source[2] is not None else source[5].shape[1]
    key_offset, value_offset, *rest = source
    n, group = tokens * heads, heads // kv_heads
    k_side, v_side = specialise.side(key, float32, q.dtype, key=True), specialise.side(value, float32, q.dtype)
    rotate = specialise.encoder(key, q.dtype, False)
    means, sums, rotated, factors = _pieces(plan, format, n, k_side.operand, q.device, workspace)
    multiplier = scoring.multiplier(key.dim) * (1.0 if scoring.softcap else LOG2E.value)
    key_matrix = value_matrix = key_levels = value_levels = None
    if key.coded:
        dtype = next(dtype for dtype, name in specialise.DTYPES.items() if name == rotate.operand)
        key_matrix = specialise.matrix(key, dtype, q.device)
        key_levels = specialise.level_tensor(key, k_side, q.device)
    if value.coded:
        value_matrix = specialise.matrix(value, torch.float16, q.device, transposed=True)
        value_levels = value.level_tensor(torch.float32, q.device)
    unit = specialise.unit(value) if value.coded else 1.0
    chunk = specialise.unrotate_chunk(value)
    if plan.prepared:
        on(prepare_kernel, (kv_heads, triton.cdiv(tokens * group, 16)))(
            q, *q.stride(), key_offset, key_matrix, rotated, factors, n, multiplier, heads, group, k_side, rotate, 16
        )
    call = specialise.Call(
        *where,
        seqs_constant(rows),
        scoring.causal,
        scoring.window is not None,
        2 if scoring.only_uncompressed else 1 if scoring.first or scoring.recent else 0,
        scoring.softcap is not None,
        scoring.threshold > 0,
        not plan.prepared,
        not plan.finished,
    )
    on(attend_kernel, (plan.blocks, kv_heads, plan.splits))(
        q,
        *q.stride(),
        rotated,
        factors,
        multiplier,
        key_offset,
        value_offset,
        key_matrix,
        value_matrix,
        key_levels,
        value_levels,
        *rest[:13],
        rows.starts,
        ends,
        tokens,
        rows.starts.shape[0] - 1,
        *rest[13:],
        scoring.window or 0,
        scoring.sinks,
        scoring.softcap or 0.0,
        scoring.first,
        scoring.recent,
        scoring.threshold,
        None if plan.finished else sink_logits,
        out,
        lse,
        means,
        sums,
        plan.splits,
        plan.least,
        kv_heads,
        group,
        k_side,
        v_side,
        rotate,
        unit,
        chunk,
        call,
        plan.rows,
        plan.keys,
        plan.stages,
        num_warps=plan.warps,
    )
    if plan.finished:
        assert means is not None
        assert sums is not None
        finish(means, sums, value, float32, value_offset, sink_logits, out, lse, kv_heads, plan.splits)
    return Partial(out, lse)


def _pieces(
    plan: AttendPlan, format: Format, n: int, operand: Any, device: torch.device, given: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Means, sums, rotated queries and factors inside the workspace."""
    at = make_workspace(plan, format, n)
    space = given if given is not None else torch.empty(at.bytes, dtype=torch.uint8, device=device)
    if space.data_ptr() % 16:
        raise InputError("workspace must be aligned to 16 bytes")
    means = sums = rotated = factors = None
    if plan.finished:
        means, sums = space[at.means : at.sums].view(torch.float32), space[at.sums : at.rotated].view(torch.float32)
    if plan.prepared:
        dtype = next(dtype for dtype, name in specialise.DTYPES.items() if name == operand)
        rotated, factors = space[at.rotated : at.factors].view(dtype), space[at.factors : at.bytes].view(torch.float32)
    return means, sums, rotated, factors


def _capacity(pages: Pages) -> int:
    return pages.table.shape[1] * pages.page_size

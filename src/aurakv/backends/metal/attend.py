"""Launches of attention: queries are turned, keys read in splits, and all partial results merged in one launch.

Keys come from one or two places: pages of codes, and pages of tokens that are kept uncompressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.partial import Partial
from ...attention.scoring import Scoring
from ...attention.step import Rows
from ...format.codec import Codec, Format
from ...storage.pages import Pages
from . import loads, source
from .kernels import Kernels, aligned, by_rows, numbers, optional, per_vector, slots
from .vectors import height, padded, turned_queries

GROUP_ROWS = 4  # query heads per KV head that attend_rows keeps in registers
ENOUGH_GROUPS = 256  # simdgroups that keep a GPU busy: sequences are split until there are so many
LEAST_KEYS = 256  # of a split

Attend = Callable[[Tensor, Tensor | None], Partial]


class Place(NamedTuple):
    """Keys and values that a call reads."""

    format: Format
    scoring: Scoring
    memory: tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, table, lengths; dense: the bounds of keys for lengths
    given: dict[str, int]
    longest: int  # at most so many keys a sequence
    key_offset: Tensor | None = None
    value_offset: Tensor | None = None
    dense: bool = False


def stored(pages: Pages, scoring: Scoring, tokens: int) -> Place:
    layout = pages.format.layout(pages.page_size)
    given = slots(pages, tokens) | {"KEY_CODES": layout.key_codes, "KEY_SCALES": layout.key_scales}
    given |= {"VALUE_CODES": layout.value_codes, "VALUE_SCALES": layout.value_scales}
    memory = pages.data, pages.data, pages.table, pages.lengths
    longest = pages.table.shape[1] * pages.page_size
    return Place(pages.format, scoring, memory, given, longest, pages.key_offset, pages.value_offset)


def dense(k: Tensor, v: Tensor, key_starts: Tensor, scoring: Scoring, tokens: int) -> Place:
    """Uncompressed tokens k, v [tokens, kv_heads, dim]."""
    format = Format(Codec(k.shape[2], 16, dtype=k.dtype), Codec(v.shape[2], 16, dtype=v.dtype))
    given = {"SEQS": key_starts.shape[0] - 1, "TOKENS": tokens, "KV_HEADS": k.shape[1], "PAGES": k.shape[0]}
    no_table = torch.zeros(1, dtype=torch.int32, device=k.device)
    memory = aligned(k), aligned(v), no_table, key_starts.contiguous()
    return Place(format, scoring, memory, given, k.shape[0], dense=True)


def prepare_attend(
    kernels: Kernels,
    q: Tensor,
    places: Sequence[Place],
    rows: Rows,
    ends: Tensor,
    sink_logits: Tensor | None,
    splits: int | None,
    factor: Tensor | None = None,
) -> Attend:
    """Attention of queries like q [tokens, heads, dim], divided by the factor [kv_heads, dim], over all places. The
    first place names the values' codec; the second, if any, holds vectors."""
    first = places[0]
    tokens, heads, _ = q.shape
    kv_heads, codec = first.given["KV_HEADS"], first.format.value
    group = heads // kv_heads
    high = height(tokens, group)
    starts, ends = rows.starts.contiguous(), ends.contiguous()
    readers = [_prepare_reader(kernels, q, place, rows, group, splits) for place in places]
    counts = [count for count, _ in readers]
    given = {"SEQS": first.given["SEQS"], "HEADS": heads, "KV_HEADS": kv_heads, "GROUP": group, "ROWS": high}
    given |= {"SPLITS": counts[0], "MORE_SPLITS": sum(counts[1:])}
    given |= {"HAS_OFFSET": first.value_offset is not None, "HAS_LOGITS": sink_logits is not None}
    merge, merging = kernels.library(source.merge(codec, q.dtype)).merge, numbers(**given)

    def run(q: Tensor, out: Tensor | None) -> Partial:
        if out is None or not out.is_contiguous() or out.dtype != q.dtype:
            out = torch.empty(tokens, heads, codec.dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        if tokens == 0:
            return Partial(out, lse)
        sums = torch.empty(sum(counts), kv_heads, high, padded(codec), dtype=torch.float32, device=q.device)
        statistics = torch.empty(sum(counts), kv_heads, high, 2, dtype=torch.float32, device=q.device)
        at, q = 0, by_rows(q)
        for place, (count, read) in zip(places, readers, strict=True):
            key, multiplier = place.format.key, place.scoring.multiplier(place.format.key.dim)
            turned = turned_queries(kernels, q, key, place.key_offset, factor, multiplier, group)
            read((*turned, *place.memory, starts, ends, sums[at : at + count], statistics[at : at + count]))
            at += count
        logits = None if sink_logits is None else sink_logits.to(torch.float32).contiguous()
        more = optional(logits, q), optional(first.value_offset, q), out, lse
        per_vector(merge, (sums, statistics, starts, *more), merging, tokens * heads)
        return Partial(out, lse)

    return run


def _prepare_reader(
    kernels: Kernels, q: Tensor, place: Place, rows: Rows, group: int, splits: int | None
) -> tuple[int, Callable[[tuple[Tensor, ...]], None]]:
    """The number of partial results that one place gives, and the launch that makes them."""
    tokens, seqs, kv_heads = q.shape[0], place.given["SEQS"], place.given["KV_HEADS"]
    fits = loads.fits(place.format, place.given.get("PAGE_SIZE", 0))
    single = rows.single and group <= GROUP_ROWS and not place.dense
    single = single and place.memory[0].numel() < loads.reach(place.format, fits)
    simds = 1 if single else _simds(group, 8) if rows.single else _simds(tokens * group, 4)
    tiles = seqs if rows.single and group <= 8 * simds else tokens * group // (8 * simds) + seqs
    busy = max(1, kv_heads * tiles)
    count = splits or max(1, min(-(-ENOUGH_GROUPS // busy), -(-place.longest // LEAST_KEYS)))
    scoring = place.scoring
    rules = {
        "CAUSAL": scoring.causal,
        "WINDOW": -1 if scoring.window is None else scoring.window,
        "SINKS": scoring.sinks,
        "FIRST": scoring.first,
        "RECENT": scoring.recent,
        "ONLY_UNCOMPRESSED": scoring.only_uncompressed,
        "SKIPS": scoring.threshold > 0 and place.format.value.coded,  # vectors are read to find damage
    }
    given = numbers(**place.given, **rules, GROUP=group, ROWS=height(tokens, group), SPLITS=count)
    sizes: dict[str, Any]
    if single:
        kernel = kernels.library(source.attend_rows(place.format, group, fits)).attend_rows
        teams = loads.teams(place.format, fits)
        sizes = {"threads": (count * 32, kv_heads, max(1, seqs)), "group_size": (min(count, teams) * 32, 1, 1)}
    else:
        kernel = kernels.library(source.attend_tiles(place.format, simds, place.dense, fits)).attend_tiles
        sizes = {"threads": (count * simds * 32, kv_heads, max(1, tiles)), "group_size": (simds * 32, 1, 1)}
    factors = [float(scoring.softcap or 0), math.log(scoring.threshold) if scoring.threshold > 0 else 0.0]

    def read(tensors: tuple[Tensor, ...]) -> None:
        kernel(*tensors, given, factors, **sizes, arg_casts={len(tensors): "int32"})

    return count, read


def _simds(rows: int, most: int) -> int:
    """Simdgroups that share expanded codes: as many as have rows, 8 each. For a single query eight, so that keys are
    read once for up to 64 heads."""
    return min(most, next((n for n in (1, 2, 4) if rows <= 8 * n), 8))

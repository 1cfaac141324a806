"""Launches: tensors and numbers for the kernels. Shapes and devices are checked before; a row of numbers lies side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention.partial import Partial
from ...attention.scoring import Scoring
from ...attention.step import Rows
from ...format.codec import Codec, Codes, Format
from ...storage.pages import Pages
from . import source
from .source import numbers

GROUP_ROWS = 4  # query heads per KV head that attend_rows keeps in registers
SPARE_ROWS = 32  # behind the queries: a tile reads whole rows
ENOUGH_GROUPS = 256  # simdgroups that keep a GPU busy; sequences are split until there are so many
LEAST_KEYS = 256  # of a split

Compiler = Callable[[str], Any]


class Launcher:
    """Kernels by a compiler of Metal source: `torch.mps.compile_shader`, or a stand-in with the same rules."""

    def __init__(self, compiler: Compiler) -> None:
        self._library = functools.lru_cache(maxsize=None)(compiler)

    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None) -> Codes:
        rows = lined_up(x.reshape(-1, *x.shape[-2:]))
        heads, device = rows.shape[1], x.device
        data = torch.empty(*x.shape[:-1], codec.row_bytes, dtype=torch.uint8, device=device)
        scale = torch.empty(x.shape[:-1], dtype=codec.dtype, device=device) if codec.coded else None
        given = _strides(rows) | {"HEADS": heads, "HAS_OFFSET": offset is not None}
        library = self._library(source.encode(codec, rows.dtype))
        nothing = _nothing(device)
        outputs = data, nothing if scale is None else scale
        _call(library.encode, rows, nothing if offset is None else offset, nothing, *outputs, given=given, simds=rows.shape[0] * heads)
        return Codes(data, scale)

    def decode(self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
        data, scale = side_by_side(codes)
        out = torch.empty(*data.shape[:-1], codec.dim, dtype=dtype, device=data.device)
        heads, nothing = data.shape[-2], _nothing(data.device)
        if offset is not None and rotated:
            offset = self._turn(offset[None], codec, None, None, 1.0, 1)[0][:, :1, : codec.dim].contiguous()
        given = {"HEADS": heads, "ROTATED": rotated, "HAS_OFFSET": offset is not None}
        tensors = data, nothing if scale is None else scale, nothing if offset is None else offset, out
        library = self._library(source.vectors(codec, dtype))
        _call(library.decode, *tensors, given=given, simds=data.numel() // codec.row_bytes)
        return out

    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
        data, scale = side_by_side(codes)
        keys, kv_heads = data.shape[:2]
        out = torch.empty(*q.shape[:2], keys, dtype=q.dtype, device=q.device)
        if out.numel() == 0:
            return out
        group = q.shape[1] // kv_heads
        queries, bias = self._turn(lined_up(q), codec, offset, None, 1.0, group)
        given = {"TOKENS": q.shape[0], "KV_HEADS": kv_heads, "GROUP": group, "KEYS": keys, "ROWS": queries.shape[1]}
        library = self._library(source.vectors(codec, q.dtype))
        stored = data, _nothing(q.device) if scale is None else scale
        _call(library.scores, queries, bias, *stored, out, given=given, simds=keys * kv_heads)
        return out

    def values(self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
        data, scale = side_by_side(codes)
        weights, (keys, kv_heads), heads = lined_up(weights.contiguous()), data.shape[:2], weights.shape[1]
        out = torch.empty(*weights.shape[:2], codec.dim, dtype=weights.dtype, device=weights.device)
        if out.numel() == 0 or keys == 0:
            return out.zero_()
        given = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "KEYS": keys, "HAS_OFFSET": offset is not None}
        library, nothing = self._library(source.vectors(codec, weights.dtype)), _nothing(weights.device)
        stored = data, nothing if scale is None else scale, nothing if offset is None else offset
        _call(library.values, weights, *stored, out, given=given, factors=[threshold], simds=weights.shape[0] * heads)
        return out

    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows, factor: Tensor | None = None, counted: bool = False) -> None:
        if k.shape[0] == 0:
            return
        starts = rows.starts.contiguous()
        base = self._claim(pages, starts, k.shape[0], counted)
        layout, nothing = pages.format.layout(pages.page_size), _nothing(k.device)
        sides = (
            (k, pages.format.key, pages.key_offset, factor, layout.key_codes, layout.key_scales),
            (v, pages.format.value, pages.value_offset, None, layout.value_codes, layout.value_scales),
        )
        for x, codec, offset, scaled, codes_at, scales_at in sides:
            x = lined_up(x)
            given = _where(pages, k.shape[0]) | _strides(x) | {"CODES": codes_at, "SCALES": scales_at, "HEADS": pages.kv_heads}
            given |= {"HAS_OFFSET": offset is not None, "HAS_FACTOR": scaled is not None}
            tensors = x, nothing if offset is None else offset, nothing if scaled is None else scaled, starts, base
            library = self._library(source.encode(codec, x.dtype))
            _call(library.append, *tensors, pages.table, pages.data, given=given, simds=x.shape[0] * pages.kv_heads)

    def append_codes(self, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
        tokens = keys.data.shape[0]
        if tokens == 0:
            return
        starts = rows.starts.contiguous()
        base = self._claim(pages, starts, tokens, False)
        layout, format = pages.format.layout(pages.page_size), pages.format
        sides = (
            (keys, format.key, layout.key_codes, layout.key_scales),
            (values, format.value, layout.value_codes, layout.value_scales),
        )
        for codes, codec, codes_at, scales_at in sides:
            data, scale = side_by_side(codes)
            given = _where(pages, tokens) | {"CODES": codes_at, "SCALES": scales_at, "HEADS": pages.kv_heads}
            given |= {"ROW": codec.row_bytes, "SCALE": codec.scale_bytes}
            tensors = data, _nothing(data.device) if scale is None else scale, starts, base, pages.table, pages.data
            copy = self._library(source.claim()).copy_rows
            width = codec.row_bytes + codec.scale_bytes
            copy(*tensors, numbers(**given), threads=(width, tokens * pages.kv_heads), group_size=(min(width, 256), 1), arg_casts={6: "int32"})

    def attend(
        self, q: Tensor, pages: Pages, rows: Rows, ends: Tensor, scoring: Scoring, sink_logits: Tensor | None, splits: int | None
    ) -> Partial:
        layout = pages.format.layout(pages.page_size)
        given = _where(pages, q.shape[0]) | _rules(scoring)
        given |= {"KEY_CODES": layout.key_codes, "KEY_SCALES": layout.key_scales}
        given |= {"VALUE_CODES": layout.value_codes, "VALUE_SCALES": layout.value_scales}
        memory = pages.data, pages.data, pages.table, pages.lengths
        longest = pages.table.shape[1] * pages.page_size
        offsets = pages.key_offset, pages.value_offset
        return self._attend(q, pages.format, memory, rows, ends, scoring, sink_logits, splits, given, longest, offsets, False)

    def attend_dense(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, key_starts: Tensor, ends: Tensor, scoring: Scoring, sink_logits: Tensor | None
    ) -> Partial:
        k, v = lined_up(k.contiguous()), lined_up(v.contiguous())
        format = Format(Codec(k.shape[2], 16, dtype=k.dtype), Codec(v.shape[2], 16, dtype=v.dtype))
        seqs = rows.starts.shape[0] - 1
        given = _rules(scoring) | {"SEQS": seqs, "TOKENS": q.shape[0], "KV_HEADS": k.shape[1], "PAGES": k.shape[0]}
        nothing = torch.zeros(1, dtype=torch.int32, device=q.device)
        memory = k, v, nothing, key_starts.contiguous()
        return self._attend(q, format, memory, rows, ends, scoring, sink_logits, None, given, k.shape[0], (None, None), True)

    def _attend(
        self,
        q: Tensor,
        format: Format,
        memory: tuple[Tensor, ...],
        rows: Rows,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
        splits: int | None,
        given: dict[str, int],
        longest: int,
        offsets: tuple[Tensor | None, Tensor | None],
        dense: bool,
    ) -> Partial:
        tokens, heads, _ = q.shape
        device, kv_heads, seqs = q.device, given["KV_HEADS"], given["SEQS"]
        group, dim = heads // kv_heads, format.value.dim
        out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
        if tokens == 0:
            return Partial(out, lse)
        queries, bias = self._turn(lined_up(q), format.key, offsets[0], None, scoring.multiplier(format.key.dim), group)
        single = rows.single and group <= GROUP_ROWS and not dense
        simds = 1 if single else _simds(tokens, group, rows.single)
        tiles = seqs if rows.single and group <= 8 * simds else tokens * group // (8 * simds) + seqs
        parts = splits or _splits(seqs if single else tiles, kv_heads, longest)
        starts = rows.starts.contiguous()
        given = given | {"GROUP": group, "ROWS": queries.shape[1], "SPLITS": parts}
        sums = torch.empty(parts, kv_heads, queries.shape[1], -(-dim // 16) * 16, dtype=torch.float32, device=device)
        statistics = torch.empty(*sums.shape[:3], 2, dtype=torch.float32, device=device)
        tensors = queries, bias, *memory, starts, ends.contiguous(), sums, statistics
        more = numbers(**given), [float(scoring.softcap or 0)]
        if single:
            kernel = self._library(source.attend_rows(format, group)).attend_rows
            sizes = {"threads": (parts * 32, kv_heads, seqs), "group_size": (min(parts, 4) * 32, 1, 1)}
        else:
            kernel = self._library(source.attend_tiles(format, simds, dense)).attend_tiles
            sizes = {"threads": (parts * simds * 32, kv_heads, tiles), "group_size": (simds * 32, 1, 1)}
        kernel(*tensors, *more, **sizes, arg_casts={len(tensors): "int32"})
        nothing = _nothing(device)
        logits = nothing if sink_logits is None else sink_logits.to(torch.float32).contiguous()
        given |= {"HEADS": heads, "HAS_OFFSET": offsets[1] is not None, "HAS_LOGITS": sink_logits is not None}
        results = logits, nothing if offsets[1] is None else offsets[1], out, lse
        library = self._library(source.merge(format.value, q.dtype))
        _call(library.merge, sums, statistics, starts, *results, given=given, simds=tokens * heads)
        return Partial(out, lse)

    def _turn(
        self, q: Tensor, codec: Codec, offset: Tensor | None, factor: Tensor | None, multiplier: float, group: int
    ) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, dim] in the rotated domain, [kv_heads, rows, padded dim], and their products with the offset."""
        tokens, heads, _ = q.shape
        rows = tokens * group + SPARE_ROWS
        turned = torch.empty(heads // group, rows, -(-codec.dim // 16) * 16, dtype=torch.float32, device=q.device)
        bias = torch.empty(turned.shape[:2], dtype=torch.float32, device=q.device)
        given = _strides(q) | {"HEADS": heads, "GROUP": group, "ROWS": rows, "HAS_OFFSET": offset is not None, "HAS_FACTOR": factor is not None}
        nothing = _nothing(q.device)
        tensors = q, nothing if offset is None else offset, nothing if factor is None else factor, turned, bias
        library = self._library(source.queries(codec, q.dtype))
        _call(library.turn_queries, *tensors, given=given, factors=[multiplier], simds=tokens * heads)
        return turned, bias

    def _claim(self, pages: Pages, starts: Tensor, tokens: int, counted: bool) -> Tensor:
        """Room for the new tokens: lengths advance where there is, and the old ones come back; −1 where there is none."""
        base = torch.empty(max(1, pages.seqs), dtype=torch.int32, device=starts.device)
        claim = self._library(source.claim()).claim
        given = _where(pages, tokens) | {"COUNTED": counted}
        claim(starts, pages.table, pages.lengths, pages.overflow, base, numbers(**given), threads=32, group_size=32, arg_casts={5: "int32"})
        return base


def lined_up(x: Tensor) -> Tensor:
    """x with its rows in one piece each and a start that vectors of 16 bytes can be read from."""
    if x.stride(-1) != 1 or min(x.stride()) < 0 or max(x.stride()) >= 2**31:
        x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


def side_by_side(codes: Codes) -> Codes:
    data, scale = codes
    return Codes(lined_up(data.contiguous()), None if scale is None else lined_up(scale.contiguous()))


def _call(kernel: Any, *tensors: Tensor, given: dict[str, int], simds: int, factors: list[float] | None = None) -> None:
    """A kernel with one simdgroup per vector, four to a threadgroup."""
    more = [numbers(**given), *([] if factors is None else [factors])]
    kernel(*tensors, *more, threads=simds * 32, group_size=min(simds, 4) * 32, arg_casts={len(tensors): "int32"})


def _strides(x: Tensor) -> dict[str, int]:
    return {"STRIDE": x.stride(0), "HEAD_STRIDE": x.stride(1)}


def _where(pages: Pages, tokens: int) -> dict[str, int]:
    """Where tokens of these pages lie."""
    return {
        "SEQS": pages.seqs,
        "TOKENS": tokens,
        "KV_HEADS": pages.kv_heads,
        "PAGE_SIZE": pages.page_size,
        "WIDTH": pages.table.shape[1],
        "PINNED": pages.pinned,
        "PAGES": pages.data.shape[0],
        "PIECE": pages.data.shape[2],
        "RING": pages.ring,
    }


def _rules(scoring: Scoring) -> dict[str, int]:
    return {
        "CAUSAL": scoring.causal,
        "WINDOW": -1 if scoring.window is None else scoring.window,
        "SINKS": scoring.sinks,
        "FIRST": scoring.first,
        "RECENT": scoring.recent,
        "ONLY_UNCOMPRESSED": scoring.only_uncompressed,
    }


def _simds(tokens: int, group: int, single: bool) -> int:
    """Simdgroups that share expanded codes: as many as have rows, 8 each."""
    rows = group if single else tokens * group
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _splits(groups: int, kv_heads: int, longest: int) -> int:
    return max(1, min(-(-ENOUGH_GROUPS // max(1, groups * kv_heads)), -(-longest // LEAST_KEYS)))


@functools.lru_cache(maxsize=8)
def _nothing(device: torch.device) -> Tensor:
    """What stands for a tensor that is not there."""
    with torch.inference_mode(False):  # cached: must not become an inference tensor
        return torch.zeros(4, dtype=torch.float32, device=device)

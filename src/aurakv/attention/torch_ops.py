"""The operators registered with torch.library (namespace `aurakv`), with fakes, for torch.compile.

Each operator takes its arguments flattened into a schema, rebuilds them and calls the eager function, checks included.
The functions below it flatten; `ops` calls them while something is being compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..checks import Starts
from ..errors import InputError
from ..format.codec import Codec, Codes, parse_codec, parse_format
from ..storage.pages import Pages
from . import ops
from .partial import Partial
from .scoring import Scoring


@torch.library.custom_op("aurakv::encode", mutates_args=())
def _encode(x: Tensor, offset: Tensor | None, codec: str, dim: int, backend: str | None) -> tuple[Tensor, Tensor]:
    data, scale = ops.encode(x, parse_codec(codec, dim), offset, backend=backend)
    return data, data.new_empty(0) if scale is None else scale


@_encode.register_fake
def _(x: Tensor, offset: Tensor | None, codec: str, dim: int, backend: str | None) -> tuple[Tensor, Tensor]:
    parsed = parse_codec(codec, dim)
    data = x.new_empty((*x.shape[:-1], parsed.row_bytes), dtype=torch.uint8)
    return data, x.new_empty(x.shape[:-1], dtype=parsed.dtype) if parsed.coded else data.new_empty(0)


def encode(x: Tensor, codec: Codec, offset: Tensor | None, backend: str | None) -> Codes:
    data, scale = torch.ops.aurakv.encode(x, offset, codec.name, codec.dim, backend)
    return Codes(data, scale if codec.coded else None)


@torch.library.custom_op("aurakv::decode", mutates_args=())
def _decode(
    data: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    codec: str,
    dim: int,
    rotated: bool,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    parsed = parse_codec(codec, dim)
    return ops.decode(Codes(data, scale), parsed, offset, rotated=rotated, dtype=dtype, backend=backend)


@_decode.register_fake
def _(
    data: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    codec: str,
    dim: int,
    rotated: bool,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    return data.new_empty((*data.shape[:-1], dim), dtype=dtype)


def decode(
    codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype, backend: str | None
) -> Tensor:
    result: Tensor = torch.ops.aurakv.decode(*codes, offset, codec.name, codec.dim, rotated, dtype, backend)
    return result


@torch.library.custom_op("aurakv::scores", mutates_args=())
def _scores(
    q: Tensor, data: Tensor, scale: Tensor | None, offset: Tensor | None, codec: str, dim: int, backend: str | None
) -> Tensor:
    return ops.scores(q, Codes(data, scale), parse_codec(codec, dim), offset, backend=backend)


@_scores.register_fake
def _(
    q: Tensor, data: Tensor, scale: Tensor | None, offset: Tensor | None, codec: str, dim: int, backend: str | None
) -> Tensor:
    return q.new_empty((*q.shape[:2], data.shape[0]))


def scores(q: Tensor, keys: Codes, codec: Codec, offset: Tensor | None, backend: str | None) -> Tensor:
    result: Tensor = torch.ops.aurakv.scores(q, *keys, offset, codec.name, codec.dim, backend)
    return result


@torch.library.custom_op("aurakv::values", mutates_args=())
def _values(
    weights: Tensor,
    data: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    codec: str,
    dim: int,
    threshold: float | None,
    backend: str | None,
) -> Tensor:
    parsed = parse_codec(codec, dim)
    return ops.values(weights, Codes(data, scale), parsed, offset, threshold=threshold, backend=backend)


@_values.register_fake
def _(
    weights: Tensor,
    data: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    codec: str,
    dim: int,
    threshold: float | None,
    backend: str | None,
) -> Tensor:
    return weights.new_empty((*weights.shape[:2], dim))


def values(
    weights: Tensor, stored: Codes, codec: Codec, offset: Tensor | None, threshold: float | None, backend: str | None
) -> Tensor:
    result: Tensor = torch.ops.aurakv.values(weights, *stored, offset, codec.name, codec.dim, threshold, backend)
    return result


@torch.library.custom_op("aurakv::append", mutates_args=("data", "lengths", "overflow"))
def _append(
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    data: Tensor,
    table: Tensor,
    lengths: Tensor,
    overflow: Tensor,
    key_offset: Tensor | None,
    value_offset: Tensor | None,
    format: str,
    key_dim: int,
    value_dim: int,
    page_size: int,
    ring: bool,
    pinned: int,
    backend: str | None,
) -> None:
    parsed = parse_format(format, key_dim, value_dim)
    pages = Pages(parsed, page_size, data, table, lengths, overflow, ring, pinned, key_offset, value_offset)
    ops.append(pages, k, v, starts, backend=backend)


def append(pages: Pages, k: Tensor, v: Tensor, starts: Starts, backend: str | None) -> None:
    torch.ops.aurakv.append(k, v, tensor_or_none("starts", starts), *flat_pages(pages), backend)


@torch.library.custom_op("aurakv::attend", mutates_args=("workspace",))
def _attend(
    q: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    sink_logits: Tensor | None,
    workspace: Tensor | None,
    data: Tensor,
    table: Tensor,
    lengths: Tensor,
    overflow: Tensor,
    key_offset: Tensor | None,
    value_offset: Tensor | None,
    format: str,
    key_dim: int,
    value_dim: int,
    page_size: int,
    ring: bool,
    pinned: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    sinks: int,
    softcap: float | None,
    first: int,
    recent: int,
    only_uncompressed: bool,
    threshold: float,
    splits: int | None,
    precision: str,
    rotated: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    parsed = parse_format(format, key_dim, value_dim)
    pages = Pages(parsed, page_size, data, table, lengths, overflow, ring, pinned, key_offset, value_offset)
    scoring = Scoring(scale, causal, window, sinks, softcap, first, recent, only_uncompressed, threshold)
    return ops.attend(
        q,
        pages,
        starts,
        scoring,
        ends=ends,
        sink_logits=sink_logits,
        splits=splits,
        precision=precision,
        workspace=workspace,
        rotated=rotated,
        backend=backend,
    )


@_attend.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    value_dim = rest[12]
    assert isinstance(value_dim, int)
    return fake_partial(q, value_dim)


def attend(
    q: Tensor,
    pages: Pages,
    starts: Starts,
    scoring: Scoring,
    ends: Tensor | Sequence[int] | None,
    sink_logits: Tensor | None,
    splits: int | None,
    precision: str,
    workspace: Tensor | None,
    rotated: bool,
    backend: str | None,
) -> Partial:
    bounds, last = tensor_or_none("starts", starts), tensor_or_none("ends", ends)
    out, lse = torch.ops.aurakv.attend(
        q, bounds, last, sink_logits, workspace, *flat_pages(pages), *flat_scoring(scoring),
        splits, precision, rotated, backend,
    )  # fmt: skip
    return Partial(out, lse)


@torch.library.custom_op("aurakv::attend_dense", mutates_args=())
def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    key_starts: Tensor | None,
    ends: Tensor | None,
    sink_logits: Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    sinks: int,
    softcap: float | None,
    first: int,
    recent: int,
    only_uncompressed: bool,
    threshold: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    scoring = Scoring(scale, causal, window, sinks, softcap, first, recent, only_uncompressed, threshold)
    return ops.attend_dense(q, k, v, starts, key_starts, scoring, ends=ends, sink_logits=sink_logits, backend=backend)


@_attend_dense.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return fake_partial(q, v.shape[-1])


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Starts,
    key_starts: Starts,
    scoring: Scoring,
    ends: Tensor | Sequence[int] | None,
    sink_logits: Tensor | None,
    backend: str | None,
) -> Partial:
    bounds = [tensor_or_none(name, x) for name, x in (("starts", starts), ("key_starts", key_starts), ("ends", ends))]
    out, lse = torch.ops.aurakv.attend_dense(q, k, v, *bounds, sink_logits, *flat_scoring(scoring), backend)
    return Partial(out, lse)


def flat_pages(pages: Pages) -> tuple[object, ...]:
    """In the order of the schemas above, which is not the order of the class: tensors come first."""
    f = pages.format
    tensors = (pages.data, pages.table, pages.lengths, pages.overflow, pages.key_offset, pages.value_offset)
    return (*tensors, f.name, f.key.dim, f.value.dim, pages.page_size, pages.ring, pages.pinned)


def flat_scoring(s: Scoring) -> tuple[object, ...]:
    return (s.scale, s.causal, s.window, s.sinks, s.softcap, s.first, s.recent, s.only_uncompressed, s.threshold)


def fake_partial(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], dim)), q.new_empty(q.shape[:2], dtype=lse_dtype)


def tensor_or_none(name: str, given: Starts) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    raise InputError(f"under torch.compile {name} must be a tensor or None, got {type(given).__name__}")

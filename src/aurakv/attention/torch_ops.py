"""The operators registered with torch.library (namespace `aurakv`), with fakes, for torch.compile.

Each operator takes its arguments flattened into a schema, rebuilds them and calls the eager function, checks included.
The functions below it flatten; `ops` calls them while something is being compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import Starts
from ..errors import InputError
from ..format.codec import Codec, Codes, parse_codec, parse_format
from ..storage.pages import Pages
from . import ops
from .partial import Partial
from .scoring import Scoring

# What operators take of pages and scorings, as torch spells it: tensors and plain numbers. `flat_pages` and
# `flat_scoring` make these arguments, in this order.
_PAGES = (
    "Tensor{} data, Tensor table, Tensor{} lengths, Tensor{} overflow, Tensor? key_offset, Tensor? value_offset,"
    " Tensor? key_fit, Tensor? value_fit,"
    " str format, SymInt key_dim, SymInt value_dim, SymInt page_size, bool ring, SymInt pinned"
)
PAGES, GROWING_PAGES = _PAGES.format("", "", ""), _PAGES.format("(a!)", "(b!)", "(c!)")
GROWN = ("data", "lengths", "overflow")  # what an append changes
PAGES_COUNT, VALUE_DIM = 14, 10  # how many these are, and the place of value_dim among them
SCORING = (
    "float? scale, bool causal, SymInt? window, SymInt sinks, float? softcap, SymInt first, SymInt recent,"
    " bool only_uncompressed, float threshold"
)


@torch.library.custom_op("aurakv::encode", mutates_args=())
def _encode(
    x: Tensor, offset: Tensor | None, fit: Tensor | None, codec: str, dim: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    data, scale = ops.encode(x, parse_codec(codec, dim), offset, fit=fit, backend=backend)
    return data, data.new_empty(0) if scale is None else scale


@_encode.register_fake
def _(
    x: Tensor, offset: Tensor | None, fit: Tensor | None, codec: str, dim: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    parsed = parse_codec(codec, dim)
    data = x.new_empty((*x.shape[:-1], parsed.row_bytes), dtype=torch.uint8)
    return data, x.new_empty(x.shape[:-1], dtype=parsed.dtype) if parsed.coded else data.new_empty(0)


def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None, backend: str | None) -> Codes:
    data, scale = torch.ops.aurakv.encode(x, offset, fit, codec.name, codec.dim, backend)
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


@torch.library.custom_op(
    "aurakv::append",
    mutates_args=GROWN,
    schema=f"(Tensor k, Tensor v, Tensor? starts, {GROWING_PAGES}, str? backend) -> ()",
)
def _append(k: Tensor, v: Tensor, starts: Tensor | None, *rest: Any) -> None:
    *pages, backend = rest
    ops.append(pages_of(*pages), k, v, starts, backend=backend)


def append(pages: Pages, k: Tensor, v: Tensor, starts: Starts, backend: str | None) -> None:
    torch.ops.aurakv.append(k, v, tensor_or_none("starts", starts), *flat_pages(pages), backend)


@torch.library.custom_op(
    "aurakv::attend",
    mutates_args=("workspace",),
    schema="(Tensor q, Tensor? starts, Tensor? ends, Tensor? sink_logits, Tensor(a!)? workspace,"
    f" {PAGES}, {SCORING}, SymInt? splits, str precision, bool rotated, str? backend) -> (Tensor, Tensor)",
)
def _attend(
    q: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    sink_logits: Tensor | None,
    workspace: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    flat, (splits, precision, rotated, backend) = rest[:-4], rest[-4:]
    return ops.attend(
        q,
        pages_of(*flat[:PAGES_COUNT]),
        starts,
        Scoring(*flat[PAGES_COUNT:]),
        ends=ends,
        sink_logits=sink_logits,
        splits=splits,
        precision=precision,
        workspace=workspace,
        rotated=rotated,
        backend=backend,
    )


@_attend.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_partial(q, rest[4 + VALUE_DIM])


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


@torch.library.custom_op(
    "aurakv::attend_dense",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? key_starts, Tensor? ends, Tensor? sink_logits,"
    f" {SCORING}, str? backend) -> (Tensor, Tensor)",
)
def _attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    key_starts: Tensor | None,
    ends: Tensor | None,
    sink_logits: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    *flat, backend = rest
    options: dict[str, Any] = {"ends": ends, "sink_logits": sink_logits, "backend": backend}
    return ops.attend_dense(q, k, v, starts, key_starts, Scoring(*flat), **options)


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
    """In the order of PAGES, which is not the order of the class: tensors come first."""
    f = pages.format
    tensors = (pages.data, pages.table, pages.lengths, pages.overflow)
    constant = (pages.key_offset, pages.value_offset, pages.key_fit, pages.value_fit)
    return (*tensors, *constant, f.name, f.key.dim, f.value.dim, pages.page_size, pages.ring, pages.pinned)


def pages_of(
    data: Tensor,
    table: Tensor,
    lengths: Tensor,
    overflow: Tensor,
    key_offset: Tensor | None,
    value_offset: Tensor | None,
    key_fit: Tensor | None,
    value_fit: Tensor | None,
    format: str,
    key_dim: int,
    value_dim: int,
    page_size: int,
    ring: bool,
    pinned: int,
) -> Pages:
    """What `flat_pages` took apart."""
    parsed = parse_format(format, key_dim, value_dim)
    constant = key_offset, value_offset, key_fit, value_fit
    return Pages(parsed, page_size, data, table, lengths, overflow, ring, pinned, *constant)


def flat_scoring(s: Scoring) -> tuple[object, ...]:
    """In the order of SCORING and of the class."""
    return (s.scale, s.causal, s.window, s.sinks, s.softcap, s.first, s.recent, s.only_uncompressed, s.threshold)


def fake_partial(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], dim)), q.new_empty(q.shape[:2], dtype=lse_dtype)


def tensor_or_none(name: str, given: Starts) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    raise InputError(f"under torch.compile {name} must be a tensor or None, got {type(given).__name__}")

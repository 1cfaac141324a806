"""What `KVCache` does while torch.compile traces it: one operator over the tensors of its pages.

The lengths on the device advance and the host follows when it next looks, so nothing is compiled again as sequences
grow. What only the host can do is refused in one sentence: `reserve` makes room and copies pages that sequences share,
and the first tokens that stay uncompressed are stored by a call outside.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import backends, checks
from ..attention.partial import Partial
from ..attention.scoring import Scoring
from ..attention.step import Step
from ..attention.torch_ops import (
    GROWING_PAGES,
    GROWN,
    PAGES_COUNT,
    SCORING,
    VALUE_DIM,
    fake_partial,
    flat_pages,
    flat_scoring,
    pages_of,
    tensor_or_none,
)
from ..checks import Starts
from ..errors import CapacityError, InputError, counted
from ..format.codec import Format, parse_format
from .attention_call import Call, check_queries, check_step
from .pages import Pages

if TYPE_CHECKING:
    from .cache import KVCache


def append(cache: KVCache, k: Tensor, v: Tensor, starts: Starts) -> None:
    if cache.uncompressed_table is not None:
        raise InputError("under torch.compile a cache with uncompressed tokens takes new ones by step, not by append")
    torch.ops.aurakv.cache_append(
        k, v, tensor_or_none("starts", starts), *flat_pages(cache.pages), cache.page_table.forked, cache.backend
    )


def step(
    cache: KVCache,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    starts: Starts,
    scoring: Scoring | None,
    key_scale: Tensor | None,
    sink_logits: Tensor | None,
    splits: int | None,
    precision: str,
) -> Partial:
    """Without keys and values it only attends."""
    kept, uncompressed = cache.page_table.kept, cache.uncompressed_table
    if scoring is None:
        scoring = cache.default_scoring
    held = None if uncompressed is None else uncompressed.pages
    most = -1 if kept is None else kept.chunk
    if uncompressed is not None and uncompressed.kept is not None:
        most = uncompressed.kept.chunk if most < 0 else min(most, uncompressed.kept.chunk)
    out, lse = torch.ops.aurakv.cache_step(
        q,
        k,
        v,
        tensor_or_none("starts", starts),
        key_scale,
        sink_logits,
        *flat_pages(cache.pages),
        None if held is None else held.data,
        None if held is None else held.table,
        None if held is None else held.lengths,
        None if held is None else held.overflow,
        "" if held is None else held.format.name,
        0 if held is None else held.page_size,
        cache.uncompressed.first,
        cache.uncompressed.recent,
        *flat_scoring(scoring),
        splits,
        precision,
        cache.backend,
        most,
        cache.page_table.forked,
        cache.uncompressed.recent > 0 or cache.first_complete,
    )
    return Partial(out, lse)


def check_rotated(rotated: bool) -> None:
    if rotated:
        raise InputError(
            "under torch.compile a cache takes queries that are not rotated: attend to cache.pages with aurakv.attend"
        )


def _refuse(new: bool, tokens: int, seqs: int, most: int, forked: bool, complete: bool) -> None:
    if new and forked:
        raise InputError(
            "a compiled step cannot copy pages that sequences share: after fork, reorder or truncate call cache.reserve"
            " for the tokens to come"
        )
    if new and not complete:
        raise InputError(
            "a compiled step cannot store the first tokens that stay uncompressed: step outside torch.compile until"
            " each sequence has them"
        )
    if 0 <= most < tokens - seqs + 1:
        raise InputError(
            f"a compiled step of this cache takes at most {counted(most, 'token')} of a sequence,"
            f" got {counted(tokens, 'token')}"
        )


def _report(pages: Pages) -> None:
    """On the CPU at once; on a GPU the next call of the host looks."""
    if pages.data.device.type == "cpu" and int(pages.overflow):
        pages.overflow.zero_()
        raise CapacityError("a compiled step cannot make room for its tokens: call cache.reserve before it")


@torch.library.custom_op(
    "aurakv::cache_append",
    mutates_args=GROWN,
    schema=f"(Tensor k, Tensor v, Tensor? starts, {GROWING_PAGES}, bool forked, str? backend) -> ()",
)
def _cache_append(k: Tensor, v: Tensor, starts: Tensor | None, *rest: Any) -> None:
    *flat, forked, backend = rest
    pages = pages_of(*flat).trust()
    pages.check()
    checks.new_tokens(k, v, pages)
    _refuse(True, 0, 1, -1, forked, True)
    rows = checks.rows_of("starts", starts, pages.seqs, k.shape[0], k.device)
    backends.select(backend, pages.format, k.device, k.dtype).append(pages, k, v, rows)
    _report(pages)


@torch.library.custom_op(
    "aurakv::cache_step",
    mutates_args=(*GROWN, "u_data", "u_lengths", "u_overflow"),
    schema="(Tensor q, Tensor? k, Tensor? v, Tensor? starts, Tensor? key_scale, Tensor? sink_logits,"
    f" {GROWING_PAGES}, Tensor(d!)? u_data, Tensor? u_table, Tensor(e!)? u_lengths, Tensor(f!)? u_overflow,"
    f" str u_format, SymInt u_page_size, SymInt u_first, SymInt u_recent, {SCORING}, SymInt? splits, str precision,"
    " str? backend, SymInt most, bool forked, bool complete) -> (Tensor, Tensor)",
)
def _cache_step(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    starts: Tensor | None,
    key_scale: Tensor | None,
    sink_logits: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    pages = pages_of(*rest[:PAGES_COUNT]).trust()
    second = rest[PAGES_COUNT : PAGES_COUNT + 8]
    first, recent = second[-2:]
    *flat, splits, precision, backend, most, forked, complete = rest[PAGES_COUNT + 8 :]
    given = Scoring(*flat)
    pages.check()
    named = (given.first, given.recent) not in ((0, 0), (first, recent))
    if named or given.only_uncompressed:
        raise InputError(
            "a cache has its own uncompressed tokens: the scoring must not name first, recent or only_uncompressed"
        )
    if pages.ring and not given.causal:
        raise InputError("a ring forgets tokens as new ones come, so its scoring must be causal")
    scoring = dataclasses.replace(given, first=first, recent=recent)
    checks.reach(pages, scoring)
    call = Call(scoring, sink_logits, checks.splits(splits), precision, key_scale)
    new = k is not None and v is not None
    if k is not None and v is not None:
        check_step(q, k, v, pages, call)
    else:
        check_queries(q, pages, call)
    _refuse(new, q.shape[0], pages.seqs, most, forked, complete)
    uncompressed = _second_pages(pages.format, *second)
    rows = checks.rows_of("starts", starts, pages.seqs, q.shape[0], q.device)
    step = Step(pages, rows, *call, uncompressed=uncompressed, uncompressed_too=recent > 0)
    part = backends.select(backend, pages.format, q.device, q.dtype).prepare_step(step, q, k, v)(q, k, v)
    if new:
        _report(pages)
    return part.out, part.lse


def _second_pages(
    coded: Format,
    data: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    overflow: Tensor,
    format: str,
    page_size: int,
    first: int,
    recent: int,
) -> Pages | None:
    """The pages of uncompressed tokens, if there are any: a ring where recent ones are kept."""
    if data is None:
        return None
    parsed = parse_format(format, coded.key.dim, coded.value.dim)
    pinned = -(-first // page_size) if recent else 0
    return Pages(parsed, page_size, data, table, lengths, overflow, recent > 0, pinned).trust()


@_cache_step.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return fake_partial(q, rest[5 + VALUE_DIM])

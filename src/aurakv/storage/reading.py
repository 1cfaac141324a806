"""How a cache is read: its codes, and the tokens that lie a second time, uncompressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import whole
from ..attention import ops
from ..attention.partial import Partial, join, merge
from ..attention.scoring import scoring_uncompressed
from ..format.codec import Codes
from .attention_call import Call
from .page_table import MAX_LENGTH, PageTable

if TYPE_CHECKING:
    from .cache import KVCache


def saturated(codes: Codes) -> int:
    """How many scales are the largest of their dtype."""
    return 0 if codes.scale is None else int((codes.scale.abs() == torch.finfo(codes.scale.dtype).max).sum())


def decode(cache: KVCache, seq: int, dtype: torch.dtype, query: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence at the positions it holds; those that the query uses uncompressed are that."""
    k, v = _decode_at(cache, seq, cache.positions(seq), dtype)
    backend = cache.backend
    query = None if query is None else whole("query", query, 0, MAX_LENGTH)
    if query is not None and cache.uncompressed_table is not None:
        uncompressed, positions = cache.uncompressed_table, cache.page_table.positions(seq)
        held = uncompressed.positions(seq)
        held = held[cache.uncompressed.seen(held, query) & torch.isin(held, positions)]
        at, format = torch.searchsorted(positions, held), uncompressed.pool.format
        keys, values = uncompressed.pages.stored(seq, held)
        k[at] = ops.decode(keys, format.key, dtype=dtype, backend=backend)
        v[at] = ops.decode(values, format.value, dtype=dtype, backend=backend)
    return k, v


def restore_recent(cache: KVCache, seq: int) -> None:
    """Fill the ring of uncompressed tokens with the last ones of a sequence as their codes have them."""
    table = cache.uncompressed_table
    assert table is not None
    length, pinned = table.lengths[seq], table.pinned * table.pool.page_size
    held = 0 if cache.page_table.kept is None else cache.page_table.oldest(seq)
    start = max(pinned, length - table.pages.wrap, held)
    k, v = _decode_at(cache, seq, torch.arange(start, length, device=table.pool.device), cache.uncompressed.dtype)
    table.place(seq, start, start)
    bounds = [0] * (seq + 1) + [length - start] * (cache.seqs - seq)
    table.make_room(bounds)
    ops.append(table.pages, k, v, bounds, backend=cache.backend)
    table.advance(bounds)


def _decode_at(cache: KVCache, seq: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the codes at some positions of a sequence stand for."""
    (keys, values), pool, backend = cache.pages.stored(seq, positions), cache.pool, cache.backend
    k = ops.decode(keys, pool.format.key, pool.key_offset, dtype=dtype, backend=backend)
    v = ops.decode(values, pool.format.value, pool.value_offset, dtype=dtype, backend=backend)
    return k, v


def attend(cache: KVCache, q: Tensor, bounds: list[int], call: Call, rotated: bool = False) -> Partial:
    """Over both tables. When rotated, queries come and the output goes in the rotation of the codes."""
    coded = _attend_table(cache, q, cache.page_table, bounds, call, rotated)
    if cache.uncompressed_table is None:
        return coded
    call = call._replace(scoring=scoring_uncompressed(call.scoring), sink_logits=None)  # sinks count once
    if not rotated:
        return join(coded, _attend_table(cache, q, cache.uncompressed_table, bounds, call))
    wide = cache.format.key.unrotate(q if q.dtype == torch.float64 else q.float())
    part = _attend_table(cache, wide, cache.uncompressed_table, bounds, call)
    return join(coded, Partial(cache.format.value.rotate(part.out).to(q.dtype), part.lse))


def attend_with_dense(cache: KVCache, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], call: Call) -> Partial:
    """With keys and values of the queries' own tokens, which the table of uncompressed tokens does not have yet."""
    assert cache.uncompressed_table is not None
    pages, scoring = cache.uncompressed_table.pages, scoring_uncompressed(call.scoring)
    ends, backend, dtype = cache.page_table.lengths, cache.backend, cache.uncompressed.dtype
    return merge(
        _attend_table(cache, q, cache.page_table, bounds, call),
        ops.attend(q, pages, bounds, scoring, ends=ends, precision=call.precision, backend=backend),
        ops.attend_dense(q, k.to(dtype), v.to(dtype), bounds, bounds, scoring, ends=ends, backend=backend),
    )


def _attend_table(
    cache: KVCache, q: Tensor, table: PageTable, bounds: list[int], call: Call, rotated: bool = False
) -> Partial:
    return ops.attend(
        q,
        table.pages,
        bounds,
        call.scoring,
        ends=None if table is cache.page_table else cache.pages.lengths,  # first tokens may be all that it has
        sink_logits=call.sink_logits,
        splits=call.splits,
        precision=call.precision,
        rotated=rotated,
        backend=cache.backend,
    )

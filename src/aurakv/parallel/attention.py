"""Attention of replicated queries over the positions that one rank holds, with the kernels for ordinary pages.

What every query sees needs no mask and is one run of local positions, however its blocks are spread over the sequence.
Where a mask cuts a block, the block is attended as a sequence of its own whose positions count from its beginning:
distances between queries and keys, and so windows and uncompressed tokens, stay what they are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import backends, checks
from ..attention.partial import Partial, merge
from ..attention.scoring import Scoring, scoring_uncompressed
from ..attention.step import Attention
from ..storage.attention_call import Call
from ..storage.page_table import PageTable
from ..storage.pages import Pages
from .placement import Share, entries, seen

if TYPE_CHECKING:
    from .sharded_cache import ShardedCache


class Piece(NamedTuple):
    """A run of local positions of a sequence and the rows of the queries that see it."""

    seq: int
    run: range
    rows: range
    end: int  # position after the last of these queries, counted like the run


def attend_share(cache: ShardedCache, q: Tensor, bounds: list[int], call: Call) -> Partial:
    """q [tokens, heads, dim], the last tokens of each sequence, over what this rank holds."""
    total = _Total(q, cache.format.value.dim)
    for table, uncompressed in zip(cache.local.page_tables, (False, True), strict=False):
        scoring = scoring_uncompressed(call.scoring) if uncompressed else call.scoring
        for wanted, pieces in _calls(cache, table, bounds, scoring):
            if whole := _whole(table, pieces, bounds):
                rows, pages, starts = None, table.pages, bounds
                ends = [*table.lengths]
                for piece in pieces:
                    ends[piece.seq] = piece.end
            else:
                rows, pages = _index([piece.rows for piece in pieces], q), _pages(table, pieces)
                starts = [0, *itertools.accumulate(len(piece.rows) for piece in pieces)]
                ends = [piece.end for piece in pieces]
            last = None if whole and ends == table.lengths else checks.ends(ends, pages.lengths)
            where = checks.on_device(starts, q.device)
            attention = Attention(pages, where, wanted, splits=call.splits, precision=call.precision, ends=last)
            backend = backends.select(cache.local.backend, pages.format, q.device, q.dtype)
            total.add(rows, backend.attend(q if rows is None else q[rows], attention))
    return total.partial()


def sees_all_before(scoring: Scoring) -> bool:
    """Whether a token sees every one before it, compressed."""
    return scoring == _without_mask(scoring)


def _without_mask(scoring: Scoring) -> Scoring:
    return Scoring(scoring.scale, softcap=scoring.softcap, threshold=scoring.threshold)


def _calls(
    cache: ShardedCache, table: PageTable, bounds: list[int], scoring: Scoring
) -> Iterator[tuple[Scoring, list[Piece]]]:
    """What to attend to, grouped so that a query occurs once in a call."""
    plain = _without_mask(scoring)
    calls: defaultdict[tuple[Scoring, int], list[Piece]] = defaultdict(list)
    used: Counter[tuple[Scoring, int]] = Counter()
    for seq, (a, b) in enumerate(itertools.pairwise(bounds)):
        length, share, held = cache._lengths[seq], cache.share(seq), table.lengths[seq]
        if a == b or not held:
            continue
        if scoring == plain and b == a + 1:  # a token sees all before it
            calls[plain, 0].append(Piece(seq, range(held), range(a, b), held))
            continue
        queries = range(length - (b - a), length)
        found = seen(share, queries, length, scoring)
        # A run ends before the first query as far as anyone can see, so every query sees all of it.
        pieces = [(plain, Piece(seq, run, range(a, b), len(run) + b - a - 1)) for run in found.runs]
        for block in found.edges:
            piece = _edge(share, block, queries, length, scoring)
            rows = range(piece.rows.start - queries.start + a, piece.rows.stop - queries.start + a)
            pieces.append((_moved(scoring, share.base(block)), piece._replace(seq=seq, rows=rows)))
        for wanted, piece in pieces:
            calls[wanted, used[wanted, seq]].append(piece)
            used[wanted, seq] += 1
    for (wanted, _), listed in calls.items():
        yield wanted, listed


def _edge(share: Share, block: int, queries: range, length: int, scoring: Scoring) -> Piece:
    """A block as a sequence of its own, for those queries that may see some of it (as positions)."""
    base = share.base(block)
    keys = range(base, min(base + share.block, length))
    first, stop = queries.start, queries.stop
    if scoring.causal:
        first = max(first, base)
    if scoring.window is not None and base >= scoring.sinks:
        stop = min(stop, keys.stop + scoring.window - 1)
    start = block * share.block
    return Piece(0, range(start, start + len(keys)), range(first, stop), stop - base)


def _moved(scoring: Scoring, base: int) -> Scoring:
    """The scoring for positions that count from `base`."""
    return dataclasses.replace(scoring, sinks=max(0, scoring.sinks - base), first=max(0, scoring.first - base))


def _whole(table: PageTable, pieces: list[Piece], bounds: list[int]) -> bool:
    """Whether these pieces are all that the table holds, with all queries, so that its own pages will do."""
    if table.kept is not None:
        return False
    given = {piece.seq: (len(piece.run), piece.rows) for piece in pieces}
    wanted = {seq: (n, range(*bounds[seq : seq + 2])) for seq, n in enumerate(table.lengths) if n}
    return given == {seq: each for seq, each in wanted.items() if len(each[1])}


def _pages(table: PageTable, pieces: list[Piece]) -> Pages:
    """Each piece as a sequence of its own, in the pages where it lies."""
    pool = table.pool
    rows = [entries(table, piece.seq, piece.run) for piece in pieces]
    width = max(map(len, rows))
    with torch.inference_mode(False):
        pages = dataclasses.replace(
            table.pages,
            table=torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).to(pool.device),
            lengths=torch.tensor([len(piece.run) for piece in pieces], dtype=torch.int32).to(pool.device),
            ring=False,
            pinned=0,
        )
    return pages.trust()


def _index(ranges: list[range], q: Tensor) -> Tensor | None:
    """The rows of the queries; None: all of them in order."""
    rows = [row for each in ranges for row in each]
    return None if rows == list(range(q.shape[0])) else torch.tensor(rows, device=q.device)


class _Total:
    """The sum of partial results, in float32 as soon as there are two."""

    def __init__(self, q: Tensor, dim: int) -> None:
        self.q, self.dim = q, dim
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.sum: Partial | None = None

    def add(self, rows: Tensor | None, part: Partial) -> None:
        if rows is None:
            self.sum = part if self.sum is None else merge(_wide(self.sum), _wide(part))
            return
        self.sum = self._nothing() if self.sum is None else _wide(self.sum)
        both = merge(Partial(self.sum.out[rows], self.sum.lse[rows]), _wide(part))
        self.sum.out[rows], self.sum.lse[rows] = both

    def partial(self) -> Partial:
        found = self._nothing() if self.sum is None else self.sum
        return Partial(found.out.to(self.q.dtype), found.lse.to(self.dtype))  # the same on every rank

    def _nothing(self) -> Partial:
        out = torch.zeros(*self.q.shape[:2], self.dim, dtype=self.dtype, device=self.q.device)
        return Partial(out, out.new_full(out.shape[:2], -torch.inf))


def _wide(part: Partial) -> Partial:
    return Partial(part.out.to(part.lse.dtype), part.lse)

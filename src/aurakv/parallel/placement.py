"""Which positions of a sequence lie with which rank, and which of them some queries see."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ..attention.scoring import Scoring
from ..storage.page_table import Kept, PageTable
from ..storage.uncompressed import Uncompressed


class Share(NamedTuple):
    """Blocks of `block` positions go round the ranks; this one has every block whose number is `turn` mod `ranks`.

    Local positions count the positions of the share: what a rank stores is a sequence without gaps.
    """

    block: int
    ranks: int
    turn: int = 0

    def count(self, length: int) -> int:
        """How many of the first `length` positions belong to the share."""
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - self.turn * self.block, 0), self.block)

    def base(self, block: int) -> int:
        """The position at which a block of the share begins."""
        return (block * self.ranks + self.turn) * self.block

    def pieces(self, start: int, stop: int) -> list[range]:
        """The positions of the share from start to stop."""
        block, left = divmod(start, self.block)
        if stop - start + left <= self.block:  # inside one block, like a single token
            return [range(start, stop)] if block % self.ranks == self.turn and stop > start else []
        blocks = range(self.count(start) // self.block, -(-self.count(stop) // self.block))
        pieces = [range(max(start, self.base(b)), min(stop, self.base(b) + self.block)) for b in blocks]
        return [piece for piece in pieces if len(piece)]

    def most(self, length: int) -> int:
        """The most positions that any share has of `length` consecutive ones."""
        rounds, rest = divmod(length, self.block * self.ranks)
        return rounds * self.block + min(rest, self.block)

    def kept(self, whole: Kept) -> Kept:
        """What a rank keeps of a ring, so that all ranks together keep what `whole` says."""
        window, sinks, chunk, rollback = (self.most(number) for number in whole)
        return Kept(window, sinks, chunk + 1, rollback)

    def uncompressed(self, whole: Uncompressed, chunk: int) -> Uncompressed:
        """What a rank keeps uncompressed, for `chunk` queries at once; always in a ring, whose pages blocks fit."""
        recent = self.most(whole.recent) + self.most(chunk) + 1 if whole.recent else min(whole.first, 1)
        return Uncompressed(self.most(whole.first), recent, whole.dtype, self.most(whole.rollback))


def own_rows(shares: list[Share], lengths: list[int], bounds: list[int]) -> tuple[list[int], list[int]]:
    """Which of the new rows belong to these shares of sequences of these lengths, and where each sequence begins among
    them."""
    rows: list[int] = []
    starts = [0]
    for share, length, (a, b) in zip(shares, lengths, itertools.pairwise(bounds), strict=True):
        for piece in share.pieces(length, length + b - a):
            rows += range(piece.start - length + a, piece.stop - length + a)
        starts.append(len(rows))
    return rows, starts


class Seen(NamedTuple):
    """What queries see of a share: runs of local positions that all of them see, and blocks that need a mask."""

    runs: list[range]
    edges: list[int]


def seen(share: Share, queries: range, length: int, scoring: Scoring) -> Seen:
    """Whatever lies in neither is seen by no query."""
    first, last = queries.start, queries.stop - 1
    common = _joined(scoring.spans(last, first, length))  # the other way round: seen by the last and by the first
    covered = [_covered(share, span, length) for span in common]
    edges: set[int] = set()
    for span in _joined(scoring.spans(first, last, length)):
        blocks = _touched(share, span)
        at = blocks.start
        for inside in covered:
            if len(inside) and inside.start in blocks:
                edges |= {*range(at, inside.start)}
                at = inside.stop
        edges |= {*range(at, blocks.stop)}
    held = share.count(length)
    runs = [range(each.start * share.block, min(each.stop * share.block, held)) for each in covered]
    return Seen([run for run in runs if len(run)], sorted(edges))


def _joined(spans: list[range]) -> list[range]:
    """In order, with neighbours made one."""
    joined: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and joined[-1].stop >= span.start:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined


def _touched(share: Share, span: range) -> range:
    """Blocks of the share that overlap a span."""
    pieces = range(share.count(span.start) // share.block, -(-share.count(span.stop) // share.block))
    return pieces if share.count(span.start) < share.count(span.stop) else range(0)


def _covered(share: Share, span: range, length: int) -> range:
    """Blocks of the share that lie in a span; the last one of a sequence may be short."""
    first = -(-share.count(span.start) // share.block)
    last = share.count(span.stop) if span.stop >= length else share.count(span.stop) // share.block * share.block
    return range(first, max(first, -(-last // share.block)))


def entries(table: PageTable, seq: int, run: range) -> list[int]:
    """The pages of a run of local positions that begins with a page."""
    size = table.pool.page_size
    if table.kept is None:
        return table.rows[seq][run.start // size : -(-run.stop // size)]
    return [table.page_at(seq, position) for position in range(run.start, run.stop, size)]

"""Recent tokens of sequences, uncompressed, beside blocks that have no place for them.

A query reads most from the tokens just before it, so codes of few bits cost most there. Tokens form groups by
position, and a query uses those of its own group as they came: in groups of n, the query at position p those from
n·⌊p / n⌋ on. Blocks hold whole groups, and engines share full blocks only. So what a query reads depends on its
position alone, not on what was found in a cache or where a prompt was cut.

Each layer has a buffer of entries, one for each sequence that may run and some more: the last group of a sequence, as
16-bit vectors. Where an entry is missing, or its block was filled without us, the codes of these tokens, which are
always in the block, are decoded into it: that costs accuracy, and nothing else. On a CPU. Knows nothing of vLLM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.step import Copies, Rows
from ..storage.pages import Pages
from .beginnings import Entries, entries_for, first_codes
from .cut import Cut, Lost
from .prompt_groups import Opened

MOST, LEAST = 64, 16  # tokens of a group
SPARE = 32  # entries beyond those of sequences that may run
_LEFT = 1 << 20  # an entry of a group that is full counts as unused for so many steps, from the next one on


def group_size(recent: int) -> int:
    """Tokens of a group that loses about as little as the last `recent` tokens of each query (docs/lab/quality.md)."""
    return min(MOST, max(LEAST, 1 << (4 * recent).bit_length() - 1)) if recent else 0


class Piece(NamedTuple):
    """Rows of one sequence that are in one group."""

    seq: int
    rows: range
    begin: int  # of the group, a position
    old: int  # tokens of the group that came before these rows


class Groups:
    """What a step finds of the last group of each of its sequences, at addresses that are kept."""

    several = False  # whether backends let several queries of a sequence use them

    def __init__(self, group: int, seqs: int, device: torch.device) -> None:
        self.group, self.step = group, 0
        self.layer: object = None  # whose contents tell blocks apart: it settles

        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.slots = numbers(seqs)  # their entries
        self.held = numbers(seqs)  # how many tokens of the groups lie there after the step
        self.before = numbers(seqs)  # and how many before it
        self.coded = numbers(seqs)  # up to where codes are read
        self.overflow = numbers(1)

    def pages_of(self, entries: Entries, seqs: int) -> Pages:
        """The groups of a layer, of the sequences of a step."""
        slots = self.slots[:seqs].view(seqs, 1)
        return Pages(entries.format, entries.tokens, entries.data, slots, self.held[:seqs], self.overflow).trust()

    def coded_of(self, pages: Pages) -> Pages:
        """The pages of a layer, as far as queries read their codes where they use recent tokens."""
        return replace(pages, lengths=self.coded[: pages.seqs]).trust()

    def stores(self, groups: Pages) -> Copies | None:
        """How an append stores the new tokens there; None where that is done apart."""
        return None

    def opened(self, entries: Entries, pages: Pages) -> Opened | None:
        """What lay of the groups that the rows of a step begin in, in the layer with these entries; None where rows are
        cut in another way."""
        return None

    def within(self, pages: Pages) -> int:
        """Tokens of a group: blocks hold whole ones."""
        return math.gcd(self.group, pages.page_size)


class Recent(Groups):
    """On a CPU."""

    def __init__(self, group: int, seqs: int) -> None:
        super().__init__(group, seqs, torch.device("cpu"))
        self.entries = [_Entry(number) for number in range(entries_for(seqs, SPARE))]
        self._of: dict[tuple[int, int], _Entry] = {}  # by block, and where in it the group begins

    def find(self, table: Tensor, lengths: Tensor, rows: Rows, pages: Pages) -> Cut | None:
        """For a step of sequences with these blocks, lengths with the new tokens, and rows; None if it has no rows.

        pages: of the layer whose contents tell blocks apart."""
        size, group = pages.page_size, self.within(pages)
        self.step += 1
        blocks = table.tolist()
        pieces = list(_pieces(rows.starts.tolist(), lengths.tolist(), group))
        begun = [piece for piece in pieces if piece.old]
        places = {piece: (blocks[piece.seq][piece.begin // size], piece.begin % size) for piece in pieces}
        reads = {piece: self._held(places[piece], piece.old, pages) for piece in begun}
        lost: list[Lost] = []
        for piece, found in reads.items():
            if found is None:
                reads[piece] = entry = self._entry(places[piece])
                lost.append(Lost(piece.seq, entry.number, range(piece.begin, piece.begin + piece.old)))
        last = {piece.seq: piece for piece in pieces}
        kept: dict[int, tuple[int, range]] = {}  # of each entry that is written: where new tokens go, and their rows
        for piece in begun:
            entry = self._entry(places[piece])
            kept[entry.number] = entry.fill(piece)
            if piece is not last[piece.seq]:
                entry.left = self.step
        for piece in last.values():
            if not piece.old:
                entry = self._entry(places[piece])
                kept[entry.number] = entry.fill(piece)
        old = [(reads[piece].number, at) for piece in begun for at in range(piece.old)]  # type: ignore[union-attr]
        new = [(number, at + i, row) for number, (at, rows_) in kept.items() for i, row in enumerate(rows_)]
        if not pieces:
            return None
        cut = _described(pieces, old, new, lost, whole=len(pieces) == len(last) == len(lengths))
        if cut.whole:
            seqs = len(pieces)
            self.slots[:seqs] = torch.tensor([self._of[places[piece]].number for piece in pieces])
            self.held[:seqs], self.coded[:seqs] = lengths - cut.begins, cut.begins
        return cut

    def settle(self, pages: Pages) -> None:
        """Behind the append of a step: note what its blocks have, before they can change. pages: as for `find`."""
        for entry in self.entries:
            if entry.place is not None and entry.tag is None:
                entry.tag = entry.codes(pages)

    def _held(self, place: tuple[int, int], count: int, pages: Pages) -> _Entry | None:
        """The entry with the first tokens of the group at a place; none if they are other ones than the block has."""
        found = self._of.get(place)
        if found is None or found.filled < count or found.tag != found.codes(pages):
            return None
        found.used = self.step
        return found

    def _entry(self, place: tuple[int, int]) -> _Entry:
        """The entry for the group at a place: the one that it has, or else the one that was not used for the longest
        time. Layers read old groups before they write new ones, so that may be one that this step reads."""
        entry = self._of.get(place)
        if entry is None:
            entry = min(self.entries, key=lambda each: each.last_used(self.step))
            if entry.place is not None:
                self._of.pop(entry.place)
            self._of[place], entry.place = entry, place
        entry.used = self.step
        return entry


@dataclass(eq=False)
class _Entry:
    """What lies in one entry of each layer."""

    number: int
    used: int = -(1 << 40)  # the last step that used it
    left: int | None = None  # the step that filled its group up: none needs it again, but to come back from drafts
    place: tuple[int, int] | None = None  # the block of its group, and where in it
    filled: int = 0  # tokens
    tag: bytes | None = None  # their codes after the step that wrote them

    def fill(self, piece: Piece) -> tuple[int, range]:
        """With the rows of a piece: where they go, and which they are."""
        self.filled, self.tag, self.left = piece.old + len(piece.rows), None, None
        return piece.old, piece.rows

    def last_used(self, step: int) -> float:
        """Full groups are given away first, but not in the step that fills them: it may hold drafts."""
        if self.left is None:
            return self.used
        return self.used - (_LEFT if self.left < step else 0.5)

    def codes(self, pages: Pages) -> bytes:
        assert self.place is not None
        block, at = self.place
        return first_codes(pages, block, at, self.filled)


def _pieces(starts: list[int], lengths: list[int], group: int) -> Iterator[Piece]:
    for seq, (row, last) in enumerate(itertools.pairwise(starts)):
        position = lengths[seq] - (last - row)
        while row < last:
            old = position % group
            stop = min(last, row + group - old)
            yield Piece(seq, range(row, stop), position - old, old)
            row, position = stop, position + stop - row


def _described(
    pieces: list[Piece],
    old: list[tuple[int, int]],
    new: list[tuple[int, int, int]],
    lost: list[Lost],
    whole: bool,
) -> Cut:
    source: list[int] = []
    key_starts, at = [0], 0
    for piece in pieces:
        source += range(at, at + piece.old)
        at += piece.old
        source += (len(old) + row for row in piece.rows)
        key_starts.append(len(source))

    def numbers(given: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(given, dtype=dtype)

    olds = torch.tensor(old, dtype=torch.int64).view(-1, 2).unbind(1)
    news = torch.tensor(new, dtype=torch.int64).view(-1, 3).unbind(1)
    return Cut(
        numbers([piece.seq for piece in pieces]),
        Rows(numbers([0, *(piece.rows.stop for piece in pieces)], torch.int32)),
        numbers([piece.begin for piece in pieces], torch.int32),
        numbers([piece.begin + piece.old + len(piece.rows) for piece in pieces], torch.int32),
        numbers(key_starts, torch.int32),
        numbers(source),
        (olds[0], olds[1]),
        (news[0], news[1], news[2]),
        lost,
        whole,
    )

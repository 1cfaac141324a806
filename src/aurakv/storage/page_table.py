"""PageTable: which page of a pool holds which tokens of a sequence. Contiguous, ring and paged storage are one rule."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import index, shown, whole
from ..errors import CapacityError, InputError
from .pages import Pages, table_entry
from .pool import PagePool

MAX_LENGTH = 2**31 - 1  # lengths are int32, also those of a ring that holds only the last tokens
GROWTH = 64  # a full contiguous cache grows by 1/64: copied every so many tokens, while every token reads all of it


class Kept(NamedTuple):
    """What a ring keeps: `window` tokens for each of `chunk` queries, also after truncating by up to `rollback`."""

    window: int
    sinks: int
    chunk: int
    rollback: int

    @classmethod
    def of(cls, window: int, sinks: int = 0, chunk: int | None = None, rollback: int = 0) -> Kept:
        """Numbers from outside, checked; without a chunk an eighth of the window, at least 16."""
        window = whole("window", window, 1)
        return cls(
            window,
            whole("sinks", sinks, 0),
            max(16, window // 8) if chunk is None else whole("chunk", chunk, 1),
            whole("rollback", rollback, 0),
        )

    def width(self, page_size: int) -> int:
        """PageTable entries: pinned ones for the sinks, the rest rounded up to pages, one more for the ragged start."""
        kept = self.window + self.chunk - 1 + self.rollback
        return -(-self.sinks // page_size) + -(-kept // page_size) + 1


class PageTable:
    """The page table of some sequences, on the host and as `pages` on the device.

    kept: a ring; else max_width bounds the entries of a sequence (None: as many as needed). A growable pool and a width
    of 1 make a contiguous table: one page per sequence, which grows.
    """

    def __init__(self, pool: PagePool, seqs: int, max_width: int | None = None, kept: Kept | None = None) -> None:
        self.pool, self.kept = pool, kept
        self.max_width = max_width if kept is None else kept.width(pool.page_size)
        self.pinned = 0 if kept is None else -(-kept.sinks // pool.page_size)
        if kept is not None and kept.width(pool.page_size) * pool.page_size > MAX_LENGTH:
            raise InputError(f"a ring keeps at most {MAX_LENGTH} tokens of a sequence, got {kept}")
        self.rows = [
            [-1] * (self.max_width or 1) for _ in range(seqs)
        ]  # page of each entry, −1 where there is none yet
        self.lengths = [0] * seqs
        self.forked = False  # whether tokens to come may go to pages that sequences share: the host copies them first
        self.highest = [0] * seqs  # longest a sequence has been: in a ring, what lies a wrap below is overwritten
        self.publish()

    def __del__(self) -> None:
        """A cache that is dropped gives its pages back, as if freed."""
        for row in self.__dict__.get("rows", ()):
            self.pool.release(page for page in row if page >= 0)

    @property
    def contiguous(self) -> bool:
        return self.max_width == 1 and self.kept is None and self.pool.growable

    @property
    def bytes_held(self) -> int:
        """The pages of the sequences (of a private pool all of it) and the table itself."""
        if self.pool.growable:
            pages = self.pool.bytes_held
        else:
            pages = len({page for row in self.rows for page in row if page >= 0}) * self.pool.data[:1].nbytes
        return pages + self.pages.table.nbytes + self.pages.lengths.nbytes + self.pages.overflow.nbytes

    def sync(self) -> None:
        """Read the lengths from the device and report an append that did not fit."""
        pages = self.pages
        overflow, lengths = pages.read()
        if lengths != self.lengths:
            self.lengths = lengths
            self.highest = [max(pair) for pair in zip(self.highest, lengths, strict=True)]
        if overflow:
            pages.overflow.zero_()
            raise CapacityError("an earlier append did not fit its pages and wrote nothing: reserve room for it first")

    def positions(self, seq: int) -> Tensor:
        """The positions that are still held: in a ring the sinks and the most recent ones."""
        length, device = self.lengths[seq], self.pool.device
        if self.kept is None:
            return torch.arange(length, device=device)
        pinned = min(length, self.pinned * self.pool.page_size)
        oldest = min(length, max(pinned, self.highest[seq] - self.pages.wrap))
        return torch.cat([torch.arange(pinned, device=device), torch.arange(oldest, length, device=device)])

    def oldest(self, seq: int) -> int:
        """The position from which on a sequence of a ring holds everything."""
        overwritten = self.highest[seq] - self.pages.wrap
        return overwritten if overwritten > self.pinned * self.pool.page_size else 0

    def make_room(self, bounds: list[int]) -> None:
        """Pages of their own for all tokens about to be written; refuses with nothing changed if there are too few."""
        if self._has_room(bounds):
            if self.forked:
                self._note_shared()
            return
        totals = [length + b - a for length, a, b in zip(self.lengths, bounds, bounds[1:], strict=False)]
        longest = max(totals, default=0)
        if longest > MAX_LENGTH:
            raise CapacityError(f"a sequence has at most {MAX_LENGTH} tokens, got {longest}")
        size = self.pool.page_size
        if self.contiguous and longest > size:
            self.pool.resize_pages(round_up(max(longest, size + size // GROWTH), 64))
            size = self.pool.page_size
        width = len(self.rows[0]) if self.rows else 0
        wanted = -(-longest // size)
        if self.kept is None and wanted > width:
            if self.max_width is not None and wanted > self.max_width:
                raise CapacityError(
                    f"a sequence of this cache holds at most {self.max_width * size} tokens, got {longest}"
                )
            width = wanted + wanted // 2
        touched = [
            (seq, entry, self.rows[seq][entry] if entry < len(self.rows[seq]) else -1)
            for seq, total in enumerate(totals)
            for entry in self._entries(self.lengths[seq], total)
        ]
        touched = [(seq, entry, page) for seq, entry, page in touched if page < 0 or self.pool.references(page) > 1]
        shared = Counter(page for _, _, page in touched if page >= 0)
        copies = sum(min(users, self.pool.references(page) - 1) for page, users in shared.items())
        growing = self.kept is None and self.pool.growable and not self.contiguous
        self.pool.need(len(touched) - shared.total() + copies, self.pool.num_pages // GROWTH if growing else 0)
        for row in self.rows:
            row += [-1] * (width - len(row))
        for seq, entry, page in touched:
            if page < 0:
                self.rows[seq][entry] = self.pool.take()
            elif self.pool.references(page) > 1:  # the last one to come keeps the original
                self.rows[seq][entry] = self.pool.copy(page)
        self._note_shared()
        if touched or self.pages.data is not self.pool.data:
            self.publish(lengths_too=False)  # a graph on the device may be ahead of the host

    def _note_shared(self) -> None:
        ahead = (
            row if self.kept is not None else row[length // self.pool.page_size :]  # a ring comes round to every page
            for row, length in zip(self.rows, self.lengths, strict=True)
        )
        self.forked = any(page >= 0 and self.pool.references(page) > 1 for row in ahead for page in row)

    def _has_room(self, bounds: list[int]) -> bool:
        """Whether the new tokens of each sequence, such as one, go to one page that is there and its own."""
        size, pool = self.pool.page_size, self.pool
        for seq, (row, old) in enumerate(zip(self.rows, self.lengths, strict=True)):
            new = old + bounds[seq + 1] - bounds[seq]
            if new == old:
                continue
            entry = old // size
            if (new - 1) // size != entry or new > MAX_LENGTH:
                return False
            if self.kept is not None:
                entry = table_entry(entry, self.pinned, len(row))
            if entry >= len(row) or row[entry] < 0 or pool.references(row[entry]) > 1:
                return False
        return self.pages.data is pool.data

    def page_ends(self) -> list[int]:
        """For each sequence, the position up to which its next tokens go to the page of the very next one."""
        size = self.pool.page_size
        return [(length // size + 1) * size for length in self.lengths]

    def advance(self, bounds: Sequence[int]) -> None:
        """Follow on the host what an append did to the lengths on the device."""
        for seq, (a, b) in enumerate(itertools.pairwise(bounds)):
            self.lengths[seq] += b - a
            self.highest[seq] = max(self.highest[seq], self.lengths[seq])

    def holds_window(self, length: int, highest: int) -> bool:
        """Whether the next query of a sequence of this length, which once was longer, sees its whole window."""
        if self.kept is None or length == 0:
            return True
        oldest = max(self.pinned * self.pool.page_size, length - self.kept.window + 1)
        return oldest >= min(length, highest - self.pages.wrap)

    def check_rollback(self, seq: int, length: int) -> None:
        """After truncating, the next query must still see its whole window."""
        if self.kept is not None and not self.holds_window(length, self.highest[seq]):
            raise CapacityError(
                f"sequence {seq} has been {self.highest[seq]} tokens long and can be rolled back by"
                f" {self.kept.rollback}, got a truncate to {length}"
            )

    def truncate(self, seq: int, length: int) -> None:
        row = self.rows[seq]
        keep = len(row) if self.kept is not None and length else -(-length // self.pool.page_size)
        self.pool.release(page for page in row[keep:] if page >= 0)
        row[keep:] = [-1] * (len(row) - keep)
        self.lengths[seq] = length
        self.highest[seq] = self.lowered(length, self.highest[seq])
        self._note_shared()
        self.publish()

    def lowered(self, length: int, highest: int) -> int:
        """`highest` after truncating: where nothing is left in the ring, what comes next is held from there on."""
        return length if length <= self.pinned * self.pool.page_size else min(highest, length + self.pages.wrap)

    def page_at(self, seq: int, position: int) -> int:
        """The page of the pool that holds a position."""
        page = position // self.pool.page_size
        return self.rows[seq][page if self.kept is None else table_entry(page, self.pinned, len(self.rows[seq]))]

    def place(self, seq: int, length: int, highest: int) -> None:
        """Give a sequence that has its pages the tokens that somebody writes there."""
        self.lengths[seq], self.highest[seq] = length, highest
        self.publish()

    def reorder(self, index: list[int]) -> None:
        rows = [list(self.rows[seq]) for seq in index]
        for row in rows:  # before anything is released
            self.pool.share(page for page in row if page >= 0)
        for row in self.rows:
            self.pool.release(page for page in row if page >= 0)
        self.rows = rows
        self.lengths = [self.lengths[seq] for seq in index]
        self.highest = [self.highest[seq] for seq in index]
        self._note_shared()
        self.publish()

    def restore(
        self, data: Tensor, page_size: int, rows: list[list[int]], lengths: list[int], highest: list[int]
    ) -> None:
        """Become the table of other sequences in a pool of their own (a cache from a file, checked by the caller)."""
        users = Counter(page for row in rows for page in row if page >= 0)
        self.pool.restore(data, page_size, [users[page] for page in range(data.shape[0])])
        self.rows, self.lengths, self.highest = rows, lengths, highest
        self._note_shared()
        self.publish()

    @torch.inference_mode(False)  # what lives as long as the cache must not become an inference tensor
    def publish(self, lengths_too: bool = True) -> None:
        """Put the host's table and lengths and the pool's data into `pages`; the same tensors where shapes allow."""
        pool, old = self.pool, self.__dict__.get("pages")
        width = len(self.rows[0]) if self.rows else (self.max_width or 1)
        table = torch.tensor(self.rows, dtype=torch.int32).view(len(self.rows), width)
        if old is not None and old.table.shape == table.shape:
            old.table.copy_(table)
            table = old.table
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if old is not None and len(old.lengths) == len(lengths):
            if lengths_too:
                old.lengths.copy_(lengths)
            lengths = old.lengths
        if old is not None and old.data is pool.data and old.table is table and old.lengths is lengths:
            return
        overflow = torch.zeros(1, dtype=torch.int32, device=pool.device) if old is None else old.overflow
        self.pages = Pages(
            pool.format,
            pool.page_size,
            pool.data,
            table.to(pool.device),
            lengths.to(pool.device),
            overflow,
            self.kept is not None,
            self.pinned,
            pool.key_offset,
            pool.value_offset,
            pool.key_fit,
            pool.value_fit,
        ).trust()

    def check_seq(self, seq: int) -> int:
        found = index(seq)
        if found is None or not 0 <= found < len(self.rows):
            raise InputError(f"this cache has sequences 0 … {len(self.rows) - 1}, got {shown(seq)}")
        return found

    def _entries(self, old: int, new: int) -> list[int]:
        """PageTable entries that tokens old … new − 1 are written to."""
        if old == new:
            return []
        size = self.pool.page_size
        touched = range(old // size, (new - 1) // size + 1)
        if self.kept is None:
            return list(touched)
        return sorted({table_entry(page, self.pinned, len(self.rows[0])) for page in touched})


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

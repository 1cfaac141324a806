"""Uncompressed: tokens that are used uncompressed, by position alone. They lie a second time, as 16-bit vectors."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import shown, whole
from ..attention.scoring import is_uncompressed
from ..errors import InputError
from ..format.codec import Codec, Format
from .page_table import Kept, PageTable, round_up
from .pool import PagePool

RING_PAGE = 16  # tokens of a page where recent ones are kept, and queries that such a ring serves at once


class Uncompressed(NamedTuple):
    """Tokens used uncompressed: the first of a sequence and, for each query, the most recent, by position alone."""

    first: int = 0
    recent: int = 0
    dtype: torch.dtype = torch.bfloat16  # they are stored in
    rollback: int = 16  # how far a sequence can be truncated

    @classmethod
    def of(cls, given: Uncompressed | None) -> Uncompressed:
        """What a user gave, checked; by default none."""
        if given is None:
            return cls()
        if not isinstance(given, Uncompressed):
            raise InputError(
                f"uncompressed must be an {Uncompressed.__module__}.Uncompressed, as Uncompressed(first=4), got"
                f" {shown(given)}"
            )
        first, recent = whole("first", given.first, 0), whole("recent", given.recent, 0)
        return cls(first, recent, given.dtype, whole("rollback", given.rollback, 0))

    def seen(self, key: Tensor, query: int) -> Tensor:
        """Which keys the query at a position uses uncompressed; both are positions."""
        return is_uncompressed(key, query, self.first, self.recent)

    def table(self, coded: PageTable) -> PageTable | None:
        """Where the uncompressed tokens of a table of codes lie, if any. `recent` is the window of a ring and `first`
        its sinks; the first tokens alone are a contiguous table of no others."""
        if not self.first and not self.recent:
            return None
        format, rows = coded.pool.format, len(coded.rows)
        key, value = (Codec(codec.dim, 16, dtype=self.dtype) for codec in (format.key, format.value))
        size = RING_PAGE if self.recent else self.page_size(0)
        pool = PagePool(Format(key, value), 0, size, coded.pool.kv_heads, coded.pool.device, growable=True)
        return PageTable(pool, rows, kept=self._ring) if self.recent else PageTable(pool, rows, max_width=1)

    @property
    def _ring(self) -> Kept:
        return Kept(self.recent, self.first, RING_PAGE, self.rollback)

    def room(self, tokens: int) -> int:
        """How many tokens the table has room for, of a sequence of so many."""
        if self.recent:
            return RING_PAGE * min(self._ring.width(RING_PAGE), -(-tokens // RING_PAGE))
        return self.page_size(min(tokens, self.first)) if self.first else 0

    def page_size(self, longest: int) -> int:
        """Of a table of first tokens whose sequences have at most `longest` of them."""
        least = min(self.first, 64)
        return least if longest <= least else round_up(longest, 64)

    def held(self, lengths: list[int]) -> list[int]:
        """How many tokens of sequences of these lengths went into the table of uncompressed tokens."""
        return lengths if self.recent else [min(length, self.first) for length in lengths]

    def taken(self, bounds: list[int], held: list[int]) -> list[range]:
        """The rows of new tokens that go into it, for sequences of which it has `held`."""
        rows = [range(a, b) for a, b in itertools.pairwise(bounds)]
        return rows if self.recent else [row[: max(0, self.first - n)] for row, n in zip(rows, held, strict=True)]

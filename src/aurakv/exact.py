"""Exact: tokens that are used uncompressed, by position alone. They lie a second time in a ring of 16-bit vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import whole
from .codec import Codec, Format
from .pool import PagePool
from .scoring import uncompressed
from .table import Kept, Table


class Exact(NamedTuple):
    """Tokens used uncompressed: the first of a sequence and, for each query, the most recent, by position alone."""

    first: int = 0
    recent: int = 0
    dtype: torch.dtype = torch.bfloat16  # they are stored in
    rollback: int = 16  # how far a sequence can be truncated

    def seen(self, key: Tensor, query: int) -> Tensor:
        """Which keys the query at a position uses uncompressed; both are positions."""
        return uncompressed(key, query, self.first, self.recent)

    def table(self, beside: Table) -> Table | None:
        """Where the exact tokens of a table lie, if any: `recent` is the window of a ring, `first` its sinks."""
        for name, number in (("first", self.first), ("recent", self.recent), ("rollback", self.rollback)):
            whole(name, number, 0)
        if not self.first and not self.recent:
            return None
        coded = beside.pool.format
        key, value = (Codec(codec.dim, 16, dtype=self.dtype) for codec in (coded.key, coded.value))
        pool = PagePool(Format(key, value), 0, 16, beside.pool.kv_heads, beside.pool.device, growable=True)
        return Table(pool, len(beside.rows), kept=Kept(max(self.recent, 1), self.first, 16, self.rollback))

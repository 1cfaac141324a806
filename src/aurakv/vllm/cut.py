"""Cut: the rows of a step, cut where groups of recent tokens begin, and a layer's step over them.

Each piece of rows attends like a sequence of its own: to codes before its group, and to its group as it came. On a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..attention.partial import in_dtype, join
from ..attention.step import Rows, Step
from ..calibration.key_scale import scaled_keys, scaled_queries
from ..storage.pages import Pages
from .beginnings import Entries, decode_into


class Lost(NamedTuple):
    """Tokens of a group of which an entry must get what their codes say."""

    seq: int
    entry: int
    positions: range


@dataclass(frozen=True)
class Cut:
    """Made once for all layers of a group."""

    seqs: Tensor  # [pieces] int64: of the batch
    rows: Rows  # of each piece
    begins: Tensor  # [pieces] int32: where its group begins; codes are read up to here
    ends: Tensor  # [pieces] int32: where its rows end
    key_starts: Tensor  # [pieces + 1] int32: where the tokens of its group are, of those that `source` gathers
    source: Tensor  # where each of these comes from: first the old ones, then the rows of the step
    old: tuple[Tensor, Tensor]  # the entries of the old ones, and their places there
    new: tuple[Tensor, Tensor, Tensor]  # entries, places and rows of the tokens that stay
    lost: list[Lost]
    whole: bool  # whether each sequence is one piece, as when it decodes: then its group can be read where it lies

    def keep(self, entries: Entries, step: Step, k: Tensor, v: Tensor) -> None:
        """Store the new tokens in their groups."""
        self._restore(entries, step.pages)
        self._keep(entries.vectors, scaled_keys(k, step.key_scale), v)

    def step(self, entries: Entries, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the new tokens and write attention of all queries to out."""
        pages, first = step.pages, step.uncompressed
        backend = backends.select(None, pages.format, q.device, q.dtype)
        q_scaled, k_scaled = scaled_queries(q, step.key_scale), scaled_keys(k, step.key_scale)
        pages.lengths.sub_(step.rows.starts.diff())
        backend.append(pages, k_scaled, v, step.rows)
        if step.first_tokens is not None:
            step.first_tokens.store(k_scaled, v, None, step.rows.starts)
        keys, values = self._groups(entries, pages, k_scaled, v)

        coded = self._of(pages, self.begins)
        whole = replace(step, pages=coded, rows=self.rows, ends=self.ends)
        parts = [backend.attend(q_scaled, whole)]
        if first is not None:
            held = torch.minimum(first.lengths[self.seqs], self.begins)
            over = replace(whole, uncompressed=self._of(first, held)).over_uncompressed()
            assert over is not None
            parts.append(backend.attend(q_scaled, over))
        near = replace(step.scoring, first=0, sinks=0)
        local = self.ends - self.begins
        keys, values = keys.to(q_scaled.dtype), values.to(q_scaled.dtype)
        part = backend.attend_dense(q_scaled, keys, values, self.rows, self.key_starts, local, near, None)
        for other in parts:
            part = join(part, other)
        out.copy_(in_dtype(part, q.dtype).out)

    def _of(self, pages: Pages, lengths: Tensor) -> Pages:
        """The pages of each piece."""
        return replace(pages, table=pages.table[self.seqs], lengths=lengths).trust()

    def _groups(self, entries: Entries, pages: Pages, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, dim] of the groups of all pieces. What is new of last groups is kept."""
        sides = entries.vectors
        self._restore(entries, pages)
        entry, place = self.old
        found = [
            torch.cat([kept[entry, :, place].to(new.dtype), new])[self.source]
            for kept, new in zip(sides, (k, v), strict=True)
        ]
        self._keep(sides, k, v)
        return found[0], found[1]

    def _keep(self, sides: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
        entry, place, row = self.new
        for kept, new in zip(sides, (k, v), strict=True):
            kept[entry, :, place] = new[row].to(kept.dtype)

    def _restore(self, entries: Entries, pages: Pages) -> None:
        for seq, entry, positions in self.lost:
            decode_into(entries.vectors, entry, pages, seq, positions)

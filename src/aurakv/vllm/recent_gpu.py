"""Recent tokens of sequences on a GPU, where all of it happens on the device: `recent` says what it is for.

Queries use them in steps with one query a sequence, as decodes are. Steps with more queries, prompts and drafts, read
codes. Where an entry is missing its tokens are read from their codes, too, until the next group begins.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.step import Copies, Rows
from ..storage.pages import Pages
from .beginnings import AGES, Entries, entries_for
from .cut import Cut
from .recent import SPARE

_NONE = -1


class RecentOnGpu:
    """`Recent`, found by a kernel."""

    def __init__(self, group: int, seqs: int, device: torch.device) -> None:
        self.group, self.seqs, self.device = group, seqs, device
        self.entries = entries_for(seqs, SPARE)
        self.step = 0
        self.layer: object = None  # whose contents tell blocks apart: it settles

        def numbers(count: int, dtype: torch.dtype = torch.int32, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.state = {
            "place_of": numbers(self.entries, torch.int64, _NONE),  # of each entry: a group of a block
            "tag": numbers(self.entries, torch.int64, _NONE),  # what the block had there
            "used": numbers(self.entries, value=-AGES[0]),  # the last step with a sequence whose last group it is
            "filled": numbers(self.entries),  # tokens that lie there
            "order": numbers(self.entries),  # in which entries are given away
            "pointer": numbers(1),
            # of a step, for each sequence, at addresses that captured graphs keep:
            "slots": numbers(seqs),  # its entry
            "held": numbers(seqs),  # how many of its tokens lie there after the step; none where they are lost
            "before": numbers(seqs),  # and how many before it
            "coded": numbers(seqs),  # up to where its codes are read
        }

    def find(self, table: Tensor, lengths: Tensor, rows: Rows, pages: Pages) -> Cut | None:
        """For a step of sequences with these blocks, lengths with the new tokens, and rows.

        pages: of the layer whose contents tell blocks apart."""
        from ..backends.triton.append import recent

        group = self._group(pages)
        places = pages.data.shape[0] * (pages.page_size // group)
        if "entry_of" not in self.state or len(self.state["entry_of"]) != places:  # the engine's memory is new
            self.state["entry_of"] = torch.full((places,), _NONE, dtype=torch.int32, device=self.device)
            self.state["place_of"].fill_(_NONE)
        self.step += 1
        recent.find(self.state, table, lengths, rows.starts, pages, self.step, group, self.seqs, AGES)
        return None

    def settle(self, pages: Pages) -> None:
        """Behind the append of a step: note what its blocks have, before they can change. pages: as for `find`."""
        from ..backends.triton.append import recent

        recent.settle(self.state, pages, self._group(pages))

    def _group(self, pages: Pages) -> int:
        return math.gcd(self.group, pages.page_size)  # blocks hold whole groups

    def copies(self, entries: Entries, seqs: int) -> Copies:
        """Those of a layer, of the sequences of a step."""
        slots, held = self.state["slots"][:seqs].view(seqs, 1), self.state["held"][:seqs]
        pages = Pages(entries.format, entries.tokens, entries.data, slots, held, self.state["pointer"]).trust()
        return Copies(pages, self.state["before"][:seqs], last=True)

    def coded(self, pages: Pages) -> Pages:
        """The pages of a layer, as far as queries read their codes where they use recent tokens."""
        return replace(pages, lengths=self.state["coded"][: pages.seqs]).trust()

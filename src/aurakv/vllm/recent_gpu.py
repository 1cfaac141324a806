"""Recent tokens of sequences on a GPU, where all of it happens on the device: `recent` says what it is for.

Prompts use them where flash attention takes prompts (`prompt_groups`), other steps where the decode kernel serves them:
there a sequence whose rows lie in two groups, as drafts may, reads codes. Where an entry is missing its tokens are read
from their codes, too, until the next group begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.step import Copies, Rows
from ..storage.pages import Pages
from .beginnings import AGES, Entries, entries_for
from .cut import Cut
from .prompt_groups import Opened
from .recent import SPARE, Groups

_NONE = -1


class RecentOnGpu(Groups):
    """Found by a kernel."""

    several = True

    def __init__(self, group: int, seqs: int, device: torch.device) -> None:
        super().__init__(group, seqs, device)
        self.seqs, self.device = seqs, device
        entries = entries_for(seqs, SPARE)

        def numbers(count: int, dtype: torch.dtype = torch.int32, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.state = {
            "place_of": numbers(entries, torch.int64, _NONE),  # of each entry: a group of a block
            "tag": numbers(entries, torch.int64, _NONE),  # what the block had there
            "used": numbers(entries, value=-AGES[0]),  # the last step with a sequence whose last group it is
            "filled": numbers(entries),  # tokens that lie there
            "order": numbers(entries),  # in which entries are given away
            "pointer": numbers(1),
            "slots": self.slots,
            "held": self.held,  # none where they are lost
            "before": self.before,
            "coded": self.coded,
            # of the group of a sequence's first row:
            "open_slots": numbers(seqs),  # its entry
            "opened": numbers(seqs),  # how many tokens lay there before the step
        }

    def find(self, table: Tensor, lengths: Tensor, rows: Rows, pages: Pages) -> Cut | None:
        """For a step of sequences with these blocks, lengths with the new tokens, and rows.

        pages: of the layer whose contents tell blocks apart."""
        from ..backends.triton.append import recent

        group = self.within(pages)
        places = pages.data.shape[0] * (pages.page_size // group)
        if "entry_of" not in self.state or len(self.state["entry_of"]) != places:  # the engine's memory is new
            self.state["entry_of"] = torch.full((places,), _NONE, dtype=torch.int32, device=self.device)
            self.state["place_of"].fill_(_NONE)
        self.step += 1
        recent.find(self.state, table, lengths, rows.starts, pages, self.step, group, self.seqs, AGES)
        return None

    def opened(self, entries: Entries, pages: Pages) -> Opened:
        seqs = pages.seqs
        slots, held = self.state["open_slots"][:seqs].view(seqs, 1), self.state["opened"][:seqs]
        before = Pages(entries.format, entries.tokens, entries.data, slots, held, self.overflow).trust()
        return Opened(before, self.within(pages))

    def settle(self, pages: Pages) -> None:
        """Behind the append of a step: note what its blocks have, before they can change. pages: as for `find`."""
        from ..backends.triton.append import recent

        recent.settle(self.state, pages, self.within(pages))

    def stores(self, groups: Pages) -> Copies | None:
        return Copies(groups, self.before[: groups.seqs], last=True)

"""Beginnings: the first tokens of sequences, uncompressed, beside blocks that have no place for them.

They attract attention and their keys are unlike all others, so codes of few bits cost most there. Blocks of an engine
have one size; so every layer has a small buffer of entries: one for each sequence that may run, and some more. An entry
belongs to a block, the first one of a sequence, and so to every sequence that begins with that block.

The codes of these tokens are always in their blocks. Where an entry is missing they are used instead (on a CPU by
decoding them into one): that costs accuracy, and nothing else. An entry knows which bytes its block had once all first
tokens were there, because blocks can be filled without us: by a connector, or as copies. Entries of sequences that run
are given to others last of all.

On a GPU all of this happens on the device, without waiting for it. Knows nothing of vLLM.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import ops
from ..attention.step import Copies, Rows
from ..format.codec import Codec, Format
from ..storage.pages import Pages, parts

SPARE = 256  # entries for blocks of sequences that do not run, which an engine may find again
AGES = (64, 16, 4, 1, 0)  # steps: entries that were not used for more than the first are given away first, and so on
_NONE = -1


@dataclass(frozen=True, eq=False)
class Entries:
    """The buffer of one layer."""

    format: Format  # vectors of 16 bits
    tokens: int  # of an entry
    data: Tensor  # [entries, kv_heads, bytes]

    @classmethod
    def for_pages(
        cls, format: Format, tokens: int, count: int, kv_heads: int, dtype: torch.dtype, device: torch.device
    ) -> Entries:
        """So many entries of so many tokens, for pages of a format."""
        uncompressed = Format(Codec(format.key.dim, 16, dtype=dtype), Codec(format.value.dim, 16, dtype=dtype))
        size = count, kv_heads, uncompressed.layout(tokens).bytes
        return cls(uncompressed, tokens, torch.zeros(size, dtype=torch.uint8, device=device))

    @functools.cached_property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Keys and values [entries, kv_heads, tokens, dim]."""
        keys, values = (part.data for part in parts(self.format, self.data, self.tokens))
        return keys.view(self.format.key.dtype), values.view(self.format.value.dtype)


class Beginnings:
    """Which entry belongs to which block, for the layers of a group, and what each sequence of a step has there."""

    def __init__(self, first: int, seqs: int, device: torch.device) -> None:
        self.first, self.seqs, self.device = first, seqs, device
        self.entries = entries_for(seqs)
        self.step = 0
        self.layer: object = None  # whose contents tell blocks apart: it settles

        def numbers(count: int, dtype: torch.dtype = torch.int32, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.state = {
            "block_of": numbers(self.entries, torch.int64, _NONE),  # of each entry
            "tag": numbers(self.entries, torch.int64, _NONE),  # what the block had in it
            "used": numbers(self.entries, value=-AGES[0]),  # the last step with a sequence that begins with it
            "filled": numbers(self.entries),  # tokens that lie there
            "order": numbers(self.entries),  # in which entries are given away
            "pointer": numbers(1),
            # of a step, for each sequence, at addresses that captured graphs keep:
            "slots": numbers(seqs),  # its entry
            "held": numbers(seqs),  # how many of its tokens count from there: all first ones, or none
            "before": numbers(seqs),  # how many lay there before the step
            "coded": numbers(seqs),  # on a CPU: how many must be decoded into it, because it was lost
        }

    @property
    def on_gpu(self) -> bool:
        """Where kernels do all of it."""
        return self.device.type == "cuda"

    def find(self, table: Tensor, lengths: Tensor, rows: Rows, pages: Pages) -> None:
        """For the sequences of a step: their blocks [seqs, width], lengths with the new tokens, and rows.

        pages: of the layer whose contents tell blocks apart."""
        blocks = pages.data.shape[0]
        if "entry_of" not in self.state or len(self.state["entry_of"]) != blocks:  # the engine's memory is new
            self.state["entry_of"] = torch.full((blocks,), _NONE, dtype=torch.int32, device=self.device)
            self.state["block_of"].fill_(_NONE)
        self.step += 1
        if self.on_gpu:
            from ..backends.triton.append import beginnings

            beginnings.find(self.state, table, lengths, rows.starts, pages, self.step, self.first, self.seqs, AGES)
        else:
            _Finder(self, pages).find(table[:, 0].tolist(), lengths.tolist(), rows.starts.tolist())

    def settle(self, pages: Pages) -> None:
        """Behind the append of a step: note what its blocks have, before they can change. pages: as for `find`."""
        if self.on_gpu:
            from ..backends.triton.append import beginnings

            beginnings.settle(self.state, pages, self.first)
        else:
            _Finder(self, pages).settle()

    def entries_of(self, entries: Entries, seqs: int) -> Pages:
        """Those of a layer as pages, one for each sequence of a step."""
        slots, held = self.state["slots"][:seqs].view(seqs, 1), self.state["held"][:seqs]
        return Pages(entries.format, entries.tokens, entries.data, slots, held, self.state["pointer"]).trust()

    def first_tokens(self, entries: Pages) -> Copies:
        """Where a step stores the new ones among the first tokens."""
        return Copies(entries, self.state["before"][: entries.seqs])

    def restore(self, entries: Pages, pages: Pages) -> None:
        """On a CPU: decode what entries have lost from the codes of the layer, its pages. A GPU uses the codes."""
        if self.on_gpu:
            return
        for seq, count in enumerate(self.state["coded"].tolist()):
            if count:
                decode_into(entries.vectors(), int(entries.table[seq, 0]), pages, seq, range(count))


def entries_for(seqs: int, spare: int | None = None) -> int:
    """Where at most so many sequences run."""
    return seqs + min(seqs, SPARE if spare is None else spare)


def decode_into(sides: tuple[Tensor, Tensor], entry: int, pages: Pages, seq: int, positions: range) -> None:
    """What a sequence stores at these positions, as the first tokens of an entry. sides: `Entries.vectors`."""
    found = pages.stored(seq, torch.arange(positions.start, positions.stop))
    codecs = (pages.format.key, pages.key_offset), (pages.format.value, pages.value_offset)
    for side, codes, (codec, offset) in zip(sides, found, codecs, strict=True):
        side[entry, :, : len(positions)] = ops.decode(codes, codec, offset, dtype=side.dtype).transpose(0, 1)


def first_codes(pages: Pages, block: int, begin: int, count: int) -> bytes:
    """What tells blocks apart: the first bytes of the keys of some tokens, from a place in the block on. On a CPU."""
    row = pages.format.key.row_bytes
    at = pages.format.layout(pages.page_size).key_codes + begin * row
    return pages.data[block, 0, at : at + count * row].view(count, row)[:, :8].numpy().tobytes()


class _Finder:
    """`find_kernel` of the GPU, one sequence after the other."""

    def __init__(self, beginnings: Beginnings, pages: Pages) -> None:
        self.first, self.step, self.entries = beginnings.first, beginnings.step, beginnings.entries
        self.state, self.pages = beginnings.state, pages

    def find(self, blocks: list[int], lengths: list[int], starts: list[int]) -> None:
        entry_of, block_of, tag, used, filled = (
            self.state[name].numpy() for name in ("entry_of", "block_of", "tag", "used", "filled")
        )
        news = [b - a for a, b in itertools.pairwise(starts)]
        given = enumerate(zip(blocks, lengths, news, strict=True))
        real = [(i, block, length, length - new) for i, (block, length, new) in given if length and new]
        for _, block, _, _ in real:
            if entry_of[block] >= 0:
                used[entry_of[block]] = self.step
        order = self.order(used)
        for _, block, _, _ in real:
            if entry_of[block] < 0:
                entry = next(order)
                if block_of[entry] >= 0:
                    entry_of[block_of[entry]] = _NONE
                entry_of[block], block_of[entry] = entry, block
                used[entry], filled[entry], tag[entry] = self.step, 0, _NONE
        for _, block, _, old in real:
            if old == 0:
                filled[entry_of[block]], tag[entry_of[block]] = 0, _NONE
        for _, block, _, _ in real:
            entry = entry_of[block]
            if tag[entry] != self.tag_of(block):
                filled[entry], tag[entry] = 0, _NONE
        self.state["held"].zero_()
        self.state["coded"].zero_()
        self.state["before"].fill_(self.first)
        for i, block, length, old in real:
            entry, most = entry_of[block], min(length, self.first)
            self.state["slots"][i], self.state["held"][i] = int(entry), most
            if filled[entry] < min(old, self.first):  # it was lost: what lies there counts for this step only
                self.state["coded"][i] = min(old, self.first)
                self.state["before"][i] = min(old, most)
            elif old < self.first:  # what lies there beyond that are drafts that were rejected
                self.state["before"][i] = old
                filled[entry], tag[entry] = most, _NONE

    def settle(self) -> None:
        block_of, tag, filled = (self.state[name].numpy() for name in ("block_of", "tag", "filled"))
        for entry in ((block_of >= 0) & (filled > 0) & (tag == _NONE)).nonzero()[0]:
            tag[entry] = self.tag_of(int(block_of[entry]))

    def order(self, used: Any) -> Iterator[int]:
        """`list_entries` of the GPU."""
        pointer = self.state["pointer"]
        free = [(int(pointer) + i) % self.entries for i in range(self.entries)]
        bounds = zip(AGES, (math.inf, *AGES), strict=False)
        for entry in [entry for low, high in bounds for entry in free if low < self.step - used[entry] <= high]:
            pointer.fill_((int(pointer) + 1) % self.entries)
            yield entry

    def tag_of(self, block: int) -> int:
        """What the first tokens of a block are."""
        return hash(first_codes(self.pages, block, 0, self.first)) & 0x7FFFFFFFFFFFFFFF

"""One attention layer over pages that an engine owns: append and attend for a ragged batch. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..attention.scoring import Scoring
from ..attention.step import Copies, Rows, Step
from ..calibration.policy import LayerPolicy
from ..errors import InputError
from ..format.codec import Format
from ..storage.pages import Pages
from . import prompt_groups
from .beginnings import Beginnings, Entries
from .cut import Cut
from .prefill import Prefill, Prompts, append
from .prompt_groups import Opened
from .recent import Recent
from .recent_gpu import RecentOnGpu

TOKENS = 16  # a block holds a multiple of this many tokens: then the parts of a page need no padding
BLOCK_TOKENS = 64  # and best this many on a GPU: a tile of the decode kernel
MOST_TOKENS = 256  # larger blocks are split where the engine can, so that each is several pages
MAX_KNOWN = 4096  # descriptions of pages that a group of layers keeps: a few for each layer


class Memory:
    """What lives as long as the engine's memory and goes with it: captured graphs keep these addresses."""

    def __init__(self, device: torch.device) -> None:
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self.beginnings: Beginnings | None = None  # where the layers have some
        self.recent: Recent | RecentOnGpu | None = None  # likewise
        self.stored: dict[tuple[object, ...], Stored] = {}  # of each layer and table


@dataclass
class Batch:
    """One forward pass of the engine: which rows belong to which sequence, and where its tokens lie.

    Sequences without rows, or of length 0, pad the batch: nothing of theirs is read or written.
    """

    tokens: int  # rows of the batch that count
    rows: Rows  # single: at most one row each, in order
    lengths: Tensor  # [seqs] int32: of the sequences, with these rows
    table: Tensor  # [seqs, width] int32 block indices
    memory: Memory
    prompts: Prompts | None = None  # sequences at the end with many rows, on a GPU: layers attend to these apart
    cut: Cut | None = None  # the rows by groups of recent tokens, where layers keep these
    seen: bool = field(default=False, init=False)  # whether the host has looked at the contents
    _front: Batch | None = field(default=None, init=False)
    _back: Batch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        seqs = self.lengths.shape[0]
        if self.table.shape[0] != seqs or self.rows.starts.shape[0] != seqs + 1:
            raise InputError(
                f"{seqs} sequences need as many table rows and one more start,"
                f" got {self.table.shape[0]} and {self.rows.starts.shape[0]}"
            )

    def front(self, prompts: Prompts) -> Batch:
        """The sequences before the prompts, made once for all layers."""
        if self._front is None:
            seqs, tokens = prompts.first, prompts.row
            rows = Rows(self.rows.starts[: seqs + 1], single=prompts.singles)
            self._front = Batch(tokens, rows, self.lengths[:seqs], self.table[:seqs], self.memory)
        return self._front

    def back(self, prompts: Prompts) -> Batch:
        """The prompts, likewise."""
        if self._back is None:
            first, row = prompts.first, prompts.row
            rows = Rows(self.rows.starts[first:] - row)
            self._back = Batch(self.tokens - row, rows, self.lengths[first:], self.table[first:], self.memory)
        return self._back

    def look(self, pages: Pages) -> None:
        """Refuse contents that are out of range, before the first layer writes. Waits for the device."""
        pages.check_values()
        if bool((self.lengths < self.rows.starts.diff()).any()):
            raise InputError(
                f"sequences have more new rows than tokens: {self.lengths.tolist()}, {self.rows.starts.tolist()}"
            )
        self.seen = True


class Stored(NamedTuple):
    """Where the tokens of a batch are that a layer stores."""

    pages: Pages
    key_scale: Tensor | None
    first: Pages | None  # uncompressed first tokens
    first_tokens: Copies | None  # where new ones among these go
    recent: Pages | None  # uncompressed last tokens
    recent_tokens: Copies | None  # where new ones go, if an append stores them
    coded: Pages | None  # the pages, as far as codes are read where queries use these
    opened: Opened | None  # on a GPU: of the groups that rows begin in, what came before

    @property
    def codes(self) -> Stored:
        """Without what is uncompressed."""
        return Stored(self.pages, self.key_scale, None, None, None, None, None, None)


class Constants(NamedTuple):
    """What a policy says, on the device. Captured graphs keep these addresses."""

    key_offset: Tensor | None
    value_offset: Tensor | None
    key_scale: Tensor | None
    key_fit: Tensor | None
    value_fit: Tensor | None


class Layer:
    """What a layer needs beside the batch: its format, offsets and scoring."""

    def __init__(
        self,
        format: Format,
        scoring: Scoring,
        *,
        sink_logits: Tensor | None = None,
        policy: LayerPolicy | None = None,
        beginnings: Entries | None = None,
        recent: Entries | None = None,
        prefill: Prefill | None = None,
    ) -> None:
        self.format = format
        self.prefill = prefill
        self.scoring = scoring
        self.beginnings = beginnings
        self.recent = recent
        self.with_first = scoring if beginnings is None else replace(scoring, first=beginnings.tokens)
        self.sink_logits = sink_logits
        self.policy = policy or LayerPolicy(format.name)
        self._constants: dict[torch.device, Constants] = {}

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, blocks: Tensor, batch: Batch, out: Tensor) -> None:
        """Store the new tokens, if they come along, and write attention of all queries to out [rows, heads, dim].

        Without keys and values the layer reads those of an earlier one.
        blocks: [blocks, kv_heads, tokens, bytes of a token] uint8, the engine's memory; padding may follow each.
        """
        stored = self._stored(blocks, batch)
        pages = stored.pages
        if not batch.seen and blocks.device.type == "cpu":
            batch.look(pages)
        if batch.tokens:
            self._forward(q, k, v, stored, blocks, batch, out)
            for each in (batch.memory.beginnings, batch.memory.recent):
                if each is not None and each.layer is self:
                    each.settle(pages)

    def _forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, stored: Stored, blocks: Tensor, batch: Batch, out: Tensor
    ) -> None:
        n, pages, prompts = batch.tokens, stored.pages, batch.prompts
        new = None if k is None else k[:n], None if v is None else v[:n]
        if stored.first is not None and batch.memory.beginnings is not None:
            batch.memory.beginnings.restore(stored.first, pages)
        if prompts is None:
            self._step(q[:n], *new, stored, batch, out[:n])
            return
        append(pages, *new, batch.rows, stored.key_scale, (stored.first_tokens, stored.recent_tokens))
        if prompts.row:
            front = batch.front(prompts)
            self._step(q[: prompts.row], None, None, self._stored(blocks, front), front, out[: prompts.row])
        if not self._prompts(q, k, v, stored, prompts, batch, out):
            back, rows = batch.back(prompts), slice(prompts.row, n)
            self._step(q[rows], None, None, self._stored(blocks, back).codes, back, out[rows])

    def _prompts(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, stored: Stored, prompts: Prompts, batch: Batch, out: Tensor
    ) -> bool:
        """Attention of prompts by flash attention; whether it serves them."""
        if self.prefill is None:
            return False
        pages, starts = stored.pages, batch.rows.starts
        if k is not None and v is not None and stored.opened is not None:
            groups = prompt_groups.plan(prompts, stored.opened, self.prefill.room(pages), starts, pages.lengths)
            if groups is not None:
                given = pages, stored.opened, self.sink_logits, stored.key_scale, stored.first, out
                prompt_groups.attend(self.prefill, groups, q, k, v, *given)
                return True
        runs = self.prefill.plan(prompts, pages, self.scoring, starts)
        if runs is not None:
            self.prefill.attend(q, pages, runs, self.scoring, self.sink_logits, stored.key_scale, stored.first, out)
        return runs is not None

    def _step(self, q: Tensor, k: Tensor | None, v: Tensor | None, stored: Stored, batch: Batch, out: Tensor) -> None:
        first, recent, coded = stored.first, stored.recent, stored.coded
        cut = None if k is None or recent is None else batch.cut
        several = batch.memory.recent is not None and batch.memory.recent.several
        if not (batch.rows.single or several if cut is None else cut.whole):
            recent = coded = None
        step = Step(
            stored.pages,
            batch.rows,
            self.scoring if first is None else self.with_first,
            self.sink_logits,
            key_scale=stored.key_scale,
            uncompressed=first,
            counted=True,
            first_tokens=stored.first_tokens,
            recent_tokens=stored.recent_tokens,
            recent=recent,
            coded=coded,
        )
        if cut is not None and self.recent is not None and k is not None and v is not None:
            if not cut.whole:
                cut.step(self.recent, step, q, k, v, out)
                return
            cut.keep(self.recent, step, k, v)
        backend = backends.select(None, self.format, q.device, q.dtype)
        backend.prepare_step(step, q, k, v)(q, k, v, out)

    def pages(self, blocks: Tensor, batch: Batch) -> Pages:
        """The engine's memory as pages."""
        return self._stored(blocks, batch).pages

    def _stored(self, blocks: Tensor, batch: Batch) -> Stored:
        """The engine's memory as pages, and what lies beside it. Made once per table: engines reuse theirs."""
        known, table, lengths = batch.memory.stored, batch.table, batch.lengths
        key = (self, blocks.data_ptr(), blocks.shape[0], table.data_ptr(), *table.shape, lengths.data_ptr())
        found = known.get(key)
        if found is None:
            tokens = blocks.shape[2]
            data = _pieces(blocks)
            made = self.constants(data.device, data.shape[1])
            # trusted: each step looks at the contents once for all layers
            pages = Pages(
                self.format,
                tokens,
                data,
                table,
                lengths,
                batch.memory.overflow,
                key_offset=made.key_offset,
                value_offset=made.value_offset,
                key_fit=made.key_fit,
                value_fit=made.value_fit,
            ).trust()
            pages.check()
            found = Stored(pages, made.key_scale, *self._beside(batch.memory, pages))
            if len(known) >= MAX_KNOWN:
                known.clear()
            known[key] = found
        return found

    def _beside(
        self, memory: Memory, pages: Pages
    ) -> tuple[Pages | None, Copies | None, Pages | None, Copies | None, Pages | None, Opened | None]:
        """What of the sequences of these pages is uncompressed."""
        first = first_tokens = recent = recent_tokens = coded = opened = None
        if self.beginnings is not None and memory.beginnings is not None:
            first = memory.beginnings.entries_of(self.beginnings, pages.seqs)
            first_tokens = memory.beginnings.first_tokens(first)
        if self.recent is not None and memory.recent is not None:
            recent = memory.recent.pages_of(self.recent, pages.seqs)
            recent_tokens, coded = memory.recent.stores(recent), memory.recent.coded_of(pages)
            opened = memory.recent.opened(self.recent, pages)
        return first, first_tokens, recent, recent_tokens, coded, opened

    def constants(self, device: torch.device, kv_heads: int) -> Constants:
        """Made once, and kept as long as the layer: graphs read them when no table that they were made for is known
        any more, and a fit takes a Cholesky factorisation for each head."""
        if device not in self._constants:
            policy = self.policy
            offset, value_offset, scale = (
                None if x is None else x.to(device) for x in (policy.key_offset, policy.value_offset, policy.key_scale)
            )
            fits = policy.fits(self.format, kv_heads, device)
            self._constants[device] = Constants(offset, value_offset, scale, *fits)
        return self._constants[device]


def _pieces(blocks: Tensor) -> Tensor:
    """[blocks, kv_heads, bytes]: what pads a block is divided among its heads, which nobody but us looks for."""
    count, heads, tokens, size = blocks.shape
    stride = blocks.stride(0)
    if stride == heads * tokens * size:
        return blocks.view(count, heads, tokens * size)
    if stride % (16 * heads) or blocks.stride()[1:] != (tokens * size, size, 1):
        raise InputError(f"blocks of {heads} KV heads must be padded to a multiple of {16 * heads} bytes, got {stride}")
    return blocks.as_strided((count, heads, stride // heads), (stride, stride // heads, 1))

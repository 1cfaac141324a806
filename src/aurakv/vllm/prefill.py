"""Prompts on a GPU: an engine's flash attention over sequences that are unpacked to 16 bits. Knows nothing of vLLM.

Sequences with many new rows stand at the end of a batch. Their tokens, the new ones too, are unpacked from their codes
into scratch memory that all layers share, so that results do not depend on how a prompt is cut into chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..attention.scoring import Scoring
from ..attention.step import Copies, Rows
from ..format.codec import Format
from ..storage.pages import Pages

MAX_SEQS = 128  # of one call; the launcher of unpack takes no more


class Flash(Protocol):
    """An engine's flash attention of one layer: queries are the last rows of their sequences, key_starts [n + 1] where
    the keys and values of these are, most: the most rows and keys of one. Gives the log-sum-exp [heads, rows]."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        most: tuple[int, int],
        *,
        causal: bool,
        sinks: bool,
    ) -> Tensor: ...

    def over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        lengths: Tensor,
        table: Tensor,
        most: tuple[int, int],
    ) -> Tensor:
        """Queries see all keys, without sinks: lengths [n] of them, in the pages that table [n, width] names."""
        ...

    def merge(self, out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        """Write to out the results a and b over different keys, each with its log-sum-exp; give that of both."""
        ...


class Piece(NamedTuple):
    """Keys that one call of flash attention reads."""

    begins: Tensor  # [n] int32: the first position of each sequence
    key_starts: Tensor  # [n + 1] int32
    tiles: int  # of `unpack`, at most
    most: tuple[int, int]  # rows and keys of a sequence
    rows: int  # of the scratch memory, at most
    causal: bool  # whether these are the last keys of their sequences; else rows see all of them


class Run(NamedTuple):
    """Sequences that attend together, or one over several pieces of its keys."""

    first: int  # sequence
    rows: slice  # of the batch
    starts: Tensor  # [n + 1] int32: rows of each, from the first one on
    pieces: list[Piece]


@dataclass
class Prompts:
    """The sequences with many new rows, at the end of a batch, as the host knows them."""

    first: int  # sequence
    row: int  # where their rows begin
    counts: list[int]  # of new rows
    lengths: list[int]  # of the sequences with these
    singles: bool  # whether each sequence before them has one row
    runs: dict[tuple[int | None, int], list[Run] | None] = field(default_factory=dict)  # by window and room
    groups: dict[tuple[int, int], Any] = field(default_factory=dict)  # see `prompt_groups.plan`

    def plan(self, window: int | None, room: int, starts: Tensor, lengths: Tensor) -> list[Run] | None:
        """How to attend with scratch memory for `room` tokens; None where a window does not fit into that.

        starts, lengths: of the whole batch, on the device, where lengths may be smaller than the host knows."""
        key = window, room
        if key not in self.runs:
            self.runs[key] = self._plan(window, room, starts, lengths)
        return self.runs[key]

    def _plan(self, window: int | None, room: int, starts: Tensor, lengths: Tensor) -> list[Run] | None:
        wanted = [
            length if window is None else min(length, count + window - 1)
            for count, length in zip(self.counts, self.lengths, strict=True)
        ]
        if any(n > room for n in (self.counts if window is None else wanted)):
            return None
        runs: list[Run] = []
        at, row = 0, self.row
        while at < len(wanted):
            end, total = at + 1, wanted[at]
            while end < len(wanted) and end - at < MAX_SEQS and total + wanted[end] <= room:
                total += wanted[end]
                end += 1
            first, rows = self.first + at, sum(self.counts[at:end])
            if not rows:  # the sequences pad the batch
                at = end
                continue
            local = starts[first : self.first + end + 1] - row
            of = lengths[first : self.first + end]
            if total > room:
                pieces = _pieces(self.counts[at], self.lengths[at], room, of)
            else:
                begins = torch.zeros_like(of) if window is None else (of - local.diff() - (window - 1)).clamp_(min=0)
                pieces = [_piece(begins, of - begins, self.counts[at:end], wanted[at:end])]
            runs.append(Run(first, slice(row, row + rows), local, pieces))
            at, row = end, row + rows
        return runs


def _piece(begins: Tensor, counts: Tensor, rows: list[int], keys: list[int], causal: bool = True) -> Piece:
    key_starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return Piece(begins, key_starts, tiles(keys), (max(rows), max(keys)), sum(keys), causal)


def _pieces(rows: int, length: int, room: int, lengths: Tensor) -> list[Piece]:
    """Of one sequence: its last keys, among them those of its rows, then the others from the front on."""
    last = (lengths - room).clamp_(min=0)
    pieces = [_piece(last, lengths - last, [rows], [room])]
    for at in range(0, length - room, room):
        keys = (last - at).clamp_(0, room)
        pieces.append(_piece(torch.full_like(lengths, at), keys, [rows], [min(room, length - room - at)], False))
    return pieces


def tiles(keys: list[int]) -> int:
    """Of `unpack`, for sequences of so many keys."""
    from ..backends.triton.unpack import launch

    return launch.tiles(keys)


def find_prompts(starts: list[int], lengths: list[int], least: int) -> Prompts | None:
    """The sequences from the first one on that has at least so many rows; None if there is none.

    starts: rows of the sequences, one more than those. Engines put long prompts last, some of them short ones, too,
    which are right either way.
    """
    all_counts = [b - a for a, b in itertools.pairwise(starts)]
    first = next((seq for seq, count in enumerate(all_counts) if count >= least), None)
    if first is None:
        return None
    counts = all_counts[first:]
    return Prompts(first, starts[first], counts, lengths[first:], starts[: first + 1] == list(range(first + 1)))


def most_rows(group: int, dim: int, decode: int) -> int:
    """Of a sequence that is no prompt: what the decode kernel takes, and those of a sequence that decodes, for graphs
    capture these. group: query heads of a KV head."""
    return max((64 if dim <= 128 else 32) // group, decode)


@dataclass(frozen=True)
class Prefill:
    """What a layer needs to attend this way."""

    flash: Flash
    scratch: Callable[[], tuple[Tensor, Tensor]]  # flat memory for keys and for values, in the model's dtype

    def room(self, pages: Pages) -> int:
        """Tokens that the scratch memory holds."""
        return int(self.scratch()[0].numel() // (pages.kv_heads * pages.format.key.dim))

    def vectors(self, pages: Pages) -> list[Tensor]:
        """The scratch memory as keys and values [room, kv_heads, dim]."""
        shape = self.room(pages), pages.kv_heads, pages.format.key.dim
        return [x[: math.prod(shape)].view(shape) for x in self.scratch()]

    def plan(self, prompts: Prompts, pages: Pages, scoring: Scoring, starts: Tensor) -> list[Run] | None:
        return prompts.plan(scoring.window, self.room(pages), starts, pages.lengths)

    def attend(
        self, q: Tensor, pages: Pages, runs: list[Run], scoring: Scoring, sink_logits: Tensor | None,
        key_scale: Tensor | None, entries: Pages | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Of the rows of the runs: attention over what their sequences store, to the same rows of out.

        entries: uncompressed first tokens of the sequences of the batch, which take the place of their codes.

        Keys get their offset back only where the sizes of scores matter: it adds the same to all scores of a query."""
        offset, sinks = scoring.softcap is not None or sink_logits is not None, sink_logits is not None
        for run in runs:
            rows, into = q[run.rows], out[run.rows]
            if len(run.pieces) == 1:
                self._piece(rows, pages, run, run.pieces[0], key_scale, entries, offset, sinks, into)
                continue
            lse = None
            for piece in run.pieces:
                part = into if lse is None else torch.empty_like(into)
                found = self._piece(rows, pages, run, piece, key_scale, entries, offset, False, part)
                lse = found if lse is None else self.flash.merge(into, (into, lse), (part, found))
            if sink_logits is not None and lse is not None:
                into.mul_(torch.sigmoid(lse - sink_logits.float()[:, None]).T[:, :, None])

    def _piece(
        self, q: Tensor, pages: Pages, run: Run, piece: Piece, key_scale: Tensor | None, entries: Pages | None,
        offset: bool, sinks: bool, out: Tensor,
    ) -> Tensor:  # fmt: skip
        from ..backends.triton.append.beginnings import place
        from ..backends.triton.unpack.launch import unpack

        k, v = self.vectors(pages)
        unpack(pages, run.first, piece.begins, piece.key_starts, piece.tiles, k, v, key_scale, offset)
        if entries is not None:
            key_offset = None if offset else pages.key_offset
            place(entries, run.first, piece.begins, piece.key_starts, k, v, key_scale, key_offset)
        k, v = k[: piece.rows], v[: piece.rows]
        return self.flash(q, k, v, out, run.starts, piece.key_starts, piece.most, causal=piece.causal, sinks=sinks)


def append(
    pages: Pages, k: Tensor | None, v: Tensor | None, rows: Rows, key_scale: Tensor | None,
    copies: tuple[Copies | None, Copies | None],
) -> None:  # fmt: skip
    """All new tokens of a batch, if they come along; lengths count them already. copies: first and recent ones."""
    from ..backends.triton.append.launch import prepare_append

    if k is not None and v is not None:
        prepare_append(pages, k, v, rows, key_scale, True, *copies)(k=k, v=v)


def why_not(format: Format, scoring: Scoring, dtype: torch.dtype) -> str | None:
    """None, or why a layer's prompts are attended from their codes, in one sentence."""
    from ..backends.triton.unpack import launch

    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention takes float16 and bfloat16, got {dtype}"
    if not scoring.causal or scoring.sinks or scoring.first or scoring.recent:
        return "flash attention knows windows and soft caps only"
    return launch.why_not_format(format)

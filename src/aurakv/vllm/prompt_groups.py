"""Prompts beside recent tokens on a GPU: rows are cut where groups begin, and each sees its own group as it came.

A query at position p reads the tokens from n·⌊p / n⌋ on as the model made them, and those before from their codes. All
rows of a group see the same codes: these are unpacked once for a sequence, into scratch memory whose pages its groups
share. The tokens of the groups themselves are gathered from the step's rows and, where a prompt was cut inside a group,
from the entry that has what came before. Flash attention reads both, and the results are merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..storage.pages import Pages
from .prefill import MAX_SEQS, Prefill, Prompts, tiles


class Opened(NamedTuple):
    """What lay of the groups that the rows of a step begin in, in one layer."""

    pages: Pages  # one page a sequence; its lengths are how many tokens: none where they were lost
    group: int  # tokens of one


class Coded(NamedTuple):
    """Codes that one call of flash attention reads."""

    begins: Tensor  # [n] int32: the first position of each sequence
    key_starts: Tensor  # [n + 1] int32, multiples of a group
    tiles: int  # of `unpack`, at most
    lengths: Tensor  # [groups] int32: how many of these the rows of a group see
    table: Tensor  # [groups, width] int32: in which pages of the scratch memory they lie


@dataclass(frozen=True)
class GroupRun:
    """Sequences that attend together, or one over several pieces of its codes."""

    first: int  # sequence
    rows: slice  # of the batch
    seq_starts: Tensor  # [n + 1] int32: rows of each sequence, from the first one on
    starts: Tensor  # [groups + 1] int32: rows of each group, likewise
    near_starts: Tensor  # [n + 1] int32: where the tokens go that are read as they came
    key_starts: Tensor  # [groups + 1] int32: those of each group
    near: int  # how many these are, at most
    coded: list[Coded]


def plan(prompts: Prompts, opened: Opened, room: int, starts: Tensor, lengths: Tensor) -> list[GroupRun] | None:
    """How to attend with scratch memory for `room` tokens; None where the rows of a sequence do not fit into that.

    starts, lengths: of the whole batch, on the device, where lengths may be smaller than the host knows."""
    key = room, opened.group
    if key not in prompts.groups:
        prompts.groups[key] = _plan(prompts, opened, room, starts, lengths)
    found: list[GroupRun] | None = prompts.groups[key]
    return found


def _plan(prompts: Prompts, opened: Opened, room: int, starts: Tensor, lengths: Tensor) -> list[GroupRun] | None:
    group = opened.group
    room -= room % group
    near = [count + group for count in prompts.counts]
    coded = [-(-length // group) * group for length in prompts.lengths]
    if max(near) > room:
        return None
    runs: list[GroupRun] = []
    at, row = 0, prompts.row
    while at < len(near):
        end, total = at + 1, (near[at], coded[at])
        while end < len(near) and end - at < MAX_SEQS:
            more = total[0] + near[end], total[1] + coded[end]
            if max(more) > room:
                break
            end, total = end + 1, more
        first, rows = prompts.first + at, sum(prompts.counts[at:end])
        if not rows:  # the sequences pad the batch
            at = end
            continue
        local = starts[first : prompts.first + end + 1] - row
        of, held = lengths[first : prompts.first + end], opened.pages.lengths[first : prompts.first + end]
        parts = sum((count - 1) // group + 2 for count in prompts.counts[at:end])
        runs.append(_run(first, slice(row, row + rows), local, of, held, group, room, parts, total[0], coded[at:end]))
        at, row = end, row + rows
    return runs


def _run(
    first: int, rows: slice, local: Tensor, lengths: Tensor, held: Tensor, group: int, room: int, parts: int, near: int,
    most: list[int],
) -> GroupRun:  # fmt: skip
    """parts: groups of rows, some of which may have none; near, most: what comes to lie in the scratch memory."""
    counts = local.diff()
    begins = lengths - counts  # positions of first rows
    old = begins % group
    lost = (old > 0) & (held == 0)
    each = (counts - 1) // group + 2
    number, last = torch.arange(parts, device=local.device), each.cumsum(0)
    seq = torch.searchsorted(last, number, right=True).clamp_(max=len(each) - 1)
    part = number - (last - each)[seq]
    row = torch.minimum((part * group - old[seq]).clamp_(min=0), counts[seq]).int()
    starts = torch.cat([local[seq] + row, local[-1:]])
    some = starts.diff() > 0
    coded = begins[seq] - old[seq] + part * group
    coded = torch.where(some, torch.where((part == 0) & lost[seq], begins[seq], coded), 0).int()
    near_starts = torch.nn.functional.pad((held + counts).cumsum(0, dtype=torch.int32), (1, 0))
    inside = torch.where(part > 0, held[seq] + row, 0).int()
    key_starts = torch.cat([near_starts[seq] + inside, near_starts[-1:]])
    needed = (lengths - 1) // group * group
    needed = torch.where(lost, torch.maximum(needed, begins + (group - old)), needed).int()
    pieces = []
    for at in range(0, max(1, sum(most)), room):
        keys = (needed - at).clamp_(0, room)
        to = torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0))
        width = min(room, max(most)) // group
        table = (to[seq] // group)[:, None] + torch.arange(width, dtype=torch.int32, device=local.device)
        pieces.append(
            Coded(
                torch.full_like(lengths, at),
                to,
                tiles([min(room, size - at) for size in most]),
                (coded - at).clamp_(0, room),
                table.clamp_(max=room // group - 1),
            )
        )
    return GroupRun(first, rows, local, starts, near_starts, key_starts, near, pieces)


def attend(
    prefill: Prefill,
    runs: list[GroupRun],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    opened: Opened,
    sink_logits: Tensor | None,
    key_scale: Tensor | None,
    entries: Pages | None,
    out: Tensor,
) -> None:
    """Of the rows of the runs, to the same rows of out; see `Prefill.attend`."""
    from ..backends.triton.append.beginnings import place
    from ..backends.triton.unpack.groups import gather
    from ..backends.triton.unpack.launch import unpack

    group, flash = opened.group, prefill.flash
    offset = sink_logits is not None  # else all scores of a query change by the same number without it
    key_offset = None if offset else pages.key_offset
    keys, values = prefill.vectors(pages)
    paged = [x[: x.shape[0] // group * group].unflatten(0, (-1, group)) for x in (keys, values)]
    for run in runs:
        rows, into = q[run.rows], out[run.rows]
        gather(
            k[run.rows], v[run.rows], opened.pages, run.first, run.seq_starts, run.near_starts, run.near, key_scale,
            key_offset, keys, values,
        )  # fmt: skip
        near, most = (keys[: run.near], values[: run.near]), (group, group)
        lse = flash(rows, *near, into, run.starts, run.key_starts, most, causal=True, sinks=offset)
        for each in run.coded:
            unpack(pages, run.first, each.begins, each.key_starts, each.tiles, keys, values, key_scale, offset)
            if entries is not None:
                place(entries, run.first, each.begins, each.key_starts, keys, values, key_scale, key_offset)
            part, widest = torch.empty_like(into), (group, each.table.shape[1] * group)
            found = flash.over_pages(rows, paged[0], paged[1], part, run.starts, each.lengths, each.table, widest)
            lse = flash.merge(into, (into, lse), (part, found))

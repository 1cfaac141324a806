"""What attending with a cache has in common, whether one process holds it or many: checks, scorings, pieces."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..attention.partial import Partial
from ..attention.scoring import Scoring
from ..attention.step import Run
from ..errors import InputError, counted
from .page_table import Kept, PageTable
from .pages import Pages
from .uncompressed import Uncompressed


class Call(NamedTuple):
    """The options of one attention call."""

    scoring: Scoring
    sink_logits: Tensor | None
    splits: int | None
    precision: str
    key_scale: Tensor | None = None  # [kv_heads, dim]: keys are multiplied, queries divided by it


class Prepared(NamedTuple):
    """A step that was found right, one token for each sequence, and what computes others of its kind."""

    kind: tuple[object, ...]
    call: Call
    pages: Pages
    limits: list[int]  # of the lengths: below them, the slots are there
    run: Run

    def serves(self, kind: tuple[object, ...] | None, sink_logits: Tensor | None, key_scale: Tensor | None) -> bool:
        return kind == self.kind and sink_logits is self.call.sink_logits and key_scale is self.call.key_scale

    def has_room(self, lengths: list[int]) -> bool:
        """Whether nobody else appended and the next tokens go to pages that were there for the last ones."""
        if self.pages.lengths.device.type == "cpu":  # on a GPU a step must not wait for what the device holds
            overflow, held = self.pages.read()
            if overflow or held != lengths:
                return False
        return all(map(operator.lt, lengths, self.limits))


def check_queries(q: Tensor, pages: Pages, call: Call) -> None:
    device = pages.data.device
    checks.queries(q, pages.kv_heads, pages.format.key.dim, device)
    checks.logits(call.sink_logits, q.shape[1], device)
    checks.precision(call.precision)


def check_step(q: Tensor, k: Tensor, v: Tensor, pages: Pages, call: Call) -> None:
    check_queries(q, pages, call)
    checks.new_tokens(k, v, pages)
    if q.shape[0] != k.shape[0]:
        raise InputError(f"a step needs as many queries as keys, got {q.shape[0]} and {k.shape[0]}")
    if call.key_scale is not None:
        checks.key_scale(call.key_scale, pages)


def check_reach(bounds: list[int], scoring: Scoring, tables: list[PageTable]) -> None:
    """Every key that a query may see must still be held. The first table has the lengths."""
    for seq, length in enumerate(tables[0].lengths):
        queries = bounds[seq + 1] - bounds[seq]
        if queries > length and scoring.causal:
            raise InputError(f"sequence {seq} has {counted(length, 'token')}, got {counted(queries, 'query')}")
        for table, window in zip(tables, (scoring.window, scoring.recent), strict=False):
            oldest = max(0, length - queries - (window or 0) + 1)
            if table.kept is not None and queries and window and oldest < table.oldest(seq):
                raise InputError(
                    f"{counted(queries, 'query')} of sequence {seq} would read position {oldest}, which is no longer"
                    f" held (positions from {table.oldest(seq)} on are): attend with at most"
                    f" {counted(table.kept.chunk, 'query')}, after an append of no more tokens, or use step"
                )


def step_kind(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[object, ...] | None:
    """All that has to be right about a step and can be told in a moment; None where more must be looked at."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not all(isinstance(x, Tensor) and x.layout is torch.strided for x in (q, k, v)):
        return None
    return (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, *options),
    )


def in_pieces(
    step: Callable[[Tensor, Tensor, Tensor, list[int]], Partial],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    chunk: int,
) -> Partial:
    """Take at most `chunk` tokens of each sequence at once, so that each query still sees its whole window."""
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), None
    for lo in range(0, longest(bounds), chunk):
        rows: list[int] = []
        piece = [0]
        for a, b in itertools.pairwise(bounds):
            rows += range(min(a + lo, b), min(a + lo + chunk, b))
            piece.append(len(rows))
        at = torch.tensor(rows, device=q.device)
        part = step(q[at], k[at], v[at], piece)
        lse = part.lse.new_empty(q.shape[:2]) if lse is None else lse
        out[at], lse[at] = part
    assert lse is not None
    return Partial(out, lse)


def longest(bounds: list[int]) -> int:
    """The most rows that one sequence has."""
    return max((b - a for a, b in itertools.pairwise(bounds)), default=0)


def own_scoring(given: Scoring | None, kept: Kept | None, uncompressed: Uncompressed) -> Scoring:
    """By default a ring's own window; the uncompressed tokens are always the cache's own."""
    scoring = given or (Scoring() if kept is None else Scoring(window=kept.window, sinks=kept.sinks))
    if kept is not None and (scoring.window is None or scoring.window > kept.window or scoring.sinks > kept.sinks):
        raise InputError(
            f"this ring keeps a window of {kept.window} and {counted(kept.sinks, 'sink')},"
            f" got a window of {scoring.window} and {counted(scoring.sinks, 'sink')}"
        )
    if kept is not None and not scoring.causal:
        raise InputError("a ring forgets tokens as new ones come, so its scoring must be causal")
    if scoring.first or scoring.recent or scoring.only_uncompressed:
        raise InputError(
            "a cache has its own uncompressed tokens: the scoring must not name first, recent or only_uncompressed"
        )
    if not uncompressed.first and not uncompressed.recent:
        return scoring
    return _with_uncompressed(scoring, uncompressed.first, uncompressed.recent)


@functools.lru_cache(maxsize=256)  # every step asks for the same few
def _with_uncompressed(scoring: Scoring, first: int, recent: int) -> Scoring:
    return dataclasses.replace(scoring, first=first, recent=recent)

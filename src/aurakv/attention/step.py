"""Attention, what queries attend to and how, and Step, the same after their own tokens were appended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..calibration.key_scale import scaled_keys, scaled_queries
from ..storage.pages import Pages
from .partial import Partial, in_dtype, join
from .scoring import Scoring, scoring_uncompressed


class Rows(NamedTuple):
    """Which rows of a batch belong to which sequence."""

    starts: Tensor  # [seqs + 1] int32 on the device: sequence i owns rows starts[i]:starts[i+1]
    single: bool = False  # the host knows that row i is the only one of sequence i, or that this one pads the batch


@dataclass(frozen=True, eq=False)
class Attention:
    """What `Backend.attend` needs besides its queries."""

    pages: Pages
    rows: Rows
    scoring: Scoring
    sink_logits: Tensor | None = None  # [heads]
    splits: int | None = None
    precision: str = "fast"
    ends: Tensor | None = field(default=None, kw_only=True)  # [seqs] int32: where queries end, if not at the lengths
    workspace: Tensor | None = field(default=None, kw_only=True)  # for split results, as `attend_workspace` says

    @property
    def query_ends(self) -> Tensor:
        """[seqs] int32: the last query of sequence i is at query_ends[i] − 1."""
        return self.pages.lengths if self.ends is None else self.ends


class Copies(NamedTuple):
    """Where a step stores some of the new tokens a second time, at 16 bits, while it appends them."""

    pages: Pages  # one page a sequence; its lengths are how many lie there after the step
    before: Tensor  # [seqs] int32: and before it; at least as many where none are new
    last: bool = False  # they are the last new rows of their sequences, not the first ones

    def store(self, k: Tensor, v: Tensor, key_scale: Tensor | None, starts: Tensor) -> None:
        """The new ones among k and v. Waits for the device: for backends whose append does not do this."""
        counts, before = self.pages.lengths.tolist(), self.before.tolist()
        if not any(old < count for old, count in zip(before, counts, strict=False)):
            return  # as in nearly all steps
        slots, (keys, values) = self.pages.table[:, 0].tolist(), self.pages.vectors()
        bounds = itertools.pairwise(starts.tolist())
        for (row, end), old, count, slot in zip(bounds, before, counts, slots, strict=False):
            if old < count:
                row = end - (count - old) if self.last else row
                new = slice(row, row + count - old)
                keys[slot, :, old:count] = scaled_keys(k[new], key_scale).transpose(0, 1).to(keys.dtype)
                values[slot, :, old:count] = v[new].transpose(0, 1).to(values.dtype)


@dataclass(frozen=True, eq=False)
class Step(Attention):
    """What a step needs besides its queries, keys and values. `Backend.prepare_step` makes a function of these."""

    key_scale: Tensor | None = None  # [kv_heads, dim]: keys are multiplied, queries divided by it
    uncompressed: Pages | None = None  # tokens that are stored a second time, at 16 bits
    uncompressed_too: bool = False  # whether the new tokens are appended there, too
    counted: bool = False  # whether the lengths count the new tokens already, as an engine's do; else they advance
    first_tokens: Copies | None = None  # where new tokens that are first ones are stored, too
    recent_tokens: Copies | None = None  # likewise, those that are the last ones
    recent: Pages | None = None  # 16-bit vectors of the last tokens, which a query sees up to its own position
    coded: Pages | None = None  # the same pages, as far as queries then read their codes, and first tokens

    def over_codes(self) -> Attention:
        """Attention over the tokens that are read from their codes."""
        if self.coded is None:
            return self
        return replace(self, pages=self.coded, ends=self.query_ends)

    def read_uncompressed(self) -> Pages | None:
        """The tokens that are stored a second time, as far as queries read them."""
        pages = self.uncompressed
        if pages is None or self.coded is None:
            return pages
        return replace(pages, lengths=torch.minimum(pages.lengths, self.coded.lengths)).trust()

    @property
    def copies(self) -> list[Copies]:
        return [each for each in (self.first_tokens, self.recent_tokens) if each is not None]

    def over_uncompressed(self) -> Attention | None:
        """Attention over the tokens that are stored a second time. Sinks count once, with the codes."""
        pages = self.read_uncompressed()
        if pages is None:
            return None
        scoring = scoring_uncompressed(self.scoring)
        return Attention(pages, self.rows, scoring, None, self.splits, self.precision, ends=self.query_ends)

    def over_recent(self) -> Attention | None:
        """Attention over the recent tokens, with one query a sequence, which sees them all."""
        if self.recent is None:
            return None
        scoring = replace(self.scoring, first=0, recent=0, sinks=0)
        return Attention(self.recent, self.rows, scoring, None, self.splits, self.precision)

    def by_parts(self, attend: Callable[[Tensor, Attention], Partial]) -> Callable[[Tensor], Partial]:
        """Attention of scaled queries, over codes and over what is uncompressed, each by a call of `attend`."""

        def parts() -> list[Attention]:
            found = self.over_codes(), self.over_uncompressed(), self.over_recent()
            return [each for each in found if each is not None]

        always = parts() if self.coded is None else None  # else how far first tokens are read changes on the device

        def run(x: Tensor) -> Partial:
            first, *others = parts() if always is None else always
            part = attend(x, first)
            for each in others:
                part = join(part, attend(x, each))
            return part

        return run


class Run(Protocol):
    """Does a step for arguments with the shapes, strides and dtypes that it was prepared for.

    Without keys and values (both None) it only attends. With `out` it writes its results there."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial: ...


def in_two_calls(backend: Any, step: Step) -> Run:
    """A step of a backend that appends and attends one after the other."""
    pages, rows, factors, attend = step.pages, step.rows, step.key_scale, step.by_parts(backend.attend)

    def run(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
        x = scaled_queries(q, factors)
        if k is not None and v is not None:
            if step.counted:
                pages.lengths.sub_(rows.starts.diff())
            backend.append(pages, scaled_keys(k, factors), v, rows)
            for each in step.copies:
                each.store(k, v, factors, rows.starts)
            if step.uncompressed is not None and step.uncompressed_too:
                backend.append(step.uncompressed, scaled_keys(k, factors), v, rows)
        return written(in_dtype(attend(x), q.dtype), out)

    return run


def written(part: Partial, out: Tensor | None) -> Partial:
    """The result in `out`, for backends that cannot write there themselves."""
    return part if out is None else Partial(out.copy_(part.out), part.lse)

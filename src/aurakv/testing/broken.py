"""Backends with one deliberate mistake each. A conformance suite that any of them passes is worth nothing."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..attention.partial import Partial
from ..attention.scoring import Scoring
from ..attention.step import Attention, Rows, Run, Step, in_two_calls
from ..backends import reference
from ..format.codec import Codes
from ..storage.pages import Pages


class _Broken:
    """The reference under another name; subclasses spoil one thing."""

    name = "broken"
    fast_error = 0.0
    float64 = True

    def prepare_step(self, step: Step, *like: object) -> Run:
        return in_two_calls(self, step)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(reference, attribute)


class FlippedMask(_Broken):
    """Sees the future instead of the past."""

    name = "broken-flipped-mask"

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        def visible(scoring: Scoring, query: Tensor, key: Tensor) -> Tensor:
            return key >= query

        with mock.patch.object(Scoring, "visible", visible):
            return reference.attend(q, attention)


class OffByOneSlot(_Broken):
    """Reads the row behind the one that was written."""

    name = "broken-off-by-one-slot"

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        right = Pages.slots

        def slots(pages: Pages, seq: int, positions: Tensor) -> tuple[Tensor, Tensor]:
            page, row = right(pages, seq, positions)
            return page, (row + 1) % pages.page_size

        with mock.patch.object(Pages, "slots", slots):
            return reference.attend(q, attention)


class UnmergedSplit(_Broken):
    """Cuts a sequence into parts and returns the last one."""

    name = "broken-unmerged-split"

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        with mock.patch.object(reference, "merge", lambda *parts: parts[-1]):
            return reference.attend(q, dataclasses.replace(attention, splits=2))


class StaleScale(_Broken):
    """Writes codes but forgets the scale of the first new token of each append."""

    name = "broken-stale-scale"

    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
        old = pages.lengths.clone()
        reference.append(pages, k, v, rows)
        scale = pages.key_parts().scale
        if scale is not None:
            for seq in range(pages.seqs):
                if int(pages.lengths[seq]) > int(old[seq]) > 0:
                    here, before = (pages.slots(seq, (old[seq] - n).long().view(1)) for n in (0, 1))
                    scale[here[0], :, here[1]] = scale[before[0], :, before[1]]


class IgnoredSoftCap(_Broken):
    """Accepts a soft cap and does nothing with it."""

    name = "broken-ignored-soft-cap"

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        scoring = dataclasses.replace(attention.scoring, softcap=None)
        return reference.attend(q, dataclasses.replace(attention, scoring=scoring))


class WrongHeadStride(_Broken):
    """Steps from one KV head to the next by the live length instead of the capacity."""

    name = "broken-wrong-head-stride"

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        right = Pages.key_parts

        def key_parts(pages: Pages) -> Codes:
            codes = right(pages)
            flat = codes.data.flatten(1, 2)  # [pages, kv_heads · page_size, row]
            live = max(1, int(pages.lengths.max()) % pages.page_size)
            rows = torch.arange(pages.page_size) + live * torch.arange(pages.kv_heads)[:, None]
            return Codes(flat[:, rows % flat.shape[1]], codes.scale)

        with mock.patch.object(Pages, "key_parts", key_parts):
            return reference.attend(q, attention)


BROKEN = (FlippedMask(), OffByOneSlot(), UnmergedSplit(), StaleScale(), IgnoredSoftCap(), WrongHeadStride())

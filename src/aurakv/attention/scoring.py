"""Scoring: which keys a query sees and what happens to its scores before the softmax."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from ..arguments import finite, instance, whole
from ..errors import InputError

_OPTIONAL = ("scale", "window", "softcap")  # None: without


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Positions count from the first token of a sequence; queries are its last tokens."""

    scale: float | None = None  # multiplies q·k; None is 1/√(key dim)
    causal: bool = True  # see t ≤ p; False sees every key (cross attention)
    window: int | None = None  # see t > p − window
    sinks: int = 0  # with a window, also see t < sinks
    softcap: float | None = None  # score becomes c·tanh(score/c)
    first: int = 0  # keys t < first are used uncompressed …
    recent: int = 0  # … and so are keys t > p − recent
    only_uncompressed: bool = False  # score those uncompressed keys only; False scores all the others
    threshold: float = 0.0  # values whose weight in this call is below may be skipped; lse counts them all the same

    def __post_init__(self) -> None:
        for name in ("causal", "only_uncompressed"):
            instance(name, getattr(self, name), bool)
        for name, least in (("window", 1), ("sinks", 0), ("first", 0), ("recent", 0)):
            given = getattr(self, name)
            if given is not None or name not in _OPTIONAL:
                self._set(name, given, whole(name, given, least))
        for name in ("scale", "softcap", "threshold"):
            given = getattr(self, name)
            if given is not None or name not in _OPTIONAL:
                self._set(name, given, finite(name, given))
        if self.softcap is not None and self.softcap <= 0:
            raise InputError(f"softcap must be positive, got {self.softcap}")
        if not 0 <= self.threshold < 1:
            raise InputError(f"threshold must be at least 0 and below 1, got {self.threshold}")

    def _set(self, name: str, given: object, number: float) -> None:
        """Keep the plain Python number: scorings are compared, hashed and given to operators."""
        if number is not given:
            object.__setattr__(self, name, number)

    def multiplier(self, key_dim: int) -> float:
        return key_dim**-0.5 if self.scale is None else self.scale

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at a position sees the key at a position; the shapes broadcast."""
        seen = torch.ones(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool, device=query.device)
        if self.causal:
            seen &= key <= query
        if self.window is not None:
            seen &= (key > query - self.window) | (key < self.sinks)
        return seen & (is_uncompressed(key, query, self.first, self.recent) == self.only_uncompressed)

    def cap(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def spans(self, lowest: int, highest: int, length: int) -> list[range]:
        """Disjoint ranges of key positions below `length` that hold every key that queries at positions
        lowest … highest see; what lies outside is never read."""
        stop = min(length, highest + 1) if self.causal else length
        if self.window is None:
            spans = [range(0, stop)]
        else:
            start = max(0, lowest - self.window + 1)
            spans = [range(0, min(self.sinks, start, stop)), range(start, stop)]
        if self.only_uncompressed:
            start = max(self.first, lowest - self.recent + 1)
            near = [range(start, stop)] if self.recent else []
            spans = [_overlap(a, b) for a in spans for b in [range(0, self.first), *near]]
        else:
            last = highest - self.recent + 1 if self.recent else stop
            spans = [_overlap(a, range(self.first, max(last, self.first))) for a in spans]
        return [span for span in spans if len(span)]


@functools.lru_cache(maxsize=256)  # every step asks for the same few
def scoring_uncompressed(scoring: Scoring) -> Scoring:
    """The same for the keys that are used uncompressed."""
    return dataclasses.replace(scoring, only_uncompressed=True)


def is_uncompressed(key: Tensor, query: Tensor | int, first: int, recent: int) -> Tensor:
    """Whether the query at a position uses the key at a position uncompressed."""
    return (key < first) | ((key > query - recent) & (recent > 0))


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))

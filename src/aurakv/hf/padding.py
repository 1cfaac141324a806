"""Padding: which columns of a padded batch hold real tokens. The caches underneath never store the others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Chunk(NamedTuple):
    """Consecutive columns. Chunks without padding have no tensor and grow, so a generation has few chunks."""

    width: int
    real: Tensor | None  # [seqs, width] bool on the host; None: all are real


class Padding:
    def __init__(self, seqs: int) -> None:
        self.seqs, self.total = seqs, 0
        self._chunks: list[_Chunk] = []

    @property
    def bytes_held(self) -> int:
        return sum(chunk.real.nbytes for chunk in self._chunks if chunk.real is not None)

    def add(self, count: int, real: Tensor | None) -> None:
        if real is None and self._chunks and self._chunks[-1].real is None:
            self._chunks[-1] = _Chunk(self._chunks[-1].width + count, None)
        else:
            self._chunks.append(_Chunk(count, real))
        self.total += count

    def copy(self) -> Padding:
        clone = Padding(self.seqs)
        clone.total, clone._chunks = self.total, list(self._chunks)
        return clone

    def crop(self, count: int) -> list[int]:
        """Forget the last columns; how many real tokens each sequence had in them."""
        removed = [0] * self.seqs
        self.total -= count
        while count:
            columns, real = self._chunks.pop()
            kept = max(0, columns - count)
            gone = [columns - kept] * self.seqs if real is None else real[:, kept:].sum(1).tolist()
            removed = [a + b for a, b in zip(removed, gone, strict=True)]
            if kept:
                self._chunks.append(_Chunk(kept, None if real is None else real[:, :kept]))
            count -= columns - kept
        return removed

    def select(self, index: list[int]) -> None:
        """Sequence i becomes what sequence index[i] was."""
        if index != list(range(self.seqs)):
            self._chunks = [_Chunk(count, None if real is None else real[index]) for count, real in self._chunks]
        self.seqs = len(index)

    def columns(self, seq: int) -> Tensor:
        """The column of each real token of a sequence."""
        parts, start = [torch.empty(0, dtype=torch.int64)], 0
        for count, real in self._chunks:
            columns = torch.arange(count) if real is None else real[seq].nonzero().squeeze(1)
            parts.append(columns + start)
            start += count
        return torch.cat(parts)

"""Rows: the real tokens of a padded batch [seqs, heads, t, dim] as rows [tokens, heads, dim], and back."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    seqs: int
    columns: int
    at: Tensor | None  # which of seqs · columns are real; None: all
    starts: list[int] | None  # of sequences among the real ones; None: each has one

    @classmethod
    def of(cls, seqs: int, count: int, real: Tensor | None, device: torch.device) -> Rows:
        """real [seqs, count] on the host says which are no padding; None: all."""
        if real is None:
            return cls(seqs, count, None, None if count == 1 else [seq * count for seq in range(seqs + 1)])
        starts = [0, *itertools.accumulate(real.sum(1).tolist())]
        return cls(seqs, count, real.flatten().nonzero().squeeze(1).to(device), starts)

    def take(self, x: Tensor) -> Tensor:
        """A view where it can be one."""
        rows = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        return rows if self.at is None else rows[self.at]

    def spread(self, rows: Tensor) -> Tensor:
        """[seqs, t, heads, dim] with zeros for the padding."""
        if self.at is not None:
            real, rows = rows, rows.new_zeros(self.seqs * self.columns, *rows.shape[1:])
            rows[self.at] = real
        return rows.view(self.seqs, self.columns, *rows.shape[1:])

"""HeldTokens: the first tokens of a layer as they came, held until there are enough to calibrate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import ENOUGH, SINKS

NEEDED = ENOUGH + SINKS  # tokens of a sequence, from which on it is compressed


@dataclass
class HeldTokens:
    """Keys, values and queries [seqs, heads, columns, dim] and which columns [seqs, columns] are no padding."""

    k: Tensor
    v: Tensor
    q: Tensor | None  # None: not all were seen
    real: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, q: Tensor | None, real: Tensor | None) -> HeldTokens:
        whole = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        return cls(k, v, q, whole if real is None else real.to(k.device))

    @property
    def enough(self) -> bool:
        """Whether one sequence can speak for the tokens to come."""
        return int(self.real.sum(1).max()) >= NEEDED

    @property
    def bytes_held(self) -> int:
        return sum(x.nbytes for x in (self.k, self.v, self.q, self.real) if x is not None)

    def followed(self, by: HeldTokens) -> HeldTokens:
        k, v = torch.cat([self.k, by.k], 2), torch.cat([self.v, by.v], 2)
        q = None if self.q is None or by.q is None else torch.cat([self.q, by.q], 2)
        return HeldTokens(k, v, q, torch.cat([self.real, by.real], 1))

    def first(self, columns: int) -> HeldTokens:
        q = None if self.q is None else self.q[:, :, :columns]
        return HeldTokens(self.k[:, :, :columns], self.v[:, :, :columns], q, self.real[:, :columns])

    def selected(self, index: list[int]) -> HeldTokens:
        return HeldTokens(self.k[index], self.v[index], None if self.q is None else self.q[index], self.real[index])

    def rows(self) -> tuple[Tensor, Tensor, list[int]]:
        """Keys and values [tokens, heads, dim] without padding, and where sequences start."""
        k, v = (x.transpose(1, 2)[self.real] for x in (self.k, self.v))
        return k, v, [0, *self.real.sum(1).cumsum(0).tolist()]

    def longest(self) -> tuple[Tensor, Tensor | None]:
        """Keys and queries [heads, tokens, dim] of the sequence with the most tokens."""
        seq = int(self.real.sum(1).argmax())
        k, q = (None if x is None else x[seq][:, self.real[seq]] for x in (self.k, self.q))
        assert k is not None
        return k, q

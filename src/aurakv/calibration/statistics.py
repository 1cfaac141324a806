"""Offsets and key scales of keys from queries and keys that a model made.

Codes carry an error that is alike in all directions and grows with the length of the stored vector. Scores do not
change when a constant is subtracted from all keys, nor when keys are multiplied and queries divided by the same
numbers: the mean makes keys shorter, the key_scale puts the error where queries are small.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .key_scale import levelled
from .policy import LayerPolicy

SINKS = 4  # first tokens of a sequence: they attract attention, and their keys are unlike those of the others
ENOUGH = 64  # tokens that can speak for those to come
MOST = 2048  # tokens of a sequence that are looked at
_SHORTEST = 512  # tokens of the contexts that keys are prepared for, up to what the model was made for
_FLOOR = 1e-4  # channels weaker than this share of the mean are treated as if they had it


class Turns(NamedTuple):
    """How positions turn the keys and queries of a layer (RoPE): pairs of channels, each by an angle per position."""

    pairs: tuple[Tensor, Tensor]  # channels [dim / 2] that are turned together: their cosine and sine parts
    angles: Tensor  # [dim / 2], 0 where positions do not turn
    longest: int  # positions that the model was made for

    @property
    def dim(self) -> int:
        return 2 * len(self.angles)

    @classmethod
    def none(cls, dim: int) -> Turns:
        return cls.half(torch.zeros(dim // 2), dim, 1)

    @classmethod
    def half(cls, angles: Tensor, dim: int, longest: int) -> Turns:
        """Channel i goes with i + n/2 of the n channels that turn, which come first; the others do not turn."""
        turned, rest = len(angles), dim // 2 - len(angles)
        first = torch.cat([torch.arange(turned), torch.arange(rest) + 2 * turned])
        second = torch.cat([torch.arange(turned) + turned, torch.arange(rest) + 2 * turned + rest])
        return cls((first, second), torch.cat([angles.double(), torch.zeros(rest, dtype=torch.float64)]), longest)

    def turn(self, x: Tensor, position: Tensor) -> Tensor:
        """x [tokens, heads, dim] as it was before positions [tokens] turned it: complex [tokens, heads, dim / 2]."""
        first, second = (channels.to(x.device) for channels in self.pairs)
        angle = position.to(x.device, torch.float64)[:, None] * self.angles.to(x.device)
        return torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), -angle)[:, None]

    def mean_turn(self, times: int = 1) -> Tensor:
        """The mean of e^(i · times · angle · t) over positions t of contexts of all lengths, each octave alike."""
        octaves = math.log2(max(self.longest, _SHORTEST) / _SHORTEST)
        lengths = _SHORTEST * 2.0 ** torch.linspace(0, octaves, 64, dtype=torch.float64)
        angle = times * self.angles[:, None] * lengths  # at the end of a context
        end = torch.polar(torch.ones_like(angle), angle)
        turned = torch.where(angle == 0, torch.ones_like(end), (end - 1) / torch.where(angle == 0, 1.0, angle) / 1j)
        return turned.mean(1)

    def channels(self, first: Tensor, second: Tensor) -> Tensor:
        """Numbers [heads, dim / 2] of both parts, in the order of channels."""
        out = first.new_empty(*first.shape[:-1], 2 * first.shape[-1])
        out[..., self.pairs[0]], out[..., self.pairs[1]] = first, second
        return out


class Moments:
    """Means and second moments of the keys of one layer and the queries that read them, over tokens added.

    They are taken before positions turn the vectors, where they do not change along a text, and turned on to the
    positions of long contexts: what slow pairs of channels do over a prompt says little about a text.
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns
        self.keys = self.queries = 0
        self._k = self._k2 = self._kk = self._q2 = self._qq = torch.zeros(())

    @torch.no_grad()
    def add(self, k: Tensor, q: Tensor | None = None, position: Tensor | None = None) -> None:
        """Keys [tokens, kv_heads, dim], queries [tokens, heads, dim]; vectors that are not finite do not count.

        Their positions [tokens] matter where positions turn.
        """
        kv_heads = k.shape[1]
        if k.device.type == "mps":  # it has no float64
            k, q, position = (None if x is None else x.cpu() for x in (k, q, position))  # type: ignore[assignment]
        if self.turns is None:
            self.turns = Turns.none(k.shape[2])
        if position is None:
            position = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
        finite = k.isfinite().flatten(1).all(1)
        k = self.turns.turn(k.double()[finite], position[finite])
        self.keys += k.shape[0]
        self._k, self._k2 = self._k + k.sum(0).cpu(), self._k2 + k.abs().square().sum(0).cpu()
        self._kk = self._kk + k.square().sum(0).cpu()
        if q is not None:
            finite = q.isfinite().flatten(1).all(1)
            q = self.turns.turn(q.double()[finite], position[finite]).unflatten(1, (kv_heads, -1))
            self.queries += q.shape[0]
            self._q2 = self._q2 + q.abs().square().mean(2).sum(0).cpu()
            self._qq = self._qq + q.square().mean(2).sum(0).cpu()

    def layer(self, format: str) -> LayerPolicy:
        """The policy of a layer with these moments."""
        if not self.keys or self.turns is None:
            return LayerPolicy(format)
        turned = self._k / self.keys * self.turns.mean_turn()
        mean = self.turns.channels(turned.real, turned.imag)
        if not self.queries:
            return LayerPolicy(format, key_offset=mean.float().contiguous())
        spread = _floored(self._squares(self._k2, self._kk, self.keys) - mean.square())
        read = _floored(self._squares(self._q2, self._qq, self.queries))
        # Nearest codes err alike in all channels; for them (read / spread)^1/4 is best: large where queries read much,
        # small where keys are long. Fitted codes put the error where queries read little themselves; for them keys
        # equally long in all channels, spread^-1/2, would be best if levels had no end. Halfway between is best.
        key_scale = levelled(read.pow(1 / 8) / spread.pow(3 / 8))
        key_weight = levelled(read / key_scale.square())
        offset, scale, weight = (x.float() for x in (mean * key_scale, key_scale, key_weight))
        return LayerPolicy(format, key_offset=offset, key_scale=scale, key_weight=weight)

    def _squares(self, sizes: Tensor, squares: Tensor, count: int) -> Tensor:
        """Mean squares of channels, from sums of |w|² and w² of `count` complex numbers w that positions turn."""
        assert self.turns is not None
        lean = (squares * self.turns.mean_turn(2)).real
        return self.turns.channels(sizes + lean, sizes - lean) / (2 * count)


def measured(
    format: str,
    k: Tensor,
    q: Tensor | None = None,
    real: Tensor | None = None,
    turns: Turns | None = None,
) -> LayerPolicy:
    """Offset and key scale from the first tokens of a cache, k and q [seqs, heads, t, dim], if they are enough.

    real [seqs, t] says which columns are no padding; None: all.
    """
    used = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if real is None else real
    position = used.cumsum(1)
    rows = (used & (position > SINKS) & (position <= MOST)).flatten().nonzero().squeeze(1)
    if len(rows) < ENOUGH:
        return LayerPolicy(format)
    moments = Moments(turns)
    moments.add(_rows(k, rows), None if q is None else _rows(q, rows), position.flatten()[rows] - 1)
    return moments.layer(format)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)[rows]


def _floored(x: Tensor) -> Tensor:
    """x [kv_heads, dim] without channels that are (almost) zero; a head that is zero everywhere becomes 1."""
    x = torch.maximum(x, _FLOOR * x.mean(-1, keepdim=True))
    return torch.where(x > 0, x, torch.ones_like(x))

"""Offsets and balances of keys from queries and keys that a model made.

Codes carry an error that is alike in all directions and grows with the length of the stored vector. Scores do not
change when a constant is subtracted from all keys, nor when keys are multiplied and queries divided by the same
numbers: the mean makes keys shorter, the balance puts the error where queries are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .codec import Codec, Format
from .policy import LayerPolicy
from .scoring import Scoring

SINKS = 4  # first tokens of a sequence: they attract attention, and their keys are unlike those of the others
ENOUGH = 64  # tokens that can speak for those to come
MOST = 2048  # tokens of a sequence that are looked at
LOST = 0.25  # nats by which attention may move before keys count as lost
_QUERIES, _KEYS = 32, 1024  # of a check
_FLOOR = 1e-4  # channels weaker than this share of the mean are treated as if they had it


class Moments:
    """Means and second moments of the keys of one layer and the queries that read them, over tokens added."""

    def __init__(self) -> None:
        self.keys = self.queries = 0
        self._k = self._k2 = self._q2 = torch.zeros(())

    @torch.no_grad()
    def add(self, k: Tensor, q: Tensor | None = None) -> None:
        """Keys [tokens, kv_heads, dim] and queries [tokens, heads, dim]; vectors that are not finite do not count."""
        kv_heads = k.shape[1]
        k = k.double()[k.isfinite().flatten(1).all(1)]
        self.keys += k.shape[0]
        self._k, self._k2 = self._k + k.sum(0).cpu(), self._k2 + k.square().sum(0).cpu()
        if q is not None:
            q = q.double()[q.isfinite().flatten(1).all(1)].unflatten(1, (kv_heads, -1))
            self.queries += q.shape[0]
            self._q2 = self._q2 + q.square().mean(2).sum(0).cpu()

    def layer(self, format: str) -> LayerPolicy:
        """The policy of a layer with these moments."""
        if not self.keys:
            return LayerPolicy(format)
        mean = self._k / self.keys
        if not self.queries:
            return LayerPolicy(format, key_offset=mean.float().contiguous())
        spread = _floored(self._k2 / self.keys - mean.square())
        balance = (_floored(self._q2 / self.queries) / spread).pow(0.25)
        balance = balance / balance.log().mean(-1, keepdim=True).exp()
        return LayerPolicy(format, key_offset=(mean * balance).float(), balance=balance.float())


def measured(format: str, k: Tensor, q: Tensor | None = None, real: Tensor | None = None) -> LayerPolicy:
    """Offset and balance from the first tokens of a cache, k and q [seqs, heads, t, dim], if there are enough of them.

    real [seqs, t] says which columns are no padding; None: all.
    """
    used = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if real is None else real
    position = used.cumsum(1)
    rows = (used & (position > SINKS) & (position <= MOST)).flatten().nonzero().squeeze(1)
    if len(rows) < ENOUGH:
        return LayerPolicy(format)
    moments = Moments()
    moments.add(_rows(k, rows), None if q is None else _rows(q, rows))
    return moments.layer(format)


@torch.no_grad()
def moved(layer: LayerPolicy, k: Tensor, q: Tensor, scoring: Scoring, first: int = 0) -> float:
    """By how many nats attention on codes differs from that on the keys: the mean KL divergence over some queries.

    k and q [heads, t, dim] are the tokens of one sequence, whose `first` ones are exact. NaN: nothing finite was there.
    """
    k, q = k[:, :_KEYS].transpose(0, 1).float(), q[:, :_KEYS].float()
    codec = Format.parse(layer.format, k.shape[2]).key
    if not codec.coded:
        return 0.0
    balance = torch.ones_like(k[0]) if layer.balance is None else layer.balance.to(k.device)
    offset = None if layer.key_offset is None else layer.key_offset.to(k.device)
    codes = ops.encode(k * balance, codec, offset)
    stored = ops.decode(codes, codec, offset) / balance
    stored[:first] = k[:first]
    at = torch.linspace(min(ENOUGH, k.shape[0]) - 1, k.shape[0] - 1, _QUERIES, device=k.device).long().unique()
    seen = scoring.visible(at[:, None], torch.arange(k.shape[0], device=k.device))
    queries = q[:, at].unflatten(0, (k.shape[1], -1))  # [kv_heads, group, n, dim]
    exact, coded = (
        scoring.cap(torch.einsum("hgnd,lhd->hgnl", queries, x) * scoring.multiplier(k.shape[2]))
        .masked_fill(~seen, -torch.inf)
        .log_softmax(3)
        for x in (k, stored)
    )
    change = torch.where(seen, exact.exp() * (exact - coded), 0.0).sum(3)
    return float(change[change.isfinite()].mean())


def widened(layer: LayerPolicy, k: Tensor, q: Tensor, scoring: Scoring, first: int = 0) -> LayerPolicy:
    """The layer with the narrowest keys, not below its own, whose attention survives; 16 bits if no codes do."""
    dim = k.shape[2]
    format = Format.parse(layer.format, dim)
    for bits in (*(bits for bits in (4, 5, 6, 8) if bits > format.key.bits), 16):
        layer = layer.with_format(Format(Codec.key(dim, bits), format.value).name, dim)
        if not moved(layer, k, q, scoring, first) > LOST:
            break
    return layer


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)[rows]


def _floored(x: Tensor) -> Tensor:
    """x [kv_heads, dim] without channels that are (almost) zero; a head that is zero everywhere becomes 1."""
    x = torch.maximum(x, _FLOOR * x.mean(-1, keepdim=True))
    return torch.where(x > 0, x, torch.ones_like(x))

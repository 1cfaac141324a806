"""Whether keys survive a format, judged by the first tokens that a model made."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..attention import ops
from ..attention.scoring import Scoring
from ..format.codec import Codec, Format
from ..format.levels import mse
from .policy import LayerPolicy, key_and_value
from .statistics import ENOUGH

LOST = 0.25  # nats by which the attention of one layer may move before its keys count as lost
ON_AVERAGE = 0.045  # and by which that of all layers of a model may move on average
BLURRED = 0.5  # and, where no queries are known, the share of what channels vary by that their error may be
_QUERIES, KEYS = 32, 1024  # of a check


def wider(bits: int, dim: int, device_type: str) -> list[int]:
    """Widths of keys to try instead of `bits`. GPUs read 5 and 6 bits slowly but at dims 128 and 256."""
    widths = (4, 8, 16) if device_type == "cuda" and dim not in (128, 256) else (4, 5, 6, 8, 16)
    return [width for width in widths if width > bits] or [16]


class Check(NamedTuple):
    """Whether keys survive being stored, judged by the tokens of one sequence, k and q [heads, t, dim], whose `first`
    ones are uncompressed. Without queries, or what scores them, only the keys themselves can be looked at."""

    k: Tensor
    q: Tensor | None
    scoring: Scoring | None
    first: int = 0

    def moved(self, layer: LayerPolicy) -> float:
        """Nats by which attention moves; 0 where nothing is known of it."""
        return self.all_moved([layer])[0]

    def all_moved(self, layers: list[LayerPolicy]) -> list[float]:
        """`moved` of each of them."""
        if self.q is None or self.scoring is None:
            return [0.0] * len(layers)
        found = all_moved(layers, self.k, self.q, self.scoring, self.first)
        return [0.0 if math.isnan(nats) else nats for nats in found]

    def lost(self, layer: LayerPolicy, most: float | None = None) -> bool:
        """Whether attention moves by more than `most` nats, by default LOST."""
        if self.q is None or self.scoring is None:
            return blurred(layer, self.k, self.first) > BLURRED
        return self.moved(layer) > (LOST if most is None else min(most, LOST))

    def finding(self, layer: LayerPolicy) -> str:
        if self.q is None or self.scoring is None:
            share = more_than(blurred(layer, self.k, self.first), BLURRED)
            return f"their error is {share} of what most channels vary by where {BLURRED} are tolerated"
        return f"attention moves by {more_than(self.moved(layer), LOST)} nats where {LOST} are tolerated"

    def widened(self, layer: LayerPolicy, most: float | None = None) -> LayerPolicy:
        """The layer with the narrowest keys of `wider` that survive; 16 bits if no codes do."""
        dim = self.k.shape[2]
        for bits in wider(Format.parse(layer.format, dim).key.bits, dim, self.k.device.type):
            layer = layer.with_format(with_keys(layer.format, bits), dim)
            if not self.lost(layer, most):
                break
        return layer


def width_for(format: str, k: Tensor, share: float) -> str:
    """The format with the narrowest keys whose squared error, and so the movement of attention, is at most this share
    of what it is at the width of the format."""
    dim = k.shape[2]
    now = Format.parse(format, dim).key
    for bits in wider(now.bits, dim, k.device.type):
        codec = Codec.key(dim, bits)
        if not codec.coded or mse(codec.levels) <= share * mse(now.levels):
            break
    return with_keys(format, bits)


def more_than(x: float, limit: float) -> str:
    """x, which is above the limit, in as few digits as show it."""
    return next(text for digits in range(2, 18) if float(text := f"{x:.{digits}g}") > limit)


def with_keys(format: str, bits: int) -> str:
    """A format with other keys and the same values, in its own words."""
    return f"k{bits}{key_and_value(format)[1]}"


def moved(layer: LayerPolicy, k: Tensor, q: Tensor, scoring: Scoring, first: int = 0) -> float:
    """By how many nats attention on codes differs from that on the keys: the mean KL divergence over some queries.

    NaN: nothing finite was there.
    """
    return all_moved([layer], k, q, scoring, first)[0]


@torch.no_grad()
def all_moved(layers: list[LayerPolicy], k: Tensor, q: Tensor, scoring: Scoring, first: int = 0) -> list[float]:
    """`moved` of each of them."""
    k = k[:, :KEYS].transpose(0, 1).float()
    at = torch.linspace(min(ENOUGH, k.shape[0]) - 1, k.shape[0] - 1, _QUERIES, device=k.device).long().unique()
    seen = scoring.visible(at[:, None], torch.arange(k.shape[0], device=k.device))
    queries = q[:, at].float().unflatten(0, (k.shape[1], -1))  # [kv_heads, group, n, dim]

    def weights(keys: Tensor) -> Tensor:
        scores = scoring.cap(torch.einsum("hgnd,lhd->hgnl", queries, keys) * scoring.multiplier(keys.shape[2]))
        return scores.masked_fill(~seen, -torch.inf).log_softmax(3)

    def change(layer: LayerPolicy) -> float:
        nats = torch.where(seen, weight * (exact - weights(stored(layer, "k", k, first))), 0.0).sum(3)
        return float(nats[nats.isfinite()].mean())

    exact = weights(k)
    weight = exact.exp()
    return [change(layer) for layer in layers]


@torch.no_grad()
def blurred(layer: LayerPolicy, k: Tensor, first: int = 0) -> float:
    """The error of a stored channel as a share of what most channels vary by, the mean over heads.

    A few channels with large numbers make the error of all channels large: then what the others say is lost.
    """
    k = k[:, first:KEYS].transpose(0, 1).float()
    k = k[k.isfinite().flatten(1).all(1)]
    error = (stored(layer, "k", k) - k).square().mean(0).median(-1).values.sqrt()
    share = error / k.std(0).median(-1).values
    return float(share[share.isfinite()].mean())


def stored(layer: LayerPolicy, side: Literal["k", "v"], x: Tensor, first: int = 0) -> Tensor:
    """What keys or values [t, kv_heads, dim] are behind their codes."""
    format = Format.parse(layer.format, x.shape[2])
    codec = format.key if side == "k" else format.value
    if not codec.coded:
        return x
    key_fit, value_fit = layer.fits(format, x.shape[1], x.device)
    given = (layer.key_offset, layer.key_scale, key_fit) if side == "k" else (layer.value_offset, None, value_fit)
    offset, scale, fit = (None if each is None else each.to(x.device) for each in given)
    scale = torch.ones_like(x[0]) if scale is None else scale
    backend = None if x.device.type == "cpu" else "reference"  # a GPU would compile two kernels for each width
    codes = ops.encode(x * scale, codec, offset, fit=fit, backend=backend)
    found = ops.decode(codes, codec, offset, backend=backend) / scale
    found[:first] = x[:first]
    return found

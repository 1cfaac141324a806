"""The specification as plain torch: any device, float16/bfloat16/float32/float64. The oracle and the fallback.

Arithmetic runs in float32, or in float64 for float64 inputs. Long contexts are read in blocks whose partial results are
merged, so the full cache is never decompressed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ..attention.partial import Partial, merge, sink
from ..attention.scoring import Scoring
from ..attention.step import Attention, Rows, Run, Step, in_two_calls
from ..format import fit as fitting
from ..format.codec import Codec, Codes, Format
from ..format.packing import pack, unpack
from ..storage.pages import Pages

name = "reference"
fast_error = 0.0
float64 = True

KEY_BLOCK = 1024
QUERY_BLOCK = 256


def why_not(format: Format | None, device: torch.device) -> str | None:
    return None


def workspace_bytes(pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
    return 0


def encode(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes:
    """x [..., kv_heads, dim]; offset [kv_heads, dim]; fit as in format/fit.py."""
    if not codec.coded:
        raw = x.to(
            codec.dtype, copy=True, memory_format=torch.contiguous_format
        )  # also where strides of size 1 are odd
        return Codes(raw.view(torch.uint8), None)
    x = x.to(_compute_dtype(x))
    y = codec.rotate(x if offset is None else x - offset.to(x.dtype))
    peak = y.abs().amax(-1, keepdim=True)
    unit = y / torch.where(peak > 0, peak, 1)  # keeps squares in range
    rms = unit.square().mean(-1, keepdim=True).sqrt()
    if fit is None:
        codes = torch.bucketize(unit / torch.where(rms > 0, rms, 1), codec.boundary_tensor(x.dtype, x.device))
        chosen = codec.level_tensor(x.dtype, x.device)[codes]
        own, mixed, energy = unit.square().sum(-1), (unit * chosen).sum(-1), chosen.square().sum(-1)
        scale = (own / energy).sqrt() if codec.scale == "l2" else mixed / energy
    else:
        codes, own, mixed, energy = _fitted(unit, torch.where(rms > 0, rms, 1), codec, fit)
        scale = fitting.scale(own, mixed, energy)
    scale = peak[..., 0] * scale
    scale = torch.where((energy > 0) & (peak[..., 0] != 0), scale, 0)
    largest = torch.finfo(codec.dtype).max
    scale = scale.clamp(-largest, largest).to(codec.dtype)  # clamp keeps NaN
    damaged = ~y.isfinite().all(-1)
    return Codes(pack(codes, codec.bits), scale.masked_fill(damaged, torch.nan))


def _fitted(y: Tensor, rms: Tensor, codec: Codec, fit: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best codes of y [..., kv_heads, dim], and with l = levels[codes] the products y'Gy, y'Gl and l'Gl."""
    levels, bounds = codec.level_tensor(y.dtype, y.device), codec.boundary_tensor(y.dtype, y.device)
    lower, cost = fitting.split(fit, codec.dim, y.dtype)
    scales = torch.tensor(fitting.SCALES, dtype=y.dtype, device=y.device)
    z = torch.einsum("hij,...hj->...hi", lower, y)  # A y: what coordinates aim at before others have erred
    aims = (z.movedim(-1, 0)[..., None] / (rms * scales)).contiguous()  # [dim, ..., kv_heads, scales]
    codes = torch.empty(aims.shape, dtype=torch.int64, device=y.device)
    if fit.shape[1]:
        for i in range(codec.dim):
            codes[i] = torch.bucketize(aims[i], bounds)
            aims[i + 1 :] -= torch.einsum("hj,...hs->j...hs", lower[:, i + 1 :, i], levels[codes[i]])
    else:
        codes = torch.bucketize(aims, bounds)
    at = torch.einsum("hij,j...hs->i...hs", lower, levels[codes])  # A l
    weight, z = cost.T.view(-1, *(1,) * (y.ndim - 2), cost.shape[0], 1), z.movedim(-1, 0)[..., None]
    mixed, energy = (weight * z * at).sum(0), (weight * at.square()).sum(0)
    fits = torch.where(energy > 0, mixed.square() / energy, 0)
    best = fits.argmax(-1, keepdim=True)  # the first of equals
    codes = codes.gather(-1, best.expand(codec.dim, *best.shape))[..., 0].movedim(0, -1)
    own = (weight * z.square()).sum((0, -1))
    return codes, own, mixed.gather(-1, best)[..., 0], energy.gather(-1, best)[..., 0]


def decode(codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
    """x̂, or R x̂ when rotated: [..., kv_heads, dim]."""
    if codes.scale is None:
        return codes.data.contiguous().view(codec.dtype).to(dtype, copy=True)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    levels = codec.level_tensor(work, codes.data.device)
    y = levels[unpack(codes.data, codec.bits)] * codes.scale.to(work)[..., None]
    if offset is None:
        return (y if rotated else codec.unrotate(y)).to(dtype)
    offset = offset.to(work)
    return (y + codec.rotate(offset) if rotated else codec.unrotate(y) + offset).to(dtype)


def scores(q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
    """q·k̂ of q [tokens, heads, dim] with n stored keys [n, kv_heads]: [tokens, heads, n]."""
    work = _compute_dtype(q)
    keys = decode(codes, codec, offset, rotated=True, dtype=work)
    grouped = _group(codec.rotate(q.to(work)), keys.shape[1])
    return torch.einsum("thgd,nhd->thgn", grouped, keys).flatten(1, 2).to(q.dtype)


def values(weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
    """Σ w·v̂ over the weights [tokens, heads, n] that are not below the threshold: [tokens, heads, dim]."""
    work = _compute_dtype(weights)
    stored = decode(codes, codec, offset, rotated=True, dtype=work)
    weights, dtype = weights.to(work), weights.dtype  # 16 bits would round the threshold
    below = weights < threshold  # never true of NaN
    kept = _group(weights.masked_fill(below, 0), stored.shape[1])
    out = _weighted_sum(kept, stored, _group(~below, stored.shape[1]))
    return codec.unrotate(out).flatten(1, 2).to(dtype)


def append(pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
    """Encode new tokens [tokens, kv_heads, dim], write them behind each sequence, advance the lengths."""
    keys = encode(k, pages.format.key, pages.key_offset, pages.key_fit)
    append_codes(pages, keys, encode(v, pages.format.value, pages.value_offset, pages.value_fit), rows)


def append_codes(pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
    bounds, lengths = rows.starts.tolist(), pages.lengths.tolist()
    stores = ((pages.key_parts(), keys), (pages.value_parts(), values))
    for seq, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            continue
        old, new = lengths[seq], lengths[seq] + b - a
        position = torch.arange(old, new, device=pages.data.device)
        pinned = pages.pinned * pages.page_size
        if pages.ring:  # of tokens that share a slot only the last one stays
            position = position[(position < pinned) | (position >= new - pages.wrap)]
        fits = pages.ring or new <= pages.table.shape[1] * pages.page_size
        if fits:
            page, row = pages.slots(seq, position)
            fits = bool((page >= 0).all())
        if not fits:
            pages.overflow.fill_(1)
            continue
        source = position - old + a
        for store, codes in stores:
            store.data[page, :, row] = codes.data[source]
            if store.scale is not None and codes.scale is not None:
                store.scale[page, :, row] = codes.scale[source]
        pages.lengths[seq] = new


def attend(q: Tensor, attention: Attention) -> Partial:
    """q [tokens, heads, key dim]; every precision is float32 here, or that of a float64 query."""
    pages, scoring = attention.pages, attention.scoring
    work, format = _compute_dtype(q), pages.format

    def load(seq: int, position: Tensor) -> tuple[Tensor, Tensor]:
        keys, vals = pages.stored(seq, position)
        k = decode(keys, format.key, pages.key_offset, rotated=True, dtype=work)
        return k, decode(vals, format.value, pages.value_offset, rotated=True, dtype=work)

    rotated = _group(format.key.rotate(q.to(work)), pages.kv_heads)
    held = [range(0, length) for length in pages.lengths.tolist()]
    where = attention.rows, attention.query_ends
    part = _attend(rotated, format.value.dim, *where, scoring, attention.splits, held, load)
    return _finish(Partial(format.value.unrotate(part.out), part.lse), attention.sink_logits, q)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    key_starts: Tensor,
    ends: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
) -> Partial:
    """Attention over uncompressed tokens k, v [tokens, kv_heads, dim], the last ones before position ends[i]."""
    work, ends_list, bounds = _compute_dtype(q), ends.tolist(), key_starts.tolist()

    def load(seq: int, position: Tensor) -> tuple[Tensor, Tensor]:
        row = position + (bounds[seq + 1] - ends_list[seq])
        return k[row].to(work), v[row].to(work)

    held = [range(end - (d - c), end) for end, c, d in zip(ends_list, bounds, bounds[1:], strict=False)]
    part = _attend(_group(q.to(work), k.shape[1]), v.shape[-1], rows, ends, scoring, None, held, load)
    return _finish(part, sink_logits, q)


def prepare_step(step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
    return in_two_calls(sys.modules[__name__], step)


def _attend(
    q: Tensor,
    dim: int,
    rows: Rows,
    ends: Tensor,
    scoring: Scoring,
    splits: int | None,
    held: list[range],
    load: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Partial:
    """q [tokens, kv_heads, group, dim] over the key positions `held` of each sequence, block by block, merged."""
    out, lse = q.new_zeros(*q.shape[:3], dim), q.new_full(q.shape[:3], -torch.inf)
    bounds, ends_list = rows.starts.tolist(), ends.tolist()
    for seq, (a, b) in enumerate(itertools.pairwise(bounds)):
        keys, base = held[seq], ends_list[seq] - b  # row + base = position
        block = KEY_BLOCK if splits is None else max(1, -(-len(keys) // splits))
        for lo in range(a, b, QUERY_BLOCK):
            hi = min(lo + QUERY_BLOCK, b)
            position = torch.arange(base + lo, base + hi, device=q.device)
            parts = []
            for span in scoring.spans(base + lo, base + hi - 1, keys.stop):
                for start in range(max(span.start, keys.start), span.stop, block):
                    key_position = torch.arange(start, min(start + block, span.stop), device=q.device)
                    k, v = load(seq, key_position)
                    parts.append(_attend_block(q[lo:hi], k, v, position, key_position, scoring))
            if parts:
                out[lo:hi], lse[lo:hi] = merge(*parts)
    return Partial(out, lse)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, scoring: Scoring) -> Partial:
    """q [t, kv_heads, group, dim] at positions `query` over k, v [n, kv_heads, dim] at positions `key`."""
    seen = scoring.visible(query[:, None], key[None])[:, None, None]  # [t, 1, 1, n]
    raw = torch.einsum("thgd,nhd->thgn", q, k) * scoring.multiplier(q.shape[-1])
    raw = raw.masked_fill(~raw.isfinite(), torch.nan)  # an infinite key damages, it is not a mask
    s = scoring.cap(raw).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    weight = torch.exp(s - lse[..., None]).masked_fill(~seen, 0)
    if scoring.threshold > 0:
        weight = weight.masked_fill(weight < scoring.threshold, 0)
    return Partial(_weighted_sum(weight, v, seen), lse)


def _weighted_sum(weight: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Σ w·v with weights [t, h, g, n] and v [n, h, d], where NaN or inf in v damages only rows that see it."""
    bad = ~v.isfinite().all(-1)  # [n, h]
    out = torch.einsum("thgn,nhd->thgd", weight, v.masked_fill(bad[..., None], 0))
    if not bool(bad.any()):
        return out
    damaged = (seen & bad.T[None, :, None, :]).any(-1)
    return out.masked_fill(damaged[..., None], torch.nan)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(1, (kv_heads, -1))  # [tokens, heads, …] -> [tokens, kv_heads, group, …]


def _finish(part: Partial, sink_logits: Tensor | None, q: Tensor) -> Partial:
    part = Partial(part.out.flatten(1, 2), part.lse.flatten(1, 2))
    if sink_logits is not None:
        part = merge(part, sink(sink_logits, part))
    return Partial(part.out.to(q.dtype), part.lse)

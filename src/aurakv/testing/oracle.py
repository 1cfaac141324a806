"""Dense attention in plain float64, written from the specification and independent of Scoring, Pages and backends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """The rules of visibility and scoring of one call, as numbers."""

    scale: float
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None
    first: int = 0
    recent: int = 0


class History(NamedTuple):
    """Keys and values of one sequence by position, what the codes stand for and what was given: [n, kv_heads, dim]."""

    decoded_k: Tensor
    decoded_v: Tensor
    uncompressed_k: Tensor
    uncompressed_v: Tensor


class Answer(NamedTuple):
    out: Tensor  # [n, heads, dim]
    lse: Tensor  # [n, heads]
    size: Tensor  # [n, heads] root of the weighted mean of |v|²: the natural unit of errors in out


def attention(
    q: Tensor, end: int, history: History, rule: Rule, sink_logits: Tensor | None, dtype: torch.dtype
) -> Answer:
    """The last queries q [n, heads, dim] of a sequence, the last one at position end − 1, computed in `dtype`."""
    n, heads, dim = q.shape
    length, kv_heads, value_dim = history.decoded_v.shape
    query = torch.arange(end - n, end).view(n, 1)
    key = torch.arange(length).view(1, length)
    visible = torch.full((n, length), True)
    if rule.causal:
        visible[key > query] = False
    if rule.window is not None:
        visible[(key <= query - rule.window) & (key >= rule.sinks)] = False
    uncompressed = key.expand(n, length) < rule.first
    if rule.recent:
        uncompressed = uncompressed | (key > query - rule.recent)
    mask, use = visible.view(n, 1, 1, length), uncompressed.view(n, 1, 1, length)
    grouped = q.to(dtype).reshape(n, kv_heads, heads // kv_heads, dim)

    raw, coded = (
        torch.einsum("nhgd,lhd->nhgl", grouped, k.to(dtype)) for k in (history.uncompressed_k, history.decoded_k)
    )
    logits = torch.where(use, raw, coded) * rule.scale
    logits[~logits.isfinite()] = torch.nan
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = torch.where(mask, logits, -torch.inf)
    if sink_logits is not None:  # one more key, with the value 0
        column = sink_logits.to(dtype).view(1, kv_heads, -1, 1).expand(n, -1, -1, 1)
        logits = torch.cat([logits, column], -1)
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else torch.full((*grouped.shape[:3], 1), -torch.inf)
    weight = torch.exp(logits - torch.where(top.isinf(), 0, top))
    total = weight.sum(-1, keepdim=True)
    lse = torch.where(top.isinf(), top, top + torch.log(total))[..., 0]
    weight = torch.where(top.isinf(), 0, weight / total)[..., :length]

    out = torch.zeros(n, kv_heads, heads // kv_heads, value_dim, dtype=dtype)
    size = torch.zeros(n, kv_heads, heads // kv_heads, dtype=dtype)
    for chosen, v in ((use, history.uncompressed_v.to(dtype)), (~use, history.decoded_v.to(dtype))):
        bad = ~v.isfinite().all(-1)  # [length, kv_heads]
        share = torch.where(chosen, weight, 0)
        out += torch.einsum("nhgl,lhd->nhgd", share, v.nan_to_num(0.0))
        size += torch.einsum("nhgl,lh->nhg", share, v.nan_to_num(0.0).square().sum(-1))
        out[(mask & chosen & bad.T.view(1, kv_heads, 1, length)).any(-1).expand(n, kv_heads, heads // kv_heads)] = (
            torch.nan
        )
    return Answer(out.flatten(1, 2), lse.flatten(1), size.sqrt().flatten(1))

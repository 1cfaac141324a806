"""Partial results of attention and the one way to combine them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import instance
from ..errors import InputError


class Partial(NamedTuple):
    """Attention over some of the keys: the weighted mean of their values and the log of their summed weights."""

    out: Tensor  # [tokens, heads, dim]
    lse: Tensor  # [tokens, heads] float32 (float64 for float64 queries); −inf where no key is visible


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the keys of all parts. Associative, commutative; lse = −inf is neutral.

    A NaN in a part that counts makes the result NaN. Parts with lse = +inf (a sink logit of +inf) outweigh all others.
    """
    if not parts:
        raise InputError("merge needs at least one partial result")
    first = parts[0]
    for part in parts:
        if not isinstance(part, Partial):
            raise InputError(f"merge takes partial results one by one, as in merge(a, b), got {type(part).__name__}")
        if part.out.shape != first.out.shape or part.lse.shape != first.lse.shape:
            raise InputError(
                f"partial results must have equal shapes, got out {tuple(first.out.shape)} and {tuple(part.out.shape)},"
                f" lse {tuple(first.lse.shape)} and {tuple(part.lse.shape)}"
            )
    lse = torch.stack([part.lse for part in parts])
    out = torch.stack([part.out for part in parts]).to(lse.dtype)
    total = lse.logsumexp(0)
    weight = torch.where(torch.isposinf(total), torch.isposinf(lse).to(lse.dtype), lse.softmax(0))
    empty = torch.isneginf(lse)
    merged = (weight.masked_fill(empty, 0)[..., None] * out.masked_fill(empty[..., None], 0)).sum(0)
    return Partial(merged.to(first.out.dtype), total)


def join(a: Partial, b: Partial) -> Partial:
    """merge of two results of ours, in half the time: of an empty part `out` must be 0, with lse = +inf too."""
    share = torch.sigmoid(b.lse - a.lse)
    share = torch.where(a.lse == b.lse, 0.5, share)  # also where both are infinite
    out = torch.lerp(a.out.to(a.lse.dtype), b.out.to(a.lse.dtype), share[..., None])
    return Partial(out.to(a.out.dtype), torch.logaddexp(a.lse, b.lse))


def sink(logits: Tensor, like: Partial) -> Partial:
    """Learned sink logits, one per query head: a virtual key with that logit and the value 0."""
    instance("logits", logits, Tensor)
    instance("like", like, Partial)
    if logits.shape != like.lse.shape[-1:]:
        raise InputError(f"sink logits need shape [{like.lse.shape[-1]}] (query heads), got {list(logits.shape)}")
    return Partial(torch.zeros_like(like.out), logits.to(like.lse).expand_as(like.lse))


def in_dtype(part: Partial, dtype: torch.dtype) -> Partial:
    return Partial(part.out.to(dtype), part.lse)

"""Partial results of attention and the one way to combine them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import instance, shown
from ..errors import InputError

_LSE_DTYPES = (torch.float32, torch.float64)  # half precision would cost up to 12% in a merge


class Partial(NamedTuple):
    """Attention over some of the keys: the weighted mean of their values and the log of their summed weights."""

    out: Tensor  # [tokens, heads, dim]
    lse: Tensor  # [tokens, heads] float32 (float64 for float64 queries); −inf where no key is visible

    @classmethod
    def of(cls, o: Tensor, m: Tensor, l: Tensor, *, base: float = math.e) -> Partial:  # noqa: E741
        """From what split kernels of others keep: o = Σ base^(s − m)·v unnormalised, l = Σ base^(s − m), m a maximum.

        `base` is that of their exponentials: e, or 2 for kernels that multiply scores by log2(e) first. m and l are
        float32 or float64. Where l is 0 no key was visible.
        """
        log_base = _log_base(base)
        for name, x in (("o", o), ("m", m), ("l", l)):
            instance(name, x, Tensor)
        if not o.is_floating_point():
            raise InputError(f"o must hold floating-point numbers, got {shown(o)}")
        for name, x in (("m", m), ("l", l)):
            if x.shape != o.shape[:-1] or x.dtype not in _LSE_DTYPES:
                raise InputError(
                    f"{name} must be float32 or float64 {list(o.shape[:-1])} for o {list(o.shape)}, got {shown(x)}"
                )
            if x.device != o.device:
                raise InputError(f"{name} must be on {o.device} like o, got {x.device}")
        empty = l == 0
        whole = o.to(l.dtype) / l[..., None]
        lse = m * log_base + l.log()
        return cls(whole.masked_fill(empty[..., None], 0).to(o.dtype), lse.masked_fill(empty, -torch.inf))

    def parts(self, *, base: float = math.e) -> tuple[Tensor, Tensor, Tensor]:
        """(o, m, l) as `of` takes them: m is the log-sum-exp in this base and l is 1, or 0 where no key is visible."""
        log_base = _log_base(base)
        sums = torch.isneginf(self.lse).logical_not().to(self.lse.dtype)
        return self.out.clone(), self.lse / log_base, sums


def _log_base(base: float) -> float:
    if base not in (2, math.e):
        raise InputError(f"base must be e or 2, got {shown(base)}")
    return math.log(base)


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the keys of all parts. Associative, commutative; lse = −inf is neutral.
    Outputs of different dtypes give one that holds both.

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
        if part.lse.dtype not in _LSE_DTYPES:
            raise InputError(f"the lse of a partial result must be float32 or float64, got {part.lse.dtype}")
    lse = torch.stack([part.lse for part in parts])
    out = torch.stack([part.out for part in parts]).to(lse.dtype)
    total = lse.logsumexp(0)
    weight = torch.where(torch.isposinf(total), torch.isposinf(lse).to(lse.dtype), lse.softmax(0))
    empty = torch.isneginf(lse)
    merged = (weight.masked_fill(empty, 0)[..., None] * out.masked_fill(empty[..., None], 0)).sum(0)
    dtype = functools.reduce(torch.promote_types, (part.out.dtype for part in parts))
    return Partial(merged.to(dtype), total)


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

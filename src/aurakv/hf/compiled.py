"""Attention of a layer as an operator of torch, for compiled models: the layer, whose state lives on the host, is named
by a token."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import AuraLayer

_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, AuraLayer] = weakref.WeakValueDictionary()


def token_of(layer: AuraLayer) -> Tensor:
    """A new token for a layer."""
    number = next(_numbers)
    _live[number] = layer
    return torch.tensor(number)


@torch.library.custom_op("aurakv::hf_attend", mutates_args=("token",))
def hf_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Tensor | None,
    sink_logits: Tensor | None,
    token: Tensor,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """AuraLayer.attend."""
    out = _live[int(token)].attend(q, k, v, reach, sink_logits, scale, softcap)
    return _own(out, q)


@torch.library.custom_op("aurakv::hf_attend_again", mutates_args=("token",))
def hf_attend_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    token: Tensor,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """AuraLayer.attend_again."""
    return _own(_live[int(token)].attend_again(q, k, v, sink_logits, scale, softcap), q)


@hf_attend.register_fake
@hf_attend_again.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _own(out: Tensor, q: Tensor) -> Tensor:
    """What an operator returns shares no memory with its arguments."""
    return out.clone() if out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() else out

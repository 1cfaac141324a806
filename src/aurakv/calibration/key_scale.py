"""Key scales [kv_heads, dim]: keys are multiplied by them and queries divided, which leaves every score as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(q: Tensor, k: Tensor, key_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys with the same scores, whose keys are easier to store: in float32, as where a backend does it."""
    return scaled_queries(q, key_scale), scaled_keys(k, key_scale)


def scaled_queries(q: Tensor, key_scale: Tensor | None) -> Tensor:
    if key_scale is None:
        return q
    return (_widest(q).unflatten(1, (key_scale.shape[0], -1)) / key_scale[:, None]).flatten(1, 2)


def scaled_keys(k: Tensor, key_scale: Tensor | None) -> Tensor:
    return k if key_scale is None else _widest(k) * key_scale


def levelled(x: Tensor) -> Tensor:
    """x [kv_heads, dim] with 1 as the geometric mean of each head: a factor of all channels changes nothing."""
    return x / x.log().mean(-1, keepdim=True).exp()


def _widest(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

"""Balances [kv_heads, dim]: keys are multiplied by them and queries divided, which leaves every score as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def balanced(q: Tensor, k: Tensor, balance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys with the same scores, whose keys are easier to store: in float32, as where a backend does it."""
    return balanced_queries(q, balance), balanced_keys(k, balance)


def balanced_queries(q: Tensor, balance: Tensor | None) -> Tensor:
    if balance is None:
        return q
    return (_widest(q).unflatten(1, (balance.shape[0], -1)) / balance[:, None]).flatten(1, 2)


def balanced_keys(k: Tensor, balance: Tensor | None) -> Tensor:
    return k if balance is None else _widest(k) * balance


def _widest(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

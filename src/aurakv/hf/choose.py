"""Caches by name, transformers' own among them, for programs that compare."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from .attention import NAME
from .cache import AuraCache, attach

UNCOMPRESSED = "none"


def choose(model: PreTrainedModel, name: str, **options: Any) -> Cache:
    """A fresh cache, and the attention that goes with it: "none" is transformers' own, else as in `attach`."""
    if name != UNCOMPRESSED:
        return attach(model, name, **options)
    if options:
        raise InputError(f"the uncompressed cache takes no options, got {options}")
    if model.config._attn_implementation == NAME:
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:  # some models have only the plain one
            model.set_attn_implementation("eager")
    return DynamicCache(config=model.config)


def bytes_held(cache: Cache) -> int:
    """Every byte that the layers of a cache occupy, counted from its tensors."""
    ours = cache.bytes_held if isinstance(cache, AuraCache) else 0
    others = [layer for layer in cache.layers if not isinstance(cache, AuraCache) or layer not in cache.compressed]
    return ours + sum(_storage(x) for layer in others for x in vars(layer).values() if isinstance(x, torch.Tensor))


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes()

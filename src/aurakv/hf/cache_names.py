"""Caches by name, transformers' own among them, for programs that compare."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InputError
from .attention import NAME
from .cache import attach

UNCOMPRESSED = "none"


def cache_named(model: PreTrainedModel, name: str, **options: Any) -> Cache:
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

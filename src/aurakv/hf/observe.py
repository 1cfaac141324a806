"""Moments of the keys and queries of every attention layer, over a text that a model reads uncompressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..calibration.statistics import SINKS, Moments
from .attention import attention, mask
from .cache import AuraCache
from .handles import Handle

_NAME = "aurakv-observed"


@torch.no_grad()
def observe(model: PreTrainedModel, ids: Tensor, chunk: int = 512) -> list[Moments]:
    """One for each attention layer, over the tokens ids [1, n] but the first few, which are unlike all others."""
    cache = AuraCache(model.config, "k16v16", first=0)
    moments = {id(layer): Moments(layer.calibration.turns) for layer in cache.compressed}

    def watched(module: torch.nn.Module, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, Handle):
            layer, k = key.update.layer, key.update.new[0]
            position = torch.arange(layer.padding.total, layer.padding.total + k.shape[2], device=k.device)
            rows = position >= SINKS
            k, q = (x[0].transpose(0, 1)[rows] for x in (k, query))
            moments[id(layer)].add(k, q, position[rows])
        return attention(module, query, key, value, *args, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, watched)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        for start in range(0, ids.shape[1], chunk):
            model(ids[:, start : start + chunk].to(model.device), past_key_values=cache, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return [moments[id(layer)] for layer in cache.compressed]

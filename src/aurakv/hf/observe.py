"""Keys and queries of every attention layer, watched while a model reads a text uncompressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..attention.scoring import Scoring
from ..calibration.observer import KeyObserver
from .attention import attention, mask
from .cache import AuraCache
from .handles import Handle
from .progress import Progress, forward
from .support import slots

_NAME = "aurakv-observed"


@torch.no_grad()
def observe(
    model: PreTrainedModel, ids: Tensor, chunk: int = 512, progress: Progress | None = None
) -> dict[int, KeyObserver]:
    """One for each attention layer with a cache, by its number, over the tokens ids [1, n]; `progress` is told how many
    more were read."""
    cache = AuraCache(model.config, "k16v16", first=0)
    numbers = [number for number, slot in enumerate(slots(model.config)) if slot.other is None]
    numbered = {id(layer): number for number, layer in zip(numbers, cache.compressed, strict=True)}
    seen: dict[int, KeyObserver] = {}

    def watched(module: torch.nn.Module, query: Tensor, key: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, Handle):
            layer, (k, _) = key.update.layer, key.update.new
            number = numbered[id(layer)]
            if number not in seen:
                scoring = Scoring(scale=kwargs.get("scaling"), window=layer.window, softcap=kwargs.get("softcap"))
                seen[number] = KeyObserver(layer.tokens.calibration.turns, scoring)
            if not key.update.attended:  # layers that share keys read them again
                seen[number].add(k[0].transpose(0, 1), query[0].transpose(0, 1))
        return attention(module, query, key, *args, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, watched)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        for start in range(0, ids.shape[1], chunk):
            piece = ids[:, start : start + chunk].to(model.device)
            forward(model, progress, piece.shape[1], piece, past_key_values=cache, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return dict(sorted(seen.items()))

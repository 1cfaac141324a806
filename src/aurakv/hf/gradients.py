"""Keys and values of every attention layer while a model reads a text, and how predictions follow changes to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..errors import InputError
from .attention import attention, mask
from .handles import Handle
from .progress import Progress, forward
from .support import slots

_NAME = "aurakv-gradients"

Vectors = list[tuple[Tensor, Tensor]]  # of layers with a cache: of keys and of values [kv_heads, t, dim]


def gradients(
    model: PreTrainedModel, ids: Tensor, samples: int, generator: torch.Generator, progress: Progress | None = None
) -> Iterator[tuple[Vectors, Vectors]]:
    """Keys and values of each layer with a cache, over the tokens ids [1, n], and `samples` times their gradients.

    Each is that of a sum of log-likelihoods: at every position one of a token that the model itself could have said,
    with a random sign. Signs make the mean square of a gradient times a change the sum of what it does at single
    positions, and half of that is the KL divergence, where changes are small. `progress` is told how many of the
    samples more are done.
    """
    numbers = {number for number, slot in enumerate(slots(model.config)) if slot.other is None}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watched(module: torch.nn.Module, query: Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, Handle):
            raise InputError("gradients are those of a model without an AuraCache")
        number: Any = getattr(module, "layer_idx", None)
        if number in numbers and number not in seen:
            for x in (key, value):
                _ = x.retain_grad() if x.requires_grad else x.requires_grad_()
            seen[number] = key, value
        return attention(module, query, key, value, *args, **kwargs)

    before = model.config._attn_implementation
    wanted = [(each, each.requires_grad) for each in model.parameters()]
    AttentionInterface.register(_NAME, watched)
    AttentionMaskInterface.register(_NAME, mask)
    try:
        model.set_attn_implementation(_NAME)
        for each, _ in wanted:
            each.requires_grad_(False)
        with torch.enable_grad():
            cache = DynamicCache(config=model.config)
            piece = ids.to(model.device)
            logits = forward(model, progress, 0.5, piece, past_key_values=cache, use_cache=True).logits[0].float()
            said = logits.log_softmax(1)
        chances = said.detach().exp().cpu()
        pairs = [seen[number] for number in sorted(seen)]
        vectors = [(k.detach()[0], v.detach()[0]) for k, v in pairs]
        for left in reversed(range(samples)):
            tokens = torch.multinomial(chances, 1, generator=generator)
            signs = torch.randint(0, 2, tokens.shape, generator=generator) * 2 - 1
            for x in (x for pair in pairs for x in pair):
                x.grad = None
            (said.gather(1, tokens.to(said.device)) * signs.to(said.device)).sum().backward(retain_graph=left > 0)
            yield vectors, [(_gradient(k), _gradient(v)) for k, v in pairs]
            if progress is not None:
                progress((samples - 0.5) / samples)
    finally:
        for each, gradient in wanted:
            each.requires_grad_(gradient)
        model.set_attn_implementation(before)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x[0]) if x.grad is None else x.grad[0]

"""Progress within a forward pass: reading a long text takes minutes, and a model has many layers to count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Progress = Callable[[float], None]  # is told how much more is done


def forward(model: torch.nn.Module, progress: Progress | None, amount: float, *args: Any, **kwargs: Any) -> Any:
    """What the model returns. `progress` is told after each layer that its part of `amount` is done, and of what is
    left in the end."""
    if progress is None:
        return model(*args, **kwargs)
    layers: dict[int, torch.nn.Module] = {}
    for module in model.modules():  # a decoder layer, or the attention in it, has the number of its layer
        if isinstance(number := getattr(module, "layer_idx", None), int):
            layers.setdefault(number, module)
    left = set(layers)

    def hook(number: int) -> Callable[..., None]:
        def done(*_: object) -> None:
            if number in left:
                left.remove(number)
                progress(amount / (len(layers) + 1))

        return done

    hooks = [layer.register_forward_hook(hook(number)) for number, layer in layers.items()]
    try:
        out = model(*args, **kwargs)
    finally:
        for registered in hooks:
            registered.remove()
    progress(amount * (1 + len(left)) / (len(layers) + 1))  # the head of the model, and layers that were left out
    return out

"""The bytes that a cache holds, counted from its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


def bytes_of(cache: Cache) -> int:
    """Bytes of every distinct storage that the layers of a cache hold; a simulated cache says itself what it would."""
    simulated = getattr(cache, "simulated_bytes", None)
    if simulated is not None:
        return int(simulated)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(cache)}.values())


def tensors_of(cache: Cache) -> list[Tensor]:
    """Every tensor that can be reached from the layers; those that wrap others, as quantised ones do, are opened."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo: list[Any] = [layer.__dict__ for layer in cache.layers]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            inner = thing.__tensor_flatten__()[0] if hasattr(thing, "__tensor_flatten__") else None
            if inner is None:
                found.append(thing)
            else:
                todo += [getattr(thing, name) for name in inner]
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple | set):
            todo += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, type):
            todo.append(thing.__dict__)
    return found

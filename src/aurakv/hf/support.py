"""Which layers a model has, and one sentence for each kind of model that cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from ..calibration.statistics import Turns
from ..errors import InputError

_OURS = ("full_attention", "sliding_attention")
_THEIRS = ("chunked_attention", "linear_attention", "conv", "moe", "mlp")  # stay as transformers makes them
_OWN_STATE = ("recurrent_gemma", "rwkv", "xlstm", "reformer", "xlnet", "minimax")  # do not take a cache


class Slot(NamedTuple):
    """One layer of a model: attention that is compressed, or what transformers makes of it."""

    window: int | None
    other: Callable[[], Any] | None  # makes the cache layer that transformers uses; None: it is ours
    shared: bool = False  # later layers, which have no cache of their own, attend to its keys and values


class Shape(NamedTuple):
    """What one attention layer stores per token, as the config says."""

    kv_heads: int
    head_dim: tuple[int, int]  # of keys and of values
    window: int | None


def slots(config: PreTrainedConfig) -> list[Slot]:
    """The layers of a decoder; refuses models whose cache does not hold one key and one value per token and head."""
    name = getattr(config, "model_type", type(config).__name__)
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"AuraCache needs the config of a model, got {type(config).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"aurakv serves decoder-only models, got {name}, an encoder-decoder with cross attention")
    config = config.get_text_config(decoder=True)
    name = getattr(config, "model_type", name)
    if name in _OWN_STATE:
        raise InputError(f"{name} keeps its state inside the model and takes no KV cache, so nothing can be compressed")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise InputError(
            f"{name} uses multi-head latent attention, whose cache is a latent vector and no keys and values"
        )
    if not getattr(config, "is_causal", True):
        raise InputError(f"aurakv serves causal models, got {name} with is_causal=False")
    types, options = get_layer_types_and_kwargs(config)
    per_layer = options if isinstance(options, list) else [options] * len(types)  # one for all before 5.17
    unknown = sorted(set(types) - {*_OURS, *_THEIRS})
    if unknown:
        raise InputError(f"aurakv serves layers of the kinds {[*_OURS, *_THEIRS]}, got {name} with {unknown}")
    if not set(types) & set(_OURS) or not getattr(config, "num_attention_heads", None):
        raise InputError(f"{name} has no attention layers with a growing cache, so there is nothing to compress")
    made = [_slot(kind, extra) for kind, extra in zip(types, per_layer, strict=True)]
    for kind in set((getattr(config, "layer_types", None) or types)[len(types) :]):  # the layers without a cache
        last = len(types) - 1 - types[::-1].index(kind)
        made[last] = made[last]._replace(shared=True)
    return made


def head_dim(config: PreTrainedConfig) -> int:
    """What the config says of models whose attention layers are alike, as a policy needs them; refuses others."""
    return uniform_shape(config)[1]


def uniform_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """KV heads and head_dim of all attention layers."""
    found = sorted({(shape.kv_heads, shape.head_dim[0]) for shape in shapes(config) if shape is not None})
    if len(found) > 1:
        raise InputError(
            "a policy is for models whose attention layers all have the same KV heads and head_dim, got layers with"
            f" {' and '.join(f'{heads} KV heads of {dim}' for heads, dim in found)}"
        )
    return found[0]


def shapes(config: PreTrainedConfig) -> list[Shape | None]:
    """The layers of a decoder; None for those that stay as transformers makes them."""
    planned = slots(config)
    layers = _layer_configs(config, len(planned))
    return [
        None if slot.other is not None else Shape(_kv_heads(layer), _dims(layer), slot.window)
        for slot, layer in zip(planned, layers, strict=True)
    ]


def turns(config: PreTrainedConfig) -> list[Turns | None]:
    """How positions turn keys in each layer; None where the config does not say.

    Variants that stretch long contexts turn some channels more slowly than this; taking them for faster costs some of
    what offsets give, and nothing else.
    """
    planned, made = slots(config), {}
    layers = _layer_configs(config, len(planned))
    for slot, layer in zip(planned, layers, strict=True):
        kind = (slot.window is not None, _dims(layer)[0])
        if kind not in made:
            made[kind] = _turns(layer, slot.window is not None)
    return [made[slot.window is not None, _dims(layer)[0]] for slot, layer in zip(planned, layers, strict=True)]


def _turns(config: PreTrainedConfig, sliding: bool) -> Turns | None:
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("sliding_attention" if sliding else "full_attention", found)
    dim, _ = _dims(config)
    turned = int(dim * (found.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0))
    if not found.get("rope_theta") or dim % 2 or not 0 < turned <= dim or turned % 2:
        return None
    proportional = found.get("rope_type") == "proportional"  # the first pairs of all, at the angles of all
    angles = found["rope_theta"] ** -(
        torch.arange(0, turned, 2, dtype=torch.float64) / (dim if proportional else turned)
    )
    if proportional:
        angles = torch.cat([angles, angles.new_zeros((dim - turned) // 2)])
    return Turns.half(angles, dim, getattr(config, "max_position_embeddings", None) or 0)


def _layer_configs(config: PreTrainedConfig, count: int) -> list[PreTrainedConfig]:
    """Of the first layers, which are those with a cache."""
    config = config.get_text_config(decoder=True)
    return list(getattr(config, "per_layer_config", None) or [config] * count)[:count]  # one for all before 5.17


def _kv_heads(config: PreTrainedConfig) -> int:
    heads = getattr(config, "num_key_value_heads", None)
    if (
        heads is None
        and getattr(config, "multi_query", False)
        and not getattr(config, "new_decoder_architecture", False)
    ):
        return 1
    return heads or getattr(config, "num_kv_heads", None) or config.num_attention_heads


def _dims(config: PreTrainedConfig) -> tuple[int, int]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim, getattr(config, "v_head_dim", None) or dim


def _slot(kind: str, extra: dict[str, Any]) -> Slot:
    if kind == "full_attention":
        return Slot(None, None)
    if kind == "sliding_attention":
        return Slot(extra["sliding_window"], None)
    return Slot(None, lambda: DYNAMIC_LAYER_TYPE_MAPPING[kind](**extra))

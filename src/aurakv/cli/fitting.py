"""What a model keeps of a sequence in each format, and how much of that fits into memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import models
from ..calibration.policy import FIRST, ROLLBACK, Policy, format_of
from ..errors import counted
from ..format.codec import DTYPE_NAMES, DTYPES, Format
from ..storage.page_table import MAX_LENGTH, Kept, round_up
from ..storage.uncompressed import Uncompressed


class Layer(NamedTuple):
    """What an attention layer stores for each token of a sequence."""

    kv_heads: int
    head_dim: tuple[int, int]  # of keys and of values
    window: int | None

    def held(self, format: Format, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, in the page layout: contiguous, or the ring of a window."""
        if self.window is None:
            return format.layout(round_up(tokens, 64)).bytes * self.kv_heads
        pages = min(Kept.of(self.window, rollback=ROLLBACK).width(64), -(-tokens // 64))
        return format.layout(64).bytes * self.kv_heads * pages

    def uncompressed(self, uncompressed: Uncompressed, tokens: int) -> int:
        """Bytes of the tokens that lie there uncompressed, too."""
        return uncompressed.room(tokens) * sum(self.head_dim) * uncompressed.dtype.itemsize * self.kv_heads

    def read(self, format: Format, tokens: int) -> int:
        """Bytes that the attention of one new token reads."""
        visible = tokens if self.window is None else min(tokens, self.window)
        return format.bytes_per_token * self.kv_heads * visible


class Model(NamedTuple):
    name: str
    layers: list[Layer]
    dtype: torch.dtype  # what the uncompressed cache holds
    uncounted: int = 0  # layers that keep something else than keys and values of all tokens


def row(model: Model, name: str, memory: int, tokens: int, speed: float) -> dict[str, Any]:
    names, first, recent = _formats(model, name)
    pairs = [(layer, format_of(x, layer.head_dim, model.dtype)) for layer, x in zip(model.layers, names, strict=True)]
    kept = Uncompressed(first, recent, model.dtype, rollback=0)
    coded = [layer for layer, format in pairs if format.key.coded or format.value.coded]

    def held(count: int) -> int:
        codes = sum(layer.held(format, count) for layer, format in pairs)
        return codes + sum(layer.uncompressed(kept, count) for layer in coded)

    without = sum(
        sum(layer.head_dim) * layer.kv_heads * model.dtype.itemsize * min(tokens, layer.window or tokens)
        for layer in model.layers
    )
    read = sum(layer.read(format, tokens) for layer, format in pairs)
    return {
        "format": name,
        "bytes_per_token": sum(f.bytes_per_token * layer.kv_heads for layer, f in pairs if layer.window is None),
        "bytes_per_sequence": held(tokens),
        "smaller": without / held(tokens),
        "tokens": _most(held, memory),
        "sequences": memory // held(tokens),
        "read_per_step": read,
        "seconds_per_step": read / speed,
    }


def _formats(model: Model, name: str) -> tuple[list[str], int, int]:
    """The format of each layer, and how many first and recent tokens are uncompressed: of a policy or of one format."""
    policy = Policy.find(name)
    if policy is None:
        return [name] * len(model.layers), FIRST, 0
    for layer in model.layers:
        policy.check_model(len(model.layers), layer.kv_heads, layer.head_dim[0])
    return [layer.format for layer in policy.layers], policy.first, policy.recent


def _most(held: Callable[[int], int], memory: int) -> int:
    """The largest number of tokens whose bytes fit."""
    low, high = 0, MAX_LENGTH
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held(middle) <= memory else (low, middle - 1)
    return low


def model_of(args: argparse.Namespace) -> Model:
    """The model that the options of `aurakv plan` describe."""
    if args.layers is not None:
        windows = (args.window_layers or args.layers) if args.window else 0
        dims = (args.head_dim, args.head_dim)
        layers = [Layer(args.kv_heads, dims, args.window if n < windows else None) for n in range(args.layers)]
        return Model("a model", layers, DTYPES[args.dtype or "bf16"])
    if args.model is None:
        count, kv_heads, dim = models.SHAPE
        made = [Layer(kv_heads, (dim, dim), None)] * count
        return Model("SmolLM2-135M-Instruct", made, DTYPES[args.dtype or "f32"])
    from ..hf import support

    config = models.config(args.model)
    shapes = support.shapes(config)
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    dtype = stored if args.dtype is None and stored in DTYPE_NAMES else DTYPES[args.dtype or "bf16"]
    found = [Layer(*shape) for shape in shapes if shape is not None]
    return Model(str(args.model), found, dtype, uncounted=shapes.count(None))


def describe(layer: Layer, count: int) -> str:
    key, value = layer.head_dim
    dims = f"{key}" if key == value else f"{key} (keys) and {value} (values)"
    window = "" if layer.window is None else f" that see the last {layer.window:,} tokens"
    return f"{counted(count, 'layer')}{window} with {counted(layer.kv_heads, 'KV head')} of dimension {dims}"


def dtype_name(model: Model) -> str:
    return str(model.dtype).removeprefix("torch.")

"""Other compressed caches, for comparison rows.

transformers: the quantised layers of its own QuantizedCache, if their packages are installed. They keep up to 128
recent tokens as they came, and dequantise everything else at each step.

vLLM's `turboquant_*` presets are simulated: the numbers that its kernels would read, and the bytes that they would
hold. Keys are divided by their norm, rotated by a Hadamard matrix without signs and rounded to Lloyd-Max levels; "nc"
scales the levels of a vector back to its norm. Values are rounded to uniform levels between their least and greatest
coordinate. k8v4 has keys in float8 without a scale. The first and the last two layers stay uncompressed, as in vLLM.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache

from ..errors import InputError, short
from ..format.levels import boundaries, lloyd_max
from ..format.rotation import hadamard
from .reads import Reads


class Preset(NamedTuple):
    """Widths of a preset of vLLM; 8-bit keys are float8."""

    key_bits: int
    value_bits: int


PRESETS = {
    "turboquant_k8v4": Preset(8, 4),
    "turboquant_4bit_nc": Preset(4, 4),
    "turboquant_k3v4_nc": Preset(3, 4),
    "turboquant_3bit_nc": Preset(3, 3),
}
QUANTISED = {  # name: (package, layer of transformers, bits)
    "quanto-4": ("optimum.quanto", "QuantoQuantizedLayer", 4),
    "quanto-2": ("optimum.quanto", "QuantoQuantizedLayer", 2),
    "hqq-4": ("hqq", "HQQQuantizedLayer", 4),
    "hqq-3": ("hqq", "HQQQuantizedLayer", 3),
    "hqq-2": ("hqq", "HQQQuantizedLayer", 2),
}
_SKIPPED = 2  # layers at either end that vLLM leaves alone


def names() -> list[str]:
    return [*QUANTISED, *PRESETS]


def why_not(name: str) -> str | None:
    """None if a rival can run here, else one sentence."""
    if name not in names():
        raise InputError(f"a rival is one of {names()}, got {short(name)}")
    package = QUANTISED[name][0] if name in QUANTISED else None
    if package is None or _installed(package):
        return None
    return f"{name} needs the package {package.replace('.', '-')}"


def make(name: str, config: PreTrainedConfig) -> Cache:
    """A fresh cache of a rival for a model."""
    reason = why_not(name)
    if reason is not None:
        raise InputError(reason)
    if name in PRESETS:
        return TurboQuant(config, PRESETS[name])
    _, layer, bits = QUANTISED[name]
    return Quantised(config, partial(getattr(cache_utils, layer), nbits=bits))


class Quantised(Cache):  # type: ignore[misc]
    """transformers' QuantizedCache, which counts. It also takes windows, which the original refuses: their layers hold
    the whole text, and the mask hides what is outside."""

    def __init__(self, config: PreTrainedConfig, layer: Callable[[], Any]) -> None:
        config = config.get_text_config(decoder=True)
        super().__init__(layers=[layer() for _ in range(config.num_hidden_layers)])
        self._coded = [0] * len(self.layers)  # tokens that came from codes in the last update

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[layer_idx]
        if layer.is_initialized:
            as_they_came = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
            self._coded[layer_idx] = layer.cumulative_length - as_they_came
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reads(self, start: int, stop: int) -> Reads:
        seen = sum(range(start + 1, stop + 1)) * len(self.layers)
        return Reads(min(self._coded), sum(self._coded) * (stop - start), seen)


class TurboQuant(DynamicCache):  # type: ignore[misc]
    """Keys and values as a preset of vLLM would give them back, in the dtype of the model."""

    def __init__(self, config: PreTrainedConfig, preset: Preset) -> None:
        super().__init__(config=config)
        self.preset = preset

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self._skipped(layer_idx):
            k, v = (x.to(torch.bfloat16).to(x.dtype) for x in (key_states, value_states))
        else:
            k, v = _keys(key_states, self.preset.key_bits), _values(value_states, self.preset.value_bits)
        return super().update(k, v, layer_idx, *args, **kwargs)

    @property
    def simulated_bytes(self) -> int:
        total = 0
        for number, layer in enumerate(self.layers):
            seqs, heads, tokens, key_dim = layer.keys.shape
            value_dim = layer.values.shape[3]
            size = 2 * (key_dim + value_dim) if self._skipped(number) else _slot(self.preset, key_dim, value_dim)
            total += seqs * heads * tokens * size
        return total

    def reads(self, start: int, stop: int) -> Reads:
        coded = total = 0
        query = torch.arange(start, stop)
        for number, layer in enumerate(self.layers):
            window = getattr(layer, "sliding_window", None) or stop
            seen = int((query - (query - window + 1).clamp(min=0) + 1).sum())
            coded, total = coded + seen * (not self._skipped(number)), total + seen
        return Reads(stop, coded, total)

    def _skipped(self, layer: int) -> bool:
        count = len(self.layers)
        ends = min(_SKIPPED, count // 2)
        return layer < ends or layer >= count - ends


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the parent
        return False


def _slot(preset: Preset, key_dim: int, value_dim: int) -> int:
    """Bytes of a token and head: codes and norm of the key, codes, scale and least coordinate of the value; even."""
    key = key_dim if preset.key_bits == 8 else -(-key_dim * preset.key_bits // 8) + 2
    size = key + -(-value_dim * preset.value_bits // 8) + 4
    return size + size % 2


def _keys(x: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return x.float().to(torch.float8_e4m3fn).to(x.dtype)
    matrix = hadamard(x.shape[-1]).to(x.device, torch.float32)  # ±1: it gives coordinates with variance 1
    levels = torch.tensor(lloyd_max(bits), device=x.device)
    edges = torch.tensor(boundaries(lloyd_max(bits)), device=x.device)
    norm = x.float().norm(dim=-1, keepdim=True)
    y = x.float() / (norm + 1e-8) @ matrix.T
    found = levels[torch.bucketize(y, edges, right=True)]
    found = found / found.norm(dim=-1, keepdim=True)
    return (norm.half().float() * (found @ matrix / x.shape[-1] ** 0.5)).to(x.dtype)


def _values(x: Tensor, bits: int) -> Tensor:
    least, most = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    steps = 2**bits - 1
    scale = ((most - least) / steps).clamp(min=1e-8)
    codes = ((x.float() - least) / scale + 0.5).floor().clamp(0, steps)
    return (codes * scale.half().float() + least.half().float()).to(x.dtype)

"""Choose the format of every KV layer of a model: the least loss for a size, or the least size for a loss.

1. The model reads a text; each layer gets the key offset and balance that its keys and queries want.
2. Each layer alone is compressed, keys and values apart, and the KL divergence of the predictions is measured.
3. Errors of layers add up, and those of one side go with the mean squared error of its width: a knapsack.
4. The whole policy is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .codebook import mse, table
from .codec import Format, default_options
from .errors import InputError
from .evaluation import measure
from .hf import AuraCache
from .hf.observe import observe
from .hf.support import head_dim, slots
from .policy import LayerPolicy, Policy
from .table import Kept

PROBE = 4  # bits at which a side of a layer is measured
WIDTHS = (2, 3, 4, 5, 6, 8)
FIRST, ROLLBACK = 4, 32  # as in AuraCache
_BATCH = 12  # caches that are measured side by side

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Layer:
    """What compressing one side of a layer alone does, and what a byte of its tokens costs."""

    key: float  # KL divergence with keys at PROBE bits
    value: float
    share: float  # of the tokens of a long text that it holds: less than 1 with a window

    def loss(self, keys: int, values: int) -> float:
        return self.key * _growth("key", keys) + self.value * _growth("value", values)


def calibrated(model: Any, ids: Tensor, format: str = "k4v4", source: str = "", first: int = FIRST) -> Policy:
    """A policy of one format for all layers, with offsets and balances from a text of at least 64 tokens."""
    if ids.shape[1] < 64:
        raise InputError(f"a model is calibrated on at least 64 tokens, got {ids.shape[1]}")
    layers = tuple(moments.layer(format) for moments in observe(model, ids))
    offset = layers[0].key_offset
    assert offset is not None
    return Policy(offset.shape[0], head_dim(model.config), layers, first=first, source=source)


def sensitivities(
    model: Any, policy: Policy, ids: Tensor, context: int, state: Path | None = None, progress: Progress | None = None
) -> list[Layer]:
    """Measured over the ids [1, n] of a text. With a state file, what it has is not measured again."""
    names = [f"{side}{layer}" for layer in range(len(policy.layers)) for side in "kv"]
    known: dict[str, float] = {}
    mark = {"tokens": ids.shape[1], "text": int(ids.sum()), "policy": policy.dumps()}
    if state is not None and state.is_file():
        read = json.loads(state.read_text("utf-8"))
        known = read["kl"] if read.get("mark") == mark else {}
    for start in range(0, len(names), _BATCH):
        batch = [name for name in names[start : start + _BATCH] if name not in known]
        caches = {name: _alone(model.config, policy, name) for name in batch}
        for row in measure.compare(model, ids, caches)[1:] if caches else ():
            known[row.name] = row.kl
        if state is not None:
            state.write_text(json.dumps({"mark": mark, "kl": known}), "utf-8")
        if progress is not None:
            progress("layers alone", min(start + _BATCH, len(names)), len(names))
    windows = [slot.window for slot in slots(model.config) if slot.other is None]
    return [
        Layer(known[f"k{i}"], known[f"v{i}"], 1.0 if window is None else min(1.0, _ring(window) / context))
        for i, window in enumerate(windows)
    ]


def choose(
    layers: Sequence[Layer],
    head_dim: int,
    budget: float | None = None,
    kl: float | None = None,
    widths: Sequence[int] = WIDTHS,
) -> list[str]:
    """The formats of least summed loss within `budget` bytes per token and KV head of all layers, or, given `kl`, of
    least size with at most that loss."""
    if (budget is None) == (kl is None):
        raise InputError("tuning needs either a size or a KL divergence")
    unit = 0.01
    options = []
    for layer in layers:
        choices = []
        for keys in widths:
            for values in widths:
                name = f"k{keys}v{values}"
                size = layer.share * Format.parse(name, head_dim).bytes_per_token
                choices.append((math.ceil(size / unit), layer.loss(keys, values), name))
        options.append(_hull(choices))
    chosen = [0] * len(options)

    def total() -> tuple[float, float]:
        picked = [choices[i] for choices, i in zip(options, chosen, strict=True)]
        return unit * sum(size for size, _, _ in picked), sum(loss for _, loss, _ in picked)

    if budget is not None and total()[0] > budget:
        raise InputError(f"the smallest formats take {total()[0]:.1f} bytes per token and head, got {budget:.1f}")
    while kl is None or total()[1] > kl:
        size = total()[0]
        steps = []
        for i, (choices, at) in enumerate(zip(options, chosen, strict=True)):
            for better in range(at + 1, len(choices)):
                more = (choices[better][0] - choices[at][0]) * unit
                if budget is None or size + more <= budget + 1e-9:
                    steps.append(((choices[at][1] - choices[better][1]) / more, i, better))
        if not steps:
            break
        _, i, better = max(steps)
        chosen[i] = better
    if kl is not None and total()[1] > kl:
        raise InputError(f"the widest formats lose {total()[1]:.2g}, got a KL divergence of {kl:.2g} to stay below")
    return [choices[i][2] for choices, i in zip(options, chosen, strict=True)]


def tuned(policy: Policy, formats: Sequence[str]) -> Policy:
    """The policy with other formats; offsets and balances do not depend on them."""
    layers = [layer.with_format(name, policy.head_dim) for layer, name in zip(policy.layers, formats, strict=True)]
    return replace(policy, layers=tuple(layers))


def _alone(config: Any, policy: Policy, name: str) -> Callable[[], AuraCache]:
    """One side of one layer compressed, everything else not."""
    side, at = name[0], int(name[1:])
    format = f"k{PROBE}v16" if side == "k" else f"k16v{PROBE}"
    raw = LayerPolicy("k16v16")
    layers = [layer.with_format(format, policy.head_dim) if i == at else raw for i, layer in enumerate(policy.layers)]
    return lambda: AuraCache(config, replace(policy, layers=tuple(layers)))


def _ring(window: int) -> int:
    """Tokens that the ring of a window has room for in an AuraCache."""
    return Kept(window, 0, max(16, window // 8), ROLLBACK).width(64) * 64


def _growth(side: Any, bits: int) -> float:
    """Squared error at a width, relative to that at PROBE bits."""
    default = default_options(side, bits)["table"], default_options(side, PROBE)["table"]
    return mse(table(str(default[0]), bits)) / mse(table(str(default[1]), PROBE))


def _hull(choices: list[tuple[int, float, str]]) -> list[tuple[int, float, str]]:
    """By size, each with less loss than all smaller ones."""
    kept: list[tuple[int, float, str]] = []
    for choice in sorted(choices):
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept

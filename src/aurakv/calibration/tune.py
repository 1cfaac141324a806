"""Choose the format of every KV layer of a model: the least loss for a size, or the least size for a loss.

1. The model reads a text; each layer gets the key offset and key_scale that its keys and queries want.
2. Each layer alone is compressed, keys and values apart, at the widths asked for and one below, and the KL divergence
   of the predictions is measured. At other widths it goes with the mean squared error. Or gradients foresee it for
   all layers and widths at once.
3. Losses of layers add up: a knapsack.
4. The whole is measured; in rounds, if any are asked for, also with every side of every layer one width up or down, and
   chosen again if that is better.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InputError
from ..evaluation import measure
from ..evaluation.results import Results, model_key, policy_key, text_key
from ..format.codec import Format, default_options
from ..format.levels import mse, table
from ..hf import AuraCache
from ..hf.gradients import Vectors, gradients
from ..hf.observe import observe
from ..hf.support import head_dim, slots
from ..storage.page_table import Kept
from .guard import stored
from .policy import FIRST, ROLLBACK, Policy

WIDTHS = (2, 3, 4, 5, 6, 8)
STATE = "aurakv-tuning"  # the kind of a file that keeps what was measured
_LEAST = 64  # tokens
_SIDES: tuple[Literal["k", "v"], ...] = "k", "v"
_UNIT = 0.01  # bytes: sizes are counted in these, rounded up
_BATCH = 24  # caches that are measured side by side
_CHUNK = 256  # tokens at a time: what a cache computes does not depend on it
_PIECE = 1024  # tokens of a text whose gradients are held at once
_LARGEST = 0.001  # of the terms that gradients foresee count as the next one does: a few of them would decide alone

Side = tuple[int, Literal["k", "v"], int]  # layer, keys or values, width
Progress = Callable[[str, float, int], None]  # what is measured, how many of them are, of how many


@dataclass(frozen=True)
class Layer:
    """What compressing one side of a layer does, and what a byte of its tokens costs."""

    key: Mapping[int, float]  # width -> KL divergence
    value: Mapping[int, float]
    share: float  # of the tokens of a long text that it holds: less than 1 with a window

    def loss(self, keys: int, values: int) -> float:
        return _loss("key", self.key, keys) + _loss("value", self.value, values)


def calibrated(
    model: Any,
    ids: Tensor,
    format: str = "k4v4",
    source: str = "",
    first: int = FIRST,
    recent: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Policy:
    """A policy of one format for all layers, with offsets and key scales from a text of at least 64 tokens. `progress`
    is told how many more were read."""
    if ids.shape[1] < _LEAST:
        raise InputError(f"a model is calibrated on at least {_LEAST} tokens, got {ids.shape[1]}")
    layers = tuple(seen.moments.layer(format) for seen in observe(model, ids, progress=progress).values())
    offset = layers[0].key_offset
    assert offset is not None
    return Policy(offset.shape[0], head_dim(model.config), layers, first, recent, source)


def sensitivities(
    model: Any,
    policy: Policy,
    ids: Tensor,
    context: int,
    state: Results | None = None,
    progress: Progress | None = None,
) -> list[Layer]:
    """Measured over the ids [1, n] of a text, at the widths of the policy and one below. What `state` (of the kind
    STATE) has is not measured again."""
    state = Results(kind=STATE) if state is None else state
    widths = [{"k": _down(format.key.bits), "v": _down(format.value.bits)} for format in _formats(policy)]
    names = [f"{side}{b} {i}" for i, sides in enumerate(widths) for side, bits in sides.items() for b in bits]
    shared = {"ids": text_key(ids), "calibrated": policy_key(policy), "model": model_key(model)}
    known: dict[str, float] = {}
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        rows = {name: state.find({**shared, "name": name}) for name in batch}
        known |= {name: row["kl"] for name, row in rows.items() if row is not None}
        todo = {name: _alone(policy, name) for name, row in rows.items() if row is None}
        found = _losses(model, ids, todo, _part(progress, "layers alone", start, len(batch), len(names)))
        for name, loss in found.items():
            state.add({**shared, "name": name}, {"kl": loss})
        known |= found
        state.save()
        if progress is not None:
            progress("layers alone", min(start + _BATCH, len(names)), len(names))
    losses = [
        [{b: known[f"{side}{b} {i}"] for b in bits} for side, bits in sides.items()] for i, sides in enumerate(widths)
    ]
    return [Layer(k, v, share) for (k, v), share in zip(losses, shares(model.config, context), strict=True)]


def foreseen(
    model: Any,
    policy: Policy,
    ids: Tensor,
    context: int,
    samples: int,
    state: Results | None = None,
    progress: Progress | None = None,
) -> list[Layer]:
    """What `sensitivities` measures, at all widths, foreseen by gradients over the ids [1, n] of a text. What `state`
    has is not computed again.

    A change e of the key or value of one token changes predictions by the KL divergence ½ (g · e)², where g is the
    gradient of the log-likelihood of what the model could have said, and these add up where errors of tokens have
    nothing to do with each other. The text is read in pieces, each a text of its own, with `samples` gradients each.
    """
    if policy.recent:
        raise InputError("gradients do not know which queries read a token uncompressed: tune recent tokens without")
    state = Results(kind=STATE) if state is None else state
    calibrated = policy_key(tuned(policy, ["k4v4"] * len(policy.layers)))  # losses do not depend on its formats
    shared = {"ids": text_key(ids), "calibrated": calibrated, "model": model_key(model), "samples": samples}
    names = {f"{side}{b} {i}": (i, side, b) for i in range(len(policy.layers)) for side in _SIDES for b in WIDTHS}
    rows = {where: state.find({**shared, "name": name}) for name, where in names.items()}
    found = {where: row["kl"] for where, row in rows.items() if row is not None}
    if len(found) < len(names):
        found = _by_gradients(model, policy, ids, samples, progress)
        for name, where in names.items():
            state.add({**shared, "name": name}, {"kl": found[where]})
        state.save()
    sides = [[{b: found[i, side, b] for b in WIDTHS} for side in _SIDES] for i in range(len(policy.layers))]
    return [Layer(k, v, share) for (k, v), share in zip(sides, shares(model.config, context), strict=True)]


def pieces(ids: Tensor) -> list[Tensor]:
    """What gradients read at once of the ids [1, n] of a text."""
    return [piece for piece in ids.split(_PIECE, 1) if piece.shape[1] >= min(_LEAST, ids.shape[1])]


def _by_gradients(
    model: Any, policy: Policy, ids: Tensor, samples: int, progress: Progress | None
) -> dict[Side, float]:
    """The loss of each layer, side and width."""
    generator = torch.Generator().manual_seed(0)
    terms: dict[Side, list[Tensor]] = {}
    texts = pieces(ids)
    for at, piece in enumerate(texts):
        report = None if progress is None else _gradient_steps(progress, at * samples, len(texts) * samples)
        errors: dict[Side, Tensor] = {}
        for vectors, slopes in gradients(model, piece, samples, generator, report):
            errors = errors or _errors(policy, vectors)
            for (layer, side, bits), error in errors.items():
                term = (slopes[layer][_SIDES.index(side)].float() * error).sum(-1).square().sum(0) / 2
                terms.setdefault((layer, side, bits), []).append(term.cpu())
    tokens = sum(piece.shape[1] for piece in texts) * samples
    return {where: _without_largest(torch.cat(each)) / tokens for where, each in terms.items()}


def shares(config: Any, context: int) -> list[float]:
    """The part of a text of `context` tokens that each layer holds."""
    windows = [slot.window for slot in slots(config) if slot.other is None]
    return [1.0 if window is None else min(1.0, _ring(window) / context) for window in windows]


def smallest(shares: Sequence[float], head_dim: int) -> float:
    """Bytes per token and KV head, in all layers, of the smallest formats: less is no budget for `choose`."""
    size = Format.parse(f"k{WIDTHS[0]}v{WIDTHS[0]}", head_dim).bytes_per_token
    return _UNIT * sum(math.ceil(share * size / _UNIT) for share in shares)


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
    options = []
    for layer in layers:
        choices = []
        for keys in widths:
            for values in widths:
                name = f"k{keys}v{values}"
                size = layer.share * Format.parse(name, head_dim).bytes_per_token
                if math.isfinite(loss := layer.loss(keys, values)):
                    choices.append((math.ceil(size / _UNIT), loss, name))
        options.append(_hull(choices))
    chosen = [0] * len(options)

    def total() -> tuple[float, float]:
        picked = [choices[i] for choices, i in zip(options, chosen, strict=True)]
        return _UNIT * sum(size for size, _, _ in picked), sum(loss for _, loss, _ in picked)

    if budget is not None and total()[0] > budget:
        raise InputError(f"the smallest formats take {total()[0]:.1f} bytes per token and head, got {budget:.1f}")
    while kl is None or total()[1] > kl:
        size = total()[0]
        steps = []
        for i, (choices, at) in enumerate(zip(options, chosen, strict=True)):
            for better in range(at + 1, len(choices)):
                more = (choices[better][0] - choices[at][0]) * _UNIT
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
    """The policy with other formats; offsets and key scales do not depend on them."""
    layers = [layer.with_format(name, policy.head_dim) for layer, name in zip(policy.layers, formats, strict=True)]
    return replace(policy, layers=tuple(layers))


def refined(
    model: Any, policy: Policy, ids: Tensor, context: int, budget: float, progress: Progress | None = None
) -> Policy:
    """A policy within the budget chosen again from what each side loses or wins in it with other widths nearby.

    `progress` is told how many widths of this round were measured.
    """
    now = [(format.key.bits, format.value.bits) for format in _formats(policy)]
    names = {}
    for layer, widths in enumerate(now):
        for side, bits in zip("kv", widths, strict=True):
            for other in _near(bits):
                changed = [*now]
                changed[layer] = (other, widths[1]) if side == "k" else (widths[0], other)
                names[f"{side}{other} {layer}"] = tuned(policy, [f"k{k}v{v}" for k, v in changed])
    found: dict[str, float] = {}
    policies = {"now": policy, **names}
    todo = list(policies)
    for start in range(0, len(todo), _BATCH):
        batch = todo[start : start + _BATCH]
        report = _part(progress, "widths nearby", start, len(batch), len(todo))
        found |= _losses(model, ids, {name: policies[name] for name in batch}, report)
    layers = []
    for layer, (widths, share) in enumerate(zip(now, shares(model.config, context), strict=True)):
        sides = {}
        for side, bits in zip("kv", widths, strict=True):
            near = {other: found[f"{side}{other} {layer}"] - found["now"] for other in _near(bits)}
            sides[side] = dict.fromkeys(WIDTHS, math.inf) | near | {bits: 0.0}
        layers.append(Layer(sides["k"], sides["v"], share))
    better = tuned(policy, choose(layers, policy.head_dim, budget=budget))
    return better if _losses(model, ids, {"better": better})["better"] < found["now"] else policy


def _errors(policy: Policy, vectors: Vectors) -> dict[Side, Tensor]:
    """What compression changes keys and values [kv_heads, t, dim] by, at each width, by layer, side and width."""
    found = {}
    for number, (layer, (k, v)) in enumerate(zip(policy.layers, vectors, strict=True)):
        for bits in WIDTHS:
            each = layer.with_format(f"k{bits}v{bits}", policy.head_dim).on(k.device.type)
            for side, x in zip(_SIDES, (k, v), strict=True):
                error = stored(each, side, x.transpose(0, 1).float()).transpose(0, 1) - x.float()
                error[:, : policy.first] = 0
                found[number, side, bits] = error
    return found


def _without_largest(terms: Tensor) -> float:
    most = max(1, round(_LARGEST * len(terms)))
    return float(terms.clamp(max=terms.topk(most).values[-1]).double().sum())


def _gradient_steps(progress: Progress, done: int, total: int) -> Callable[[float], None]:
    at = float(done)

    def more(amount: float) -> None:
        nonlocal at
        at += amount
        progress("gradients", round(at, 6), total)

    return more


def _part(progress: Progress | None, what: str, start: int, count: int, total: int) -> measure.Progress | None:
    """The progress of `count` of `total` measurements, which follow `start` others."""
    if progress is None:
        return None
    return lambda done, passes: progress(what, start + count * done / passes, total)


def _losses(
    model: Any, ids: Tensor, policies: Mapping[str, Policy], progress: measure.Progress | None = None
) -> dict[str, float]:
    """The KL divergence of each."""

    def cache(policy: Policy) -> Callable[[], AuraCache]:
        return lambda: AuraCache(model.config, policy)

    if not policies:
        return {}
    caches = {name: cache(policy) for name, policy in policies.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what keys do not survive is tried as well
        rows = measure.compare(model, ids, caches, chunk=_CHUNK, progress=progress)
    return {row.name: row.kl for row in rows[1:]}


def _near(bits: int) -> list[int]:
    """One width down and one up, where there are."""
    at = WIDTHS.index(bits)
    return [*WIDTHS[max(0, at - 1) : at], *WIDTHS[at + 1 : at + 2]]


def _down(bits: int) -> list[int]:
    """A width and one below, if there is one."""
    return [bits, *(other for other in _near(bits) if other < bits)]


def _formats(policy: Policy) -> list[Format]:
    return [Format.parse(layer.format, policy.head_dim) for layer in policy.layers]


def _alone(policy: Policy, name: str) -> Policy:
    """One side of one layer compressed, everything else not."""
    side, bits, at = name[0], int(name[1]), int(name[2:])
    formats = ["k16v16"] * len(policy.layers)
    formats[at] = f"k{bits}v16" if side == "k" else f"k16v{bits}"
    return tuned(policy, formats)


def _ring(window: int) -> int:
    """Tokens that the ring of a window has room for in an AuraCache."""
    return Kept.of(window, rollback=ROLLBACK).width(64) * 64


def _loss(side: Any, measured: Mapping[int, float], bits: int) -> float:
    """At a width that was not measured, from the nearest that was, in proportion to the squared error."""
    near = min(measured, key=lambda other: abs(other - bits))
    return measured[near] if near == bits else measured[near] * _error(side, bits) / _error(side, near)


@functools.cache
def _error(side: Any, bits: int) -> float:
    """Mean squared error at a width."""
    return mse(table(str(default_options(side, bits)["table"]), bits))


def _hull(choices: list[tuple[int, float, str]]) -> list[tuple[int, float, str]]:
    """By size, each with less loss than all smaller ones."""
    kept: list[tuple[int, float, str]] = []
    for choice in sorted(choices):
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept

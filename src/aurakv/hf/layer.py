"""AuraLayer: one layer of a cache for transformers.

`update` stores nothing yet. It returns handles, and whoever computes attention decides: the attention function `aurakv`
appends the new tokens without their padding and attends on the codes; any other function sees decoded tensors. Tokens
that nobody looked at are appended before the layer is used again.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.scoring import Scoring
from ..calibration.policy import LayerPolicy
from ..calibration.statistics import Turns
from ..errors import InputError
from ..storage.cache import KVCache
from .compiled import token_of
from .context import Context
from .handles import Handle, Update
from .held_tokens import HeldTokens
from .layer_calibration import LayerCalibration
from .padding import Padding
from .rows import Rows
from .scaled_cache import ScaledCache


class Attended(NamedTuple):
    """The last tokens that were stored and attended, for layers that share them."""

    rows: Rows
    before: ScaledCache | None  # the cache without them, where it has forgotten what their queries see


class AuraLayer(CacheLayerMixin):  # type: ignore[misc]
    """The compressed keys and values of one layer: contiguous, or a ring where the model attends in a window."""

    is_compileable = False  # `generate` does not compile by itself; the forward of a model can be compiled
    is_croppable = True

    def __init__(
        self,
        index: int,
        policy: LayerPolicy,
        window: int | None,
        turns: Turns | None,
        context: Context,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.policy, self.window, self.context = policy, window, context
        self.shared = shared  # later layers of the model attend to the same keys and values
        self.is_sliding = window is not None
        self.calibration = LayerCalibration(index, policy, turns, context)
        self.stored: ScaledCache | None = None
        self.padding = Padding(0)
        self.pending: Update | None = None
        self.attended: Attended | None = None
        self.token = token_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AuraLayer:
        clone = memo[id(self)] = object.__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(clone, name, value if name == "token" else copy.deepcopy(value, memo))
        clone.token = token_of(clone)
        return clone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.token = token_of(self)

    @property
    def cache(self) -> KVCache | None:
        return None if self.stored is None else self.stored.cache

    @property
    def key_scale(self) -> Tensor | None:
        return None if self.stored is None else self.stored.key_scale

    @property
    def format(self) -> str:
        """How tokens are stored, or will be."""
        return self.policy.format if self.cache is None or self.calibration.waiting else self.cache.format.name

    @property
    def bytes_held(self) -> int:
        before = None if self.attended is None else self.attended.before
        parts = (self.stored, before, self.padding, self.calibration)
        return sum(part.bytes_held for part in parts if part is not None)

    def __repr__(self) -> str:
        return f"AuraLayer({self.format}" + (")" if self.window is None else f", window={self.window})")

    # what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._begin(HeldTokens.of(key_states, value_states, None, None), None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Any, Any]:
        update = Update(self, key_states, value_states)
        if not torch.compiler.is_compiling():
            self._settle()
            self.pending = update
        return Handle(update, 0), Handle(update, 1)

    def get_seq_length(self) -> int:
        """Columns of the padded batch so far, padding included: what transformers counts."""
        self._settle()
        return self.padding.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = 0 if self.window is None else max(self.padding.total - self.window + 1, 0)
        return self.padding.total - offset + query_length, offset

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        self.stored = self.pending = self.attended = None
        self.padding, self.is_initialized = Padding(0), False
        self.calibration.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −n columns; a positive number is the count of columns to keep."""
        padding, lengths = self.check_crop(tokens_to_remove)
        if self.cache is not None:
            for seq, length in enumerate(lengths):
                self.cache.truncate(seq, length)
        self.padding, self.attended = padding, None
        self.calibration.crop(padding.total)

    def check_crop(self, tokens_to_remove: int) -> tuple[Padding, list[int]]:
        """Padding and lengths as `crop` would leave them, or its refusal; nothing changes."""
        self._settle()
        count, total = int(tokens_to_remove), self.padding.total  # some versions pass a tensor
        remove = max(0, total - count) if count > 0 else min(-count, total)
        if self.cache is None or not remove:
            return self.padding, []
        padding = self.padding.copy()
        lengths = [length - gone for length, gone in zip(self.cache.lengths, padding.crop(remove), strict=True)]
        for seq, length in enumerate(lengths):
            self.cache.check_truncate(seq, length)
        return padding, lengths

    def activate_past_recording(self) -> None:
        """Nothing to do: rings always keep `rollback` tokens more than their window."""

    def select(self, index: list[int]) -> None:
        """Sequence i becomes what sequence index[i] was; codes are shared until one of two is written to."""
        self._settle()
        self.attended = None
        if self.cache is not None:
            self.cache.reorder(index)
            self.padding.select(index)
        self.calibration.select(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([seq for seq in range(self.padding.seqs) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(torch.arange(self.padding.seqs)[indices.cpu()].tolist())

    def offload(self) -> None:
        raise InputError("a compressed cache is not offloaded: make it without offloading")

    prefetch = offload

    # attention

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        reach: Tensor | None,
        sink_logits: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Append new tokens k, v [seqs, kv_heads, t, dim] and attend with their queries: [seqs, t, heads, dim]."""
        self.pending = self.attended = None
        scoring = _scoring(scale, self.window, softcap)
        self._check_batch(k)
        count = q.shape[2]
        real = None if reach is None and self.window is None else self.context.masks.real(reach, self, count)
        stored = self.stored
        if stored is None or self.calibration.held is not None:
            stored = self._ready(HeldTokens.of(k, v, q, real), scoring)
        rows = Rows.of(q.shape[0], count, real, q.device)
        if self.shared:
            self.attended = Attended(rows, copy.deepcopy(stored) if stored.forgets(count) else None)
        out = stored.step(q, k, v, rows, scoring, sink_logits)
        self.padding.add(count, real)
        return out

    def attend_again(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend with the queries of another layer to the same tokens, which `attend` stored."""
        if self.stored is None or self.attended is None:
            raise InputError("this cache was made for a model whose layers do not share these keys and values")
        scoring, (rows, before) = _scoring(scale, self.window, softcap), self.attended
        if before is not None:
            return copy.deepcopy(before).step(q, k, v, rows, scoring, sink_logits)
        return self.stored.attend(q, rows, scoring, sink_logits)

    def decoded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens, all of them real, and decode what the mask of another attention function spans."""
        self.context.warn_of_decoding()
        stored = self._ready_for(k, v)
        length, offset = self.get_mask_sizes(k.shape[2])
        dense = stored.decoded(self.padding, offset, length, k, v)
        self._append(stored, k, v)
        return dense

    def _settle(self) -> None:
        """Append the tokens of an update that no attention function used."""
        if self.pending is not None:
            k, v = self.pending.new
            self._append(self._ready_for(k, v), k, v)

    def _ready_for(self, k: Tensor, v: Tensor) -> ScaledCache:
        """The cache for tokens without queries, all of them real."""
        self.pending = self.attended = None
        self._check_batch(k)
        return self._ready(HeldTokens.of(k, v, None, None), None)

    def _ready(self, new: HeldTokens, scoring: Scoring | None) -> ScaledCache:
        """The cache for tokens that are about to be stored: compressed from now on, if they complete the first ones."""
        stored = self._begin(new, scoring) if self.stored is None else self.stored
        decision = self.calibration.add(new, self.padding.total, scoring)
        if decision is None:
            return stored
        stored = self._make(decision.policy, new)
        stored.append_rows(*decision.stored.rows())
        return stored

    def _begin(self, new: HeldTokens, scoring: Scoring | None) -> ScaledCache:
        self.padding = Padding(new.k.shape[0])
        return self._make(self.calibration.begin(new, scoring), new)

    def _make(self, policy: LayerPolicy, new: HeldTokens) -> ScaledCache:
        self.stored = ScaledCache.empty(policy, new.k, new.v, self.window, self.context.options)
        self.dtype, self.device, self.is_initialized = new.k.dtype, new.k.device, True
        return self.stored

    def _append(self, stored: ScaledCache, k: Tensor, v: Tensor) -> None:
        """All tokens are real."""
        seqs, _, count, _ = k.shape
        stored.append(k, v, Rows.of(seqs, count, None, k.device))
        self.padding.add(count, None)

    def _check_batch(self, k: Tensor) -> None:
        if self.cache is not None and k.shape[0] != self.padding.seqs:
            raise InputError(f"this cache holds {self.padding.seqs} sequences, got a batch of {k.shape[0]}")


@functools.lru_cache(maxsize=256)
def _scoring(scale: float | None, window: int | None, softcap: float | None) -> Scoring:
    """The same object from call to call: a cache looks at a scoring once."""
    return Scoring(scale, window=window, softcap=softcap)

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
from .rows import Rows
from .scaled_cache import ScaledCache
from .stored_tokens import StoredTokens


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
        self.window, self.context = window, context
        self.shared = shared  # later layers of the model attend to the same keys and values
        self.is_sliding = window is not None
        self.tokens = StoredTokens(index, policy, window, turns, context)
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
        return None if self.tokens.scaled is None else self.tokens.scaled.cache

    @property
    def key_scale(self) -> Tensor | None:
        return None if self.tokens.scaled is None else self.tokens.scaled.key_scale

    @property
    def format(self) -> str:
        """How tokens are stored, or will be."""
        return self.tokens.format

    @property
    def bytes_held(self) -> int:
        before = None if self.attended is None else self.attended.before
        return self.tokens.bytes_held + (0 if before is None else before.bytes_held)

    def __repr__(self) -> str:
        return f"AuraLayer({self.format}" + (")" if self.window is None else f", window={self.window})")

    # what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._ready(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Any, Any]:
        update = Update(self, key_states, value_states)
        if not torch.compiler.is_compiling():
            self._settle()
            self.pending = update
        return Handle(update, 0), Handle(update, 1)

    def get_seq_length(self) -> int:
        """Columns of the padded batch so far, padding included: what transformers counts."""
        self._settle()
        return self.tokens.padding.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        total = self.tokens.padding.total
        offset = 0 if self.window is None else max(total - self.window + 1, 0)
        return total - offset + query_length, offset

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        self.pending = self.attended = None
        self.is_initialized = False
        self.tokens.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −n columns; a positive number is the count of columns to keep."""
        self.tokens.crop(self._removed(tokens_to_remove))
        self.attended = None

    def check_crop(self, tokens_to_remove: int) -> None:
        """The refusal of `crop`, if it would refuse; nothing changes."""
        self.tokens.cropped(self._removed(tokens_to_remove))

    def activate_past_recording(self) -> None:
        """Nothing to do: rings always keep `rollback` tokens more than their window."""

    def select(self, index: list[int]) -> None:
        """Sequence i becomes what sequence index[i] was; codes are shared until one of two is written to."""
        self._settle()
        self.attended = None
        self.tokens.select(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._settle()
        self.select([seq for seq in range(self.tokens.padding.seqs) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._settle()
        self.select(torch.arange(self.tokens.padding.seqs)[indices.cpu()].tolist())

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
        self.tokens.check_batch(k)
        count = q.shape[2]
        real = None if reach is None and self.window is None else self.context.masks.real(reach, self, count)
        stored = self._ready(k, v, q, real, scoring)
        rows = Rows.of(q.shape[0], count, real, q.device)
        if self.shared:
            self.attended = Attended(rows, copy.deepcopy(stored) if stored.forgets(count) else None)
        out = stored.step(q, k, v, rows, scoring, sink_logits)
        self.tokens.padding.add(count, real)
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
        if self.tokens.scaled is None or self.attended is None:
            raise InputError("this cache was made for a model whose layers do not share these keys and values")
        scoring, (rows, before) = _scoring(scale, self.window, softcap), self.attended
        if before is not None:
            return copy.deepcopy(before).step(q, k, v, rows, scoring, sink_logits)
        return self.tokens.scaled.attend(q, rows, scoring, sink_logits)

    def decoded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens, all of them real, and decode what the mask of another attention function spans."""
        self.context.warn_of_decoding()
        stored = self._ready(k, v)
        length, offset = self.get_mask_sizes(k.shape[2])
        dense = stored.decoded(self.tokens.padding, offset, length, k, v)
        self.tokens.append(k, v)
        return dense

    def _settle(self) -> None:
        """Append the tokens of an update that no attention function used."""
        if self.pending is not None:
            k, v = self.pending.new
            self._ready(k, v)
            self.tokens.append(k, v)

    def _ready(self, k: Tensor, v: Tensor, *queries: Any) -> ScaledCache:
        """The cache for tokens that are about to be stored, noted where transformers looks."""
        self.pending = self.attended = None
        self.tokens.check_batch(k)
        stored = self.tokens.ready(k, v, *queries)
        self.dtype, self.device, self.is_initialized = k.dtype, k.device, True
        return stored

    def _removed(self, tokens_to_remove: int) -> int:
        """How many columns `crop` is asked to remove."""
        self._settle()
        count, total = int(tokens_to_remove), self.tokens.padding.total  # some versions pass a tensor
        return max(0, total - count) if count > 0 else min(-count, total)


@functools.lru_cache(maxsize=256)
def _scoring(scale: float | None, window: int | None, softcap: float | None) -> Scoring:
    """The same object from call to call: a cache looks at a scoring once."""
    return Scoring(scale, window=window, softcap=softcap)

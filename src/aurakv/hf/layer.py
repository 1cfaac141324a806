"""AuraLayer: one layer of a cache for transformers.

`update` stores nothing yet. It returns handles, and whoever computes attention decides: the attention function `aurakv`
appends the new tokens without their padding and attends on the codes; any other function sees decoded tensors. Tokens
that nobody looked at are appended before the layer is used again.

Where keys are measured before they are stored, tokens stay uncompressed until there are enough of them; then all are
compressed, once.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.ops import decode, encode
from ..attention.scoring import Scoring
from ..calibration.key_scale import scaled_keys
from ..calibration.policy import LayerPolicy
from ..calibration.statistics import ENOUGH, Check, Turns, measured
from ..errors import InputError
from ..format.codec import Codec, Format
from ..storage.cache import KVCache
from ..storage.uncompressed import Uncompressed
from .beginning import NEEDED, Beginning
from .columns import Columns
from .handles import Handle, Step
from .shared import Options, Shared

_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, AuraLayer] = weakref.WeakValueDictionary()


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
        options: Options,
        shared: Shared,
    ) -> None:
        super().__init__()
        self.index = index
        self.policy, self.window, self.turns, self.options, self.shared = policy, window, turns, options, shared
        self.is_sliding = window is not None
        self.cache: KVCache | None = None
        self.key_scale: Tensor | None = None  # [kv_heads, dim]: keys are multiplied, queries divided by it
        self.columns = Columns(0)
        self.beginning: Beginning | None = None  # what came so far, while keys are still to be looked at
        self.pending: Step | None = None
        self.token = _enrol(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AuraLayer:
        clone = memo[id(self)] = object.__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(clone, name, value if name == "token" else copy.deepcopy(value, memo))
        clone.token = _enrol(clone)
        return clone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.token = _enrol(self)

    @property
    def format(self) -> str:
        """How tokens are stored, or will be."""
        return self.policy.format if self.cache is None or self._waits else self.cache.format.name

    @property
    def _waits(self) -> bool:
        """Whether tokens are uncompressed until enough of them were seen."""
        return self.beginning is not None and self._measures

    @property
    def waits_for(self) -> int | None:
        """From how many tokens of a sequence on they are compressed, if there are still fewer."""
        return NEEDED if self._waits else None

    def __repr__(self) -> str:
        return f"AuraLayer({self.format}" + (")" if self.window is None else f", window={self.window})")

    # what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._begin(Beginning.of(key_states, value_states, None, None), None)

    @property
    def _measures(self) -> bool:
        """Whether the first tokens have a say in how they are stored."""
        return self.options.calibrate or self.options.widen

    def _begin(self, new: Beginning, scoring: Scoring | None) -> KVCache:
        """A cache for what is to come, of which `new` are the first tokens."""
        coded = Format.parse(self.policy.format, (new.k.shape[3], new.v.shape[3])).key.coded
        self.beginning = None if new.enough or not coded else new.first(0)
        self.columns = Columns(new.k.shape[0])
        return self._make(LayerPolicy("k16v16") if self._waits else self._chosen(new, scoring), new)

    def _chosen(self, begun: Beginning, scoring: Scoring | None) -> LayerPolicy:
        """How tokens are stored, from the first ones."""
        policy, dim = self.policy, begun.k.shape[3]
        if not Format.parse(policy.format, (dim, begun.v.shape[3])).key.coded:
            return policy
        if self.options.calibrate:
            turns = self.turns if self.turns is not None and self.turns.dim == dim else None
            policy = measured(policy.format, begun.k, begun.q, begun.real, turns)
        return self._guarded(policy, begun, scoring)

    def _make(self, policy: LayerPolicy, begun: Beginning) -> KVCache:
        """An empty cache."""
        k, v = begun.k, begun.v
        seqs, kv_heads, _, key_dim = k.shape
        first, recent, rollback, _, _, backend, _ = self.options
        dtype = torch.float32 if k.dtype == torch.float64 else k.dtype  # the widest that is stored
        format = Format.parse(policy.format, (key_dim, v.shape[3]), dtype)
        uncompressed = None
        if (first or recent) and (format.key.coded or format.value.coded):
            uncompressed = Uncompressed(first, recent, dtype, rollback)
        options: dict[str, Any] = {"device": k.device, "uncompressed": uncompressed, "backend": backend}
        for name in ("key_offset", "value_offset"):
            offset = getattr(policy, name)
            options[name] = None if offset is None else offset.to(k.device)
        if self.window is None:
            self.cache = KVCache.contiguous(format, seqs, kv_heads, **options)
        else:
            self.cache = KVCache.ring(format, seqs, kv_heads, self.window, rollback=rollback, **options)
        self.key_scale = None if policy.key_scale is None else policy.key_scale.to(k.device)
        self.dtype, self.device, self.is_initialized = k.dtype, k.device, True
        return self.cache

    def _watch(self, new: Beginning, scoring: Scoring | None) -> KVCache:
        """Note tokens that are about to be stored, and when there are enough, decide how, and compress those so far."""
        cache = self._begin(new, scoring) if self.cache is None else self.cache
        if self.beginning is None:
            return cache
        stored = self.beginning.first(self.columns.total)  # what was noted and then refused is not
        begun = self.beginning = stored.followed(new)
        if not begun.enough:
            return cache
        waits, self.beginning = self._waits, None
        policy = self._chosen(begun, scoring)
        if not waits:
            return cache
        cache = self._make(policy, begun)
        k, v, starts = stored.rows()
        cache.append(scaled_keys(k, self.key_scale), v, starts)
        return cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Any, Any]:
        step = Step(self, key_states, value_states)
        if not torch.compiler.is_compiling():
            self._settle()
            self.pending = step
        return Handle(step, 0), Handle(step, 1)

    def get_seq_length(self) -> int:
        """Columns of the padded batch so far, padding included: what transformers counts."""
        self._settle()
        return self.columns.total

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = 0 if self.window is None else max(self.columns.total - self.window + 1, 0)
        return self.columns.total - offset + query_length, offset

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        self.cache, self.columns, self.pending, self.is_initialized = None, Columns(0), None, False
        self.key_scale = self.beginning = None
        self.shared.forget(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −n columns; a positive number is the count of columns to keep."""
        columns, lengths = self.check_crop(tokens_to_remove)
        if self.cache is not None:
            for seq, length in enumerate(lengths):
                self.cache.truncate(seq, length)
        self.columns = columns
        if self.beginning is not None:
            self.beginning = self.beginning.first(columns.total)

    def check_crop(self, tokens_to_remove: int) -> tuple[Columns, list[int]]:
        """Columns and lengths as `crop` would leave them, or its refusal; nothing changes."""
        self._settle()
        count, total = int(tokens_to_remove), self.columns.total  # some versions pass a tensor
        remove = max(0, total - count) if count > 0 else min(-count, total)
        if self.cache is None or not remove:
            return self.columns, []
        columns = self.columns.copy()
        lengths = [length - gone for length, gone in zip(self.cache.lengths, columns.crop(remove), strict=True)]
        for seq, length in enumerate(lengths):
            self.cache.check_truncate(seq, length)
        return columns, lengths

    def activate_past_recording(self) -> None:
        """Nothing to do: rings always keep `rollback` tokens more than their window."""

    def select(self, index: list[int]) -> None:
        """Sequence i becomes what sequence index[i] was; codes are shared until one of two is written to."""
        self._settle()
        if self.cache is not None:
            self.cache.reorder(index)
            self.columns.select(index)
        if self.beginning is not None:
            self.beginning = self.beginning.selected(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([seq for seq in range(self.columns.seqs) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(torch.arange(self.columns.seqs)[indices.cpu()].tolist())

    def offload(self) -> None:
        raise InputError("a compressed cache is not offloaded: make it without offloading")

    prefetch = offload

    @property
    def bytes_held(self) -> int:
        if self.cache is None:
            return 0
        key_scale = 0 if self.key_scale is None else self.key_scale.nbytes
        beginning = 0 if self.beginning is None else self.beginning.bytes_held
        return self.cache.bytes_held + self.columns.bytes_held + key_scale + beginning

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
        self.pending = None
        scoring = _scoring(scale, self.window, softcap)
        self._check_batch(k)
        seqs, heads, count, _ = q.shape
        real = None if reach is None and self.window is None else self.shared.real(reach, self, count)
        cache = self.cache
        if cache is None or self.beginning is not None:
            cache = self._watch(Beginning.of(k, v, q, real), scoring)
        q, k, v = _rows(q), _rows(k), _rows(v)
        options: dict[str, Any] = {
            "key_scale": self.key_scale,
            "sink_logits": sink_logits,
            "precision": self.options.precision,
        }
        starts: list[int] | None
        if real is None:
            starts = None if count == 1 else [seq * count for seq in range(seqs + 1)]
            out = cache.step(q, k, v, starts, scoring, **options).out
        else:
            starts = [0, *itertools.accumulate(real.sum(1).tolist())]
            at = real.flatten().nonzero().squeeze(1).to(q.device)
            out = q.new_zeros(seqs * count, heads, v.shape[2])
            out[at] = cache.step(q[at], k[at], v[at], starts, scoring, **options).out
        self.columns.add(count, real)
        return out.view(seqs, count, heads, v.shape[2])

    def decoded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens, all of them real, and decode what the mask of another attention function spans.

        Uncompressed tokens are those of the last query.
        """
        self.pending = None
        self.shared.warn()
        cache = self._ready(k, v)
        count = k.shape[2]
        length, offset = self.get_mask_sizes(count)
        past = self.columns.total - offset
        pool = cache.pool
        dtype, k = k.dtype, self._scaled(k)
        dense = [x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in (k, v)]
        for seq, tokens in enumerate(cache.lengths):
            last = tokens + count - 1
            column = self.columns.of(seq)[cache.positions(seq).cpu()] - offset
            held = (column >= 0).to(k.device)
            at = column.to(k.device)[held]
            stored = (x.to(y.dtype) for x, y in zip(cache.decode(seq, k.dtype, query=last), (k, v), strict=True))
            new = torch.arange(tokens, tokens + count, device=k.device)
            uncompressed = cache.uncompressed.seen(new, last)[:, None]
            sides = (cache.format.key, pool.key_offset), (cache.format.value, pool.value_offset)
            for x, old, fresh, side in zip(dense, stored, (k, v), sides, strict=True):
                x[seq, :, at] = old[held].transpose(0, 1)
                x[seq, :, past:] = torch.where(uncompressed, fresh[seq], _round_trip(fresh[seq], *side, cache.backend))
        self._append(cache, k, v)
        return dense[0] if self.key_scale is None else (dense[0] / self.key_scale[:, None]).to(dtype), dense[1]

    def _scaled(self, k: Tensor) -> Tensor:
        return k if self.key_scale is None else scaled_keys(k, self.key_scale[:, None])

    def _append(self, cache: KVCache, k: Tensor, v: Tensor) -> None:
        """All tokens are real; keys are scaled."""
        seqs, _, count, _ = k.shape
        cache.append(_rows(k), _rows(v), [seq * count for seq in range(seqs + 1)])
        self.columns.add(count, None)

    def _settle(self) -> None:
        """Append the tokens of an update that no attention function used."""
        if self.pending is not None:
            (k, v), self.pending = self.pending.new, None
            cache = self._ready(k, v)
            self._append(cache, self._scaled(k), v)

    def _guarded(self, policy: LayerPolicy, begun: Beginning, scoring: Scoring | None) -> LayerPolicy:
        """Look at one sequence: would its keys survive? If not, they get more bits, or the user one sentence."""
        seq = int(begun.real.sum(1).argmax())
        k, q = (None if x is None else x[seq][:, begun.real[seq]] for x in (begun.k, begun.q))
        assert k is not None
        if k.shape[1] < ENOUGH:
            return policy
        check = Check(k, q, scoring, self.options.first)
        if not check.lost(policy):
            return policy
        wider = check.widened(policy)
        if self.options.widen:
            return wider
        self.shared.tell(self, check.finding(policy), wider.format)
        return policy

    def _ready(self, k: Tensor, v: Tensor) -> KVCache:
        """For tokens without queries, all of them real."""
        self._check_batch(k)
        return self._watch(Beginning.of(k, v, None, None), None)

    def _check_batch(self, k: Tensor) -> None:
        if self.cache is not None and k.shape[0] != self.columns.seqs:
            raise InputError(f"this cache holds {self.columns.seqs} sequences, got a batch of {k.shape[0]}")


@torch.library.custom_op("aurakv::hf_attend", mutates_args=("token",))
def hf_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Tensor | None,
    sink_logits: Tensor | None,
    token: Tensor,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """AuraLayer.attend while compiling: the layer, whose state lives on the host, is named by its token."""
    out = _live[int(token)].attend(q, k, v, reach, sink_logits, scale, softcap)
    return out.clone() if out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() else out


@hf_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@functools.lru_cache(maxsize=256)
def _scoring(scale: float | None, window: int | None, softcap: float | None) -> Scoring:
    """The same object from call to call: a cache looks at a scoring once."""
    return Scoring(scale, window=window, softcap=softcap)


def _rows(x: Tensor) -> Tensor:
    """[seqs, heads, t, dim] as [seqs · t, heads, dim], a view where it can be one."""
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


def _enrol(layer: AuraLayer) -> Tensor:
    number = next(_numbers)
    _live[number] = layer
    return torch.tensor(number)


def _round_trip(x: Tensor, codec: Codec, offset: Tensor | None, backend: str | None) -> Tensor:
    """What [kv_heads, t, dim] becomes when it is stored."""
    codes = encode(x.transpose(0, 1), codec, offset, backend=backend)
    return decode(codes, codec, offset, dtype=x.dtype, backend=backend).transpose(0, 1)

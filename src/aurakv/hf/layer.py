"""AuraLayer: one layer of a cache for transformers, and the handles that carry it to the attention function.

`update` stores nothing yet. It returns handles, and whoever computes attention decides: the attention function `aurakv`
appends the new tokens without their padding and attends on the codes; any other function sees decoded tensors. Tokens
that nobody looked at are appended before the layer is used again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import CacheLayerMixin

from ..cache import KVCache
from ..calibrate import ENOUGH, LOST, Turns, measured, moved, widened
from ..codec import Codec, Format
from ..errors import InputError
from ..exact import Exact
from ..ops import decode, encode
from ..policy import LayerPolicy
from ..scoring import Scoring
from .columns import Columns
from .shared import Options, Shared

_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, AuraLayer] = weakref.WeakValueDictionary()


class AuraLayer(CacheLayerMixin):  # type: ignore[misc]
    """The compressed keys and values of one layer: contiguous, or a ring where the model attends in a window."""

    is_compileable = False  # `generate` does not compile by itself; the forward of a model can be compiled
    is_croppable = True

    def __init__(
        self, policy: LayerPolicy, window: int | None, turns: Turns | None, options: Options, shared: Shared
    ) -> None:
        super().__init__()
        self.policy, self.window, self.turns, self.options, self.shared = policy, window, turns, options, shared
        self.is_sliding = window is not None
        self.cache: KVCache | None = None
        self.balance: Tensor | None = None  # [kv_heads, dim]: keys are multiplied, queries divided by it
        self.columns = Columns(0)
        self.pending: Step | None = None
        self.token = _enrol(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AuraLayer:
        clone = memo[id(self)] = object.__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(clone, name, value if name == "token" else copy.deepcopy(value, memo))
        clone.token = _enrol(clone)
        return clone

    @property
    def format(self) -> str:
        return self.policy.format

    def __repr__(self) -> str:
        return f"AuraLayer({self.format}" + (")" if self.window is None else f", window={self.window})")

    # what transformers asks

    def lazy_initialization(
        self,
        key_states: Tensor,
        value_states: Tensor,
        q: Tensor | None = None,
        real: Tensor | None = None,
        scoring: Scoring | None = None,
    ) -> None:
        seqs, kv_heads, _, key_dim = key_states.shape
        first, recent, rollback, centre, _, backend, _ = self.options
        device = key_states.device
        dtype = torch.float32 if key_states.dtype == torch.float64 else key_states.dtype  # the widest that is stored
        policy = self.policy
        if centre and Format.parse(policy.format, (key_dim, value_states.shape[3]), dtype).key.coded:
            turns = self.turns if self.turns is not None and self.turns.dim == key_dim else None
            policy = measured(policy.format, key_states, q, real, turns)
        if q is not None and scoring is not None:
            policy = self._guarded(policy, key_states, q, real, scoring)
        format = Format.parse(policy.format, (key_dim, value_states.shape[3]), dtype)
        exact = None
        if (first or recent) and (format.key.coded or format.value.coded):
            exact = Exact(first, recent, dtype, rollback)
        options: dict[str, Any] = {"device": device, "exact": exact, "backend": backend}
        for name in ("key_offset", "value_offset"):
            offset = getattr(policy, name)
            options[name] = None if offset is None else offset.to(device)
        if self.window is None:
            self.cache = KVCache.contiguous(format, seqs, kv_heads, **options)
        else:
            self.cache = KVCache.ring(format, seqs, kv_heads, self.window, rollback=rollback, **options)
        if policy.balance is not None:
            self.balance = policy.balance.to(device, key_states.dtype)
        self.columns = Columns(seqs)
        self.dtype, self.device, self.is_initialized = key_states.dtype, device, True

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
        self.balance = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −n columns; a positive number is the count of columns to keep."""
        columns, lengths = self.check_crop(tokens_to_remove)
        if self.cache is not None:
            for seq, length in enumerate(lengths):
                self.cache.truncate(seq, length)
        self.columns = columns

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
        balance = 0 if self.balance is None else self.balance.nbytes
        return 0 if self.cache is None else self.cache.bytes_held + self.columns.bytes_held + balance

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
        cache = self._ready(k, v, q, reach, scoring)
        seqs, heads, count, _ = q.shape
        real = None if reach is None and self.window is None else self.shared.real(reach, self, count)
        q, k, v = _rows(q), _rows(k), _rows(v)
        options: dict[str, Any] = {
            "balance": self.balance,
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

        Exact tokens are those of the last query.
        """
        self.pending = None
        self.shared.warn()
        cache = self._ready(k, v)
        count = k.shape[2]
        length, offset = self.get_mask_sizes(count)
        past = self.columns.total - offset
        pool = cache.pool
        k = self._balanced(k)
        dense = [x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in (k, v)]
        for seq, tokens in enumerate(cache.lengths):
            last = tokens + count - 1
            column = self.columns.of(seq)[cache.positions(seq).cpu()] - offset
            held = (column >= 0).to(k.device)
            at = column.to(k.device)[held]
            stored = cache.decode(seq, k.dtype, query=last)
            new = torch.arange(tokens, tokens + count, device=k.device)
            exact = cache.exact.seen(new, last)[:, None]
            sides = (cache.format.key, pool.key_offset), (cache.format.value, pool.value_offset)
            for x, old, fresh, side in zip(dense, stored, (k, v), sides, strict=True):
                x[seq, :, at] = old[held].transpose(0, 1)
                x[seq, :, past:] = torch.where(exact, fresh[seq], _round_trip(fresh[seq], *side, cache.backend))
        self._append(cache, k, v)
        return dense[0] if self.balance is None else dense[0] / self.balance[:, None], dense[1]

    def _balanced(self, k: Tensor) -> Tensor:
        return k if self.balance is None else k * self.balance[:, None]

    def _append(self, cache: KVCache, k: Tensor, v: Tensor) -> None:
        """All tokens are real; keys are balanced."""
        seqs, _, count, _ = k.shape
        cache.append(_rows(k), _rows(v), [seq * count for seq in range(seqs + 1)])
        self.columns.add(count, None)

    def _settle(self) -> None:
        """Append the tokens of an update that no attention function used."""
        if self.pending is not None:
            (k, v), self.pending = self.pending.new, None
            cache = self._ready(k, v)
            self._append(cache, self._balanced(k), v)

    def _guarded(self, policy: LayerPolicy, k: Tensor, q: Tensor, real: Tensor | None, scoring: Scoring) -> LayerPolicy:
        """Look at one sequence: would its keys survive? If not, they get more bits, or the user one sentence."""
        seq = 0 if real is None else int(real.sum(1).argmax())
        k, q = (x[seq] if real is None else x[seq][:, real[seq]] for x in (k, q))
        if k.shape[1] < ENOUGH:
            return policy
        first = self.options.first
        nats = moved(policy, k, q, scoring, first)
        if not nats > LOST:
            return policy
        wider = widened(policy, k, q, scoring, first)
        if self.options.widen:
            return wider
        self.shared.tell(self, nats, wider.format)
        return policy

    def _ready(
        self,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        reach: Tensor | None = None,
        scoring: Scoring | None = None,
    ) -> KVCache:
        if self.cache is None:
            real = None if reach is None or reach.shape[1] != k.shape[2] else reach > 0
            self.lazy_initialization(k, v, q, real, scoring)
        assert self.cache is not None
        if k.shape[0] != self.columns.seqs:
            raise InputError(f"this cache holds {self.columns.seqs} sequences, got a batch of {k.shape[0]}")
        return self.cache


class Step:
    """New tokens of a layer [seqs, kv_heads, t, dim], used once: by attention on codes, or decoded."""

    __slots__ = ("dense", "layer", "new")

    def __init__(self, layer: AuraLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.new = layer, (k, v)
        self.dense: tuple[Tensor, Tensor] | None = None

    def decoded(self) -> tuple[Tensor, Tensor]:
        if self.dense is None:
            self.dense = self.layer.decoded(*self.new)
        return self.dense


class Handle:
    """What `update` returns for keys or values: no tensor, but one for every torch function, by decoding."""

    __slots__ = ("side", "step")

    def __init__(self, step: Step, side: int) -> None:
        self.step, self.side = step, side

    @property
    def tensor(self) -> Tensor:
        return self.step.decoded()[self.side]

    @property
    def dtype(self) -> torch.dtype:
        return self.step.new[self.side].dtype

    @property
    def device(self) -> torch.device:
        return self.step.new[self.side].device

    @property
    def shape(self) -> torch.Size:
        if self.step.dense is not None:
            return self.tensor.shape
        new = self.step.new[self.side]
        return torch.Size((*new.shape[:2], self.step.layer.get_mask_sizes(new.shape[2])[0], new.shape[3]))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("step", "side"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def __mul__(self, other: Any) -> Any:
        return self.tensor * other

    __rmul__ = __mul__

    def __matmul__(self, other: Any) -> Any:
        return self.tensor @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.tensor if isinstance(x, Handle) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


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

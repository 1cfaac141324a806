"""ScaledCache: the KVCache of a layer for tensors as transformers has them, with the scale of its keys.

Tensors are [seqs, heads, t, dim]; `Rows` says which of their tokens are real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.ops import decode, encode
from ..attention.scoring import Scoring
from ..calibration.key_scale import scaled_keys, scaled_queries
from ..calibration.policy import LayerPolicy
from ..format.codec import Codec, Format
from ..storage.cache import KVCache
from ..storage.uncompressed import Uncompressed
from .context import Options
from .padding import Padding
from .rows import Rows


@dataclass
class ScaledCache:
    cache: KVCache
    key_scale: Tensor | None  # [kv_heads, dim]: keys are multiplied, queries divided by it
    precision: str

    @classmethod
    def empty(cls, policy: LayerPolicy, k: Tensor, v: Tensor, window: int | None, options: Options) -> ScaledCache:
        """For keys and values like these: contiguous, or a ring where there is a window."""
        seqs, kv_heads, _, key_dim = k.shape
        dtype = torch.float32 if k.dtype == torch.float64 else k.dtype  # the widest that is stored
        format = Format.parse(policy.format, (key_dim, v.shape[3]), dtype)
        uncompressed = None
        if (options.first or options.recent) and (format.key.coded or format.value.coded):
            uncompressed = Uncompressed(
                options.first, options.recent, dtype, rollback=0
            )  # what is lost comes from codes
        given: dict[str, Any] = {"device": k.device, "uncompressed": uncompressed, "backend": options.backend}
        for name in ("key_offset", "value_offset"):
            offset = getattr(policy, name)
            given[name] = None if offset is None else offset.to(k.device)
        given["key_fit"], given["value_fit"] = policy.fits(format, kv_heads, k.device)
        if window is None:
            cache = KVCache.contiguous(format, seqs, kv_heads, **given)
        else:
            cache = KVCache.ring(format, seqs, kv_heads, window, rollback=options.rollback, **given)
        return cls(cache, None if policy.key_scale is None else policy.key_scale.to(k.device), options.precision)

    @property
    def bytes_held(self) -> int:
        return self.cache.bytes_held + (0 if self.key_scale is None else self.key_scale.nbytes)

    def forgets(self, count: int) -> bool:
        """Whether appending `count` tokens at once drops some that the first of their queries see."""
        return any(table.kept is not None and count > table.kept.chunk for table in self.cache.page_tables)

    def append(self, k: Tensor, v: Tensor, rows: Rows) -> None:
        self.append_rows(rows.take(k), rows.take(v), rows.starts)

    def append_rows(self, k: Tensor, v: Tensor, starts: list[int] | None) -> None:
        self.cache.append(scaled_keys(k, self.key_scale), v, starts)

    def step(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scoring: Scoring, sink_logits: Tensor | None) -> Tensor:
        """Append tokens and attend with their queries: [seqs, t, heads, dim]."""
        options: dict[str, Any] = {"sink_logits": sink_logits, "precision": self.precision}
        new = rows.take(q), rows.take(k), rows.take(v)
        return rows.spread(self.cache.step(*new, rows.starts, scoring, key_scale=self.key_scale, **options).out)

    def attend(self, q: Tensor, rows: Rows, scoring: Scoring, sink_logits: Tensor | None) -> Tensor:
        """Attend with queries of the tokens that were appended last."""
        options: dict[str, Any] = {"sink_logits": sink_logits, "precision": self.precision}
        queries = scaled_queries(rows.take(q), self.key_scale)
        return rows.spread(self.cache.attend(queries, rows.starts, scoring, **options).out).to(q.dtype)

    def decoded(self, padding: Padding, offset: int, length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What is held, and new tokens as they will be stored, in the columns offset … offset + length of the batch.

        Uncompressed tokens are those of the last query.
        """
        cache, scale, dtype = self.cache, self.key_scale, k.dtype
        k = k if scale is None else scaled_keys(k, scale[:, None])
        count, past = k.shape[2], padding.total - offset
        dense = [x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in (k, v)]
        pool = cache.pool
        sides = (
            (cache.format.key, pool.key_offset, pool.key_fit),
            (cache.format.value, pool.value_offset, pool.value_fit),
        )
        for seq, tokens in enumerate(cache.lengths):
            last = tokens + count - 1
            column = padding.columns(seq)[cache.positions(seq).cpu()] - offset
            held = (column >= 0).to(k.device)
            at = column.to(k.device)[held]
            stored = (x.to(y.dtype) for x, y in zip(cache.decode(seq, k.dtype, query=last), (k, v), strict=True))
            new = torch.arange(tokens, tokens + count, device=k.device)
            uncompressed = cache.uncompressed.seen(new, last)[:, None]
            for x, old, fresh, side in zip(dense, stored, (k, v), sides, strict=True):
                x[seq, :, at] = old[held].transpose(0, 1)
                x[seq, :, past:] = torch.where(uncompressed, fresh[seq], _round_trip(fresh[seq], *side, cache.backend))
        return dense[0] if scale is None else (dense[0] / scale[:, None]).to(dtype), dense[1]


def _round_trip(x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None, backend: str | None) -> Tensor:
    """What [kv_heads, t, dim] becomes when it is stored."""
    codes = encode(x.transpose(0, 1), codec, offset, fit=fit, backend=backend)
    return decode(codes, codec, offset, dtype=x.dtype, backend=backend).transpose(0, 1)

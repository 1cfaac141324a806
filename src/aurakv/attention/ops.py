"""The operations: check the arguments, choose a backend, call it. While compiling they become registered operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends, checks
from ..arguments import finite, instance, whole
from ..checks import Starts
from ..errors import InputError
from ..format.codec import Codec, Codes, both_sides
from ..format.fit import check_fit
from ..storage.pages import Pages, check_offset
from .partial import Partial
from .scoring import Scoring
from .step import Attention

_DEFAULT = Scoring()


def encode(
    x: Tensor,
    codec: Codec,
    offset: Tensor | None = None,
    *,
    fit: Tensor | None = None,
    backend: str | None = None,
) -> Codes:
    """Compress vectors x [..., kv_heads, dim]; the offset is [kv_heads, dim]. Codes are the nearest ones, or fitted as
    `aurakv.format.fit` says."""
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.encode(x, codec, offset, fit, backend)
    checks.floating("x", x)
    instance("codec", codec, Codec)
    if x.ndim < 2 or x.shape[-1] != codec.dim:
        raise InputError(f"x must be [..., kv_heads, {codec.dim}], got {list(x.shape)}")
    check_offset("offset", offset, codec, x.shape[-2], x.device)
    check_fit("fit", fit, codec, x.shape[-2], x.device)
    chosen = backends.select(backend, both_sides(codec), x.device, x.dtype)
    if not x.numel():
        scale = x.new_empty(x.shape[:-1], dtype=codec.dtype) if codec.coded else None
        return Codes(x.new_empty((*x.shape[:-1], codec.row_bytes), dtype=torch.uint8), scale)
    return chosen.encode(x, codec, offset, fit)


def decode(
    codes: Codes,
    codec: Codec,
    offset: Tensor | None = None,
    *,
    rotated: bool = False,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> Tensor:
    """The vectors x̂ that the codes stand for, or R x̂ when `rotated`."""
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.decode(codes, codec, offset, rotated, dtype, backend)
    checks.rows("codes", codes, codec)
    check_offset("offset", offset, codec, codes.data.shape[-2], codes.data.device)
    if dtype not in checks.FLOATS:
        raise InputError(f"dtype must be float32, float16, bfloat16 or float64, got {dtype}")
    if dtype == torch.float64 and codes.data.device.type == "mps":
        raise InputError(f"dtype must be float32, float16 or bfloat16 on an Apple GPU, got {dtype}")
    chosen = backends.select(backend, both_sides(codec), codes.data.device, dtype)
    if not codes.data.numel():
        return codes.data.new_empty((*codes.data.shape[:-1], codec.dim), dtype=dtype)
    return chosen.decode(codes, codec, offset, rotated, dtype)


def scores(q: Tensor, keys: Codes, codec: Codec, offset: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """q·k̂ of queries [tokens, heads, dim] with n stored keys [n, kv_heads]: [tokens, heads, n]; no softmax."""
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.scores(q, keys, codec, offset, backend)
    checks.rows("keys", keys, codec, ndim=3)
    checks.queries(q, keys.data.shape[1], codec.dim, keys.data.device)
    check_offset("offset", offset, codec, keys.data.shape[1], q.device)
    return backends.select(backend, both_sides(codec), q.device, q.dtype).scores(q, keys, codec, offset)


def values(
    weights: Tensor,
    stored: Codes,
    codec: Codec,
    offset: Tensor | None = None,
    *,
    threshold: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Σ w·v̂ of weights [tokens, heads, n] with n stored values [n, kv_heads]: [tokens, heads, dim].

    Weights below a threshold are dropped, NaN weights never; nothing is renormalised.
    """
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.values(weights, stored, codec, offset, threshold, backend)
    checks.rows("stored", stored, codec, ndim=3)
    checks.floating("weights", weights, stored.data.device)
    n, kv_heads = stored.data.shape[:2]
    if weights.ndim != 3 or weights.shape[2] != n or weights.shape[1] == 0 or weights.shape[1] % kv_heads:
        raise InputError(
            f"weights must be [tokens, heads, {n}] with heads a multiple of {kv_heads} KV heads,"
            f" got {list(weights.shape)}"
        )
    threshold = None if threshold is None else finite("threshold", threshold)
    if threshold is not None and not 0 <= threshold < 1:
        raise InputError(f"threshold must be at least 0 and below 1, got {threshold}")
    check_offset("offset", offset, codec, kv_heads, weights.device)
    lowest = -math.inf if threshold is None else threshold
    chosen = backends.select(backend, both_sides(codec), weights.device, weights.dtype)
    return chosen.values(weights, stored, codec, offset, lowest)


def append(pages: Pages, k: Tensor, v: Tensor, starts: Starts = None, *, backend: str | None = None) -> None:
    """Write tokens [tokens, kv_heads, dim] behind their sequences and advance `pages.lengths`.

    Sequence i owns rows starts[i]:starts[i+1]; without starts each has one, a single sequence all of them. A sequence
    whose tokens do not fit its pages stays as it is and `pages.overflow` is set: caches make room first, captured
    graphs look after. Pages shared by forks are written as they are: `KVCache.append` and `KVCache.reserve` give
    each sequence its own.
    """
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.append(pages, k, v, starts, backend)
    pages.check()
    checks.new_tokens(k, v, pages)
    rows = checks.rows_of("starts", starts, pages.seqs, k.shape[0], k.device)
    backends.select(backend, pages.format, k.device, k.dtype).append(pages, k, v, rows)


def append_codes(
    pages: Pages, keys: Codes, values: Codes, starts: Starts = None, *, backend: str | None = None
) -> None:
    """Like append, for tokens that already are encoded: [tokens, kv_heads]."""
    pages.check()
    checks.new_codes(keys, values, pages)
    rows = checks.rows_of("starts", starts, pages.seqs, keys.data.shape[0], pages.data.device)
    backends.select(backend, pages.format, pages.data.device).append_codes(pages, keys, values, rows)


def attend(
    q: Tensor,
    pages: Pages,
    starts: Starts = None,
    scoring: Scoring = _DEFAULT,
    *,
    ends: Tensor | Sequence[int] | None = None,
    sink_logits: Tensor | None = None,
    splits: int | None = None,
    precision: str = "fast",
    workspace: Tensor | None = None,
    rotated: bool = False,
    backend: str | None = None,
) -> Partial:
    """Attention of queries [tokens, heads, key dim] over the stored tokens of their sequences.

    Sequence i owns rows starts[i]:starts[i+1], and these are its last tokens: the last one is at position ends[i] − 1,
    by default the last stored token. Without starts each has one, a single sequence all of them. `splits` sets into how
    many parts a sequence is cut for parallel work; `precision="float32"` asks for float32 accuracy where the default is
    coarser. `rotated`: the caller rotates. Queries come as R q (`format.key.rotate`), and the output stays rotated
    (`format.value.unrotate` turns it back). A caller who has scaled the queries, too, says `Scoring(scale=1.0)`.
    """
    if torch.compiler.is_compiling():
        from . import torch_ops

        options = (splits, precision, workspace, rotated, backend)
        return torch_ops.attend(q, pages, starts, scoring, ends, sink_logits, *options)
    pages.check()
    instance("rotated", rotated, bool)
    if rotated:
        pages = pages.unrotated()
    instance("scoring", scoring, Scoring)
    checks.reach(pages, scoring)
    device = pages.data.device
    checks.queries(q, pages.kv_heads, pages.format.key.dim, device)
    checks.logits(sink_logits, q.shape[1], device)
    checks.precision(precision)
    splits = checks.splits(splits)
    rows = checks.rows_of("starts", starts, pages.seqs, q.shape[0], device)
    last = checks.ends(ends, pages.lengths)
    chosen = backends.select(backend, pages.format, device, q.dtype)
    if workspace is not None:
        needed = chosen.workspace_bytes(pages, q.shape[0], q.shape[1], splits)
        checks.workspace(workspace, needed, device)
    wanted = Attention(pages, rows, scoring, sink_logits, splits, precision, ends=last, workspace=workspace)
    return chosen.attend(q, wanted)


def attend_workspace(
    pages: Pages, tokens: int, heads: int, *, splits: int | None = None, backend: str | None = None
) -> int:
    """Bytes of the workspace that `attend` needs for split results of this many queries over these pages."""
    tokens, heads, splits = whole("tokens", tokens, 0), whole("heads", heads, 1), checks.splits(splits)
    return backends.select(backend, pages.format, pages.data.device).workspace_bytes(pages, tokens, heads, splits)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Starts = None,
    key_starts: Starts = None,
    scoring: Scoring = _DEFAULT,
    *,
    ends: Tensor | Sequence[int] | None = None,
    sink_logits: Tensor | None = None,
    backend: str | None = None,
) -> Partial:
    """Attention over uncompressed tokens k, v [tokens, kv_heads, dim], ragged like the queries.

    The keys of sequence i are its last tokens before position ends[i], by default all of them. key_starts defaults to
    starts: as many keys as queries, a prefill.
    """
    if torch.compiler.is_compiling():
        from . import torch_ops

        return torch_ops.attend_dense(q, k, v, starts, key_starts, scoring, ends, sink_logits, backend)
    instance("scoring", scoring, Scoring)
    checks.floating("k", k)
    checks.floating("v", v, k.device)
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or k.shape[1] == 0:
        raise InputError(
            f"k and v must be [tokens, kv_heads, dim] with equal tokens and heads,"
            f" got {list(k.shape)} and {list(v.shape)}"
        )
    checks.queries(q, k.shape[1], k.shape[2], k.device)
    checks.logits(sink_logits, q.shape[1], k.device)
    seqs = q.shape[0] if starts is None else len(starts) - 1
    rows = checks.rows_of("starts", starts, seqs, q.shape[0], q.device)
    given = starts if key_starts is None else key_starts
    key_bounds = checks.rows_of("key_starts", given, seqs, k.shape[0], k.device).starts
    last = checks.ends(ends, key_bounds.diff())
    chosen = backends.select(backend, None, q.device, q.dtype)
    return chosen.attend_dense(q, k, v, rows, key_bounds, last, scoring, sink_logits)

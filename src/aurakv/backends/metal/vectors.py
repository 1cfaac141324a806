"""Launches on codes that are not in pages: encode, decode, scores, values; and queries into the rotated domain."""

from __future__ import annotations

import torch
from torch import Tensor

from ...format.codec import Codec, Codes
from . import source
from .kernels import Kernels, aligned_codes, by_rows, encoder, numbers, optional, per_vector, strides


def encode(kernels: Kernels, x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None) -> Codes:
    rows = by_rows(x.reshape(-1, *x.shape[-2:]))
    data = torch.empty(*x.shape[:-1], codec.row_bytes, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=codec.dtype, device=x.device) if codec.coded else None
    given = numbers(**strides(rows), HEADS=rows.shape[1], HAS_OFFSET=offset is not None)
    library, fits, teams = encoder(kernels, x, codec, fit)
    tensors = rows, optional(offset, x), optional(None, x), *fits, data, optional(scale, x)
    per_vector(library.encode, tensors, given, rows.shape[0] * rows.shape[1], teams=teams)
    return Codes(data, scale)


def decode(
    kernels: Kernels, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype
) -> Tensor:
    data, scale = aligned_codes(codes)
    out = torch.empty(*data.shape[:-1], codec.dim, dtype=dtype, device=data.device)
    if offset is not None and rotated:
        offset = turned_queries(kernels, offset[None], codec, None, None, 1.0, 1)[0][:, 0, : codec.dim].contiguous()
    given = numbers(HEADS=data.shape[-2], ROTATED=rotated, HAS_OFFSET=offset is not None)
    tensors = data, scale, optional(offset, data), out
    per_vector(kernels.library(source.vectors(codec, dtype)).decode, tensors, given, data.numel() // codec.row_bytes)
    return out


def scores(kernels: Kernels, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
    data, scale = aligned_codes(codes)
    keys, kv_heads = data.shape[:2]
    out = torch.empty(*q.shape[:2], keys, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group = q.shape[1] // kv_heads
    turned, bias = turned_queries(kernels, by_rows(q), codec, offset, None, 1.0, group)
    given = numbers(TOKENS=q.shape[0], KV_HEADS=kv_heads, GROUP=group, KEYS=keys, ROWS=turned.shape[1])
    kernel = kernels.library(source.vectors(codec, q.dtype)).scores
    per_vector(kernel, (turned, bias, data, scale, out), given, keys * kv_heads)
    return out


def values(
    kernels: Kernels, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float
) -> Tensor:
    data, scale = aligned_codes(codes)
    (keys, kv_heads), (tokens, heads) = data.shape[:2], weights.shape[:2]
    out = torch.empty(tokens, heads, codec.dim, dtype=weights.dtype, device=weights.device)
    if tokens == 0 or keys == 0:
        return out.zero_()
    given = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "KEYS": keys}
    tensors = weights.contiguous(), data, scale, optional(offset, data), out
    kernel = kernels.library(source.vectors(codec, weights.dtype)).values
    per_vector(kernel, tensors, numbers(**given, HAS_OFFSET=offset is not None), tokens * heads, threshold)
    return out


def turned_queries(
    kernels: Kernels,
    q: Tensor,
    codec: Codec,
    offset: Tensor | None,
    factor: Tensor | None,
    multiplier: float,
    group: int,
) -> tuple[Tensor, Tensor]:
    """Queries [tokens, heads, dim] as attention reads them: R (q / factor) · multiplier, [kv_heads, rows, padded dim],
    where a row is token · group + head in the group; and their products with the offset [kv_heads, rows]."""
    tokens, heads, _ = q.shape
    rows = height(tokens, group)
    turned = torch.empty(heads // group, rows, padded(codec), dtype=torch.float32, device=q.device)
    bias = torch.empty(heads // group, rows, dtype=torch.float32, device=q.device)
    given = {"HEADS": heads, "GROUP": group, "ROWS": rows, "HAS_OFFSET": offset is not None}
    tensors = q, optional(offset, q), optional(factor, q), turned, bias
    kernel = kernels.library(source.queries(codec, q.dtype)).turn_queries
    given_list = numbers(**strides(q), **given, HAS_FACTOR=factor is not None)
    per_vector(kernel, tensors, given_list, tokens * heads, multiplier)
    return turned, bias


def height(tokens: int, group: int) -> int:
    """Rows of a KV head: its queries, and as many behind them as a tile of `attend_tiles` may read beyond the last."""
    return tokens * group + (64 if group > 32 else 32)


def padded(codec: Codec) -> int:
    return -(-codec.dim // 16) * 16

"""Launchers of decode, scores and values."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ....format.codec import Codec, Codes
from ..common import specialise
from .kernels import decode_kernel, scores_kernel, values_kernel

ROWS = 16  # of queries or vectors in a tile


def decode(codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
    if codes.scale is None:
        return codes.data.contiguous().view(codec.dtype).to(dtype, copy=True)
    out = codes.data.new_empty((*codes.data.shape[:-1], codec.dim), dtype=dtype)
    n, heads = codes.scale.numel(), codes.data.shape[-2]
    if n:
        how = specialise.side(codec, True, torch.float32)
        decode_kernel[(triton.cdiv(n, ROWS),)](
            codes.data.contiguous(),
            codes.scale.contiguous(),
            codec.rotate(offset) if rotated and offset is not None else offset,
            *_back(codec, out.device),
            out,
            n,
            heads,
            how,
            *_unrotate(codec),
            rotated,
            ROWS,
        )
    return out


def scores(q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
    n, kv_heads = codes.data.shape[:2]
    tokens, heads = q.shape[:2]
    out = q.new_empty(tokens, heads, n)
    if out.numel():
        how, rotate = specialise.side(codec, True, torch.float32), specialise.encoder(codec, q.dtype, False)
        group, keys = heads // kv_heads, specialise.LEAST_TILE
        matrix = levels = None
        if codec.coded:
            dtype = next(dtype for dtype, name in specialise.DTYPES.items() if name == rotate.operand)
            matrix = specialise.matrix(codec, dtype, q.device)
            levels = codec.level_tensor(torch.float32, q.device)
        grid = (triton.cdiv(n, keys), kv_heads, triton.cdiv(tokens * group, ROWS))
        scores_kernel[grid](
            q,
            *q.stride(),
            offset,
            matrix,
            codes.data.contiguous(),
            None if codes.scale is None else codes.scale.contiguous(),
            levels,
            out,
            tokens * group,
            n,
            kv_heads,
            group,
            how,
            rotate,
            ROWS,
            keys,
        )
    return out


def values(weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
    n, kv_heads = codes.data.shape[:2]
    tokens, heads = weights.shape[:2]
    out = weights.new_empty(tokens, heads, codec.dim)
    if out.numel():
        group = heads // kv_heads
        matrix, levels = _back(codec, out.device)
        values_kernel[(triton.cdiv(tokens * group, ROWS), kv_heads)](
            weights,
            *weights.stride(),
            offset,
            matrix,
            codes.data.contiguous(),
            None if codes.scale is None else codes.scale.contiguous(),
            levels,
            out,
            tokens * group,
            n,
            threshold,
            kv_heads,
            group,
            specialise.side(codec, True, torch.float32),
            *_unrotate(codec),
            ROWS,
            specialise.LEAST_TILE,
            threshold > 0,
        )
    return out


def _back(codec: Codec, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The matrix that rotates back, and the levels."""
    if not codec.coded:
        return None, None
    matrix = specialise.matrix(codec, torch.float16, device, transposed=True)
    return matrix, codec.level_tensor(torch.float32, device)


def _unrotate(codec: Codec) -> tuple[Any, ...]:
    """UNIT and CHUNK of unrotate_store."""
    return specialise.unit(codec) if codec.coded else 1.0, specialise.unrotate_chunk(codec)

"""Decode attention of other packages over a smaller KV cache, each only where it is installed: gpu_decode.py --rivals.

A rival is given q [seqs, heads, dim] and k, v [seqs, tokens, kv_heads, dim], keeps k and v in its own way in pages of
64 tokens in random order, and returns calls that give [seqs, heads, dim], one for each setting of its own: the fastest
counts.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aurakv.format.rotation import hadamard

PAGE = 64
Call = Callable[[], Tensor]


class Paged(NamedTuple):
    """Where tokens of sequences of the same length lie."""

    table: Tensor  # int32 [seqs, pages of a sequence]
    lengths: Tensor  # int32 [seqs]

    def put(self, x: Tensor) -> Tensor:
        """[seqs, tokens, …] as pages [pages, PAGE, …]."""
        pages = x.new_empty(self.table.numel(), PAGE, *x.shape[2:])
        pages[self.table.flatten().long()] = x.reshape(-1, PAGE, *x.shape[2:])
        return pages

    def put_fp8(self, x: Tensor) -> Tensor:
        """As e4m3, whose elements torch does not scatter: as bytes."""
        return self.put(x.to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)


def paged(seqs: int, tokens: int, device: torch.device) -> Paged:
    if tokens % PAGE:
        raise ValueError(f"tokens must be a multiple of {PAGE}, got {tokens}")
    table = torch.randperm(seqs * tokens // PAGE, device=device).view(seqs, -1).to(torch.int32)
    return Paged(table, torch.full((seqs,), tokens, dtype=torch.int32, device=device))


def flashinfer_fp8(q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
    """XQA with keys and values in e4m3."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    seqs, tokens, _, dim = k.shape
    where = paged(seqs, tokens, q.device)
    cache = (where.put_fp8(k), where.put_fp8(v))
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)
    lengths = where.lengths.to(torch.uint32)

    def call() -> Tensor:
        out: Tensor = xqa_batch_decode_with_kv_cache(
            q, cache, workspace, where.table, lengths, tokens, bmm1_scale=1 / math.sqrt(dim)
        )
        return out

    return [call]


def vllm_fp8(q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
    """vLLM's Triton attention with keys and values in e4m3, cut into several numbers of segments."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    seqs, tokens, kv_heads, dim = k.shape
    heads, device = q.shape[1], q.device
    where = paged(seqs, tokens, device)
    keys, values = where.put_fp8(k), where.put_fp8(v)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    scale = torch.ones(seqs, kv_heads, device=device)

    def make(segments: int) -> Call:
        out = torch.empty_like(q)
        parts = torch.empty(seqs, heads, segments, dim, device=device)
        tops, sums = torch.empty(2, seqs, heads, segments, device=device)

        def call() -> Tensor:
            unified_attention(
                q=q, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=where.lengths,
                max_seqlen_k=tokens, softmax_scale=1 / math.sqrt(dim), causal=True, window_size=(-1, -1),
                block_table=where.table, softcap=0, q_descale=None, k_descale=scale, v_descale=scale,
                seq_threshold_3D=seqs if segments > 1 else 0, num_par_softmax_segments=segments,
                softmax_segm_output=parts, softmax_segm_max=tops, softmax_segm_expsum=sums,
                kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
            )  # fmt: skip
            return out

        return call

    return [make(segments) for segments in (1, 16, 64)]


def vllm_turboquant(q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
    """vLLM's Triton TurboQuant with 4 bits for keys and values (turboquant_4bit_nc)."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    seqs, tokens, kv_heads, dim = k.shape
    where = paged(seqs, tokens, q.device)
    config = TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", dim)
    rotation = (hadamard(dim) / math.sqrt(dim)).to(q.device, torch.float32)
    levels = get_centroids(dim, config.centroid_bits).to(q.device, torch.float32).sort()[0]
    middles = (levels[1:] + levels[:-1]) / 2
    cache = torch.zeros(
        where.table.numel(), PAGE, kv_heads, config.slot_size_aligned, dtype=torch.uint8, device=q.device
    )
    inside = torch.arange(PAGE, dtype=torch.int32, device=q.device)
    slots = (where.table[:, :, None] * PAGE + inside).view(seqs, tokens)
    for i in range(seqs):  # one at a time: less memory
        triton_turboquant_store(
            k[i], v[i], cache, slots[i], rotation, middles, config.key_mse_bits, config.key_packed_size,
            config.effective_value_quant_bits,
        )  # fmt: skip

    def make(splits: int) -> Call:
        def call() -> Tensor:
            out: Tensor = triton_turboquant_decode_attention(
                q, cache, where.table, where.lengths, rotation, levels, 1 / math.sqrt(dim), config.key_mse_bits,
                config.key_packed_size, config.effective_value_quant_bits, norm_correction=config.norm_correction,
                PiT=rotation, max_num_kv_splits=splits,
            )  # fmt: skip
            return out

        return call

    return [make(splits) for splits in (8, 32, 128)]


RIVALS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], list[Call]]]] = {
    "fp8, FlashInfer XQA": ("flashinfer", flashinfer_fp8),
    "fp8, vLLM Triton": ("vllm", vllm_fp8),
    "4 bits, vLLM TurboQuant": ("vllm", vllm_turboquant),
}


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Of a rival's result, relative to attention in float32 on the vectors that it was given."""
    x, keys, values = q[:, :, None].float(), k.transpose(1, 2).float(), v.transpose(1, 2).float()
    truth = F.scaled_dot_product_attention(x, keys, values, enable_gqa=True)[:, :, 0]
    return float((out.float() - truth).norm() / truth.norm())


def why_not(name: str) -> str | None:
    """None if the package of a rival is installed, else one sentence."""
    package = RIVALS[name][0]
    return None if importlib.util.find_spec(package) else f"{package} is not installed"

"""What of vLLM is used on CUDA alone: flash attention, scratch memory, warm-up of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_fa_version_supported
from vllm.v1.worker.workspace import current_workspace_manager

from ..attention.scoring import Scoring
from ..format.codec import Format
from .prefill import Prefill, why_not
from .recent import MOST
from .warmup import Limits, WarmUp, shape_of

SCRATCH = 1 << 26  # elements for keys, and as many for values, of 16 bits: 128 MiB each
VERSIONS = (3, 2)  # of flash attention
MOST_THREADS = 16  # that compile


def make_prefill(
    config: VllmConfig, format: Format, scoring: Scoring, sinks: Tensor | None, kv_heads: int, dtype: torch.dtype
) -> Prefill | None:
    """For one layer; None where its prompts are attended from their codes."""
    if not current_platform.is_cuda() or why_not(format, scoring, dtype) is not None:
        return None
    if config.parallel_config.use_ubatching:  # vLLM reserves scratch memory for one of two microbatches
        return None
    dim = format.key.dim
    version = get_flash_attn_version(
        head_size=dim, has_sinks=sinks is not None, requires_softcap=scoring.softcap is not None
    )
    if version not in VERSIONS:
        version = 2 if version is not None and is_fa_version_supported(2) else None
    if version is None or dim > 256 or (sinks is not None and version == 2):
        return None
    size = max(SCRATCH, (config.scheduler_config.max_num_batched_tokens + MOST) * kv_heads * dim)

    def scratch() -> tuple[Tensor, Tensor]:
        keys, values = current_workspace_manager().get_simultaneous(((size,), dtype), ((size,), dtype))
        return keys, values

    return Prefill(FlashAttention(version, scoring.multiplier(dim), scoring.window, scoring.softcap, sinks), scratch)


@dataclass(frozen=True)
class FlashAttention:
    """`prefill.Flash`, by vLLM's own kernels."""

    version: int
    scale: float
    window: int | None
    softcap: float | None
    sink_logits: Tensor | None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        most: tuple[int, int],
        *,
        causal: bool,
        sinks: bool,
    ) -> Tensor:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        _, lse, *_ = flash_attn_varlen_func(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=most[0],
            max_seqlen_k=most[1],
            softmax_scale=self.scale,
            causal=causal,
            window_size=None if self.window is None else [self.window - 1, 0],
            softcap=self.softcap or 0.0,
            return_softmax_lse=True,
            fa_version=self.version,
            s_aux=self.sink_logits if sinks else None,
        )
        found: Any = lse
        return found

    def over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        starts: Tensor,
        lengths: Tensor,
        table: Tensor,
        most: tuple[int, int],
    ) -> Tensor:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        _, lse, *_ = flash_attn_varlen_func(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=starts,
            seqused_k=lengths,
            max_seqlen_q=most[0],
            max_seqlen_k=most[1],
            block_table=table,
            softmax_scale=self.scale,
            causal=False,
            return_softmax_lse=True,
            fa_version=self.version,
        )
        found: Any = lse
        return found

    def merge(self, out: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

        lse = torch.empty_like(a[1])
        merge_attn_states(out, *a, *b, output_lse=lse)
        return lse


class Kernels(VllmJitKernel[WarmUp]):  # type: ignore[misc]
    """Our kernels, compiled when vLLM warms up."""

    def get_warmup_keys(self, work: WarmUp) -> list[WarmUp]:
        return [work]

    def compile(self, compile_key: WarmUp) -> None:
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[WarmUp]) -> None:
        from ..backends.triton.warm_up import compile_all, launches

        found: dict[tuple[Any, ...], Any] = {}
        for each in compile_keys:
            found |= launches(each.run)
        compile_all(found, min(MOST_THREADS, os.cpu_count() or 1))


_KERNELS = Kernels()


def warm_up(attention: Attention, config: VllmConfig, rows: int, pages: tuple[int, int], device: torch.device) -> None:
    """Have vLLM compile what a layer may launch. rows: of a sequence that decodes; pages: how many a row of its table
    has, and the tokens of one."""
    scheduler, impl, layer = config.scheduler_config, attention.impl, attention.impl.layer
    limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, rows, *pages)
    shape = shape_of(layer, impl.num_heads, impl.num_kv_heads, attention.dtype)
    _KERNELS.register_warmup(WarmUp(shape, limits, device, layer, lambda: attention.kv_cache))

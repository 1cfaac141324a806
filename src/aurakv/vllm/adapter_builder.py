"""AuraBuilder: what vLLM knows of a forward pass, as the batch that our layers take."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from ..attention.step import Rows
from ..errors import InputError
from ..storage.pages import Pages
from .adapter_cuda import warm_up
from .beginnings import Beginnings
from .layer import BLOCK_TOKENS, Batch, Memory
from .prefill import find_prompts, most_rows
from .recent import Recent
from .recent_gpu import RecentOnGpu

_logger = init_logger("vllm.aurakv")


def decode_kernel_reads(tokens: int) -> bool:
    """Whether the decode kernel for GPUs reads blocks of so many tokens."""
    return tokens == 16 or tokens % 32 == 0


class AuraBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the batch that all layers of a group share.

    Captured whole, graphs hold any batch of equally many queries a sequence: what a layer does follows from shapes on
    the host and from starts, lengths and tables on the device, and sequences that pad a batch have no rows.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    requires_block_table_width: ClassVar[bool] = True  # kernels are chosen by it

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        block_table_width: int,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = kv_cache_spec.block_size
        if current_platform.is_cuda() and not decode_kernel_reads(tokens):
            _logger.warning_once(
                f"blocks of {tokens} tokens keep aurakv from its decode kernel for GPUs, which reads 16 or a multiple"
                f" of 32: attention is several times slower than with --block-size {BLOCK_TOKENS}"
            )
        self.memory = Memory(device)
        context = vllm_config.compilation_config.static_forward_context
        seqs = vllm_config.scheduler_config.max_num_seqs
        self.with_entries = [name for name in layer_names if context[name].impl.layer.beginnings is not None]
        self.context = context
        if self.with_entries:
            first = context[self.with_entries[-1]].impl.layer.beginnings.tokens
            self.memory.beginnings = Beginnings(first, seqs, device)
            self.memory.beginnings.layer = context[self.with_entries[-1]].impl.layer
        self.with_recent = [name for name in layer_names if context[name].impl.layer.recent is not None]
        if self.with_recent:
            group = context[self.with_recent[-1]].impl.layer.recent.tokens
            self.memory.recent = RecentOnGpu(group, seqs, device) if current_platform.is_cuda() else Recent(group, seqs)
            self.memory.recent.layer = context[self.with_recent[-1]].impl.layer
        # those of a draft model have neither
        self.supports_draft_decode_metadata_update = not self.with_entries and not self.with_recent
        self.least_rows: int | None = None  # of a sequence that is a prompt
        drafts = vllm_config.speculative_config.num_speculative_tokens if vllm_config.speculative_config else 0
        rows = 1 + drafts  # of a sequence that decodes
        self.unknown = rows if drafts else 0  # tokens of drafts that vLLM's host does not count in lengths of prompts
        for name in layer_names:
            layer = context[name]
            if current_platform.is_cuda():
                group = layer.impl.num_heads // layer.impl.num_kv_heads
                self.least_rows = 1 + most_rows(group, layer.head_size, rows)
                warm_up(layer, vllm_config, rows, (block_table_width, kv_cache_spec.block_size), device)
        if self.least_rows is not None:
            self.reorder_batch_threshold = self.least_rows - 1  # the sequences with fewer rows come first

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise InputError("aurakv serves causal attention")
        rows = Rows(
            batch.query_start_loc, single=batch.max_query_len == 1 and batch.num_actual_tokens == batch.num_reqs
        )
        prompts = None
        known = batch.seq_lens_cpu_upper_bound  # exact for sequences with many rows, but in a draft model
        if self.least_rows is not None and batch.max_query_len >= self.least_rows and known is not None:
            lengths = (known + self.unknown).tolist()
            prompts = find_prompts(batch.query_start_loc_cpu.tolist(), lengths, self.least_rows)
        made = Batch(batch.num_actual_tokens, rows, batch.seq_lens, batch.block_table_tensor, self.memory, prompts)
        if self.memory.beginnings is not None and (pages := self._pages(self.with_entries, made)) is not None:
            self.memory.beginnings.find(made.table, made.lengths, rows, pages)
        if self.memory.recent is not None and (pages := self._pages(self.with_recent, made)) is not None:
            made.cut = self.memory.recent.find(made.table, made.lengths, rows, pages)
        return made

    def _pages(self, layers: list[str], batch: Batch) -> Pages | None:
        """Of the last of some layers: its keys depend on everything that came before. None before there is memory."""
        last = self.context[layers[-1]]
        return last.impl.layer.pages(last.kv_cache, batch) if last.kv_cache.numel() else None

    def update_draft_decode_metadata(self, metadata: Batch) -> None:
        """Between the steps of a draft model: a batch is read from vLLM's own buffers, which have changed by then."""

"""Everything that touches vLLM, so that what changes between its versions is here and nowhere else.

One place of vLLM is wrapped: the platform's check of a configuration, which turns the switch into a backend and a
worker and refuses what cannot be served. Without it `--attention-backend CUSTOM --worker-cls WORKER` does the same.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout, KVCacheSpec, SlidingWindowSpec

from ..attention.ops import attend_dense
from ..attention.scoring import Scoring
from ..calibration.observer import KeyObserver
from ..calibration.policy import LayerPolicy
from ..errors import InputError
from ..format.codec import Format
from . import VERSIONS, connectors
from .adapter_builder import AuraBuilder
from .adapter_cuda import make_prefill
from .beginnings import Entries, entries_for
from .layer import BLOCK_TOKENS, MOST_TOKENS, TOKENS, Batch, Layer
from .recent import SPARE, group_size
from .recurrent import attention_numbers
from .switch import Switch

WORKER = "aurakv.vllm.worker.AuraWorker"

_logger = init_logger("vllm.aurakv")
_installed = False


def install() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    global _installed
    if _installed:
        return
    _installed = True
    register_backend(AttentionBackendEnum.CUSTOM, f"{AuraBackend.__module__}.{AuraBackend.__qualname__}")
    _wrap_class_method(type(current_platform), "check_and_update_config", _check_config)


def _wrap_class_method(owner: type, name: str, wrapper: Any) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped))


def _check_config(stock: Any, config: VllmConfig) -> None:
    switch = Switch.parse(config.additional_config)
    if switch is not None:
        reason = why_not(config)
        if reason is not None:
            raise InputError(f"aurakv cannot serve this: {reason}")
        model = config.model_config
        if model.runner_type == "generate":  # a policy says nothing of a draft model
            layers = len(attention_numbers(config)) if switch.policy is not None else 0
            switch.check_model(layers, model.get_total_num_kv_heads(), model.get_head_size())
        connectors.name_folders(config, switch)
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
        if switch.note is not None:
            _logger.warning_once(switch.note)
        if config.parallel_config.worker_cls == "auto":
            config.parallel_config.worker_cls = WORKER
    stock(config)


def why_not(config: VllmConfig) -> str | None:
    """None, or why a model or an option cannot be served, in one sentence."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    chosen = config.attention_config.backend
    if model.hf_text_config.model_type.startswith("gemma4") and chosen is AttentionBackendEnum.TRITON_ATTN:
        chosen = None  # vLLM names it for head dimensions that differ, where the user names none
    named = cache.block_size if cache.user_specified_block_size else TOKENS
    served = any(vllm_version.startswith(f"{version}.") for version in VERSIONS)
    checks = (
        (not served, f"the version of vLLM must be {' or '.join(VERSIONS)}, got {vllm_version}"),
        (chosen not in (None, AttentionBackendEnum.CUSTOM), "--attention-backend names another backend"),
        (cache.cache_dtype != "auto", f"--kv-cache-dtype must be auto, got {cache.cache_dtype}"),
        (named % TOKENS != 0, f"--block-size must be a multiple of {TOKENS}, got {named}"),
        (model.use_mla, "the model uses multi-head latent attention, which stores no keys and values"),
        (model.is_encoder_decoder, "the model is an encoder-decoder with cross attention"),
        (model.is_attention_free, "the model has no attention"),
        (
            model.runner_type not in ("generate", "draft"),
            f"the model must generate text, got the runner {model.runner_type}",
        ),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism is not supported"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism is not supported"),
        (not current_platform.is_cpu() and not current_platform.is_cuda(), "it runs on CPUs and on CUDA"),
    )
    return next((sentence for refused, sentence in checks if refused), None) or connectors.why_not(config)


class AuraBackend(AttentionBackend):  # type: ignore[misc]
    """Pages of aurakv in vLLM's memory."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    token_bytes: ClassVar[int | None] = None  # of a token and KV head, in the layers that `with_bytes` is for

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AuraImpl]:
        return AuraImpl

    @staticmethod
    def get_builder_cls() -> type[AuraBuilder]:
        return AuraBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        """A block as a page, unless it is large, as beside recurrent states: then vLLM splits it into several."""
        large = (
            isinstance(kv_cache_spec, AttentionSpec)
            and kv_cache_spec.block_size > MOST_TOKENS
            and kv_cache_spec.block_size % BLOCK_TOKENS == 0
            and kv_cache_spec.page_size_padded is None  # padding lies behind a block, not behind its parts
        )
        return [BLOCK_TOKENS] if large else [MultipleOf(TOKENS)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user names no size: a page that the decode kernel for GPUs reads as one tile."""
        return BLOCK_TOKENS if current_platform.is_cuda() else default_block_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a page is one run of bytes, head after head

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The memory vLLM sets aside: the bytes of our pages, with the tokens of its blocks."""
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise InputError(f"aurakv cannot serve this: the model has layers of the kind {type(spec).__name__}")
        if cls.token_bytes is None:
            raise InputError(f"aurakv needs its own worker: --worker-cls must be {WORKER} or derive from it")
        if spec.block_size != 1 and spec.block_size % TOKENS:
            raise InputError(f"--block-size must be a multiple of {TOKENS} with aurakv, got {spec.block_size}")
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.token_bytes)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


@functools.cache
def with_bytes(token_bytes: int) -> type[AuraBackend]:
    """The backend of layers whose tokens take so many bytes: vLLM asks a backend for the memory of its layers."""
    name = f"AuraBackend{token_bytes}"
    made = type(name, (AuraBackend,), {"token_bytes": token_bytes, "__module__": __name__, "__qualname__": name})
    return made


class AuraImpl(AttentionImpl):  # type: ignore[misc]
    """What vLLM calls for one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        for refused, sentence in (
            (alibi_slopes is not None, "ALiBi is not supported"),
            (attn_type != "decoder", f"attention must be that of a decoder, got {attn_type}"),
            (kv_cache_dtype != "auto", f"--kv-cache-dtype must be auto, got {kv_cache_dtype}"),
            (bool(options), f"the layer has options that aurakv does not know: {sorted(options)}"),
        ):
            if refused:
                raise InputError(f"aurakv cannot serve this: {sentence}")
        self.config = get_current_vllm_config()
        switch = Switch.parse(self.config.additional_config)
        if switch is None:
            raise InputError('the backend of aurakv needs its switch: --additional-config \'{"aurakv": "k4v4"}\'')
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.shares = kv_sharing_target_layer_name  # the layer whose keys and values it uses
        self.observer: KeyObserver | None = None  # while a text is read to calibrate
        self.scoring = Scoring(scale=self.scale, window=sliding_window, softcap=logits_soft_cap or None)
        self.layer: Layer | None = None

    def keeps_first(self, layer: Attention) -> bool:
        """Whether the first tokens of sequences are kept uncompressed. A window leaves them behind."""
        alike = layer.head_size == layer.head_size_v and layer.dtype != torch.float64
        return self.sliding_window is None and self.scoring.softcap is None and alike

    def give(
        self, layer: Attention, policy: LayerPolicy, first: int, recent: int, seqs: int, device: torch.device
    ) -> None:
        """What this layer stores, once the model is loaded; seqs: that may run at once."""
        format = Format.parse(policy.format, (layer.head_size, layer.head_size_v), layer.dtype)
        entries = groups = None
        options = self.num_kv_heads, layer.dtype, device
        if self.shares is None and (format.key.coded or format.value.coded):
            if first and self.keeps_first(layer):
                entries = Entries.for_pages(format, first, entries_for(seqs), *options)
            # on a GPU the launch that merges scores them, which knows neither windows nor soft caps
            if recent and layer.dtype != torch.float64 and (not current_platform.is_cuda() or self.keeps_first(layer)):
                groups = Entries.for_pages(format, group_size(recent), entries_for(seqs, SPARE), *options)
        prefill = make_prefill(self.config, format, self.scoring, self.sinks, self.num_kv_heads, layer.dtype)
        self.layer = Layer(
            format,
            self.scoring,
            sink_logits=self.sinks,
            policy=policy,
            beginnings=entries,
            recent=groups,
            prefill=prefill,
        )
        self.layer.constants(device, self.num_kv_heads)  # now: what is made here outlives sleep
        layer.attn_backend = with_bytes(format.bytes_per_token)

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise InputError("aurakv does not quantise outputs")
        if self.shares is not None:
            key = value = None  # its own keys and values, if a model makes some, are stored nowhere
        if attn_metadata is not None:
            assert self.layer is not None
            self.layer.forward(query, key, value, kv_cache, attn_metadata, output)
        elif self.observer is not None and key is not None and value is not None:
            self.observer.add(key, query)
            output.copy_(
                attend_dense(query, key, value, [0, len(query)], None, self.scoring, sink_logits=self.sinks).out
            )
        else:  # vLLM warms up, and measures memory
            if self.layer is not None and self.layer.prefill is not None:
                self.layer.prefill.scratch()
            output.zero_()
        return output

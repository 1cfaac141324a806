"""Names of caches that benchmarks of vLLM's engine take, and what vLLM is told for each.

A cache is `stock` (vLLM's own, of the model's dtype; `bf16` is another name for it), a --kv-cache-dtype of vLLM, a
format or policy of aurakv, or `mixed`: a policy of k8v4 in the first and last two layers and k4v4 in the others.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

STOCK = ("stock", "bf16")  # whatever the model has
DTYPES = (
    *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit"),
    *("int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6"),
)


def options_of(cache: str, model: Path) -> dict[str, Any]:
    """Arguments of vllm.LLM."""
    if cache in STOCK:
        return {}
    if cache in DTYPES:
        return {"kv_cache_dtype": cache}
    return {"additional_config": {"aurakv": mixed_policy(model) if cache == "mixed" else cache}}


def is_ours(cache: str) -> bool:
    return cache not in STOCK and cache not in DTYPES


def name_of(cache: str) -> str:
    """In rows: a policy's file without its folder."""
    return Path(cache).stem if cache.endswith(".json") else cache


def mixed_policy(model: Path) -> str:
    from aurakv.calibration.policy import LayerPolicy, Policy

    config = json.loads((model / "config.json").read_text("utf-8"))
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    formats = ["k8v4" if i < 2 or i >= layers - 2 else "k4v4" for i in range(layers)]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    policy = Policy(config.get("num_key_value_heads", heads), dim, tuple(map(LayerPolicy, formats)))
    file = Path(tempfile.mkdtemp()) / "mixed.json"
    policy.save(file)
    return str(file)

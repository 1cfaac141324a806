"""Steps of a large model with random weights at long contexts: transformers' caches and ours, one after the other.

    python benchmarks/hf_model.py --batch 1 8 --tokens 8192 32768 --json benchmarks/baselines/hf_model-h200.json

The model has the shape of an 8B Llama unless told otherwise. Caches are given random keys and values behind a short
prompt, so that not much has to be read before. Medians of single steps with quartiles, and what a cache holds.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from aurakv.bench import machine
from aurakv.bench.timing import summary, wait
from aurakv.evaluation.tensors import bytes_of
from aurakv.hf.cache_names import UNCOMPRESSED, cache_named

WARM = 8  # steps that are not counted: kernels are compiled, a prepared step is made
CHUNK = 2048  # tokens that a cache is given at once
PROMPT = 256
DYNAMIC, STATIC = "DynamicCache", "StaticCache"


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    layers, hidden, wide, heads, kv_heads, dim = args.model
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=max(args.tokens) + 1024,
    )
    torch.set_default_dtype(torch.bfloat16 if args.device == "cuda" else torch.float32)
    with torch.device(args.device):
        return LlamaForCausalLM(config).eval()


def make_cache(name: str, model: LlamaForCausalLM, tokens: int) -> Any:
    """A cache with its attention function: of transformers, or ours in a format."""
    cache = cache_named(model, UNCOMPRESSED if name in (DYNAMIC, STATIC) else name)
    return StaticCache(config=model.config, max_cache_len=tokens + 256) if name == STATIC else cache


@torch.no_grad()
def fill(cache: Any, model: LlamaForCausalLM, batch: int, tokens: int) -> None:
    """The model reads a short prompt, as caches that look at queries expect it; the rest is random."""
    config = model.config
    ids = torch.randint(config.vocab_size, (batch, PROMPT), device=model.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    shape = (batch, config.num_key_value_heads, CHUNK, config.head_dim)
    for number in range(config.num_hidden_layers):
        for start in range(PROMPT, tokens, CHUNK):
            k, v = (torch.randn(shape, device=model.device)[:, :, : tokens - start] for _ in range(2))
            place = torch.arange(start, start + k.shape[2], device=model.device)
            cache.update(k, v, number, {"cache_position": place})


@torch.no_grad()
def steps(cache: Any, model: LlamaForCausalLM, batch: int, count: int) -> list[float]:
    """Seconds of each step."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    seconds = []
    for _ in range(WARM + count):
        wait(model.device)
        began = time.perf_counter()
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        wait(model.device)
        seconds.append(time.perf_counter() - began)
    return seconds[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--formats", nargs="+", default=["k4v4"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--model", type=int, nargs=6, default=[32, 4096, 14336, 32, 8, 128],
        metavar=("LAYERS", "HIDDEN", "WIDE", "HEADS", "KV", "DIM"),
    )  # fmt: skip
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, rows = make_model(args), []
    for batch in args.batch:
        for tokens in args.tokens:
            first = None
            for name in (DYNAMIC, STATIC, *args.formats):
                cache = make_cache(name, model, tokens)
                fill(cache, model, batch, tokens)
                times = summary([1e6 * x for x in steps(cache, model, batch, args.steps)])
                first = first or times["us"]
                row = {
                    "batch": batch,
                    "tokens": tokens,
                    "cache": name,
                    **times,
                    "tokens/s": round(1e6 * batch / times["us"], 1),
                    "times DynamicCache": round(first / times["us"], 2),
                    "GiB": round(bytes_of(cache) / 2**30, 2),
                }
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                del cache
                gc.collect()
    if args.json:
        machine.save(args.json, torch.device(args.device), rows)


if __name__ == "__main__":
    main()

"""vLLM with its own cache and with ours, through the engine: time of a decode step, of a prefill, tokens that fit.

    python benchmarks/engine_gpu.py MODEL --caches bf16,fp8,k4v4 --tokens 8192 --batches 1,32,96 --json engine.json

MODEL is a folder; --dummy gives it random weights, so that a config.json is enough. Each cache runs in a process of its
own. The prompts, random tokens, stay in the prefix cache; a step is (time for 1 + K tokens − time for 1) / K.
`prefill_s` is the time of four new prompts. A cache is `bf16`, a --kv-cache-dtype of vLLM, or a format or
policy of aurakv.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEW = 64  # tokens of a generation, K
STOCK = ("bf16", "fp8", "turboquant_4bit_nc", "int8_per_token_head", "int4_per_token_head")


def options_of(cache: str) -> dict[str, Any]:
    if cache == "bf16":
        return {}
    return {"kv_cache_dtype": cache} if cache in STOCK else {"additional_config": {"aurakv": cache}}


def measure(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One cache, in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    import vllm

    batches = [int(batch) for batch in args.batches.split(",")]
    start = time.time()
    llm = vllm.LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.tokens + NEW + 80,
        max_num_seqs=max(8, *batches),
        enable_prefix_caching=True,
        **({} if args.memory is None else {"gpu_memory_utilization": args.memory}),
        **({} if args.cache_bytes is None else {"kv_cache_memory_bytes": args.cache_bytes}),
        **options_of(cache),
    )
    loaded = time.time() - start
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(count: int, seed: int) -> list[dict[str, list[int]]]:
        draw = random.Random(seed)
        return [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(args.tokens)]} for _ in range(count)]

    def seconds(batch: list[dict[str, list[int]]], new: int) -> float:
        begin = time.time()
        params = vllm.SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        llm.generate(batch, params, use_tqdm=False)
        return time.time() - begin

    batch = prompts(max(batches), 1)
    seconds(batch, 1)
    prefill = [round(seconds(prompts(4, seed), 1), 4) for seed in (5, 6)]
    steps = {}
    for count in batches:
        seconds(batch[:count], 1 + NEW)
        one, many = (min(seconds(batch[:count], new) for _ in range(2)) for new in (1, 1 + NEW))
        steps[count] = {"ms": round((many - one) / NEW * 1e3, 3), "tokens_per_s": round(count * NEW / (many - one), 1)}
    config = llm.llm_engine.vllm_config
    return {
        "cache": cache,
        "tokens": args.tokens,
        "load_s": round(loaded, 1),
        "prefill_s": prefill,
        "steps": steps,
        "capacity_tokens": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        "block": config.cache_config.block_size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--caches", default="bf16,fp8,k4v4")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--batches", default="1,32", help="numbers of sequences")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--cache-bytes", type=int, help="vLLM's --kv-cache-memory-bytes")
    parser.add_argument("--json", type=Path, help="where rows are added")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print("ROW", json.dumps(measure(args, args.one)), flush=True)
        return
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for cache in args.caches.split(","):
        done = subprocess.run([sys.executable, *sys.argv, "--one", cache], stdout=subprocess.PIPE, text=True)
        found = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if not found:
            print(f"{cache}: no row, exit code {done.returncode}", flush=True)
            continue
        row = json.loads(found[-1])
        rows.append(row)
        steps = ", ".join(f"{count} × {args.tokens}: {step['ms']} ms" for count, step in row["steps"].items())
        print(
            f"{cache}: {steps}; 4 prefills {min(row['prefill_s'])} s; {row['capacity_tokens']} tokens fit", flush=True
        )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

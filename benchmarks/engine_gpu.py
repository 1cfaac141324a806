"""vLLM with its own cache and with ours, through the engine: decode steps, prefill, tokens that fit, tokens a second.

    python benchmarks/engine_gpu.py MODEL --caches bf16,fp8,k4v4 --tokens 8192 --batches 1,32,96 --json engine.json
    python benchmarks/engine_gpu.py MODEL --caches k4v4 --batches 1,8,32,64,128,256,fit --json engine.json
    python benchmarks/engine_gpu_plot.py engine.json engine.png

MODEL is a folder; --dummy gives it random weights, so that a config.json is enough. A cache is `bf16`, a
--kv-cache-dtype of vLLM, or a format or policy of aurakv. Each runs in a process of its own, and every number is saved
as soon as it is there: a run that was cut goes on where it ended, --again measures anew.

Prompts of random tokens stay in the prefix cache; a step is (time for 1 + K tokens − time for 1) / K, the best of two
each. `fits` is how many sequences of prompt and K tokens the memory holds: the batch `fit` is that many, larger batches
are left out. `prefill_s` is the time of four new prompts, twice; `first_s` that of the first prompt of all, and of a
second one.
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
STOCK = ("bf16", "fp8", "turboquant_4bit_nc", "turboquant_3bit_nc", "int8_per_token_head", "int4_per_token_head")
CACHES = "bf16,fp8,turboquant_4bit_nc,k8v8,k8v4,k5v4,k4v4,k3v3,k2v2"
FIT = "fit"  # the largest batch
KEY = ("model", "cache", "tokens", "memory", "block_size")
_MARK = "PART "  # of lines by which a child process reports


def options_of(cache: str) -> dict[str, Any]:
    if cache == "bf16":
        return {}
    return {"kv_cache_dtype": cache} if cache in STOCK else {"additional_config": {"aurakv": cache}}


def row_of(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """What tells one row from another."""
    memory = args.memory if args.cache_bytes is None else args.cache_bytes
    name = Path(cache).stem if cache.endswith(".json") else cache
    return dict(zip(KEY, (Path(args.model).name, name, args.tokens, memory, args.block_size), strict=True))


def missing(row: dict[str, Any], batches: list[str], most: int) -> list[str]:
    """Batches that were not measured and fit, as far as that is known."""
    steps, fits = row.get("steps", {}), row.get("fits")
    if fits is None:
        return batches
    most = max([most, *(int(batch) for batch in batches if batch != FIT)])
    named = dict.fromkeys(min(fits, most) if batch == FIT else int(batch) for batch in batches)
    return [str(batch) for batch in named if batch <= fits and str(batch) not in steps]


# one cache, in this process


def measure(args: argparse.Namespace, cache: str, batches: list[str], report: Any) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # which would be compiled
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import vllm

    most = max([args.most if FIT in batches else 8, *(int(batch) for batch in batches if batch != FIT)])
    start = time.perf_counter()
    llm = vllm.LLM(
        model=args.model,
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=args.tokens + NEW + 80,
        max_num_seqs=most,
        max_num_batched_tokens=args.chunk,
        enable_prefix_caching=True,
        **{
            name: value
            for name, value in (
                ("gpu_memory_utilization", args.memory),
                ("kv_cache_memory_bytes", args.cache_bytes),
                ("block_size", args.block_size),
                ("enforce_eager", args.eager or None),
            )
            if value is not None
        },
        **options_of(cache),
    )
    config = llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    blocks = (config.cache_config.num_gpu_blocks or 0) - 1  # vLLM keeps one free
    fits = min(most, blocks // -(-(args.tokens + NEW + 1) // block))
    report(
        {
            "load_s": round(time.perf_counter() - start, 1),
            "capacity_tokens": blocks * block,
            "fits": blocks // -(-(args.tokens + NEW + 1) // block),
            "block": block,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(count: int, seed: int) -> list[dict[str, list[int]]]:
        draw = random.Random(seed)
        return [{"prompt_token_ids": draw.choices(range(vocabulary), k=args.tokens)} for _ in range(count)]

    def generate(batch: list[dict[str, list[int]]], new: int) -> tuple[float, list[list[int]]]:
        params = vllm.SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        begin = time.perf_counter()
        done = llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - begin, [list(each.outputs[0].token_ids) for each in done]

    first = [round(generate(prompts(1, seed), 1)[0], 4) for seed in (7, 8)]
    prefill = [round(generate(prompts(min(4, fits), seed), 1)[0], 4) for seed in (5, 6)]
    report({"first_s": first, "prefill_s": prefill})
    batch = prompts(max([0, *(fits if each == FIT else int(each) for each in batches)]), 1)
    for count in dict.fromkeys(fits if each == FIT else int(each) for each in batches):
        if count > fits:
            continue
        generate(batch[:count], 1)  # what is new of it is read here
        said = generate(batch[:count], 1 + NEW)[1]
        one = min(generate(batch[:count], 1)[0] for _ in range(2))
        runs = [generate(batch[:count], 1 + NEW) for _ in range(2)]
        taken = min(seconds for seconds, _ in runs) - one
        step = {
            "ms": round(taken / NEW * 1e3, 3),
            "tokens_per_s": round(count * NEW / taken, 1),
            "repeats": all(again == said for _, again in runs),
        }
        report({"steps": {str(count): step}})


# all of them


def main() -> None:
    args = parsed()
    if args.one is not None:
        cache, batches = json.loads(args.one)
        measure(args, cache, batches, lambda part: print(_MARK + json.dumps(part), flush=True))
        return
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text("utf-8"))["rows"]
    for cache in args.caches.split(","):
        key = row_of(args, cache)
        known = next((row for row in rows if {name: row.get(name) for name in KEY} == key), None)
        row = known if known is not None and not args.again else dict(key)
        rows = [*(other for other in rows if other is not known), row]
        wanted = missing(row, args.batches.split(","), args.most)
        if wanted or "prefill_s" not in row:
            run(args, cache, wanted, row, rows)
        show(row)


def run(
    args: argparse.Namespace, cache: str, batches: list[str], row: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Measure in a process of its own, and save each part of the row as it comes."""
    command = [sys.executable, *sys.argv, "--one", json.dumps([cache, batches])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith(_MARK):
                continue
            part = json.loads(line.removeprefix(_MARK))
            row["steps"] = {**row.get("steps", {}), **part.pop("steps", {})}
            row.update(part)
            if args.json:
                made = {"command": " ".join(["python", *sys.argv]), "rows": rows}
                args.json.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    if child.returncode:
        print(f"{cache}: ended with exit code {child.returncode}", flush=True)


def show(row: dict[str, Any]) -> None:
    steps = sorted(row.get("steps", {}).items(), key=lambda item: int(item[0]))
    found = ", ".join(f"{count} × {row['tokens']}: {step['ms']} ms" for count, step in steps) or "no steps"
    prefill = f"{min(row['prefill_s'])} s" if "prefill_s" in row else "not measured"
    print(f"{row['cache']}: {found}; 4 prefills {prefill}; {row.get('capacity_tokens', 0)} tokens fit", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--caches", default=CACHES, help=f"separated by commas (default {CACHES})")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--batches", default="1,32", help=f"numbers of sequences, or {FIT}")
    parser.add_argument("--most", type=int, default=512, help=f"sequences that {FIT} may have")
    parser.add_argument("--chunk", type=int, default=8192, help="vLLM's --max-num-batched-tokens")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="vLLM's --enforce-eager")
    parser.add_argument("--memory", type=float, help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--cache-bytes", type=int, help="vLLM's --kv-cache-memory-bytes")
    parser.add_argument("--block-size", type=int, help="vLLM's --block-size")
    parser.add_argument("--json", type=Path, help="where rows are kept")
    parser.add_argument("--again", action="store_true", help="measure these caches anew")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

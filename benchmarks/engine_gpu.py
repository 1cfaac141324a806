"""vLLM with its own cache and with ours, through the engine: decode steps, prefill, tokens that fit, tokens a second.

    python benchmarks/engine_gpu.py llama-3.1-8b --dummy --memory 0.85 --json engine.json --brief 32x8192 --seconds 570
    python benchmarks/engine_gpu_plot.py engine.json engine.png       # the first one again, until it has nothing to do

MODEL is a folder; --dummy gives it random weights, so that a config.json is enough, and the name of a shape that is
known here (SHAPES) instead of a folder. Such weights are always the same, and their calibration is kept as that of
other models is: the first format of aurakv makes it, the others find it. benchmarks/engine_caches.py has the names of
caches. Each runs in a process of its own, and every number is saved as soon as it is there. A run that
was cut goes on where it ended; a cache that failed is not tried again. --again measures anew.

Caches are measured in their order, the ones that matter most first. With --brief those that are not in --fit get
that piece of work only. A start takes about 65 s (torch.compile, graphs), a new prompt of 8,192 tokens 0.2 s: on an
H200 about 2 minutes for bf16, 3 to 4 for k4v4 and its largest batch of 390, 75 s for a cache in brief, 17 minutes for
all with --brief and 25 without. --together 4 starts four at a time, which share the GPU; when all have started they
measure, one after the other: for caches that are small together, with --cache-bytes. Their `load_s` says nothing about
one that starts alone.

A piece of work is SEQUENCESxTOKENS. Prompts of random tokens stay in the prefix cache; a step is (time for 1 + K
tokens − time for 1) / K, the best of two each. The work `fitxTOKENS`, which the caches of --fit get besides, is as many
sequences as memory holds. For each length of prompts there is the time of four new ones, twice where there are so many
(`prefill_s`). `first_s` is the time of the first prompt of all, and of a second one; `compiled` the Triton kernels that
were compiled after the start, while requests ran.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_caches import name_of, options_of

NEW = 64  # tokens of a generation, K
PREFILL = 4  # new prompts
CACHES = "bf16,k4v4,fp8,turboquant_4bit_nc,k8v8,k8v4,k5v4,k3v3,k2v2,mixed"
WORK = "1x8192,32x8192,8x32768,96x8192"
FIT = "fit"  # the largest batch
SHAPES = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
KEY = ("model", "cache", "memory", "block_size")
START = 150  # seconds that must be left for a cache to begin with
STARTED = "started"  # a file that is there once all that start together have
_MARK = "PART "  # of lines by which a child process reports


def folder_of(name: Path, dummy: bool) -> Path:
    """Of a model; that of a shape is made."""
    if name.exists() or str(name) not in SHAPES or not dummy:
        return name
    folder = Path(tempfile.gettempdir()) / "aurakv-shapes" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[str(name)]), "utf-8")
    return folder


def row_of(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    """What tells one row from another."""
    size = cache_bytes_of(args, cache)
    memory = args.memory if size is None else size
    return dict(zip(KEY, (args.model.resolve().name, name_of(cache), memory, args.block_size), strict=True))


def cache_bytes_of(args: argparse.Namespace, cache: str) -> int | None:
    """One number for all caches, or one for each in their order."""
    if args.cache_bytes is None:
        return None
    sizes = [int(float(each)) for each in args.cache_bytes.split(",")]
    return sizes[0] if len(sizes) == 1 else sizes[args.caches.split(",").index(cache)]


def work_of(args: argparse.Namespace, cache: str) -> list[str]:
    found = args.work.split(",")
    if args.brief and cache not in args.fit.split(","):
        return [str(each) for each in args.brief.split(",")]
    if cache in args.fit.split(","):
        found.append(f"{FIT}x{min(int(each.split('x')[1]) for each in found)}")
    return found


def missing(row: dict[str, Any], work: list[str], most: int) -> list[str]:
    """What was not measured and fits, as far as that is known. The largest batch keeps its name: it has the most
    sequences that the engine is started with."""
    left = []
    for each in work:
        count, tokens = each.split("x")
        fits = row.get("fits", {}).get(tokens)
        number = most if count == FIT else int(count)
        known = f"{min(number, fits)}x{tokens}" if fits is not None and count == FIT else each
        if known not in row.get("steps", {}) and (fits is None or count == FIT or number <= fits):
            left.append(each)
    return left


# one cache, in this process


@contextlib.contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Alone among the processes that have this folder, if there is one, and once all of them have started."""
    if folder is None:
        yield
        return
    parent = os.getppid()
    while not (folder / STARTED).exists():
        if os.getppid() != parent:
            raise SystemExit("the process that started this one has ended")
        time.sleep(0.1)
    with (folder / "turn").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def measure(args: argparse.Namespace, cache: str, work: list[str], report: Any) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # which would be compiled
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    lengths = sorted({int(each.split("x")[1]) for each in args.work.split(",")})
    counts = [each.split("x")[0] for each in work_of(args, cache)]
    most = max([PREFILL, *(args.most if count == FIT else int(count) for count in counts)])
    given = {"gpu_memory_utilization": args.memory, "kv_cache_memory_bytes": cache_bytes_of(args, cache)}
    given |= {"block_size": args.block_size, "enforce_eager": args.eager or None}
    start = time.perf_counter()
    llm = vllm.LLM(
        model=str(args.model),
        load_format="dummy" if args.dummy else "auto",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=lengths[-1] + NEW + 80,
        max_num_seqs=most,
        max_num_batched_tokens=args.chunk,
        enable_prefix_caching=True,
        **{name: value for name, value in given.items() if value is not None},
        **options_of(cache, args.model),
    )
    load = round(time.perf_counter() - start, 1)
    compiled = watch_compiler()
    report({"load_s": load})
    with turn(args.turns):
        measure_engine(args, llm, work, most, lengths, compiled, report)


def measure_engine(
    args: argparse.Namespace, llm: Any, work: list[str], most: int, lengths: list[int], compiled: list[str], report: Any
) -> None:
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    blocks = (config.cache_config.num_gpu_blocks or 0) - 1  # vLLM keeps one free
    fits = {tokens: blocks // -(-(tokens + NEW + 1) // block) for tokens in lengths}
    report(
        {
            "capacity_tokens": blocks * block,
            "fits": {str(tokens): count for tokens, count in fits.items()},
            "block": block,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompt(tokens: int, seed: int) -> dict[str, list[int]]:
        draw = random.Random(seed * 1_000_003 + tokens)
        return {"prompt_token_ids": draw.choices(range(vocabulary), k=tokens)}

    def generate(batch: list[dict[str, list[int]]], new: int) -> tuple[float, list[list[int]]]:
        params = vllm.SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        begin = time.perf_counter()
        done = llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - begin, [list(each.outputs[0].token_ids) for each in done]

    first = [round(generate([prompt(lengths[0], seed)], 1)[0], 4) for seed in (-1, -2)]
    report({"first_s": first, "compiled": list(compiled)})
    read: dict[int, int] = {}  # prompts that the engine knows, by length

    def prompts(tokens: int, count: int) -> list[dict[str, list[int]]]:
        """Prompts that the engine has read; how long that takes for the first ones is reported."""
        batch = [prompt(tokens, seed) for seed in range(count)]
        times = []
        while (known := read.get(tokens, 0)) < count:
            few = PREFILL if known < 2 * PREFILL else count
            times.append((generate(batch[known : known + few], 1)[0], min(few, count - known)))
            read[tokens] = min(count, known + few)
        whole = [round(seconds, 4) for seconds, number in times[:2] if number == PREFILL]
        if whole:
            report({"prefill_s": {str(tokens): whole}})
        return batch

    # by length, for prompts of one may take the memory of another's; the largest batch is last, it takes longest
    for name, of in sorted((each.split("x") for each in work), key=lambda each: (each[0] == FIT, int(each[1]))):
        tokens = int(of)
        count = min(most, fits[tokens]) if name == FIT else int(name)
        if 0 < count <= fits[tokens]:
            batch = prompts(tokens, max(count, min(2 * PREFILL, fits[tokens])))[:count]
            generate(batch, 1)  # what was lost meanwhile is read again
            said = generate(batch, 1 + NEW)[1]
            one = min(generate(batch, 1)[0] for _ in range(2))
            runs = [generate(batch, 1 + NEW) for _ in range(2)]
            taken = min(seconds for seconds, _ in runs) - one
            step = {
                "ms": round(taken / NEW * 1e3, 3),
                "tokens_per_s": round(count * NEW / taken, 1),
                "repeats": all(again == said for _, again in runs),
            }
            report({"steps": {f"{count}x{tokens}": step}, "compiled": list(compiled)})
    report({"done": True})


def watch_compiler() -> list[str]:
    """Names of Triton kernels that are compiled from now on."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:  # on a CPU
        return names
    before = knobs.runtime.jit_post_compile_hook

    def note(**found: Any) -> Any:
        names.append(getattr(found.get("fn"), "name", "?"))
        return None if before is None else before(**found)

    knobs.runtime.jit_post_compile_hook = note
    return names


# all of them


def main() -> None:
    args = parsed()
    if args.one is not None:
        cache, work = json.loads(args.one)
        measure(args, cache, work, lambda part: print(_MARK + json.dumps(part), flush=True))
        return
    end = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text("utf-8"))["rows"]
    waiting: list[tuple[str, list[str], dict[str, Any]]] = []
    for cache in args.caches.split(","):
        key = row_of(args, cache)
        known = next((row for row in rows if {name: row.get(name) for name in KEY} == key), None)
        row = known if known is not None and not args.again else dict(key)
        rows = [*(other for other in rows if other is not known), row]
        work = missing(row, work_of(args, cache), args.most)
        if work and "failed" not in row:
            waiting.append((cache, work, row))

    for first in range(0, len(waiting), args.together):
        some = waiting[first : first + args.together]
        if end - time.monotonic() < START:
            print(f"{', '.join(cache for cache, _, _ in some)}: no time left, run the same command again", flush=True)
            break
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(some)) as pool:
            group = Group(Path(folder), len(some))
            for each in [pool.submit(run, args, *one, rows, group) for one in some]:
                each.result()
    print(table(measured(rows)), flush=True)


class Group:
    """Caches that start together."""

    def __init__(self, folder: Path, waiting: int) -> None:
        self.folder, self._waiting, self._lock = folder, waiting, threading.Lock()

    def started(self) -> None:
        """Another one has, or has failed to."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                (self.folder / STARTED).touch()


def run(
    args: argparse.Namespace, cache: str, work: list[str], row: dict[str, Any], rows: list[dict[str, Any]], group: Group
) -> None:
    """Measure in a process of its own, and save each part of the row as it comes."""
    command = [sys.executable, *sys.argv, "--one", json.dumps([cache, work]), "--turns", str(group.folder)]
    started = done = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith(_MARK):
                continue
            part = json.loads(line.removeprefix(_MARK))
            if not started:
                started = True
                group.started()
            done = part.pop("done", done)
            with _saving:
                for name in ("steps", "prefill_s"):
                    row[name] = {**row.get(name, {}), **part.pop(name, {})}
                row.update(part)
                save(args, rows)
    if not started:
        group.started()
    if not done:
        with _saving:
            row["failed"] = child.returncode
            print(f"{cache}: ended with exit code {child.returncode}", flush=True)
            save(args, rows)


_saving = threading.Lock()


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of caches that wait for their turn."""
    return [row for row in rows if len(row) > len(KEY)]


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.json:
        command = " ".join(["python", *sys.argv])
        known = json.loads(args.json.read_text("utf-8")).get("commands", []) if args.json.exists() else []
        made = {"commands": [*(each for each in known if each != command), command], "rows": measured(rows)}
        new = args.json.with_suffix(".new")
        new.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        new.replace(args.json)  # whole, whenever this is ended


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; in brackets how many times as fast as bf16."""

    def size(name: str) -> tuple[int, ...]:
        return tuple(int(x) for x in reversed(name.split("x")))

    steps = sorted({name for row in rows for name in row.get("steps", {})}, key=size)
    lengths = sorted({name for row in rows for name in row.get("prefill_s", {})}, key=int)
    stock = next((row for row in rows if row["cache"] == "bf16"), {})
    lines = [["cache", *(f"{name} ms" for name in steps), *(f"{PREFILL} new {name} s" for name in lengths)]]
    lines[0] += ["largest batch, tokens/s", "tokens that fit", "first, second s", "start s", "compiled", "repeats"]
    lines.append(["---"] * len(lines[0]))

    def shown(mine: float | None, other: float | None) -> str:
        return "" if mine is None else f"{mine:.2f}" if not other else f"{mine:.2f} ({other / mine:.2f})"

    for row in rows:
        line = [row["cache"] if "failed" not in row else f"{row['cache']} (exit code {row['failed']})"]
        mine, other = row.get("steps", {}), stock.get("steps", {})
        line += [shown(mine.get(name, {}).get("ms"), other.get(name, {}).get("ms")) for name in steps]
        mine, other = ({n: min(s) for n, s in x.get("prefill_s", {}).items()} for x in (row, stock))
        line += [shown(mine.get(name), other.get(name)) for name in lengths]
        short = [name for name in row.get("steps", {}) if size(name)[0] == size(steps[0])[0]]
        largest = max(short, key=size, default=None)
        line.append("" if largest is None else f"{largest}: {row['steps'][largest]['tokens_per_s']:,.0f}")
        line += [f"{row.get('capacity_tokens', 0):,}", ", ".join(map(str, row.get("first_s", [])))]
        line += [str(row.get("load_s", "")), " ".join(sorted(set(row.get("compiled", [])))) or "none"]
        line.append("yes" if all(step["repeats"] for step in row.get("steps", {}).values()) else "no")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--caches", default=CACHES, help=f"separated by commas, in this order (default {CACHES})")
    parser.add_argument("--work", default=WORK, help=f"of each cache (default {WORK})")
    parser.add_argument(
        "--fit", default="bf16,k4v4,fp8,turboquant_4bit_nc", help="caches with the largest batch as well"
    )
    parser.add_argument("--brief", help="work of the caches that are not in --fit (default that of --work)")
    parser.add_argument("--most", type=int, default=512, help="sequences that the largest batch may have")
    parser.add_argument("--chunk", type=int, default=8192, help="vLLM's --max-num-batched-tokens")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help=f"begin no cache with less than {START} left"
    )
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="vLLM's --enforce-eager")
    parser.add_argument("--memory", type=float, help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--cache-bytes", help="vLLM's --kv-cache-memory-bytes: one number, or one for each of --caches")
    parser.add_argument("--block-size", type=int, help="vLLM's --block-size")
    parser.add_argument("--json", type=Path, help="where rows are kept")
    parser.add_argument("--again", action="store_true", help="measure these caches anew")
    parser.add_argument("--together", type=int, default=1, help="caches that are started at a time")
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cache_bytes and args.cache_bytes.count(",") not in (0, args.caches.count(",")):
        parser.error("--cache-bytes takes one number, or one for each of --caches")
    args.model = folder_of(args.model, args.dummy)
    return args


if __name__ == "__main__":
    main()

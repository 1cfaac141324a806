"""Tests of the vLLM plugin on one GPU: every test in a process of its own, several at once, each with a time limit.

    PYTHONPATH=src python tools/gpu_engine.py [--jobs 8] [--seconds 280] [--limit 150] [--log FILE] [NAME …]

NAMEs choose the tests whose name contains one of them. A line for each test as it ends, what went wrong below it;
everything that the tests wrote goes to FILE. Exits 1 on a failure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = (
    "load",
    "operators",
    "models",
    "host_memory",
    "sleep",
    "engine",
    "beginnings",
    "recent",
    "prefill",
    "layer",
    "warmup",
)
# what needs no engine, or is skipped on one GPU: one process for each file
TOGETHER = (
    "test_beginnings", "test_recent.py", "test_prefill", "test_layer.py", "test_warmup", "refused", "is_allowed",
    "found_by_format", "sixteen_bits", "eight_bits", "shipped_policy", "a_format_is_calibrated",
    "depends_on_the_batch", "needs_a_gpu", "transformers_sees", "nothing_of_ours", "parallel", "policy_of_another",
    "without_the_switch",
)  # fmt: skip
LONGEST = ("drafts_change_nothing", "many_requests", "lengths_from", "every_mode", "on_disk_are_found_by_another",
           "come_back_from", "adapters", "delta_nets", "mamba", "pictures")  # started first  # fmt: skip


class Job(NamedTuple):
    name: str
    tests: list[str]


class Result(NamedTuple):
    job: Job
    seconds: float
    verdict: str
    output: str


def collected(names: list[str]) -> list[str]:
    files = [f"tests/vllm/test_{name}.py" for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *files],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if not found or done.returncode not in (0, 5):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return [test for test in found if not names or any(name in test for name in names)]


def jobs(tests: list[str]) -> list[Job]:
    alone, together = [], dict[str, list[str]]()
    for test in tests:
        if any(name in test for name in TOGETHER):
            together.setdefault(test.split("::")[0], []).append(test)
        else:
            alone.append(Job(test.removeprefix("tests/vllm/"), [test]))
    rank = {name: number for number, name in enumerate(LONGEST)}
    alone.sort(key=lambda job: min((rank[name] for name in rank if name in job.name), default=len(rank)))
    return alone + [Job(f"{Path(file).name} ({len(each)})", each) for file, each in together.items()]


def run(job: Job, limit: float, environment: dict[str, str]) -> Result:
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "-s", "--tb=short", *job.tests]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        last = next(
            (line for line in reversed(output.splitlines()) if re.search(r"\d (passed|failed|skipped|error)", line)), ""
        )
        verdict = "FAIL" if process.returncode else "skip" if "passed" not in last else "pass"
    except subprocess.TimeoutExpired:
        verdict = "TIME"
        os.killpg(process.pid, signal.SIGINT)  # Python says where it was
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    return Result(job, time.perf_counter() - start, verdict, output)


def told(result: Result, lines: int) -> str:
    """The line of a job, and what is worth reading of its output."""
    kept: list[str] = []
    written = result.output.splitlines()
    if result.verdict in ("FAIL", "TIME"):
        errors = [line for line in written if line.startswith(("E  ", "FAILED", "ERROR"))]
        kept = (errors or written)[-lines:]
    elif result.verdict == "skip":
        kept = [line for line in written if line.startswith("SKIPPED")][:1]
    else:
        kept = [line for line in written if re.search(r"answers are equal|tokens are equal|of \d+ are", line)]
    return "\n".join([f"{result.verdict} {result.seconds:4.0f} s {result.job.name}", *(f"    {x[:300]}" for x in kept)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="end everything after this long")
    parser.add_argument("--limit", type=float, default=150, help="seconds for a test")
    parser.add_argument("--lines", type=int, default=6, help="of a failure that are shown")
    parser.add_argument("--log", type=Path, help="all that the tests write")
    args = parser.parse_args()
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    todo = jobs(collected(args.names))
    print(f"{len(todo)} jobs, collected in {time.perf_counter() - start:.0f} s", flush=True)

    def limited(job: Job) -> Result:
        left = args.seconds - (time.perf_counter() - start)
        return run(job, min(args.limit, left), environment) if left > 20 else Result(job, 0, "late", "")

    results: list[Result] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(limited, job) for job in todo]):
            results.append(future.result())
            print(told(results[-1], args.lines), flush=True)
    if args.log:
        parts = (f"{'=' * 20} {r.verdict} {r.seconds:.0f} s {r.job.name}\n{r.output[-60000:]}\n" for r in results)
        args.log.write_text("".join(parts))
    count = {
        verdict: sum(r.verdict == verdict for r in results) for verdict in ("pass", "skip", "FAIL", "TIME", "late")
    }
    print(*(f"{r.verdict} {r.job.name}" for r in results if r.verdict in ("FAIL", "TIME", "late")), sep="\n")
    print(f"{count} of {len(results)} jobs, {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(bool(count["FAIL"] + count["TIME"] + count["late"]))


if __name__ == "__main__":
    main()

"""Speed of the native CPU backend beside torch on uncompressed tensors, interleaved in one process.

    python benchmarks/cpu.py --threads 2 --json benchmarks/baselines/cpu.json

Every comparison first checks the result of its shape against the reference in float64: no number without it. Methods
take turns in short windows; the table shows medians, the JSON also the spread. Buffers change from call to call and are
together larger than the caches, as the layers of a model are. --realtime (needs the right to it) keeps other processes
of a shared machine out of the windows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

import aurakv as kv

Call = Callable[[int], object]
BUFFERS = 200_000_000  # bytes that the calls of a method walk through


class Timer:
    def __init__(self, rounds: int, window: float, realtime: bool) -> None:
        self.rounds, self.window, self.realtime = rounds, window, realtime

    def compare(self, calls: dict[str, Call]) -> dict[str, dict[str, float]]:
        """Microseconds a call of each method: median and quartiles over the rounds."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call(0)
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self._sample(call))
                time.sleep(0.005)
        return {name: _summary(x) for name, x in samples.items()}

    def _sample(self, call: Call) -> float:
        self._schedule(True)
        try:
            call(0)
            count, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < self.window or count == 0:
                call(count)
                count += 1
            return passed / count * 1e6
        finally:
            self._schedule(False)

    def _schedule(self, first: bool) -> None:
        if self.realtime:
            policy, level = (os.SCHED_FIFO, 1) if first else (os.SCHED_OTHER, 0)
            for task in os.listdir("/proc/self/task"):
                os.sched_setscheduler(int(task), policy, os.sched_param(level))


def _summary(samples: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return {"us": round(middle, 1), "low": round(low, 1), "high": round(high, 1)}


def _cycle(make: Callable[[], object], size: int) -> list:
    return [make() for _ in range(max(1, min(64, BUFFERS // size)))]


def read_bandwidth(timer: Timer) -> float:
    """GB/s of reading memory that is in no cache, all threads."""
    words = torch.ones(50_000_000, dtype=torch.int64)
    us = timer.compare({"read": lambda _: words.sum()})["read"]["us"]
    return words.nbytes / us / 1e3


def fill(format: kv.Format, batch: int, heads: int, tokens: int, page: int | None) -> Callable[[], kv.Pages]:
    """A function that makes a cache with this many tokens in each sequence."""
    codes = [kv.encode(torch.randn(batch * tokens, heads, codec.dim), codec) for codec in (format.key, format.value)]
    starts = list(range(0, batch * tokens + 1, tokens))

    def make() -> kv.Pages:
        if page is None:
            cache = kv.KVCache.contiguous(format, batch, heads, capacity=tokens)
        else:
            cache = kv.KVCache.paged(kv.PagePool(format, batch * -(-tokens // page), page, heads), batch)
        cache.append_codes(*codes, starts)
        return cache.pages

    return make


def check(q: torch.Tensor, pages: kv.Pages, backend: str, starts: list[int] | None = None) -> None:
    """The result of the shape that is about to be timed."""
    got = kv.attend(q, pages, starts, backend=backend).out.double()
    truth = kv.attend(q.double(), pages, starts, backend="reference").out
    error = ((got - truth).norm() / truth.norm()).item()
    if not error < 1e-3:
        raise SystemExit(f"{pages.format} with {backend}: relative error {error:.1e}, nothing is timed")


def decode(
    timer: Timer, formats: Iterable[str], batch: int, heads: int, kv_heads: int, dim: int, tokens: int,
    page: int | None = None, backend: str = "native", rivals: Iterable[str] = ("bf16",),
) -> list[dict[str, object]]:  # fmt: skip
    group, calls, names = heads // kv_heads, {}, []
    size = batch * kv_heads * tokens * dim
    q = torch.randn(batch, heads, dim)
    for rival in rivals:
        dtype = torch.float32 if "fp32" in rival else torch.bfloat16
        k, v = (
            _cycle(lambda t=dtype: torch.randn(batch, kv_heads, tokens, dim).to(t), 2 * size * dtype.itemsize)
            for _ in "kv"
        )
        if "gqa" in rival:
            x = q.to(dtype)[:, :, None]
            calls[rival] = lambda i, x=x, k=k, v=v: F.scaled_dot_product_attention(
                x, k[i % len(k)], v[i % len(v)], enable_gqa=True
            )
        else:  # the heads of a group as queries: each key is read once
            x = q.to(dtype).view(batch, kv_heads, group, dim)
            calls[rival] = lambda i, x=x, k=k, v=v: F.scaled_dot_product_attention(x, k[i % len(k)], v[i % len(v)])
    for name in formats:
        format = kv.Format.parse(name, dim)
        pages = _cycle(fill(format, batch, kv_heads, tokens, page), format.bytes_per_token * batch * kv_heads * tokens)
        check(q, pages[0], backend)
        calls[name] = lambda i, p=pages: kv.attend(q, p[i % len(p)], backend=backend)
        names.append(name)
    times = timer.compare(calls)
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim, "tokens": tokens, "page": page}
    rows: list[dict[str, object]] = [
        {"what": "decode", **shape, "method": f"torch {rival}", **times[rival]} for rival in rivals
    ]
    for name in names:
        us = times[name]["us"]
        row = {"what": "decode", **shape, "method": f"{backend} {name}", **times[name]}
        row["GB/s"] = round(kv.Format.parse(name, dim).bytes_per_token * batch * kv_heads * tokens / us / 1e3, 1)
        row["times bf16"] = round(times["bf16"]["us"] / us, 2) if "bf16" in times else None
        rows.append(row)
    return rows


def dequantised(timer: Timer, tokens: int) -> list[dict[str, object]]:
    """Decode all stored vectors to bfloat16, then SDPA: what libraries without attention on codes do."""
    pages = fill(kv.Format.parse("k4v4", 128), 1, 8, tokens, None)()
    q = torch.randn(1, 8, 4, 128).bfloat16()
    keys, values = pages.stored(0, torch.arange(tokens))

    def call(_: int) -> object:
        f = pages.format
        k, v = kv.decode(keys, f.key, dtype=q.dtype), kv.decode(values, f.value, dtype=q.dtype)
        return F.scaled_dot_product_attention(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None])

    times = timer.compare({"x": call})["x"]
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "dim": 128, "tokens": tokens, "page": None}
    return [{"what": "decode", **shape, "method": "dequantise k4v4, then SDPA bf16", **times}]


def extend(timer: Timer, queries: int, tokens: int) -> list[dict[str, object]]:
    """Queries at the end of a compressed history, against SDPA float32 on uncompressed keys and values."""
    pages = fill(kv.Format.parse("k4v4", 128), 1, 8, tokens, None)()
    q = torch.randn(queries, 32, 128)
    check(q[-3:], pages, "native", [0, 3])
    k, v = torch.randn(2, 1, 8, tokens, 128)
    x, mask = torch.randn(1, 32, queries, 128), torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    times = timer.compare(
        {
            "torch fp32": lambda _: F.scaled_dot_product_attention(x, k, v, attn_mask=mask, enable_gqa=True),
            "torch fp32 without mask": lambda _: F.scaled_dot_product_attention(x, k, v, enable_gqa=True),
            "native k4v4": lambda _: kv.attend(q, pages, [0, queries]),
        }
    )
    shape = {"heads": 32, "kv_heads": 8, "dim": 128, "queries": queries, "tokens": tokens}
    what = "prefill" if queries == tokens else "extend"
    return [{"what": what, **shape, "method": name, **x} for name, x in times.items()]


def encode(timer: Timer, vectors: int) -> list[dict[str, object]]:
    format, rows = kv.Format.parse("k4v4", 128), []
    x = torch.randn(vectors // 8, 8, 128)
    calls: dict[str, Call] = {
        "native": lambda _: kv.encode(x, format.key, backend="native"),
        "reference": lambda _: kv.encode(x, format.key, backend="reference"),
    }
    for name, times in timer.compare(calls).items():
        rows.append(
            {"what": "encode", "dim": 128, "method": name, **times, "Mvectors/s": round(vectors / times["us"], 2)}
        )
    pool = kv.PagePool(format, vectors // 8 // 64 + 1, 64, 8)
    cache = kv.KVCache.paged(pool, 1)

    def append(_: int) -> None:
        cache.free(0)
        cache.append(x, x, [0, len(x)])

    times = timer.compare({"append": append})["append"]
    rows.append(
        {"what": "append", "dim": 128, "method": "native", **times, "Mvectors/s": round(2 * vectors / times["us"], 2)}
    )
    return rows


def overhead(timer: Timer) -> list[dict[str, object]]:
    """A decode call at 128 tokens, from Python."""
    cache = kv.KVCache.contiguous(kv.Format.parse("k4v4", 128), 1, 8, capacity=128)
    cache.append(torch.randn(128, 8, 128), torch.randn(128, 8, 128), [0, 128])
    q, pages = torch.randn(1, 32, 128), cache.pages
    times = timer.compare({"kv.attend": lambda _: kv.attend(q, pages), "KVCache.attend": lambda _: cache.attend(q)})
    return [{"what": "overhead", "tokens": 128, "method": name, **x} for name, x in times.items()]


def growth(timer: Timer) -> list[dict[str, object]]:
    """Cost over tokens, batch and heads, for benchmarks/cpu_plot.py."""
    rows = []
    for tokens in (256, 1024, 4096, 16384, 65536):
        rows += decode(timer, ["k4v4", "k2v2"], 1, 32, 8, 128, tokens)
    for batch in (2, 4, 8):
        rows += decode(timer, ["k4v4"], batch, 32, 8, 128, 4096)
    for heads in (8, 16, 64):
        rows += decode(timer, ["k4v4"], 1, heads, 8, 128, 4096)
    return [{**row, "what": "growth"} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--window", type=float, default=0.04, help="seconds of each sample")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument(
        "--only", default="", help="comma-separated parts: decode, pages, extend, encode, overhead, growth"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    timer, slow = (Timer(n, options.window, options.realtime) for n in (options.rounds, 3))
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "decode": lambda: [
            *decode(timer, ["k4v4", "k2v2", "k3v3", "k8v8", "k8v4"], 1, 32, 8, 128, 16384, rivals=("bf16", "fp32")),
            *decode(timer, ["k4v4"], 1, 32, 8, 128, 16384, backend="native-avx2"),
            *decode(timer, ["k4v4", "k2v2", "k3v3"], 1, 32, 8, 128, 65536),
            *decode(timer, ["k4v4"], 1, 32, 8, 128, 1024, rivals=("bf16", "bf16 enable_gqa")),
            *decode(timer, ["k4v4"], 1, 9, 3, 64, 4096),
            *decode(timer, ["k4v4"], 8, 32, 8, 128, 1024),
            *decode(timer, ["k4v4"], 1, 64, 8, 128, 16384),
            *decode(slow, ["k4v4"], 1, 32, 8, 128, 16384, rivals=("bf16", "bf16 enable_gqa")),
            *dequantised(slow, 16384),
        ],
        "pages": lambda: [
            row for n in (16384, 65536, 1024) for row in decode(timer, ["k4v4"], 1, 32, 8, 128, n, page=64)
        ],
        "extend": lambda: [*extend(slow, 512, 16384), *extend(slow, 2048, 2048)],
        "encode": lambda: encode(slow, 262144),
        "overhead": lambda: overhead(timer),
        "growth": lambda: growth(slow),
    }
    before, rows = read_bandwidth(slow), []
    for name, run in parts.items():
        if not options.only or name in options.only.split(","):
            for row in run():
                rows.append(row)
                print(
                    "  ".join(f"{k} {v}" for k, v in row.items() if v is not None and k not in ("low", "high")),
                    flush=True,
                )
    bandwidth = statistics.mean((before, read_bandwidth(slow)))
    print(f"read bandwidth {bandwidth:.1f} GB/s")
    for row in rows:
        if "GB/s" in row:
            row["of read bandwidth"] = round(float(str(row["GB/s"])) / bandwidth, 2)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "cpu": _cpu(), "threads": options.threads, "command": " ".join(["python", *sys.argv]), "commit": commit,
            "torch": torch.__version__, "aurakv": kv.__version__, "python": platform.python_version(),
            "read GB/s": round(bandwidth, 1),
        }  # fmt: skip
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    return (
        f"{facts.get('model name', platform.machine())}, family {facts.get('cpu family')}, model {facts.get('model')}"
    )


if __name__ == "__main__":
    main()

"""Speed of the native CPU backend against torch on uncompressed tensors, interleaved in one process.

    python benchmarks/cpu.py --threads 2 --only growth --json benchmarks/baselines/cpu-growth.json

Every comparison first checks the result of its shape against the reference in float64: no number without it. Methods
take turns in short windows; the table shows medians, the JSON also the spread. Buffers change from call to call and are
together larger than the caches, as the layers of a model are. --realtime (needs the right to it) keeps other processes
of a shared machine out of the windows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import aurakv as kv
from aurakv.bench import bandwidth, machine
from aurakv.bench import decode as bench
from aurakv.bench.timing import Call, HostTimer

CPU = torch.device("cpu")


def decode(
    timer: HostTimer, formats: list[str], batch: int, heads: int, kv_heads: int, dim: int, tokens: int,
    page: int | None = None, backend: str = "native", rivals: tuple[str, ...] = ("bf16",),
) -> list[dict[str, object]]:  # fmt: skip
    return bench.decode(timer, bench.Shape(batch, heads, kv_heads, dim, tokens, page), formats, CPU, backend, rivals)


def fill(tokens: int) -> kv.Pages:
    return bench.fill(kv.Format.parse("k4v4", 128), bench.Shape(1, 32, 8, 128, tokens), CPU)()


def dequantised(timer: HostTimer, tokens: int) -> list[dict[str, object]]:
    """Decode all stored vectors to bfloat16, then SDPA: what libraries without attention on codes do."""
    pages = fill(tokens)
    q = torch.randn(1, 8, 4, 128).bfloat16()
    keys, values = pages.stored(0, torch.arange(tokens))

    def call(_: int) -> object:
        f = pages.format
        k, v = kv.decode(keys, f.key, dtype=q.dtype), kv.decode(values, f.value, dtype=q.dtype)
        return F.scaled_dot_product_attention(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None])

    times = timer.compare({"x": call})["x"]
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "dim": 128, "tokens": tokens, "page": None}
    return [{"what": "decode", **shape, "method": "dequantise k4v4, then SDPA bf16", **times}]


def extend(timer: HostTimer, queries: int, tokens: int) -> list[dict[str, object]]:
    """Queries at the end of a compressed history, against SDPA float32 on uncompressed keys and values."""
    pages = fill(tokens)
    q = torch.randn(queries, 32, 128)
    bench.check(q[-3:], pages, "native", [0, 3])
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


def encode(timer: HostTimer, vectors: int) -> list[dict[str, object]]:
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


def overhead(timer: HostTimer) -> list[dict[str, object]]:
    """A decode call at 128 tokens, from Python."""
    cache = kv.KVCache.contiguous(kv.Format.parse("k4v4", 128), 1, 8, capacity=128)
    cache.append(torch.randn(128, 8, 128), torch.randn(128, 8, 128), [0, 128])
    q, pages = torch.randn(1, 32, 128), cache.pages
    times = timer.compare({"kv.attend": lambda _: kv.attend(q, pages), "KVCache.attend": lambda _: cache.attend(q)})
    return [{"what": "overhead", "tokens": 128, "method": name, **x} for name, x in times.items()]


def growth(timer: HostTimer) -> list[dict[str, object]]:
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
    timer, slow = (HostTimer(n, options.window, options.realtime) for n in (options.rounds, 3))
    parts: dict[str, Callable[[], list[dict[str, object]]]] = {
        "decode": lambda: [
            *decode(timer, ["k4v4", "k2v2", "k3v3", "k8v8", "k8v4"], 1, 32, 8, 128, 16384, rivals=("bf16", "fp32")),
            *decode(
                timer, ["k4v4", "k2v2", "k3v3", "k5v4", "k8v4", "k8v8"], 1, 32, 8, 128, 16384, backend="native-avx2"
            ),
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
    before, rows = bandwidth.read(CPU, slow) / 1e9, []
    for name, run in parts.items():
        if not options.only or name in options.only.split(","):
            for row in run():
                rows.append(row)
                print(
                    "  ".join(f"{k} {v}" for k, v in row.items() if v is not None and k not in ("low", "high")),
                    flush=True,
                )
    speed = statistics.mean((before, bandwidth.read(CPU, slow) / 1e9))
    print(f"read bandwidth {speed:.1f} GB/s")
    for row in rows:
        if "GB/s" in row:
            row["of read bandwidth"] = round(float(str(row["GB/s"])) / speed, 2)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "cpu": machine.cpu_name(), "threads": options.threads,
            "command": " ".join(["python", *sys.argv]), "commit": commit,
            "torch": torch.__version__, "aurakv": kv.__version__, "python": platform.python_version(),
            "read GB/s": round(speed, 1),
        }  # fmt: skip
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

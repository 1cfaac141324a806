"""Time append, decode, verify, extend and prefill on a GPU against the best bf16 attention of torch, in one process.

    python benchmarks/gpu.py [--only decode …] [--format k4v4 …] [--json FILE]

Every shape is first checked against the float64 reference on its own codes: a wrong result gets no number. Times are
medians of CUDA-graph replays with a cold L2 cache. Printed for each: microseconds; TB/s of the bytes that the codes
take and their share of the measured read bandwidth; how many times faster than the faster of torch's flash and cuDNN.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.bench import bandwidth
from aurakv.bench.timing import GraphTimer
from aurakv.format import fit as fitting
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

TOLERANCE = 0.005  # of the norm of the result


class Shape(NamedTuple):
    """One measurement: `queries` new tokens of each of `batch` sequences on `context` stored ones."""

    kind: str
    batch: int
    kv_heads: int
    group: int
    context: int
    queries: int = 1
    dim: int = 128
    format: str = "k4v4"
    page: int = 0  # tokens a page; 0: one page per sequence
    fitted: str = ""  # codes of keys and values, the former with weights: "fitted", or "fitted one by one"

    @property
    def name(self) -> str:
        where = f" page {self.page}" if self.page else ""
        queries = f" q{self.queries}" if self.queries > 1 else ""
        sizes = f"{self.batch},{self.kv_heads},{self.group},{self.context}"
        fitted = f" {self.fitted}" if self.fitted else ""
        return f"{self.kind} {self.format} d{self.dim} {sizes}{queries}{where}{fitted}"


DECODE = [(8, 8, 4, 32768), (32, 8, 4, 8192), (16, 8, 8, 32768), (1, 8, 4, 131072), (64, 8, 8, 4096), (1, 8, 4, 32768),
          (8, 8, 4, 2048)]  # fmt: skip


def shapes(formats: list[str]) -> list[Shape]:
    found = [Shape("decode", *s, format=f) for f in formats for s in DECODE]
    found += [Shape("decode", *DECODE[0], format=f) for f in ("k2v2", "k3v3", "k8v4", "k4v4:minifloat", "k8v8")]
    for name in formats:
        found += [Shape("decode", *DECODE[0], dim=d, format=name) for d in (64, 256)]
        found += [Shape("decode", *DECODE[0], format=name, page=p) for p in (64, 16)]
        found += [Shape("verify", *DECODE[0], queries=n, format=name) for n in (4, 8)]
        found += [Shape("extend", 1, 8, 4, 32768, queries=n, format=name, page=64) for n in (512, 2048, 4096)]
        found += [Shape("prefill", 1, 8, 4, 8192, queries=8192, format=name)]
        for fitted in ("", "fitted", "fitted one by one"):
            found += [Shape("append", n, 8, 4, 1024, format=name, page=64, fitted=fitted) for n in (1, 32, 64, 96)]
            found += [
                Shape("append", 1, 8, 4, 32768, queries=32768, format=name, page=p, fitted=fitted) for p in (0, 64)
            ]
    return found


def make_pages(shape: Shape) -> Pages:
    """Pages with room for every token, in random order where there are several."""
    device, tokens = torch.device("cuda"), shape.context
    size = shape.page or tokens
    width = -(-tokens // size)
    order = torch.randperm(shape.batch * width, device=device, dtype=torch.int32)
    format = Format.parse(shape.format, shape.dim)
    weight = torch.rand(shape.kv_heads, shape.dim, device=device) ** 2 + 0.01
    fits: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if shape.fitted:
        key = fitting.fit(format.key, weight, at_once=shape.fitted == "fitted")  # as is the default on GPUs
        fits = key, fitting.equal(shape.kv_heads, device)
    return Pages(
        format,
        size,
        allocate(format, size, shape.batch * width, shape.kv_heads, device),
        order.view(shape.batch, width).contiguous(),
        torch.zeros(shape.batch, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        key_fit=fits[0],
        value_fit=fits[1],
    )


def fill(pages: Pages, shape: Shape) -> tuple[Tensor, Tensor]:
    """Random keys and values [batch, context, kv_heads, dim] in bf16, appended."""
    k, v = (
        torch.randn(shape.batch, shape.context, shape.kv_heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        for _ in "kv"
    )
    for seq in range(shape.batch):  # one at a time: less memory
        starts = [0] * (seq + 1) + [shape.context] * (shape.batch - seq)
        ops.append(pages, k[seq], v[seq], starts)
    return k, v


def sdpa_time(q: Tensor, k: Tensor, v: Tensor, timer: GraphTimer) -> tuple[float, str]:
    """The fastest of torch's bf16 attentions for q [batch, n, heads, dim] over k, v [batch, tokens, kv_heads, dim]."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    n, tokens = q.shape[2], k.shape[2]
    options: dict[str, dict[str, Any]] = (
        {"": {}} if n == 1 else {" causal": {"attn_mask": causal_lower_right(n, tokens)}}
    )
    if n == tokens:
        options = {" causal": {"is_causal": True}}
    best = (float("inf"), "none")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for label, extra in options.items():
            try:
                with sdpa_kernel([backend]):
                    time = timer.seconds(
                        lambda extra=extra: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **extra)
                    )
            except RuntimeError:
                continue
            best = min(best, (time, backend.name.split("_")[0].lower() + label))
    return best


def check(q: Tensor, pages: Pages, queries: int, out: Tensor) -> float:
    """Error of the first and last sequence's first queries against float64 on the same codes, relative to the norm."""
    worst = 0.0
    for seq in {0, pages.seqs - 1}:
        alone = Pages(
            pages.format, pages.page_size, pages.data, pages.table[seq : seq + 1].contiguous(),
            pages.lengths[seq : seq + 1].contiguous(), pages.overflow,
        )  # fmt: skip
        rows = slice(seq * queries, seq * queries + min(queries, 4))
        count = rows.stop - rows.start
        ends = alone.lengths - (queries - count)
        where = Rows(torch.tensor([0, count], device="cuda", dtype=torch.int32))
        truth = reference.attend(q[rows].double(), Attention(alone, where, kv.Scoring(), ends=ends)).out
        worst = max(worst, ((out[rows].double() - truth).norm() / truth.norm()).item())
    return worst


def measure(shape: Shape, backend: str, timer: GraphTimer) -> dict[str, Any]:
    torch.manual_seed(0)
    pages = make_pages(shape)
    if shape.kind == "append":
        return measure_append(shape, pages, backend, timer)
    k, v = fill(pages, shape)
    heads = shape.kv_heads * shape.group
    q = torch.randn(shape.batch * shape.queries, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * shape.queries
    chosen = None if shape.queries == 1 else starts

    def call() -> Tensor:
        return kv.attend(q, pages, chosen, backend=backend).out

    error = check(q, pages, shape.queries, call())
    if not error < TOLERANCE:
        return {"name": shape.name, "error": error, "wrong": True}
    seconds = timer.seconds(call)
    bf16, name = sdpa_time(q.view(shape.batch, shape.queries, heads, shape.dim), k, v, timer)
    size = shape.batch * shape.context * shape.kv_heads * pages.format.bytes_per_token
    return {
        "name": shape.name, "us": seconds * 1e6, "bytes": size, "error": error, "bf16_us": bf16 * 1e6, "bf16": name,
        "ratio": bf16 / seconds,
    }  # fmt: skip


def measure_append(shape: Shape, pages: Pages, backend: str, timer: GraphTimer) -> dict[str, Any]:
    """Bytes are those read and written: bf16 in, codes out."""
    n = shape.batch * shape.queries
    k, v = (torch.randn(n, shape.kv_heads, shape.dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    starts = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * shape.queries
    chosen = None if shape.queries == 1 else starts
    ops.append(pages, k, v, chosen, backend=backend)
    sides = (k, pages.format.key, pages.key_fit), (v, pages.format.value, pages.value_fit)
    wanted = [ops.encode(x[-2048:], codec, fit=fit, backend="reference") for x, codec, fit in sides]
    position = torch.arange(shape.queries, device="cuda")[-2048:]
    stored = pages.stored(shape.batch - 1, position)
    same = min((a.data == b.data[-len(position) :]).float().mean().item() for a, b in zip(stored, wanted, strict=True))
    if same < (0.99 if shape.fitted else 0.9999):  # a fit chooses among codes that are almost equally good
        return {"name": shape.name, "error": 1 - same, "wrong": True}

    again = shape.context < 2 * timer.repeats * shape.queries  # as often as it is called there is no room

    def call() -> None:
        if again:
            pages.lengths.zero_()
        ops.append(pages, k, v, chosen, backend=backend)

    seconds = timer.seconds(call)
    assert not int(pages.overflow) & 1, "an append did not fit"
    size = k.nbytes + v.nbytes + n * shape.kv_heads * pages.format.bytes_per_token
    result = {"name": shape.name, "us": seconds * 1e6, "bytes": size, "error": 1 - same}
    if again:
        result["of_which_zeroing_us"] = timer.seconds(lambda: pages.lengths.zero_()) * 1e6
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="kinds: decode, verify, extend, prefill, append")
    parser.add_argument("--format", nargs="*", default=["k4v4"])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--limit", type=int, help="only this many shapes")
    parser.add_argument("--json")
    args = parser.parse_args()
    timer = GraphTimer()
    read, copy = bandwidth.read("cuda", timer), bandwidth.copy("cuda", timer)
    print(f"{torch.cuda.get_device_name()}: read {read / 1e12:.2f} TB/s, copy {copy / 1e12:.2f} TB/s", flush=True)
    results = []
    for shape in [s for s in shapes(args.format) if not args.only or s.kind in args.only][: args.limit]:
        result = measure(shape, args.backend, timer)
        results.append(result)
        if "us" not in result:
            print(f"{shape.name:45} WRONG: error {result['error']:.2e}", flush=True)
            continue
        result["tbs"] = result["bytes"] / result["us"] / 1e6
        result["share"] = result["tbs"] * 1e12 / read
        line = f"{shape.name:45} {result['us']:9.1f} us {result['tbs']:5.2f} TB/s {result['share']:4.0%}"
        if "ratio" in result:
            line += f"  {result['ratio']:5.2f}x {result['bf16']} {result['bf16_us']:.1f} us"
        print(line + f"  error {result['error']:.1e}", flush=True)
        torch.cuda.empty_cache()
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit,
            "read_bytes_per_s": read, "copy_bytes_per_s": copy, "backends": backends.names(),
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump({"about": about, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

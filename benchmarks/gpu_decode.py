"""Decode attention on a GPU against bf16 SDPA (cuDNN, or what torch has besides where that refuses), in one process,
correctness first.

python benchmarks/gpu_decode.py [--baseline] [--jobs 16] --json out.json

Times are medians of CUDA-graph replays with a cold L2 cache. --flush write leaves it full of dirty lines, as
triton.testing.do_bench does; --flush read leaves clean ones. Bytes are the compressed bytes of the cache; beside them
stands how long torch takes to sum as many, which nothing is done with but to read them. --rivals also times other
packages' attention on fp8 or 4 bits where they are installed (gpu_rivals.py). --baseline measures BASELINE,
OTHER_SHAPES, WITHOUT_TMA and THRESHOLDS, of which --lines names some: every row of baselines/gpu_decode-h200.json.
--ways own 8.0 portable also times what a GPU of compute capability 8.0 would run, and the portable kernel. --jobs 16:
so many processes compile everything before, which otherwise takes most of the time. Rows are added to a file that
exists.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import gpu_rivals
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from aurakv.attention import ops
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.backends.triton import dispatch
from aurakv.backends.triton.common import target
from aurakv.backends.triton.decode import launch
from aurakv.checks import rows_of
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate, parts

SHAPES = [
    (1, 8, 4, 32768), (1, 8, 4, 131072), (8, 8, 4, 32768), (32, 8, 4, 8192), (16, 8, 8, 32768), (64, 8, 8, 4096),
    (8, 8, 4, 2048),
]  # fmt: skip
DEVICE = torch.device("cuda")
RIVAL_ERROR = 0.2  # of the output; 4 uniform bits for normal values alone are 0.1


def random_pages(
    name: str, dim: int, seqs: int, kv_heads: int, tokens: int, page_size: int, offsets: bool = False
) -> Pages:
    format = Format.parse(name, dim)
    width = -(-tokens // page_size)
    data = allocate(format, page_size, seqs * width, kv_heads, DEVICE)
    data.random_(0, 256)
    for part in parts(format, data, page_size):
        assert part.scale is not None
        part.scale.copy_(torch.rand(part.scale.shape, device=DEVICE) + 0.5)
    table = torch.randperm(seqs * width, device=DEVICE).view(seqs, width).to(torch.int32)
    lengths = torch.full((seqs,), tokens, dtype=torch.int32, device=DEVICE)
    pages = Pages(format, page_size, data, table, lengths, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    if offsets:
        key, value = torch.randn(2, kv_heads, dim, device=DEVICE)
        pages = dataclasses.replace(pages, key_offset=key, value_offset=value)
    return pages


def microseconds(step: Callable[[], object], flush: str, repeats: int = 60) -> float:
    """The median time of a captured step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    buffer = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE).view(torch.int64)
    times = []
    for _ in range(repeats + 5):
        buffer.zero_() if flush == "write" else buffer.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in times[5:])


def sdpa_bf16(
    seqs: int, kv_heads: int, group: int, tokens: int, dim: int, flush: str, queries: int = 1
) -> tuple[str, float]:
    """cuDNN's time, or where it refuses that of the fastest of torch's others; whose it is."""
    q = torch.randn(seqs, kv_heads * group, queries, dim, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(seqs, kv_heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16)
    v = torch.randn_like(k)
    grouped = q.view(seqs, kv_heads, group * queries, dim)
    found = {}
    others = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    for backend in (SDPBackend.CUDNN_ATTENTION, *others):
        with_gqa = backend == SDPBackend.CUDNN_ATTENTION
        step = functools.partial(F.scaled_dot_product_attention, q if with_gqa else grouped, k, v, enable_gqa=with_gqa)
        try:
            with sdpa_kernel(backend):
                found[backend.name] = microseconds(step, flush)
        except RuntimeError as refusal:  # of this dimension
            print(f"  {backend.name}: {str(refusal).splitlines()[0]:.100}", flush=True)
        if with_gqa and found:
            break
    name = min(found, key=lambda name: found[name])
    return name, found[name]


def rival(name: str, seqs: int, kv_heads: int, group: int, tokens: int, dim: int, flush: str) -> tuple[float, float]:
    """The time of its fastest setting, and the error for the first sequence."""
    q = torch.randn(seqs, kv_heads * group, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(seqs, tokens, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    calls = gpu_rivals.RIVALS[name][1](q, k, v)
    wrong = max(gpu_rivals.error(call()[:1], q[:1], k[:1], v[:1]) for call in calls)
    return min(microseconds(call, flush) for call in calls), wrong


def plain_read(pages: Pages, flush: str) -> float:
    """Of all bytes of the pages, for a sum."""
    words = pages.data.view(torch.int64)
    return microseconds(words.sum, flush)


class Call(NamedTuple):
    """Attention of one shape over random codes."""

    q: torch.Tensor
    pages: Pages
    starts: Rows


def make_call(args: argparse.Namespace, index: int, name: str, page_size: int) -> Call:
    seqs, kv_heads, group, tokens = shape_of(args, index)
    pages = random_pages(name, args.dim, seqs, kv_heads, tokens, page_size or tokens, args.offsets)
    q = torch.randn(seqs * args.queries, kv_heads * group, args.dim, device=DEVICE, dtype=torch.bfloat16)
    if args.peak:  # the first key looks like all queries of its group at once: a score of about 3 √dim for each
        first = 3 * q.unflatten(1, (kv_heads, group)).sum(2)
        pages.lengths.zero_()
        ops.append(pages, first, first, backend="triton")
        pages.lengths.fill_(tokens)
    starts = rows_of("starts", None, seqs, seqs, pages.data.device)
    return Call(q, pages, Rows(args.queries * starts.starts) if args.queries > 1 else starts)


def shape_of(args: argparse.Namespace, index: int) -> tuple[int, int, int, int]:
    seqs, kv_heads, group, tokens = SHAPES[index]
    return args.seqs or seqs, kv_heads, args.group or group, args.tokens or tokens


def scoring_of(args: argparse.Namespace, threshold: float) -> Scoring:
    first = min(4, args.uncompressed)
    return Scoring(softcap=args.softcap, recent=args.uncompressed, first=first, threshold=threshold)


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    """Meanwhile, kernels are chosen and cut as for this way's GPU, or every call is the portable kernel's."""
    with contextlib.ExitStack() as stack:
        if way == "portable":
            for path in ("decode_path", "extend_path"):
                stack.enter_context(mock.patch.object(dispatch, path, return_value=None))
        elif way != "own":
            stack.enter_context(target.assuming(target.parsed(way), target.device_type()))
        yield


def decode(call: Call, scoring: Scoring) -> torch.Tensor:
    return dispatch.attend(call.q, Attention(call.pages, call.starts, scoring)).out


def wanted(call: Call, scoring: Scoring) -> torch.Tensor:
    """float64 on the same codes, of the first sequence."""
    q, pages, starts = call
    one = dataclasses.replace(pages, table=pages.table[:1].contiguous(), lengths=pages.lengths[:1].contiguous())
    first = q[: q.shape[0] // pages.seqs].double()
    return reference.attend(first, Attention(one, Rows(starts.starts[:2]), scoring)).out


def error(call: Call, scoring: Scoring, truth: torch.Tensor | None = None) -> float:
    """Relative, of the first sequence."""
    truth = wanted(call, scoring) if truth is None else truth
    return float((decode(call, scoring)[: truth.shape[0]].double() - truth).norm() / truth.norm())


BASELINE = [  # options of its rows
    "--pages 64",
    "--pages 64 --flush read",
    "--shapes 2 --pages 64 --formats k2v2 k2/v2:uniform k4v2 k3/v3:minifloat k3v3 k3/v4:minifloat",
    "--shapes 2 --pages 64 --formats k8v4 k8/v4:minifloat k8v8 k8:cubic/v4:minifloat k8:cubic/v4 k8:cubic/v8:cubic",
    "--shapes 2 --pages 64 --formats k5v4 k6v4 k5v5 k6v6 k4v5",
    "--shapes 2 --pages 64 --dim 64",
    "--shapes 2 --pages 64 --dim 64 --flush read",
    "--shapes 2 --pages 64 --dim 256",
    "--shapes 2 --pages 64 --dim 256 --formats k3v3 k5v4 k6v6 k8v4",
    "--shapes 2 --pages 0",
    "--shapes 2 --pages 64 --group 8 --formats k3/v3:minifloat k5v4 k8v4 k8:cubic/v4:minifloat",
    "--shapes 2 --pages 64 --queries 4",
    "--shapes 2 --pages 64 --group 16",
    "--shapes 2 --pages 64 --offsets",
    "--shapes 2 --pages 64 --offsets --uncompressed 64",
    "--shapes 2 --pages 64 --softcap 30",
    "--shapes 2 5 --pages 64 --tokens 128",
]
OTHER_SHAPES = [  # against what they took before the decode kernel served them
    "--shapes 2 --pages 64 --ways own portable --dim 64 --formats k4v2 k2v2 k3v3 k5v5 k6v6 k5v4"
    " k4:lloyd-max/v4:lloyd-max",
    "--shapes 2 --pages 64 --ways own portable --dim 80 --formats k4v4 k4v2 k2v2 k3v3 k5v5 k6v6 k8v4 k8v8",
    "--shapes 2 --pages 64 --ways own portable --dim 96 --formats k4v4 k4v2 k2v2 k3v3 k5v5 k6v6 k8v4 k8v8",
    "--shapes 2 --pages 64 --ways own portable --dim 512 --formats k4v4 k4v2 k2v2 k3v3 k5v5 k6v6 k8v4",
    "--shapes 2 --pages 64 --ways own portable --formats k4:lloyd-max/v4:lloyd-max k4:f32/v4:f32"
    " k4:lloyd-max:f32/v4:lloyd-max:f32",
    "--shapes 2 --pages 64 --formats k4:lloyd-max/v4 k4/v4:lloyd-max k3:lloyd-max/v3:lloyd-max k3:f32/v3:f32"
    " k2:lloyd-max/v2:lloyd-max k2:f32/v2:f32",
    "--shapes 2 --pages 64 --dim 256 --formats k4:lloyd-max/v4:lloyd-max",
    "--shapes 2 --pages 64 --group 8 --formats k4:lloyd-max/v4:lloyd-max k4:f32/v4:f32",
]
WITHOUT_TMA = [
    "--pages 64 --ways own 8.0 --formats k4v4 k3v3 k2v2 k8v4",
    "--shapes 2 --pages 16 --ways own 8.0 --formats k4v4 k3v3 k2v2 k8v4",
]
THRESHOLDS = [  # weights so alike that no tile drops out; all tiles of so many sequences drop out but the first ones
    "--shapes 2 --pages 64 --threshold 0 1e-5 --formats k4v4 k2v2 k6v6 k8v4",
    "--shapes 5 --pages 64 --group 4 --seqs 256 --peak --threshold 0 1e-5 --formats k4v4 k2v2 k6v6 k8v4",
]
LINES = {"baseline": BASELINE, "other-shapes": OTHER_SHAPES, "without-tma": WITHOUT_TMA, "thresholds": THRESHOLDS}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--baseline", action="store_true", help="all of --lines")
    parser.add_argument("--lines", nargs="+", choices=LINES, help="instead of other options")
    parser.add_argument("--formats", nargs="*", default=["k4/v4:minifloat", "k4v4"])
    parser.add_argument("--pages", nargs="*", type=int, default=[64, 0], help="page sizes; 0: one page a sequence")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", type=int, default=range(len(SHAPES)))
    parser.add_argument("--flush", choices=("write", "read"), default="write")
    parser.add_argument("--queries", type=int, default=1, help="of each sequence; bf16 attention then sees all keys")
    parser.add_argument("--group", type=int, help="query heads of a KV head instead of the shape's")
    parser.add_argument("--seqs", type=int, help="instead of the shape's")
    parser.add_argument("--tokens", type=int, help="instead of the shape's")
    parser.add_argument("--offsets", action="store_true", help="calibrated keys and values")
    parser.add_argument("--uncompressed", type=int, default=0, help="recent tokens that another call scores")
    parser.add_argument("--softcap", type=float)
    parser.add_argument(
        "--threshold", nargs="+", type=float, default=[0.0], help="of weights whose values may be skipped"
    )
    parser.add_argument("--peak", action="store_true", help="the first key has nearly all of the weight")
    parser.add_argument(
        "--ways", nargs="+", default=["own"], help="own, portable, or of a compute capability such as 8.0"
    )
    parser.add_argument("--rivals", action="store_true", help="other packages, where they are installed")
    parser.add_argument("--jobs", type=int, help="processes that compile kernels before any is timed")
    parser.add_argument("--json")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    sets = [args]
    if args.baseline or args.lines:
        own = {name: vars(args)[name] for name in ("baseline", "lines", "jobs", "json")}
        if vars(args) != {**vars(parser.parse_args([])), **own}:
            parser.error("--baseline and --lines have their own options")
        sets = [parser.parse_args(line.split()) for name in args.lines or LINES for line in LINES[name]]
    if args.jobs:
        compile_before(sets, args.jobs)
    for each in sets:
        save(args.json, measure(each))


def compile_before(sets: list[argparse.Namespace], jobs: int) -> None:
    """Every kernel that `measure` will call, into Triton's cache of compiled kernels."""
    begin = time.perf_counter()
    calls = [
        (args, i, name, size) for args in sets for i in args.shapes for name in args.formats for size in args.pages
    ]
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for call in [pool.submit(call_once, *call) for call in calls]:
            if (failure := call.exception()) is not None:  # `measure` will say it again, or has the memory
                print(f"not compiled: {failure!s:.200}", flush=True)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def call_once(args: argparse.Namespace, index: int, name: str, page_size: int) -> None:
    call = make_call(args, index, name, page_size)
    for threshold in args.threshold:
        for way in args.ways:
            with going(way):
                decode(call, scoring_of(args, threshold))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # for the other processes


def save(path: str | None, rows: list[dict[str, Any]]) -> None:
    """Add rows to those of a file, each with the commit that it is of."""
    if path is None:
        return
    file = pathlib.Path(path)
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    new = [{**row, "commit": run.stdout.strip()} for row in rows]
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    file.write_text(json.dumps({**device, "rows": known + new}, indent=1) + "\n")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of one set of options."""
    rows: list[dict[str, Any]] = []
    refused = {name: gpu_rivals.why_not(name) for name in gpu_rivals.RIVALS} if args.rivals else {}
    for name, reason in refused.items():
        print(f"{name}: {reason or 'is timed'}")
    rivals = [name for name, reason in refused.items() if reason is None]
    options = {"flush": args.flush, "queries": args.queries, "uncompressed": args.uncompressed, "softcap": args.softcap}
    options = {**options, "offsets": args.offsets, "peak": args.peak}
    for index in args.shapes:
        seqs, kv_heads, group, tokens = shape_of(args, index)
        whose, base = sdpa_bf16(seqs, kv_heads, group, tokens, args.dim, args.flush, args.queries)
        print(f"({seqs},{kv_heads},{group},{tokens}) D={args.dim} {whose} bf16 {base:.1f} us", flush=True)
        for name in rivals:
            us, wrong = rival(name, seqs, kv_heads, group, tokens, args.dim, args.flush)
            if not wrong < RIVAL_ERROR:
                print(f"  {name}: WRONG, error {wrong:.1e}", flush=True)
                continue
            shape = {"shape": [seqs, kv_heads, group, tokens], "dim": args.dim, "page": gpu_rivals.PAGE}
            times = {"us": us, "bf16_us": base, "ratio": base / us, "error": wrong}
            rows.append({"flush": args.flush, "rival": name, **shape, **times})
            print(f"  {name:24}: {us:6.1f} us x{base / us:.2f} error {wrong:.1e}", flush=True)
        for name, page_size in ((name, size) for name in args.formats for size in args.pages):
            call = make_call(args, index, name, page_size)
            truth = wanted(call, scoring_of(args, 0.0))
            refusal = launch.why_not_call(call.q, call.pages, scoring_of(args, 0.0), "fast")
            assert refusal is None, refusal
            read = seqs * kv_heads * tokens * call.pages.format.bytes_per_token
            bound = plain_read(call.pages, args.flush)
            for threshold, way in ((threshold, way) for threshold in args.threshold for way in args.ways):
                scoring = scoring_of(args, threshold)
                with going(way):
                    wrong = error(call, scoring, truth)
                    right = wrong < 6e-3  # bf16 output alone is 2e-3
                    us = microseconds(functools.partial(decode, call, scoring), args.flush) if right else 0.0
                about = f"  {name:16} pages {page_size or 'one':>4}{f' {way}' * (way != 'own')}"
                about += f" threshold {threshold}" * (threshold > 0)
                if not right:
                    print(f"{about}: WRONG, error {wrong:.1e}", flush=True)
                    continue
                rows.append({
                    **options, "threshold": threshold, "way": way,
                    "shape": [seqs, kv_heads, group, tokens], "dim": args.dim, "format": name, "page": page_size,
                    "us": us, "bf16": whose, "bf16_us": base, "ratio": base / us, "TB/s": read / us / 1e6,
                    "read_us": bound, "error": wrong,
                })  # fmt: skip
                print(
                    f"{about}: {us:6.1f} us {read / us / 1e6:.2f} TB/s"
                    f" x{base / us:.2f} error {wrong:.1e}, read alone {bound:.1f} us", flush=True,
                )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()

"""Many queries on a long context: the kernel of this GPU, that of older ones and the portable one, against torch's
flash attention (FlashAttention 2) and cuDNN on bf16, in one process, correctness first.

    python benchmarks/gpu_extend.py [--ways own 8.0 portable] [--formats k4v4] [--queries 2048] [--jobs 16] --json FILE

Times are medians of CUDA-graph replays with a cold L2 cache, of one sequence of 32K tokens in pages of 64 whose last
tokens are the queries. Rows are added to a file that exists.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
from typing import Any

import gpu
import gpu_decode
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows
from aurakv.backends.triton import dispatch
from aurakv.storage.pages import Pages

WAYS = ["own", "8.0", "portable"]
REPEATS = 15


def make_call(name: str, queries: int) -> tuple[Tensor, Pages, Rows, Tensor, Tensor]:
    """Queries, pages, where the queries are; keys and values as they were."""
    torch.manual_seed(0)
    shape = gpu.Shape("extend", 1, 8, 4, 32768, queries, 128, name, 64)
    pages = gpu.make_pages(shape)
    k, v = gpu.fill(pages, shape)
    q = torch.randn(queries, shape.kv_heads * shape.group, shape.dim, device="cuda", dtype=torch.bfloat16)
    return q, pages, Rows(torch.tensor([0, queries], device="cuda", dtype=torch.int32)), k, v


def attend(q: Tensor, pages: Pages, rows: Rows) -> Tensor:
    return dispatch.attend(q, Attention(pages, rows, Scoring())).out


def compile_call(name: str, queries: int, ways: list[str]) -> None:
    q, pages, rows, _, _ = make_call(name, queries)
    for way in ways:
        with gpu_decode.going(way):
            attend(q, pages, rows)
    torch.cuda.synchronize()


def sdpa_times(q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Microseconds of torch's flash attention and of cuDNN's, where they serve this."""
    q, k, v = q[None].transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    mask = causal_lower_right(q.shape[2], k.shape[2])

    def step() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                found[backend.name] = gpu_decode.microseconds(step, "write", REPEATS)
        except RuntimeError as refusal:
            print(f"  {backend.name}: {str(refusal).splitlines()[0]:.100}", flush=True)
    return found


def measure(name: str, queries: int, ways: list[str]) -> list[dict[str, Any]]:
    q, pages, rows, k, v = make_call(name, queries)
    bf16 = sdpa_times(q, k, v)
    print(f"{queries} queries: {', '.join(f'{whose} {us:.0f} us' for whose, us in bf16.items())}", flush=True)
    results: list[dict[str, Any]] = []
    for way in ways:
        with gpu_decode.going(way):
            wrong = gpu.check(q, pages, queries, attend(q, pages, rows))
            if not wrong < gpu.TOLERANCE:
                print(f"  {name} {way}: WRONG, error {wrong:.1e}", flush=True)
                continue
            us = gpu_decode.microseconds(lambda: attend(q, pages, rows), "write", REPEATS)
        about = {"format": name, "queries": queries, "tokens": 32768, "way": way}
        results.append({**about, "us": us, "bf16_us": bf16, "error": wrong})
        ratios = ", ".join(f"{whose} x{each / us:.2f}" for whose, each in bf16.items())
        print(f"  {name} {way:9}: {us:7.0f} us, {ratios}, error {wrong:.1e}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["k4v4", "k3v3", "k8v4"])
    parser.add_argument("--queries", nargs="+", type=int, default=[512, 2048, 4096])
    parser.add_argument("--ways", nargs="+", default=WAYS, help="own, portable, or of a compute capability such as 8.0")
    parser.add_argument("--jobs", type=int, help="processes that compile kernels before any is timed")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.jobs:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool:
            calls = [pool.submit(compile_call, *each, [way]) for each in cases(args) for way in args.ways]
            for call in calls:
                if (failure := call.exception()) is not None:  # `measure` will say it again, or has the memory
                    print(f"not compiled: {failure!s:.200}", flush=True)
    for name, queries in cases(args):
        gpu_decode.save(args.json, measure(name, queries, args.ways))
        torch.cuda.empty_cache()


def cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    return [(name, queries) for name in args.formats for queries in args.queries]


if __name__ == "__main__":
    main()

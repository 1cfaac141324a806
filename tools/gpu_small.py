"""A small run of every kernel, for compute-sanitizer: appends, decode and verification on both paths, extend, merges.

PYTHONPATH=src compute-sanitizer --tool memcheck python tools/gpu_small.py
PYTHONPATH=src compute-sanitizer --tool racecheck python tools/gpu_small.py
PYTHONPATH=src compute-sanitizer --tool racecheck python tools/gpu_small.py --control

--capability 8.0 runs the kernels that such a GPU would, --runs 0 12 the first twelve.

racecheck finds nothing but hazards between the words through which Triton hands a warp group its task and arguments, in
`extend_kernel`. They lie on both sides of a barrier of all warps; racecheck seems to count how many barriers a warp has
passed, and the first warps have passed some of their own. The control shows that without anything of ours, in kernels
that do nothing but hand a number over: reported are the two in which the first warps meet more often than the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import aurakv as kv
from aurakv.attention import ops
from aurakv.backends.triton.common import target
from aurakv.backends.triton.common.gluon_names import meet
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

# format, dim, page size, queries of each sequence, options of attend
RUNS = [
    ("k4v4", 128, 64, 1, {}),
    ("k4/v4:minifloat", 64, 64, 1, {"scoring": kv.Scoring(window=100, sinks=4)}),
    ("k3v3", 128, 64, 1, {}),
    ("k3v4", 128, 16, 1, {}),
    ("k4v4", 128, 16, 4, {"scoring": kv.Scoring(window=100, sinks=4)}),
    ("k3/v3:minifloat", 128, 300, 1, {}),
    ("k2v2", 128, 64, 4, {}),
    ("k2/v2:uniform", 128, 64, 1, {"scoring": kv.Scoring(window=20, sinks=4)}),  # one launch
    ("k8v8", 64, 64, 4, {}),
    ("k8v4", 128, 64, 1, {"scoring": kv.Scoring(softcap=20.0)}),
    ("k5v4", 128, 64, 1, {}),
    ("k6v6", 256, 64, 4, {}),
    ("k4v5", 128, 300, 1, {"scoring": kv.Scoring(window=20, sinks=4)}),
    ("k4v4", 128, 64, 2, {"scoring": kv.Scoring(softcap=20.0)}),  # and an offset: see below
    ("k4v4", 128, 64, 100, {}),
    ("k3v2", 64, 128, 100, {"splits": 2}),
    ("k8v5", 128, 64, 100, {}),
    ("k6v8", 64, 64, 100, {"splits": 2}),
    ("k5v6", 96, 16, 1, {"splits": 3}),
    ("k4v4", 128, 64, 1, {"precision": "float32"}),
    ("k16v3", 64, 48, 3, {}),
    ("k4v4", 80, 64, 1, {}),  # in pieces
    ("k5v4", 96, 16, 4, {}),
    ("k3v3", 512, 64, 1, {}),
    ("k6v2", 64, 300, 4, {}),
    ("k4:lloyd-max/v4:lloyd-max", 128, 64, 1, {"scoring": kv.Scoring(threshold=1e-3)}),
    ("k4:f32/v4:f32", 128, 16, 4, {}),
]
LONG = [("k4v4", 128), ("k3v2", 64), ("k4v4", 256)]


@gluon.jit
def store_number(p, n, MEET: gl.constexpr):
    if MEET:
        meet()
    gl.store(p, n)


@gluon.jit
def hand_over(p, BEFORE: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Two warp groups that store a number each. Where they meet, it is a group alone: the first one before it hands the
    number over, each one behind."""
    n = gl.load(p + 2)
    if BEFORE:
        meet()
    gl.warp_specialize([(store_number, (p, n, FIRST)), (store_number, (p + 1, n, SECOND))], [4], [24])


def control() -> None:
    for name, barriers in {
        "no barriers": (False, False, False),
        "one of the first group before": (True, False, False),
        "one of the first group behind": (False, True, False),
        "one of the second group": (False, False, True),
        "one of each": (False, True, True),
    }.items():
        numbers = torch.tensor([0, 0, 1], dtype=torch.int32, device="cuda")
        hand_over[(1,)](numbers, *barriers, num_warps=4)
        torch.cuda.synchronize()
        print(name, numbers.tolist(), flush=True)


def small(name: str, dim: int, page: int, queries: int, options: dict[str, Any]) -> None:
    device, lengths = torch.device("cuda"), [300, 0, 77]
    format = Format.parse(name, dim)
    width = -(-max(lengths) // page)
    pages = Pages(
        format, page, allocate(format, page, len(lengths) * width, 2, device),
        torch.randperm(len(lengths) * width, device=device, dtype=torch.int32).view(-1, width).contiguous(),
        torch.zeros(len(lengths), dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    x = torch.randn(sum(lengths), 2, dim, device=device, dtype=torch.bfloat16)
    ops.append(pages, x, x, [0, 300, 300, 377], backend="triton")
    starts = [0, queries, queries, 2 * queries] if queries > 1 else None
    if queries == 2:  # the last sequence has no queries, and a key offset enters the scores
        pages = dataclasses.replace(pages, key_offset=torch.randn(2, dim, device=device))
        starts = [0, 2, 4, 4]
    tokens = starts[-1] if starts else len(lengths)
    q = torch.randn(tokens, 8, dim, device=device, dtype=torch.bfloat16)
    part = kv.attend(q, pages, starts, backend="triton", **options)
    torch.cuda.synchronize()
    assert bool(part.out.isfinite().all()), (name, dim)
    if queries == 1:
        ops.append(pages, x[:3], x[:3], backend="triton")  # where the first page has room for 300, it is refused
    print(name, dim, page, queries, "fine", flush=True)


def long(name: str, dim: int) -> None:
    """An append of so many vectors that each warp has its own."""
    device = torch.device("cuda")
    format = Format.parse(name, dim)
    pages = Pages(
        format, 64, allocate(format, 64, 160, 2, device),
        torch.randperm(160, device=device, dtype=torch.int32).view(2, 80).contiguous(),
        torch.tensor([0, 7], dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    x = torch.randn(9001, 2, dim, device=device, dtype=torch.bfloat16)
    ops.append(pages, x, x, [0, 4800, 9001], backend="triton")
    assert pages.lengths.tolist() == [4800, 4208]
    print(name, dim, "long append fine", flush=True)


def main(first: int, last: int) -> None:
    torch.manual_seed(0)
    steps = [*(functools.partial(small, *run) for run in RUNS), *(functools.partial(long, *run) for run in LONG)]
    for step in steps[first:last]:
        step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", action="store_true", help="only what Triton does by itself")
    parser.add_argument("--capability", help="kernels as on such a GPU, for example 8.0")
    parser.add_argument("--runs", nargs=2, type=int, default=(0, len(RUNS) + len(LONG)), help="from, to")
    args = parser.parse_args()
    if args.capability:
        target.assume(target.parsed(args.capability))
    control() if args.control else main(*args.runs)

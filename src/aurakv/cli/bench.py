"""aurakv bench: attention on codes beside torch on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..bench import bandwidth, decode, machine, plot
from ..bench.timing import timer_for
from ..errors import InputError
from ..format.codec import Format
from . import frame, loading

TOKENS = {"cpu": [1024, 4096, 16384, 65536], "cuda": [2048, 8192, 32768, 131072]}
FORMATS = ["k8v8", "k8v4", "k4v4", "k2v2"]


def add(subparsers: Any) -> None:
    parser = frame.command(
        subparsers,
        "bench",
        run,
        "time attention on codes beside torch, on this machine",
        "One decode call (one query per sequence, one layer) for each number of tokens and each format, beside the\n"
        "fastest bfloat16 attention of torch over uncompressed keys and values. The methods take turns; each result\n"
        "is first checked against float64 on the same codes. GB/s are compressed bytes; their share of the memory\n"
        "bandwidth measured in the same run says how much is left to win.",
        [
            "aurakv bench",
            "aurakv bench --tokens 4K,32K --formats k4v4,k8v4 --batch 4 --plot bench.png",
            "aurakv bench --device cuda --heads 64 --page 64 --json",
        ],
    )
    parser.add_argument("--tokens", type=frame.token_list, metavar="LIST",
                        help="numbers of tokens (default 1K,4K,16K,64K; on a GPU 2K,8K,32K,128K)")  # fmt: skip
    parser.add_argument("--formats", type=frame.names, default=FORMATS, metavar="LIST",
                        help=f"formats, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--batch", type=frame.count, default=1, help="sequences (default 1)")
    parser.add_argument("--heads", type=frame.count, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=frame.count, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-dim", type=frame.count, default=128, help="dimension of a head (default 128)")
    parser.add_argument("--page", type=frame.count, help="tokens a page (default one page per sequence)")
    parser.add_argument("--backend", help="a backend by name (default the best; see aurakv info)")
    parser.add_argument("--device", help="cpu, cuda, … (default a GPU that torch can use, else the CPU)")
    parser.add_argument("--threads", type=frame.threads, help="of the CPU (default what torch takes)")
    parser.add_argument("--rounds", type=frame.count, default=7, help="samples of each method (default 7)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="save a picture of the cost over tokens (.png, .svg, .pdf)"
    )


def run(args: argparse.Namespace) -> None:
    screen, device = frame.Screen(args), loading.device(args)
    if args.heads % args.kv_heads:
        raise InputError(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
    for name in args.formats:
        with frame.entry(name):
            Format.parse(name, args.head_dim)  # refused now, not after minutes
    if args.plot is not None:
        frame.picture(args.plot)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    timer = timer_for(device, args.rounds)
    lengths = args.tokens or TOKENS.get(device.type, TOKENS["cpu"])
    rows: list[dict[str, Any]] = []
    with screen.progress("measuring the memory bandwidth", len(lengths) + 1) as step:
        speed = bandwidth.read(device, timer)
        for tokens in lengths:
            step(text=f"{tokens:,} tokens")
            shape = decode.Shape(args.batch, args.heads, args.kv_heads, args.head_dim, tokens, args.page)
            rows += decode.decode(timer, shape, args.formats, device, args.backend)
    for row in rows:
        if "GB/s" in row:
            row["of read bandwidth"] = round(row["GB/s"] * 1e9 / speed, 3)
    facts = machine.facts(device)
    about = f"{args.batch} × {args.heads} query heads, {args.kv_heads} KV heads of dimension {args.head_dim}"
    screen.say(
        f"{facts['device']}, {facts['threads']} threads, torch {torch.__version__}; reads {speed / 1e9:,.1f} GB/s"
    )
    screen.table(
        f"decode, {about}",
        [">tokens", "method", ">a call", ">GB/s", ">of bandwidth", ">times torch bf16"],
        [(f"{r['tokens']:,}", r["method"], frame.time_text(r["us"] / 1e6), r.get("GB/s", ""),
          f"{r['of read bandwidth']:.0%}" if "GB/s" in r else "", r.get("times bf16", "")) for r in rows],
    )  # fmt: skip
    if args.plot is not None:
        plot.growth(rows, f"A decode call on {facts['device'].split(',')[0]}: {about}", args.plot)
        screen.say(f"picture: {args.plot}")
    screen.result({**facts, "bandwidth": speed, "rows": rows, "plot": None if args.plot is None else str(args.plot)})

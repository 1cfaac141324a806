"""aurakv bench: attention on codes against torch, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import CapacityError, InputError, counted
from . import arguments, loading
from .screen import Screen, bytes_text, time_text

if TYPE_CHECKING:
    import torch

TOKENS = {"cpu": [1024, 4096, 16384, 65536], "cuda": [2048, 8192, 32768, 131072]}
FORMATS = ["k8v8", "k8v4", "k4v4", "k2v2"]


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "bench",
        run,
        "time attention on codes against torch, on this machine",
        "One decode call (one query per sequence, one layer) for each number of tokens and each format, against the\n"
        "fastest bfloat16 attention of torch over uncompressed keys and values. The methods take turns; each result\n"
        "is first checked against float64 on the same codes. GB/s are compressed bytes; their share of the memory\n"
        "bandwidth measured in the same run says how much is left to win.\n"
        "--device mps times the Metal backend: emulated on Linux; not yet run on an Apple GPU.",
        [
            "aurakv bench",
            "aurakv bench --tokens 4K,32K --formats k4v4,k8v4 --batch 4 --plot bench.png",
            "aurakv bench --device cuda --heads 64 --page 64 --json",
        ],
        check,
    )
    parser.add_argument("--tokens", type=arguments.token_list, metavar="LIST",
                        help="numbers of tokens (default 1K,4K,16K,64K; on a GPU 2K,8K,32K,128K)")  # fmt: skip
    parser.add_argument("--formats", type=arguments.names, default=FORMATS, metavar="LIST",
                        help=f"formats, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--batch", type=arguments.count, default=1, help="sequences (default 1)")
    parser.add_argument("--heads", type=arguments.count, default=32, help="query heads (default 32)")
    parser.add_argument("--kv-heads", type=arguments.count, default=8, help="KV heads (default 8)")
    parser.add_argument("--head-dim", type=arguments.count, default=128, help="dimension of a head (default 128)")
    parser.add_argument("--page", type=arguments.count, help="tokens a page (default one page per sequence)")
    parser.add_argument("--backend", help="a backend by name (default the best; see aurakv info)")
    parser.add_argument("--device", help="cpu, cuda, mps, … (default cuda where torch can use it, else cpu)")
    parser.add_argument("--threads", type=arguments.threads, help="of the CPU (default what torch takes)")
    parser.add_argument("--rounds", type=arguments.count, default=7, help="samples of each method (default 7)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="save a picture of the cost over tokens (.png, .svg, .pdf)"
    )


def check(args: argparse.Namespace) -> None:
    arguments.check_formats(args.formats, policies=False)
    if args.heads % args.kv_heads:
        raise InputError(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
    if args.plot is not None:
        arguments.picture(args.plot)


def run(args: argparse.Namespace) -> None:
    import torch

    from ..bench import bandwidth, decode, machine, plot
    from ..bench.timing import timer_for
    from ..format.codec import Format

    screen, device = Screen(args), loading.device(args)
    for name in args.formats:
        with arguments.entry(name):
            Format.parse(name, args.head_dim)  # refused now, not after minutes
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    timer = timer_for(device, args.rounds)
    lengths = args.tokens or TOKENS.get(device.type, TOKENS["cpu"])
    least = args.batch * max(lengths) * args.kv_heads * args.head_dim * 4  # of the keys alone, before they are encoded
    memory = machine.memory(device)
    if memory is not None and least > memory:
        raise CapacityError(
            f"--batch and --tokens must fit into the {bytes_text(memory)} of {device}, got {args.batch:,} × "
            f"{max(lengths):,} tokens, whose keys take {bytes_text(least)} before they are encoded"
        )
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
    facts, limit = machine.facts(device), _limit(device, args.backend, args.formats[0], args.head_dim)
    heads = f"{args.batch} × {counted(args.heads, 'query head')}, {counted(args.kv_heads, 'KV head')}"
    about = f"{heads} of dimension {args.head_dim}"
    screen.say(
        f"{facts['device']}, {counted(facts['threads'], 'thread')}, torch {torch.__version__};"
        f" reads {speed / 1e9:,.1f} GB/s"
    )
    if limit is not None:
        screen.say(limit)
    screen.table(
        f"decode, {about}",
        [">tokens", "method", ">a call", ">GB/s", ">of bandwidth", ">times torch bf16"],
        [(f"{r['tokens']:,}", r["method"], time_text(r["us"] / 1e6), r.get("GB/s", ""),
          f"{r['of read bandwidth']:.0%}" if "GB/s" in r else "", r.get("times bf16", "")) for r in rows],
    )  # fmt: skip
    line = _line(facts, speed, about, rows)
    screen.say(f"to send us, or to compare: {line}")
    if args.plot is not None:
        plot.growth(rows, f"A decode call on {facts['device'].split(',')[0]}: {about}", args.plot)
        screen.say(f"picture: {args.plot}")
    picture = None if args.plot is None else str(args.plot)
    screen.result({**facts, "bandwidth": speed, "rows": rows, "line": line, "plot": picture, "limit": limit})


def _limit(device: torch.device, backend: str | None, format: str, head_dim: int) -> str | None:
    """What whoever reads these times must know about the backend."""
    from .. import backends
    from ..backends import metal
    from ..format.codec import Format

    chosen = backends.select(backend, Format.parse(format, head_dim), device)
    return f"{chosen.name}: {metal.LIMIT}" if isinstance(chosen, metal.Metal) else None


def _line(facts: dict[str, Any], speed: float, about: str, rows: list[dict[str, Any]]) -> str:
    """The machine, what the largest number of tokens took on it, and by which backend and kernel, in one line."""
    known = facts["versions"]
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "triton") if name in known)
    most = max(row["tokens"] for row in rows)
    times = [
        f"{row['method']} {row['us']:.1f} µs"
        + (f" ×{row['times bf16']}" if row.get("times bf16") else "")
        + (f" ({row['runs']})" if "runs" in row else "")
        for row in rows
        if row["tokens"] == most
    ]
    where = f"aurakv {__version__}, {versions}; {facts['device']}, reads {speed / 1e9:,.0f} GB/s"
    return f"{where}; {about}, {most:,} tokens: {'; '.join(times)}"

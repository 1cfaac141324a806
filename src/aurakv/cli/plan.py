"""aurakv plan: what fits into a memory budget, and what a decode step reads."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InputError
from . import arguments
from .screen import Screen, bytes_text, time_text

FORMATS = ["k16v16", "k8v8", "k8v4", "k6v4", "k4v4", "k3v3", "k2v2"]


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "plan",
        run,
        "show what fits into memory, in each format",
        "For a model and a memory budget for its cache: how many tokens one sequence can have, how many sequences of\n"
        "a given length fit, and what each decode step reads and how long that takes at least. Layers that attend in\n"
        "a sliding window hold a ring of fixed size and are counted so, as are tokens kept uncompressed (the first 4,\n"
        "or what a policy says). The weights of the model are not included.",
        [
            "aurakv plan --memory 2GiB",
            "aurakv plan --memory 40GB --tokens 32K --model path/to/model --bandwidth 3.35TB",
            "aurakv plan --memory 16GiB --layers 32 --kv-heads 8 --head-dim 128 --formats k8v4,k4v4",
            "aurakv plan --memory 16GiB --layers 32 --kv-heads 8 --head-dim 128 --window 4096 --window-layers 16",
        ],
        check,
    )
    parser.add_argument("--memory", type=arguments.size, required=True, help="bytes for the cache, e.g. 8GiB")
    parser.add_argument("--tokens", type=arguments.tokens, default=4096, help="length of a sequence (default 4096)")
    parser.add_argument("--formats", type=arguments.names, default=FORMATS, metavar="LIST",
                        help=f"formats and policies, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--model", help="local path or hub id of a model (default SmolLM2-135M-Instruct)")
    parser.add_argument("--layers", type=arguments.count, help="attention layers (instead of --model)")
    parser.add_argument("--kv-heads", type=arguments.count, help="KV heads per layer")
    parser.add_argument("--head-dim", type=arguments.count, help="head dimension")
    parser.add_argument("--window", type=arguments.tokens, help="tokens that layers with a sliding window see")
    parser.add_argument("--window-layers", type=arguments.count, help="how many layers have it (default all)")
    parser.add_argument(
        "--dtype", choices=arguments.DTYPES, help="of the uncompressed cache (default what the model says, else bf16)"
    )
    parser.add_argument("--bandwidth", type=arguments.size, help="bytes a second, e.g. 3.35TB (default measured here)")


def check(args: argparse.Namespace) -> None:
    arguments.check_formats(args.formats)
    numbers = (args.layers, args.kv_heads, args.head_dim)
    if not any(numbers):
        if args.window or args.window_layers:
            raise InputError(
                "--window and --window-layers belong to --layers: a model says itself which layers have one"
            )
        return
    if not all(numbers) or args.model is not None:
        raise InputError("a model is --model, or --layers, --kv-heads and --head-dim together")
    if (args.window_layers and not args.window) or (args.window_layers or 0) > args.layers:
        raise InputError(f"--window-layers needs a --window and is at most --layers, got {args.window_layers}")


def run(args: argparse.Namespace) -> None:
    from ..bench import bandwidth, machine
    from .fitting import describe, dtype_name, model_of, row

    screen, model = Screen(args), model_of(args)
    device = machine.devices()[0]
    speed = args.bandwidth or bandwidth.read(device)
    rows = []
    for name in args.formats:
        with arguments.entry(name):
            rows.append(row(model, name, args.memory, args.tokens, speed))
    layers = {layer: model.layers.count(layer) for layer in model.layers}
    screen.say(f"{model.name}: " + "; ".join(describe(layer, n) for layer, n in layers.items()))
    if model.uncounted:
        screen.say(f"{model.uncounted} layers keep something else than the keys and values of all tokens: not counted")
    measured = "given" if args.bandwidth else f"measured on {machine.device_name(device)}"
    screen.say(f"{bytes_text(args.memory)} for the cache; {speed / 1e9:,.1f} GB/s, {measured}")
    screen.table(
        "",
        ["format", ">bytes a token", ">smaller", ">tokens of one sequence", f">sequences of {args.tokens:,}",
         ">read per step", ">takes at least"],
        [(r["format"], f"{r['bytes_per_token']:,}", f"{r['smaller']:.2f}x", f"{r['tokens']:,}", f"{r['sequences']:,}",
          bytes_text(r["read_per_step"]), time_text(r["seconds_per_step"])) for r in rows],
    )  # fmt: skip
    rings = any(layer.window is not None for layer in model.layers)
    screen.say(
        "bytes a token: what one more token adds" + (", windows being full; " if rings else "; ")
        + f"smaller: a sequence of {args.tokens:,} tokens against {dtype_name(model)};\n"
        "read per step: the cache that one sequence of this length reads for its next token, in all layers;\n"
        "while a sequence grows, it holds up to 1/64 more than it needs"
    )  # fmt: skip
    screen.result(
        {
            "model": model.name,
            "layers": [{**layer._asdict(), "count": n} for layer, n in layers.items()],
            "uncounted_layers": model.uncounted,
            "dtype": dtype_name(model),
            "memory": args.memory,
            "tokens": args.tokens,
            "bandwidth": speed,
            "bandwidth_measured": not args.bandwidth,
            "rows": rows,
        }
    )

"""aurakv plan: what fits into a memory budget, and what a decode step reads."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from .. import models
from ..bench import bandwidth, machine
from ..calibration.policy import FIRST, ROLLBACK, Policy, format_of
from ..errors import InputError
from ..format.codec import DTYPE_NAMES, DTYPES, Format
from ..storage.page_table import MAX_LENGTH, Kept, round_up
from ..storage.uncompressed import Uncompressed
from . import frame

FORMATS = ["k16v16", "k8v8", "k8v4", "k6v4", "k4v4", "k3v3", "k2v2"]


class Layer(NamedTuple):
    """What an attention layer stores for each token of a sequence."""

    kv_heads: int
    head_dim: tuple[int, int]  # of keys and of values
    window: int | None

    def held(self, format: Format, tokens: int) -> int:
        """Bytes of a sequence of so many tokens, in the page layout: contiguous, or the ring of a window."""
        if self.window is None:
            return format.layout(round_up(tokens, 64)).bytes * self.kv_heads
        pages = min(Kept.of(self.window, rollback=ROLLBACK).width(64), -(-tokens // 64))
        return format.layout(64).bytes * self.kv_heads * pages

    def uncompressed(self, uncompressed: Uncompressed, tokens: int) -> int:
        """Bytes of the tokens that lie there uncompressed, too."""
        rows = uncompressed.page_size(min(tokens, uncompressed.first)) if uncompressed.first else 0
        if uncompressed.recent:
            rows = 16 * min(
                Kept(uncompressed.recent, uncompressed.first, 16, uncompressed.rollback).width(16), -(-tokens // 16)
            )
        return rows * sum(self.head_dim) * uncompressed.dtype.itemsize * self.kv_heads

    def read(self, format: Format, tokens: int) -> int:
        """Bytes that the attention of one new token reads."""
        visible = tokens if self.window is None else min(tokens, self.window)
        return format.bytes_per_token * self.kv_heads * visible


class Model(NamedTuple):
    name: str
    layers: list[Layer]
    dtype: torch.dtype  # what the uncompressed cache holds
    uncounted: int = 0  # layers that keep something else than keys and values of all tokens


def add(subparsers: Any) -> None:
    parser = frame.command(
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
    )
    parser.add_argument("--memory", type=frame.size, required=True, help="bytes for the cache, e.g. 8GiB")
    parser.add_argument("--tokens", type=frame.tokens, default=4096, help="length of a sequence (default 4096)")
    parser.add_argument("--formats", type=frame.names, default=FORMATS, metavar="LIST",
                        help=f"formats and policies, separated by commas (default {','.join(FORMATS)})")  # fmt: skip
    parser.add_argument("--model", help="local path or hub id of a model (default SmolLM2-135M-Instruct)")
    parser.add_argument("--layers", type=frame.count, help="instead of a model: its attention layers, with …")
    parser.add_argument("--kv-heads", type=frame.count, help="… KV heads in each …")
    parser.add_argument("--head-dim", type=frame.count, help="… of this dimension")
    parser.add_argument("--window", type=frame.tokens, help="tokens that layers with a sliding window see")
    parser.add_argument("--window-layers", type=frame.count, help="how many layers have it (default all)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the uncompressed cache (default what the model says, else bf16)"
    )
    parser.add_argument("--bandwidth", type=frame.size, help="bytes a second, e.g. 3.35TB (default measured here)")


def run(args: argparse.Namespace) -> None:
    screen, model = frame.Screen(args), _model(args)
    device = machine.devices()[0]
    speed = args.bandwidth or bandwidth.read(device)
    rows = []
    for name in args.formats:
        with frame.entry(name):
            rows.append(_row(model, name, args.memory, args.tokens, speed))
    layers = {layer: model.layers.count(layer) for layer in model.layers}
    screen.say(f"{model.name}: " + "; ".join(_describe(layer, n) for layer, n in layers.items()))
    if model.uncounted:
        screen.say(f"{model.uncounted} layers keep something else than the keys and values of all tokens: not counted")
    measured = "given" if args.bandwidth else f"measured on {machine.device_name(device)}"
    screen.say(f"{frame.bytes_text(args.memory)} for the cache; {speed / 1e9:,.1f} GB/s, {measured}")
    screen.table(
        "",
        ["format", ">bytes a token", ">smaller", ">tokens of one sequence", f">sequences of {args.tokens:,}",
         ">read per step", ">takes at least"],
        [(r["format"], f"{r['bytes_per_token']:,}", f"{r['smaller']:.2f}x", f"{r['tokens']:,}", f"{r['sequences']:,}",
          frame.bytes_text(r["read_per_step"]), frame.time_text(r["seconds_per_step"])) for r in rows],
    )  # fmt: skip
    rings = any(layer.window is not None for layer in model.layers)
    screen.say(
        "bytes a token: what one more token adds" + (", windows being full; " if rings else "; ")
        + f"smaller: a sequence of {args.tokens:,} tokens against {_dtype_name(model)};\n"
        "read per step: the cache that one sequence of this length reads for its next token, in all layers;\n"
        "while a sequence grows, it holds up to 1/64 more than it needs"
    )  # fmt: skip
    screen.result(
        {
            "model": model.name,
            "layers": [{**layer._asdict(), "count": n} for layer, n in layers.items()],
            "uncounted_layers": model.uncounted,
            "dtype": _dtype_name(model),
            "memory": args.memory,
            "tokens": args.tokens,
            "bandwidth": speed,
            "bandwidth_measured": not args.bandwidth,
            "rows": rows,
        }
    )


def _row(model: Model, name: str, memory: int, tokens: int, speed: float) -> dict[str, Any]:
    names, first, recent = _formats(model, name)
    pairs = [(layer, format_of(x, layer.head_dim, model.dtype)) for layer, x in zip(model.layers, names, strict=True)]
    kept = Uncompressed(first, recent, model.dtype, ROLLBACK)
    coded = [layer for layer, format in pairs if format.key.coded or format.value.coded]

    def held(count: int) -> int:
        codes = sum(layer.held(format, count) for layer, format in pairs)
        return codes + sum(layer.uncompressed(kept, count) for layer in coded)

    without = sum(
        sum(layer.head_dim) * layer.kv_heads * model.dtype.itemsize * min(tokens, layer.window or tokens)
        for layer in model.layers
    )
    read = sum(layer.read(format, tokens) for layer, format in pairs)
    return {
        "format": name,
        "bytes_per_token": sum(f.bytes_per_token * layer.kv_heads for layer, f in pairs if layer.window is None),
        "bytes_per_sequence": held(tokens),
        "smaller": without / held(tokens),
        "tokens": _most(held, memory),
        "sequences": memory // held(tokens),
        "read_per_step": read,
        "seconds_per_step": read / speed,
    }


def _formats(model: Model, name: str) -> tuple[list[str], int, int]:
    """The format of each layer, and how many first and recent tokens are uncompressed: of a policy or of one format."""
    policy = Policy.find(name)
    if policy is None:
        return [name] * len(model.layers), FIRST, 0
    for layer in model.layers:
        policy.check_model(len(model.layers), layer.kv_heads, layer.head_dim[0])
    return [layer.format for layer in policy.layers], policy.first, policy.recent


def _most(held: Any, memory: int) -> int:
    """The largest number of tokens whose bytes fit."""
    low, high = 0, MAX_LENGTH
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held(middle) <= memory else (low, middle - 1)
    return low


def _model(args: argparse.Namespace) -> Model:
    numbers = (args.layers, args.kv_heads, args.head_dim)
    if any(numbers):
        if not all(numbers) or args.model is not None:
            raise InputError("a model is --model, or --layers, --kv-heads and --head-dim together")
        if (args.window_layers and not args.window) or (args.window_layers or 0) > args.layers:
            raise InputError(f"--window-layers needs a --window and is at most --layers, got {args.window_layers}")
        windows = (args.window_layers or args.layers) if args.window else 0
        dims = (args.head_dim, args.head_dim)
        layers = [Layer(args.kv_heads, dims, args.window if n < windows else None) for n in range(args.layers)]
        return Model("a model", layers, DTYPES[args.dtype or "bf16"])
    if args.window or args.window_layers:
        raise InputError("--window and --window-layers belong to --layers: a model says itself which layers have one")
    if args.model is None:
        count, kv_heads, dim = models.SHAPE
        made = [Layer(kv_heads, (dim, dim), None)] * count
        return Model("SmolLM2-135M-Instruct", made, DTYPES[args.dtype or "f32"])
    from ..hf import support

    config = models.config(args.model)
    shapes = support.shapes(config)
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    dtype = stored if args.dtype is None and stored in DTYPE_NAMES else DTYPES[args.dtype or "bf16"]
    found = [Layer(*shape) for shape in shapes if shape is not None]
    return Model(str(args.model), found, dtype, uncounted=shapes.count(None))


def _describe(layer: Layer, count: int) -> str:
    key, value = layer.head_dim
    dims = f"{key}" if key == value else f"{key} (keys) and {value} (values)"
    window = "" if layer.window is None else f" that see the last {layer.window:,} tokens"
    return f"{count} layers{window} with {layer.kv_heads} KV heads of dimension {dims}"


def _dtype_name(model: Model) -> str:
    return str(model.dtype).removeprefix("torch.")

"""aurakv calibrate: what the keys of a model teach, kept for engines that serve it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import arguments, loading
from .screen import Screen, time_text

if TYPE_CHECKING:
    from ..calibration.calibration import Calibration

TOKENS = 2048


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "calibrate",
        run,
        "measure the keys of a model once, for vLLM",
        "The model reads a text. Offset and scale of the keys of each layer and head, and how far attention would\n"
        "move at each width, are kept in the cache folder of this user under the identity of the model: its\n"
        "configuration and weights. vLLM with aurakv finds them there when it starts, and makes them\n"
        "itself where there are none.",
        [
            "aurakv calibrate path/to/model",
            "aurakv calibrate path/to/model --text report.txt",
            "aurakv calibrate path/to/model --out calibration.json  # to look at, or to move to another machine",
        ],
        check,
    )
    parser.add_argument("model", help="local path or hub id")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text (default two chapters of Alice in Wonderland)"
    )
    parser.add_argument("--tokens", type=arguments.tokens, default=TOKENS, help=f"to read (default {TOKENS})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it here as well")
    loading.add_place(parser)


def check(args: argparse.Namespace) -> None:
    if args.out is not None:
        if args.out.suffix != ".json":
            raise InputError(f"--out must be a .json file, got {args.out}")
        arguments.in_folder(args.out)


def run(args: argparse.Namespace) -> None:
    from ..calibration import texts
    from ..calibration.guard import LOST, ON_AVERAGE
    from ..calibration.identity import identity_of
    from ..hf.calibrate import calibrate
    from ..models import folder_of

    screen = Screen(args)
    text = texts.builtin() if args.text is None else texts.read(args.text)
    loaded = loading.load(args, screen)
    identity = identity_of(folder_of(args.model))
    ids = texts.ids_of(text, loaded.tokenizer, loaded.model.config)[:, : args.tokens]
    source = f"{ids.shape[1]:,} tokens of {'alice' if args.text is None else args.text.stem}"
    begin = time.perf_counter()
    with screen.progress(f"reading {ids.shape[1]:,} tokens", ids.shape[1], lines=True) as step:
        made = calibrate(loaded.model, ids, source, identity, step)
    path = made.keep()
    if args.out is not None:
        args.out.write_text(made.dumps(), "utf-8")
    rows = [(f"k{bits}", *(f"{x:.2g}" for x in moved)) for bits, moved in movements(made).items()]
    screen.table("", ["keys", ">worst layer", ">mean", ">plain: worst", ">mean"], rows)
    screen.say(
        f"nats by which attention moves, in {len(made.layers)} layers, over {made.source}; a layer is lost above"
        f" {LOST}, and above {ON_AVERAGE} on average a model loses some quality.\n"
        f"kept in {path} ({time_text(time.perf_counter() - begin)})"
    )
    screen.result({"path": str(path), "model": identity, "source": made.source, "moved": movements(made)})


def movements(made: Calibration) -> dict[int, tuple[float, ...]]:
    """Worst layer and mean of all, calibrated and plain, by the width of keys."""
    from ..calibration.calibration import WIDTHS

    found = {}
    for bits in reversed(WIDTHS):
        nats = [[layer.nats(bits, plain) for layer in made.layers.values()] for plain in (False, True)]
        found[bits] = tuple(number for each in nats for number in (max(each), sum(each) / len(each)))
    return found

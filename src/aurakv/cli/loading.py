"""The model of a command: which one, where, and loading it."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from . import arguments
from .screen import Screen

if TYPE_CHECKING:
    import torch

DEFAULT = "SmolLM2-135M-Instruct"


class Loaded(NamedTuple):
    name: str
    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def longest(self) -> int | None:
        """How many tokens the model was made for."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"local path or hub id (default {DEFAULT}, which needs no hub)")
    add_place(parser)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where a model runs, and how."""
    parser.add_argument("--device", help="cpu, cuda, mps, … (default cuda where torch can use it, else cpu)")
    parser.add_argument("--dtype", choices=arguments.DTYPES, help="of the model (default f32 on a CPU, bf16 elsewhere)")
    parser.add_argument("--threads", type=arguments.threads, help="of the CPU (default what torch takes)")


def device(args: argparse.Namespace) -> torch.device:
    """The device that was asked for, if torch can use it here."""
    import torch

    from ..arguments import usable_device

    if args.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(args.device, "--device")


def load(args: argparse.Namespace, screen: Screen) -> Loaded:
    """The model and its tokenizer, with a line on stderr while it takes time."""
    import torch

    from .. import models
    from ..format.codec import DTYPES

    place = device(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype or ("f32" if place.type == "cpu" else "bf16")]
    name = DEFAULT if args.model is None else str(args.model)
    with screen.progress(f"loading {name}") as step:
        models.quiet()
        model, tokenizer = models.load(args.model, dtype, report=lambda line: step(text=line))
        model.to(place)
    warnings.filterwarnings("ignore", message=".*max_length.*")
    return Loaded(name, model, tokenizer)

"""The command `aurakv`: one file per command, each with `add(subparsers)` and `run(args)`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import __version__, hub
from ..errors import AuraError, cut, missing
from . import arguments, bench, calibrate, demo, eval, generate, info, plan, tune

if TYPE_CHECKING:
    from types import ModuleType

COMMANDS: tuple[ModuleType, ...] = (demo, generate, eval, tune, calibrate, bench, plan, info)  # in the order of --help

_EXTRAS = {"rich": "cli", "matplotlib": "cli", "safetensors": "files", "triton": "gpu"}
_EXTRAS |= dict.fromkeys(("transformers", "tokenizers", "accelerate", "gguf", "huggingface_hub"), "hf")
LONGEST = 800  # characters of an error, whoever made it
_WITH_MODEL = ("demo", "generate", "eval", "tune", "calibrate")


def parser() -> argparse.ArgumentParser:
    made = arguments.Parser(
        prog="aurakv",
        description="A KV cache at 2-8 bits per coordinate, with attention computed directly on the packed codes.",
        epilog="aurakv COMMAND --help explains a command and shows examples.",
    )
    made.add_argument("--version", action="version", version=f"aurakv {__version__}")
    subparsers = made.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(subparsers)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. What a user can do something about is one sentence on stderr and the code 2."""
    made = parser()
    args, unknown = made.parse_known_args(argv)
    if args.command is None and not unknown:
        made.print_help()
        return 0
    if args.command is None:
        made.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the help of the command, not of all
    try:
        args.check(args)
        if getattr(args, "model", None) is not None:
            hub.check(args.model)
        args.run(args)
        sys.stdout.flush()
    except AuraError as error:
        return _fail(args, str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extras = {"cli", _EXTRAS[package], *(["hf"] if args.command in _WITH_MODEL else [])}  # all, to install once
        return _fail(args, missing(package, *extras))
    except BrokenPipeError:  # the reader of a pipe has gone, which is no error; do not let the exit flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        named = error.filename and error.strerror
        return _fail(args, f"{cut(str(error.filename), 200)}: {error.strerror}" if named else str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _fail(args: argparse.Namespace, sentence: str) -> int:
    print(f"aurakv {args.command}: {cut(' '.join(sentence.split()), LONGEST)}", file=sys.stderr)
    return 2

"""aurakv generate: text from a model with the compressed cache, streamed; without a prompt a chat."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AuraError, InputError
from . import arguments, loading
from .screen import Screen

if TYPE_CHECKING:
    from .chat import Chat

TOP_P, TOP_K, SEED = 0.95, 0, 0  # of sampling
HELP = "/reset starts over, /quit leaves, Ctrl-C stops an answer"


def add(subparsers: Any) -> None:
    parser = arguments.command(
        subparsers,
        "generate",
        run,
        "generate text with the compressed cache, or chat",
        "With a prompt (or text on stdin): one answer. Without: a chat, whose turns share one cache, so that\n"
        f"each computes only what is new; {HELP}. Statistics go to stderr.",
        [
            "aurakv generate  # chat with SmolLM2-135M-Instruct",
            'aurakv generate --prompt "Why is the sky blue?" --format k4v4',
            'aurakv generate --file book.txt --prompt "Who is the story about?" --temperature 0',
            'aurakv generate --raw --prompt "Once upon a time" --max-tokens 64 --format none',
        ],
        check,
    )
    parser.add_argument("--prompt", help="what to answer, or with --raw to continue")
    parser.add_argument("--file", type=Path, help="a text to put before the prompt; - reads stdin")
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    parser.add_argument("--system", help="a system message for the chat template")
    parser.add_argument(
        "--format",
        default="k8v4",
        help="format or policy of the cache, or none for the uncompressed one (default k8v4)",
    )
    parser.add_argument(
        "--first", type=arguments.natural, help="first tokens that stay uncompressed (default 4, or as a policy says)"
    )
    parser.add_argument(
        "--recent",
        type=arguments.natural,
        help="most recent tokens that stay uncompressed (default 0, or as a policy says)",
    )
    parser.add_argument("--max-tokens", type=arguments.tokens, default=512, help="of an answer (default 512)")
    parser.add_argument(
        "--temperature", type=arguments.fraction, default=0.7, help="0 always takes the likeliest token (default 0.7)"
    )
    parser.add_argument(
        "--top-p", type=arguments.share, help=f"sample among tokens of this total probability (default {TOP_P})"
    )
    parser.add_argument(
        "--top-k", type=arguments.natural, help=f"and among so many likeliest ones (default {TOP_K}, all)"
    )
    parser.add_argument("--seed", type=arguments.natural, help=f"of the sampling (default {SEED})")
    loading.add_options(parser)


def check(args: argparse.Namespace) -> None:
    arguments.check_formats([args.format], "--format", [arguments.AUTO, arguments.UNCOMPRESSED], instead="--recent")
    if args.format == arguments.UNCOMPRESSED and not (args.first is None and args.recent is None):
        raise InputError(f"--first and --recent belong to compressed formats, got --format {args.format}")
    if args.raw and args.system is not None:
        raise InputError("--system belongs to the chat template, which --raw leaves out")
    if args.temperature == 0 and not (args.top_p is None and args.top_k is None and args.seed is None):
        raise InputError("--top-p, --top-k and --seed belong to sampling, and --temperature 0 does not sample")


def run(args: argparse.Namespace) -> None:
    prompt = _prompt(args)
    if prompt is None and (args.json or not sys.stdin.isatty()):
        raise InputError("there is nothing to answer: give a --prompt, a --file or text on stdin")
    from .chat import Chat

    screen = Screen(args)
    loaded = loading.load(args, screen)
    chat = Chat(loaded, args, screen)
    if prompt is not None:
        answer = chat.answer(prompt, _silent if screen.json else _write)
        screen.say()
        if not screen.json:
            screen.note(chat.statistics(answer))
        screen.result(answer)
        return
    screen.note(f"{loaded.name}, {args.format}, {loaded.device}; {HELP}")
    while (line := _line()) is not None:
        if line == "/reset":
            chat.reset()
        elif line.startswith("/"):
            screen.note(HELP)
        elif line:
            _turn(chat, line, screen)


def _turn(chat: Chat, line: str, screen: Screen) -> None:
    try:
        answer = chat.answer(line, _write)
    except KeyboardInterrupt:  # the layers of the cache may be unequal now
        chat.forget()
        screen.say()
        screen.note("stopped")
    except AuraError as error:
        screen.note(f"{error}: /reset starts over")
    else:
        screen.say()
        screen.note(chat.statistics(answer))


def _prompt(args: argparse.Namespace) -> str | None:
    parts = []
    if args.file is not None:
        parts.append(sys.stdin.read() if str(args.file) == "-" else arguments.read_text(args.file))
    elif args.prompt is None and not sys.stdin.isatty():
        parts.append(sys.stdin.read())
    if args.prompt is not None:
        parts.append(args.prompt)
    return "\n\n".join(parts).strip() or None


def _line() -> str | None:
    """A line of the user; None to leave."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line in ("/quit", "/exit") else line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _silent(text: str) -> None:
    pass

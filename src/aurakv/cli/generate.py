"""aurakv generate: text from a model with the compressed cache, streamed; without a prompt a chat."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import AuraError, InputError
from . import frame, loading

TOP_P, TOP_K, SEED = 0.95, 0, 0  # of sampling
HELP = "/reset starts over, /quit leaves, Ctrl-C stops an answer"


def add(subparsers: Any) -> None:
    parser = frame.command(
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
    parser.add_argument("--first", type=frame.natural, help="so many first tokens stay uncompressed")
    parser.add_argument("--recent", type=frame.natural, help="and so many most recent ones")
    parser.add_argument("--max-tokens", type=frame.tokens, default=512, help="of an answer (default 512)")
    parser.add_argument(
        "--temperature", type=frame.fraction, default=0.7, help="0 always takes the likeliest token (default 0.7)"
    )
    parser.add_argument(
        "--top-p", type=frame.share, help=f"sample among tokens of this total probability (default {TOP_P})"
    )
    parser.add_argument("--top-k", type=frame.natural, help=f"and among so many likeliest ones (default {TOP_K}, all)")
    parser.add_argument("--seed", type=frame.natural, help=f"of the sampling (default {SEED})")
    loading.add_options(parser)


def run(args: argparse.Namespace) -> None:
    from ..hf.choose import UNCOMPRESSED

    screen = frame.Screen(args)
    if args.format == UNCOMPRESSED and not (args.first is None and args.recent is None):
        raise InputError(f"--first and --recent belong to compressed formats, got --format {UNCOMPRESSED}")
    if args.raw and args.system is not None:
        raise InputError("--system belongs to the chat template, which --raw leaves out")
    if args.temperature == 0 and not (args.top_p is None and args.top_k is None and args.seed is None):
        raise InputError("--top-p, --top-k and --seed belong to sampling, and --temperature 0 does not sample")
    prompt = _prompt(args)
    if prompt is None and (args.json or not sys.stdin.isatty()):
        raise InputError("there is nothing to answer: give a --prompt, a --file or text on stdin")
    loaded = loading.load(args, screen)
    chat = Chat(loaded, args)
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


def _turn(chat: Chat, line: str, screen: frame.Screen) -> None:
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


class Chat:
    """The turns of a conversation and the cache that holds what the model has read of them."""

    def __init__(self, loaded: loading.Loaded, args: argparse.Namespace) -> None:
        self.loaded, self.args = loaded, args
        if not args.raw and getattr(loaded.tokenizer, "chat_template", None) is None:
            raise InputError(f"{loaded.name} has no chat template: use --raw and a --prompt to continue a text")
        torch.manual_seed(SEED if args.seed is None else args.seed)
        self.reset()

    def reset(self) -> None:
        self.turns = [] if self.args.system is None else [{"role": "system", "content": self.args.system}]
        self.forget()

    def forget(self) -> None:
        """An empty cache; the turns remain."""
        from ..hf.choose import choose

        uncompressed = {"first": self.args.first, "recent": self.args.recent}
        given = {name: number for name, number in uncompressed.items() if number is not None}
        self.cache = choose(self.loaded.model, self.args.format, **given)
        self.read: list[int] = []  # the tokens in the cache

    def answer(self, prompt: str, write: Callable[[str], None]) -> dict[str, Any]:
        """Text and statistics of an answer; the turn is part of the conversation from now on."""
        from ..evaluation.tensors import bytes_of

        turns = [*self.turns, {"role": "user", "content": prompt}]
        ids = self._ids(turns)
        reused = self._reuse(ids)
        stream = Stream(self.loaded.tokenizer, write)
        started = time.perf_counter()
        made = self.loaded.model.generate(
            torch.tensor([ids], device=self.loaded.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.loaded.device),
            past_key_values=self.cache,
            streamer=stream,
            max_new_tokens=self.args.max_tokens,
            pad_token_id=self.loaded.tokenizer.pad_token_id or 0,
            **self._sampling(),
        )[0].tolist()
        self.read = made[: self.cache.get_seq_length()]
        self.turns = [*turns, {"role": "assistant", "content": stream.text}]
        held = bytes_of(self.cache)
        return {
            "text": stream.text,
            "format": self.args.format,
            "prompt_tokens": len(ids),
            "reused_tokens": reused,
            "tokens": len(made) - len(ids),
            "seconds_to_first_token": stream.times[0] - started,
            "tokens_per_second": stream.speed,
            "cache_tokens": len(self.read),
            "cache_bytes": held,
            "compresses_from": getattr(self.cache, "waits_for", None),
        }

    def statistics(self, answer: dict[str, Any]) -> str:
        held, tokens = answer["cache_bytes"], answer["cache_tokens"]
        speed = "" if answer["tokens_per_second"] is None else f" at {answer['tokens_per_second']:.1f} tokens/s"
        size = f"{held / max(1, tokens):,.0f} bytes a token"
        if answer["compresses_from"] is not None:
            size = (
                f"still uncompressed, with queries to measure keys by; compresses from {answer['compresses_from']} on"
            )
        return (
            f"{answer['tokens']} tokens{speed}, the first after {frame.time_text(answer['seconds_to_first_token'])};"
            f" prompt: {answer['prompt_tokens']:,} tokens, {answer['reused_tokens']:,} of them known;"
            f" cache {self.args.format}: {tokens:,} tokens in {frame.bytes_text(held)}, {size}"
        )

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if self.args.raw:
            ids = tokenizer(turns[-1]["content"])["input_ids"]
        else:
            ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True),
                            add_special_tokens=False)["input_ids"]  # fmt: skip
        longest = self.loaded.longest
        if not ids:
            raise InputError("there is nothing to answer: the prompt has no tokens")
        if longest is not None and len(ids) + self.args.max_tokens > longest:
            raise InputError(
                f"prompt and answer must stay within the {longest:,} tokens of this model,"
                f" got {len(ids):,} and --max-tokens {self.args.max_tokens:,}"
            )
        return ids

    def _reuse(self, ids: list[int]) -> int:
        """Keep what the cache and the new prompt have in common, all but the last token, which must be computed."""
        same = next(
            (n for n, (a, b) in enumerate(zip(self.read, ids, strict=False)) if a != b), min(len(self.read), len(ids))
        )
        keep = min(same, len(ids) - 1)
        if keep < len(self.read):
            try:
                self.cache.crop(keep - len(self.read))
            except AuraError:  # a sliding window no longer holds what came before
                keep = 0
            if keep == 0:
                self.forget()
            self.read = self.read[:keep]
        return keep

    def _sampling(self) -> dict[str, Any]:
        if self.args.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {
            "do_sample": True,
            "temperature": self.args.temperature,
            "top_p": TOP_P if self.args.top_p is None else self.args.top_p,
            "top_k": TOP_K if self.args.top_k is None else self.args.top_k,
        }


class Stream:
    """What `model.generate` calls with the prompt and then with every token: writes text as soon as it is whole."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] | None = None
        self.times: list[float] = []
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self.ids is None:  # the prompt
            self.ids = []
            return
        self.times.append(time.perf_counter())
        self.ids += value.flatten().tolist()
        self._show(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def end(self) -> None:
        self._show(self.tokenizer.decode(self.ids or [], skip_special_tokens=True), last=True)

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first one."""
        count = len(self.times) - 1
        return count / (self.times[-1] - self.times[0]) if count > 0 else None

    def _show(self, text: str, last: bool = False) -> None:
        if last or not text.endswith("\ufffd"):  # half a character
            self.write(text[len(self.text) :])
            self.text = text


def _prompt(args: argparse.Namespace) -> str | None:
    parts = []
    if args.file is not None:
        parts.append(sys.stdin.read() if str(args.file) == "-" else frame.read_text(args.file))
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

"""A conversation with a model, and the cache that holds what the model has read of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from ..errors import AuraError, InputError, counted
from .generate import SEED, TOP_K, TOP_P
from .loading import Loaded
from .screen import Screen, bytes_text, time_text

CHUNK = 2048  # tokens of a long prompt that are read at a time: the first of them calibrate the keys
SHORT = 256  # of a prompt that needs no progress


class Chat:
    """The turns of a conversation and the cache that holds what the model has read of them."""

    def __init__(self, loaded: Loaded, args: argparse.Namespace, screen: Screen) -> None:
        self.loaded, self.args, self.screen = loaded, args, screen
        if not args.raw and getattr(loaded.tokenizer, "chat_template", None) is None:
            raise InputError(f"{loaded.name} has no chat template: use --raw and a --prompt to continue a text")
        torch.manual_seed(SEED if args.seed is None else args.seed)
        self.reset()

    def reset(self) -> None:
        self.turns = [] if self.args.system is None else [{"role": "system", "content": self.args.system}]
        self.forget()

    def forget(self) -> None:
        """An empty cache; the turns remain."""
        from ..hf.cache_names import cache_named

        uncompressed = {"first": self.args.first, "recent": self.args.recent}
        given = {name: number for name, number in uncompressed.items() if number is not None}
        self.cache = cache_named(self.loaded.model, self.args.format, **given)
        self.read: list[int] = []  # the tokens in the cache

    def answer(self, prompt: str, write: Callable[[str], None]) -> dict[str, Any]:
        """Text and statistics of an answer; the turn is part of the conversation from now on."""
        from ..evaluation.tensors import bytes_of

        turns = [*self.turns, {"role": "user", "content": prompt}]
        ids = self._ids(turns)
        reused = self._reuse(ids)
        stream = Stream(self.loaded.tokenizer, write)
        started = time.perf_counter()
        self._prefill(ids, reused)
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
        first = time_text(answer["seconds_to_first_token"])
        return (
            f"{counted(answer['tokens'], 'token')}{speed}, the first after {first};"
            f" prompt: {counted(answer['prompt_tokens'], 'token')}, {answer['reused_tokens']:,} of them known;"
            f" cache {self.args.format}: {counted(tokens, 'token')} in {bytes_text(held)}, {size}"
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

    @torch.no_grad()
    def _prefill(self, ids: list[int], start: int) -> None:
        """Read a long prompt up to its last token, which generate reads: generate would show nothing meanwhile."""
        from ..hf.progress import forward

        if len(ids) - start <= SHORT:
            return
        with self.screen.progress(f"reading {len(ids):,} tokens", len(ids), lines=True) as step:
            step(start)
            while start < len(ids) - 1:
                piece = torch.tensor([ids[start : min(start + CHUNK, len(ids) - 1)]], device=self.loaded.device)
                forward(self.loaded.model, step, piece.shape[1], piece, past_key_values=self.cache, logits_to_keep=1)
                start += piece.shape[1]

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

"""Speed of a model's decoding with several caches, which take turns token by token in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .timing import alone, wait

WARM = 3  # steps of each cache that are not counted, if there are more


class Run:
    """One cache of a model and the text that it leads to. `attention` is the attention function that goes with it."""

    def __init__(self, name: str, model: Any, cache: Any, attention: str) -> None:
        self.name, self.model, self.cache, self.attention = name, model, cache, attention
        self.next = torch.empty(1, 0, dtype=torch.long)
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, chunk: int = 256, step: Callable[[], None] = lambda: None) -> None:
        """Read what the cache does not hold yet of ids [1, n]; the last of them is what decoding begins with."""
        self.model.set_attn_implementation(self.attention)
        held = self.cache.get_seq_length()
        for start in range(held, ids.shape[1] - 1, chunk):
            piece = ids[:, start : min(start + chunk, ids.shape[1] - 1)].to(self.model.device)
            self.model(piece, past_key_values=self.cache, logits_to_keep=1)
            step()
        self.next = ids[:, -1:].to(self.model.device)

    @torch.no_grad()
    def decode(self, realtime: bool = False) -> None:
        """Read one token and choose the likeliest next one."""
        self.model.set_attn_implementation(self.attention)
        wait(self.model.device)
        with alone(realtime):
            began = time.perf_counter()
            logits = self.model(self.next, past_key_values=self.cache, logits_to_keep=1).logits
            self.next = logits[:, -1:].argmax(-1)
            wait(self.model.device)
            self.seconds.append(time.perf_counter() - began)
        self.tokens.append(int(self.next))

    @property
    def tokens_per_second(self) -> float:
        return 1 / statistics.median(self.seconds[WARM:] or self.seconds)


def decode(runs: Sequence[Run], steps: int, step: Callable[[], None] = lambda: None, *, realtime: bool = False) -> None:
    """So many tokens of each run. Every token is computed, also after the end of an answer: times stay comparable."""
    for _ in range(steps):
        for run in runs:
            run.decode(realtime)
            step()

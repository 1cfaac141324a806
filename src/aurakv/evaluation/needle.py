"""Needles: facts inserted into real text at several depths, and whether the model finds each of them in the end.

All needles of a length stand in one text, "The password of the lighthouse is 40716.", each with another place. After
the text the model reads "The password of the lighthouse is" and predicts the digits, teacher-forced: a needle is found
if every token of the answer is the most likely one, which is when greedy decoding writes it. Each question starts from
a copy of the cache as the text left it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..calibration.texts import ids_of
from ..errors import InputError
from ..hf import AuraCache, register
from ..hf.attention import NAME
from ..hf.progress import forward
from .measure import REFERENCE, Progress
from .reads import reads_of

PLACES = ("lighthouse", "library", "bakery", "station", "museum", "harbour", "garden", "theatre", "castle", "market")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIGITS = 5


@dataclass(frozen=True)
class Found:
    """One needle in one cache."""

    name: str
    tokens: int  # of the text with its needles
    depth: float  # 0: at its beginning, 1: at its end
    found: bool
    nll: float  # mean negative log likelihood of the tokens of the answer
    tokens_from_codes: int


class Question(NamedTuple):
    depth: float
    ids: Tensor  # [1, cue and answer]
    answer: int  # tokens at their end


def search(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    caches: Mapping[str, Callable[[], Cache]],
    *,
    tokens: int,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    chunk: int = 256,
    reference: bool = True,
    progress: Progress | None = None,
) -> list[Found]:
    """Every needle in the uncompressed cache (if `reference`), then in each of the caches, in `tokens` of a text."""
    ids, questions = haystack(tokenizer, model.config, text, tokens, depths, seed)
    ids = ids.to(model.device)
    register()
    before = model.config._attn_implementation
    makers: dict[str, Callable[[], Cache]] = {REFERENCE: lambda: DynamicCache(config=model.config)} if reference else {}
    makers |= caches
    rows: list[Found] = []
    done = 0.0

    def more(amount: float) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(round(done, 6), len(makers))

    try:
        for name, make in makers.items():
            cache = make()
            model.set_attn_implementation(NAME if isinstance(cache, AuraCache) else before)
            coded = 0
            for start in range(0, tokens, chunk):
                stop = min(start + chunk, tokens)
                options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
                with torch.no_grad():
                    forward(model, more if progress else None, (stop - start) / tokens, ids[:, start:stop], **options)
                coded = reads_of(cache, start, stop).tokens
            for question in questions:
                found, nll = _ask(model, copy.deepcopy(cache), question)
                rows.append(Found(name, tokens, question.depth, found, nll, coded))
    finally:
        model.set_attn_implementation(before)
    return rows


def haystack(
    tokenizer: Any, config: Any, text: str, tokens: int, depths: Sequence[float], seed: int
) -> tuple[Tensor, list[Question]]:
    """Ids [1, tokens] of a text with a needle at each depth, between two of its lines, and the questions."""
    if not 1 <= len(depths) <= len(PLACES) or not all(0 <= depth <= 1 for depth in depths):
        raise InputError(f"needles need from 1 to {len(PLACES)} depths between 0 and 1, got {list(depths)}")
    rng = random.Random(seed)
    needles: list[list[int]] = []
    questions: list[Question] = []
    for depth, place in zip(depths, rng.sample(PLACES, len(depths)), strict=True):
        cue, answer = f"The password of the {place} is", f" {rng.randrange(10**_DIGITS):0{_DIGITS}}"
        short, full = (_ids(tokenizer, x) for x in (cue, f"{cue}{answer}"))
        if full[: len(short)] != short:
            raise InputError("the tokenizer of this model must end a token after the word 'is'")
        needles.append(_ids(tokenizer, f"\n{cue}{answer}.\n"))
        questions.append(Question(depth, torch.tensor([_ids(tokenizer, "\n") + full]), len(full) - len(short)))
    room = tokens - sum(map(len, needles))
    if room < 2:
        raise InputError(f"{len(needles)} needles need a text of at least {tokens - room + 2} tokens, got {tokens}")
    hay = ids_of(text, tokenizer, config, room)[0].tolist()
    ends = [0, *(n + 1 for n, token in enumerate(hay) if "\n" in tokenizer.decode([token])), room]
    made, last = [], 0
    for depth, needle in sorted(zip(depths, needles, strict=True)):
        at = min((end for end in ends if end >= last), key=lambda end: abs(end - depth * room))
        at = max(at, 1)  # what a text begins with stays first
        made += hay[last:at] + needle
        last = at
    return torch.tensor([made + hay[last:]]), questions


@torch.no_grad()
def _ask(model: PreTrainedModel, cache: Cache, question: Question) -> tuple[bool, float]:
    ids = question.ids.to(model.device)
    logits = model(ids[:, :-1], past_key_values=cache, use_cache=True).logits[0, -question.answer :].float()
    answer = ids[0, -question.answer :]
    nll = torch.nn.functional.cross_entropy(logits, answer)
    return bool((logits.argmax(1) == answer).all()), float(nll)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)

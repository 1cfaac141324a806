"""Answers of engines side by side.

In float32 on a CPU answers must be equal. On a GPU engines compute in bfloat16, and a product is rounded differently in
batches of different sizes, with the stock backend as well: so where an answer leaves the expected one for the first
time, it must say a token that was nearly as likely there. A wrong token, of 512 with random weights, is about 6 nats
less likely than the best one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.helpers.gpu import EMULATED

ON_GPU = EMULATED or torch.cuda.is_available()
DTYPE = os.environ.get("VLLM_TEST_DTYPE") or ("bfloat16" if ON_GPU else "float32")
EXACT = DTYPE == "float32" and not ON_GPU
NEAR = 0.0 if EXACT else 0.7 if DTYPE == "bfloat16" else 0.02  # nats
NEAR_AT_4_BITS = 0.0 if EXACT else 3.5  # codes of 4 bits amplify rounding: on an H200 up to 2.3 were seen
LIKELY = 0 if EXACT else 8  # tokens of a position whose likelihood is asked for


def near(switch: str | bool | None) -> float:
    """How much less likely a token may be that an engine says instead of another, in nats."""
    return NEAR_AT_4_BITS if switch == "k4v4" else NEAR


class Answer(list[int]):
    """Token ids, and by how many nats each of the likely tokens was less likely than the best one."""

    def __init__(
        self, tokens: Sequence[int], behind: list[dict[int, float]] | None = None, chained: bool = True
    ) -> None:
        super().__init__(tokens)
        self.behind = behind or []
        self.chained = chained  # whether each token follows from those before it


def answer(tokens: Sequence[int], positions: Any, chained: bool = True) -> Answer:
    """From the logprobs that vLLM gives for each position, if it was asked."""
    behind = []
    for position in positions or []:
        best = max(each.logprob for each in position.values())
        behind.append({token: best - each.logprob for token, each in position.items()})
    return Answer(tokens, behind, chained)


def how_far(found: Sequence[int], expected: Sequence[int]) -> list[tuple[int, float]]:
    """Where an answer leaves the expected one, and how much less likely that was. Later tokens follow from it."""
    assert len(found) == len(expected)
    known = expected.behind if isinstance(expected, Answer) else []
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    if different and (not isinstance(expected, Answer) or expected.chained):
        different = different[:1]
    return [(i, known[i].get(found[i], math.inf) if known else math.inf) for i in different]


def wrong(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], near: float = NEAR) -> list[str]:
    """What cannot be explained by rounding, one line each."""
    return [
        f"prompt {number}, token {i} of {len(mine)}: {mine[i]} for {theirs[i]}, {nats:.2f} nats less likely"
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        for i, nats in how_far(mine, theirs)
        if nats > near
    ]


def equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], near: float = NEAR) -> int:
    """Tokens that are the expected ones. Where the answers part at a token that was nearly as likely, the others after
    it count as well."""
    total = 0
    for mine, theirs in zip(found, expected, strict=True):
        places = how_far(mine, theirs)
        bad = [i for i, nats in places if nats > near]
        if not isinstance(theirs, Answer) or not theirs.chained or not theirs.behind:
            total += sum(a == b for a, b in zip(mine, theirs, strict=True))
            total += len(places) - len(bad) if isinstance(theirs, Answer) and not theirs.chained else 0
        elif bad:
            total += bad[0]
        else:
            total += len(theirs)
    return total

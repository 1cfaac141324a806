"""Prompts that the tests of the vLLM plugin share, and the length of the contexts that they serve."""

import random
from pathlib import Path
from typing import NamedTuple

LENGTH = 2048
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")  # does not change
BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    TEXT[:2500],
    TEXT[3000:6000],
)


class Request(NamedTuple):
    kind: str
    prompt: str
    tokens: int


def mixture(count: int, kinds: tuple[str, ...]) -> list[Request]:
    """Requests of these kinds in turns: short, long, with a common prefix, to be aborted midway, beyond the limits."""
    draw = random.Random(0)

    def piece(low: int, high: int) -> str:
        start, length = draw.randrange(len(TEXT) - high), draw.randrange(low, high)
        return TEXT[start : start + length]

    make = {
        "short": lambda: piece(20, 120),
        "long": lambda: piece(800, 2000),
        "prefix": lambda: TEXT[:1000] + piece(20, 200),
        "abort": lambda: piece(200, 1500),
        "limit": lambda: 2 * TEXT,
    }
    return [Request(kind, make[kind](), draw.randrange(4, 40)) for kind in (kinds * count)[:count]]

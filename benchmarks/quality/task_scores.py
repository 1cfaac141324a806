"""How answers to GSM8K and RULER are scored, and how sure a score is. Standard library alone.

GSM8K. `strict`: the number behind the first `####`, as the examples in the prompt write it; `flexible`: the last number
of the answer. Commas, dollar signs and a final full stop do not count; the rest must equal the right answer, character
by character. Rows report the strict one as `score`.
RULER. The share of the expected words that the answer contains, in upper or lower case; for its two sets of questions
(`any`) 1 if it contains one of them.

Intervals are of 95%. Of a mean score it is Wilson's, which is wider than needed for scores between 0 and 1. Of the mean
difference of two caches on the same questions it is that of Agresti and Min (Statistics in Medicine 24, 2005): half a
question is added to each of the four cells (right or wrong with either cache), so that equal answers to a few questions
do not look like certainty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Z = 1.959964  # of the normal distribution, 95%
_BEHIND_MARK = re.compile(r"####\s*(-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


# answers


def strict(text: str) -> str | None:
    found = _BEHIND_MARK.search(text)
    return None if found is None else bare(found.group(1))


def flexible(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return bare(found[-1]) if found else None


def bare(number: str) -> str:
    return number.replace(",", "").replace("$", "").removesuffix(".")


def contained(text: str, expected: Sequence[str]) -> list[bool]:
    low = text.lower()
    return [each.lower() in low for each in expected]


def scores_of(kind: str, text: str, expected: Sequence[str]) -> dict[str, float]:
    """By name; `score` is the one that rows report."""
    if kind == "gsm8k":
        (right,) = expected
        return {"score": float(strict(text) == bare(right)), "flexible": float(flexible(text) == bare(right))}
    found = contained(text, expected)
    return {"score": float(any(found)) if kind == "any" else sum(found) / len(found)}


# intervals


def wilson(total: float, count: int) -> tuple[float, float]:
    """Of the mean of `count` scores between 0 and 1 that sum to `total`."""
    mean, extra = total / count, Z * Z / count
    middle = (mean + extra / 2) / (1 + extra)
    half = Z / (1 + extra) * math.sqrt(mean * (1 - mean) / count + extra / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Of the mean difference. A question that only one cache answers adds 1 to the sum of squares."""
    count, total = len(differences) + 2, sum(differences)
    squares = sum(each * each for each in differences) + 1
    middle, half = total / count, Z * math.sqrt(squares - total * total / count) / count
    return max(-1.0, middle - half), min(1.0, middle + half)

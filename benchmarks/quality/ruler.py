"""RULER's 13 tasks at a given length: written anew from their definitions (Hsieh et al., arXiv 2404.06654), with its
wording, essays and sets of questions.

`niah_*`: needles, sentences that give a key a magic value, in a haystack of essays, of one repeated line or of other
needles. `vt`: variables that are assigned one another; which have the value of the first? `cwe`: the ten words that
are listed 30 times, where the others are listed three times. `fwe`: the three most frequent of invented words whose
frequencies fall with the square of their rank (the first is dots). `qa_*`: a question with its documents among others.

The first sample of a task and length is about as large as its tokens and those of an answer allow; the others have the
same size, or less where that does not fit. Each is drawn by a generator of its own, seeded by task, length and number:
it does not depend on how many there are. Random numbers are not those of RULER's programs, so single samples differ.
With a chat template the task is the user's message, and RULER's beginning of the answer begins the assistant's.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from task_questions import Question

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40  # places in an essay where needles may be


class Asked(NamedTuple):
    """One task of a sample: what RULER's wording is filled with, and what an answer must contain."""

    fields: dict[str, Any]
    expected: list[str]
    before: str = ""  # a solved example
    one: bool = False  # one answer is asked for: the wording is singular


class Sources:
    """What `benchmarks/quality/prepare.py FOLDER tasks` has left in FOLDER/ruler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text("utf-8"))

    def _words(self, *kinds: str) -> list[str]:
        lines = (line.strip() for kind in kinds for line in (self.folder / f"{kind}list.txt").open(encoding="utf-8"))
        return sorted({line for line in lines if line})

    @cached_property
    def wording(self) -> dict[str, dict[str, Any]]:
        return self._json("wording.json")

    @cached_property
    def sentences(self) -> list[str]:
        return re.split(r"(?<=[.!?])\s+", " ".join(self._json("PaulGrahamEssays.json")["text"].split()))

    @cached_property
    def words(self) -> list[str]:
        return self._words("noun", "adjective", "verb")

    @cached_property
    def pairs(self) -> tuple[list[str], list[str]]:
        return self._words("adjective"), self._words("noun")

    @cached_property
    def squad(self) -> list[tuple[str, list[str], list[str], list[str]]]:
        """Questions with answers, their document, and others of the same article."""
        found = []
        for article in self._json("squad.json")["data"]:
            texts = list(dict.fromkeys(each["context"] for each in article["paragraphs"]))
            for each in article["paragraphs"]:
                others = [text for text in texts if text != each["context"]]
                for asked in each["qas"]:
                    if not asked["is_impossible"]:
                        answers = [answer["text"] for answer in asked["answers"]]
                        found.append((asked["question"], answers, [each["context"]], others))
        return found

    @cached_property
    def hotpotqa(self) -> list[tuple[str, list[str], list[str], list[str]]]:
        def documents(each: dict[str, Any]) -> list[str]:
            return [f"{title}\n{''.join(lines)}" for title, lines in each["context"]]

        return [(each["question"], [each["answer"]], documents(each), []) for each in self._json("hotpotqa.json")]

    @cached_property
    def documents(self) -> dict[str, list[str]]:
        """All of each set."""
        sets = {"squad": self.squad, "hotpotqa": self.hotpotqa}
        return {
            name: sorted({text for _, _, own, others in found for text in (*own, *others)})
            for name, found in sets.items()
        }


# tasks: each makes a sample of a size, in its own unit


def needles(
    draw: Random, size: int, sources: Sources, haystack: str, key: str, value: str, keys: int, values: int, queries: int
) -> Asked:
    """Of a haystack of `size` sentences."""
    drawn = {
        "words": lambda: f"{draw.choice(sources.pairs[0])}-{draw.choice(sources.pairs[1])}",
        "numbers": lambda: str(draw.randrange(10**6, 10**7)),
        "uuids": lambda: str(UUID(int=draw.getrandbits(128), version=4)),
    }

    def needle(key: str, found: str) -> str:
        return NEEDLE.format(kind=value, key=key, value=found)

    hidden: dict[str, list[str]] = {}
    while len(hidden) < keys:
        hidden[drawn[key]()] = [drawn[value]() for _ in range(values)]
    lines = [needle(name, found) for name, given in hidden.items() for found in given]
    draw.shuffle(lines)
    if haystack == "essay":
        texts = sources.sentences[:size]
        steps = draw.sample(range(DEPTHS), len(lines))
        places = [round(len(texts) * step / (DEPTHS - 1)) for step in steps]
    else:
        texts = [NOISE if haystack == "repeat" else needle(drawn[key](), drawn[value]()) for _ in range(size)]
        places = draw.sample(range(size), len(lines))
    for place, line in sorted(zip(places, lines, strict=True), reverse=True):
        texts.insert(place, line)
    asked = draw.sample(list(hidden), queries)
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if queries > 1 else asked[0]
    one = queries * values == 1
    fields = {"type_needle_v": value.removesuffix("s") if one else value, "query": query}
    fields["context"] = (" " if haystack == "essay" else "\n").join(texts)
    return Asked(fields, [found for name in asked for found in hidden[name]], one=one)


def variables(draw: Random, size: int, sources: Sources, hops: int) -> Asked:
    """Behind a short solved example."""

    def chain(letters: int, lines: int) -> tuple[dict[str, Any], list[str]]:
        names: dict[str, None] = {}
        while len(names) <= hops:
            names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
        chosen, value = list(names), str(draw.randrange(10000, 99999))
        said = [f"VAR {chosen[0]} = {value}"]
        said += [f"VAR {new} = VAR {old}" for old, new in pairwise(chosen)]
        texts = [NOISE] * lines
        for place, line in reversed(list(zip(sorted(draw.sample(range(lines), len(said))), said, strict=True))):
            texts.insert(place, line)
        return {"context": "\n".join(texts), "query": value, "num_v": len(chosen)}, chosen

    wording = sources.wording["variable_tracking"]
    shown, right = chain(3, 2 * (hops + 1))
    before = (wording["template"] + wording["answer_prefix"]).format(**shown) + " ".join(right) + "\n\n"
    return Asked(*chain(5, size), before=before)


def common_words(draw: Random, size: int, sources: Sources, common: int, often: int, seldom: int) -> Asked:
    """Of `size` different words, behind a short solved example."""

    def listed(number: int, often: int) -> tuple[dict[str, Any], list[str]]:
        words = draw.sample(sources.words, number)
        texts = words[:common] * often + words[common:] * seldom
        draw.shuffle(texts)
        return {"context": numbered(texts), "query": ""}, words[:common]

    wording = sources.wording["common_words_extraction"]
    shown, right = listed(4 * common, 10)
    before = (wording["template"] + wording["answer_prefix"]).format(**shown) + " " + numbered(right) + "\n"
    return Asked(*listed(size, often), before=before)


def numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(draw: Random, size: int, sources: Sources, length: int) -> Asked:
    """About `size` words of length // 50 different ones."""
    words: dict[str, None] = {"...": None}
    while len(words) < length // 50:
        words["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    counts = [int(size / rank**2 / (math.pi**2 / 6)) for rank in range(1, len(words) + 1)]
    texts = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    draw.shuffle(texts)
    return Asked({"context": " ".join(texts), "query": ""}, list(words)[1:4])


def documents(draw: Random, size: int, sources: Sources, name: str, number: int) -> Asked:
    """A question among `size` documents, first of its article and then of all."""
    found = sources.squad if name == "squad" else sources.hotpotqa
    question, answers, own, others = found[order(name, len(found))[number]]
    texts = [*own, *draw.sample(others, min(len(others), max(0, size - len(own))))]
    known = set(texts)
    while len(texts) < size:
        other = draw.choice(sources.documents[name])
        if other not in known:
            known.add(other)
            texts.append(other)
    draw.shuffle(texts)
    context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, 1))
    return Asked({"context": context, "query": question}, answers)


def order(name: str, count: int) -> list[int]:
    return Random(name).sample(range(count), count)


class Task(NamedTuple):
    wording: str  # its name in RULER's
    make: Callable[..., Asked]
    least: int  # size of the smallest sample
    kind: str = "all"


def _needles(haystack: str, key: str, value: str, keys: int = 1, values: int = 1, queries: int = 1) -> Task:
    count = max(keys, queries)
    make = partial(needles, haystack=haystack, key=key, value=value, keys=count, values=values, queries=queries)
    return Task("niah", make, count * values)


def tasks(length: int, number: int) -> dict[str, Task]:
    return {
        "niah_single_1": _needles("repeat", "words", "numbers"),
        "niah_single_2": _needles("essay", "words", "numbers"),
        "niah_single_3": _needles("essay", "words", "uuids"),
        "niah_multikey_1": _needles("essay", "words", "numbers", keys=4),
        "niah_multikey_2": _needles("needle", "words", "numbers"),
        "niah_multikey_3": _needles("needle", "uuids", "uuids"),
        "niah_multivalue": _needles("essay", "words", "numbers", values=4),
        "niah_multiquery": _needles("essay", "words", "numbers", queries=4),
        "vt": Task("variable_tracking", partial(variables, hops=4), 5),
        "cwe": Task("common_words_extraction", partial(common_words, common=10, often=30, seldom=3), 11),
        "fwe": Task("freq_words_extraction", partial(frequent_words, length=length), 64),
        "qa_1": Task("qa", partial(documents, name="squad", number=number), 1, "any"),
        "qa_2": Task("qa", partial(documents, name="hotpotqa", number=number), 1, "any"),
    }


# samples


def questions(sources: Sources, tokenizer: Any, length: int, samples: int) -> Iterator[Question]:
    for name in tasks(length, 0):
        first = None  # size of the first sample: others differ little
        for number in range(samples):
            task = tasks(length, number)[name]
            new = sources.wording[task.wording]["tokens_to_generate"]

            def sample(size: int, task: Task = task, seed: str = f"{name}-{length}-{number}") -> tuple[str, list[str]]:
                asked = task.make(Random(seed), size, sources)
                return prompt_of(sources.wording[task.wording], asked, tokenizer), asked.expected

            def fits(size: int, room: int = length - new, sample: Any = sample) -> bool:
                return len(tokenizer(sample(size)[0])["input_ids"]) <= room

            size = largest(fits, task.least, first)
            first = first or size
            prompt, expected = sample(size)
            yield Question(f"ruler-{length}-{name}-{number}", name, task.kind, prompt, expected, new, [])


def prompt_of(wording: dict[str, Any], asked: Asked, tokenizer: Any) -> str:
    template, start = wording["template"], wording["answer_prefix"]
    if asked.one:
        template, start = singular(template), singular(start)
    text, start = asked.before + template.format(**asked.fields), start.format(**asked.fields)
    if not tokenizer.chat_template:
        return text + start
    told = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    return chat.removeprefix(tokenizer.bos_token or "") + start.strip()  # vLLM adds a first token itself


def singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace(" are", " is")


def largest(fits: Callable[[int], bool], least: int, near: int | None) -> int:
    """The largest size that fits, to about one part in 64; `near` is what it was for a sample like this."""
    if near is not None:
        step = max(1, near // 64)
        while near > least and not fits(near):
            near -= step
        if near > least:
            return near
    low = high = least
    while fits(high):
        low, high = high, 2 * high
    if high == least:
        raise SystemExit("the length is too short for this task")
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

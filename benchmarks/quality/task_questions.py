"""Questions of a task, in the order in which parts of it are asked; and the answers of one cache, kept as they come."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


class Question(NamedTuple):
    id: str
    group: str  # a part of a task that has a score of its own
    kind: str  # how it is scored
    prompt: str
    expected: list[str]
    new: int  # tokens that an answer may have
    stop: list[str]

    @property
    def mark(self) -> str:
        """Changes where the answer might."""
        return hashlib.sha256(json.dumps([self.prompt, self.new, self.stop]).encode()).hexdigest()[:16]


def read(folder: Path, task: str) -> list[Question]:
    """All of them, from TASK.jsonl, .jsonl.gz or .jsonl.xz."""
    for path in (folder / f"{task}.jsonl{ending}" for ending in ("", *_OPENERS)):
        if path.exists():
            with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
                return ordered(Question(**json.loads(line)) for line in file)
    raise SystemExit(f"{folder} has no {task}.jsonl, .jsonl.gz or .jsonl.xz: see benchmarks/quality/task_data.py")


def write(path: Path, questions: Iterable[Question]) -> None:
    with _OPENERS.get(path.suffix, open)(path, "wt", encoding="utf-8") as file:
        for each in questions:
            file.write(json.dumps(each._asdict()) + "\n")


def ordered(questions: Iterable[Question]) -> list[Question]:
    """Shuffled by a hash of their names, one of each group after the other: the first N are a fair sample, the same for
    every cache, and a larger N contains a smaller one."""
    groups: dict[str, list[Question]] = defaultdict(list)
    for each in sorted(questions, key=lambda each: hashlib.sha256(each.id.encode()).digest()):
        groups[each.group].append(each)
    rounds = zip_longest(*(groups[name] for name in sorted(groups)))
    return [each for one in rounds for each in one if each is not None]


class Answers:
    """Of one cache to one task, in a file of JSON lines. The first says what they depend on besides the question."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self.lines: dict[str, dict[str, Any]] = {}
        if path.exists():
            for text in path.read_text("utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # cut while it was written
                if "facts" in line:
                    self.facts, self.notes = line["facts"], line.get("notes", {})
                else:
                    self.lines[line["id"]] = line

    def begin(self, facts: dict[str, Any], notes: dict[str, Any]) -> None:
        """Keep the answers that were made under the same facts, and forget others. Notes may change."""
        if facts != self.facts:
            self.facts, self.lines = facts, {}
        self.notes = notes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"facts": self.facts, "notes": self.notes}, *self.lines.values()]
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        new.replace(self.path)  # whole lines only, whenever this is ended

    def add(self, question: Question, text: str, tokens: int, end: str | None) -> None:
        line = {"id": question.id, "mark": question.mark, "text": text, "tokens": tokens, "end": end}
        self.lines[question.id] = line
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def of(self, question: Question) -> dict[str, Any] | None:
        line = self.lines.get(question.id)
        return line if line is not None and line["mark"] == question.mark else None

    def missing(self, questions: Iterable[Question]) -> list[Question]:
        return [each for each in questions if self.of(each) is None]

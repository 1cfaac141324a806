"""Rows of benchmarks/quality/tasks.py, from the answers that are kept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import task_scores
from engine_caches import STOCK, name_of
from task_questions import Answers, Question

KEY = ("model", "dtype", "cache", "task")


def plain(cache: str) -> str:
    """For names of files."""
    return name_of(cache).replace(":", "-").replace("/", "-")


def file_of(args: argparse.Namespace, cache: str, task: str) -> Path:
    return args.work / f"{args.model.resolve().name}-{args.dtype}" / f"{task}-{plain(cache)}.jsonl"


def scores_of(questions: list[Question], answers: Answers) -> dict[str, dict[str, float]]:
    """By name of question."""
    found = {each.id: (each, answers.of(each)) for each in questions}
    return {
        name: task_scores.scores_of(each.kind, line["text"], each.expected)
        for name, (each, line) in found.items()
        if line is not None
    }


def row_of(args: argparse.Namespace, cache: str, task: str, questions: list[Question]) -> dict[str, Any]:
    answers = Answers(file_of(args, cache, task))
    mine = scores_of(questions, answers)
    key = (args.model.resolve().name, args.dtype, name_of(cache), task)
    row: dict[str, Any] = dict(zip(KEY, key, strict=True)) | {"questions": len(mine), "of": len(questions)}
    if not mine:
        return row
    for name in next(iter(mine.values())):
        total = sum(each[name] for each in mine.values())
        low, high = task_scores.wilson(total, len(mine))
        row[name] = round(total / len(mine), 5)
        row["interval" if name == "score" else f"{name}_interval"] = [round(low, 5), round(high, 5)]
    row["groups"] = groups_of(questions, mine)
    lines = [line for line in map(answers.of, questions) if line is not None]
    row["tokens"] = sum(line["tokens"] for line in lines)
    row["unfinished"] = sum(line["end"] == "length" for line in lines)  # answers that reached their limit
    if cache not in STOCK:
        stock = Answers(file_of(args, STOCK[0], task))
        found = compared(mine, scores_of(questions, stock))
        texts = [(line["text"], (stock.of(each) or {}).get("text")) for each in questions if (line := answers.of(each))]
        row["against_stock"] = found | {"identical": sum(a == b for a, b in texts)}
    return row | answers.facts | answers.notes


def groups_of(questions: list[Question], scores: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Of each group its mean score and the number of answers."""
    found: dict[str, list[float]] = {}
    for each in questions:
        if each.id in scores:
            found.setdefault(each.group, []).append(scores[each.id]["score"])
    return {name: [round(sum(x) / len(x), 5), len(x)] for name, x in sorted(found.items())}


def compared(mine: dict[str, dict[str, float]], stock: dict[str, dict[str, float]]) -> dict[str, Any]:
    """On the questions that both have answered."""
    both = [name for name in mine if name in stock]
    made: dict[str, Any] = {"questions": len(both)}
    if both:
        for name in next(iter(mine.values())):
            changes = [mine[each][name] - stock[each][name] for each in both]
            low, high = task_scores.paired(changes)
            found = {"lower": sum(x < 0 for x in changes), "higher": sum(x > 0 for x in changes)}
            found["difference"] = round(sum(changes) / len(changes), 5)
            found["interval"] = [round(low, 5), round(high, 5)]
            made |= found if name == "score" else {name: found}
    return made


def update(rows: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """In its old place."""
    key = [new[name] for name in KEY]
    place = next((i for i, row in enumerate(rows) if [row[name] for name in KEY] == key), len(rows))
    return [*rows[:place], new, *rows[place + 1 :]]


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, in per cent."""
    lines = [
        "| task | cache | questions | score (95%) | lower, higher than stock | difference (95%) |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        cells = [row["task"], f"`{row['cache']}`"]
        if "score" in row:
            low, high = row["interval"]
            cells += [str(row["questions"]), f"{row['score']:.1%} ({low:.1%} to {high:.1%})"]
        if "difference" in (found := row.get("against_stock", {})):
            change, low, high = (f"{100 * x:+.1f}" for x in (found["difference"], *found["interval"]))
            cells += [f"{found['lower']}, {found['higher']}", f"{change} ({low} to {high})"]
        if "failed" in row:
            cells.append(f"failed: {row['failed']}")
        lines.append(f"| {' | '.join(cells + [''] * (6 - len(cells)))} |")
    return "\n".join(lines)

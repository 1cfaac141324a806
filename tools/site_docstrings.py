"""An extension of griffe: paragraphs of docstrings that explain arguments, `name: what it is`, become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): ")


class ArgumentLists(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            summary, *paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join([summary, *map(as_list, paragraphs)])


def as_list(paragraph: str) -> str:
    """One entry for each line that begins with names and a colon; lines further in belong to the entry before."""
    lines = paragraph.split("\n")
    if not all(line.startswith(" ") or ARGUMENT.match(line) for line in lines):
        return paragraph
    return "\n".join(line if line.startswith(" ") else "- " + ARGUMENT.sub(_as_code, line, count=1) for line in lines)


def _as_code(match: re.Match[str]) -> str:
    return ", ".join(f"`{name}`" for name in match[1].split(", ")) + ": "

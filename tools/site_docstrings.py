"""An extension of griffe, for the API reference on the site.

Paragraphs of docstrings that explain arguments, `name: what it is`, become lists. The comment behind a field of a class
is its docstring.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): ")


COMMENT = re.compile(r"  # (?!noqa|type:)(.*)$")


class Readable(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            summary, *paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join([summary, *map(as_list, paragraphs)])

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno and attr.parent is not None and attr.parent.is_class:
            comment = COMMENT.search(attr.lines_collection[attr.filepath][attr.lineno - 1])
            if comment:
                attr.docstring = griffe.Docstring(comment[1], parent=attr)


def as_list(paragraph: str) -> str:
    """One entry for each line that begins with names and a colon; lines further in belong to the entry before."""
    lines = paragraph.split("\n")
    if not all(line.startswith(" ") or ARGUMENT.match(line) for line in lines):
        return paragraph
    return "\n".join(line if line.startswith(" ") else "- " + ARGUMENT.sub(_as_code, line, count=1) for line in lines)


def _as_code(match: re.Match[str]) -> str:
    return ", ".join(f"`{name}`" for name in match[1].split(", ")) + ": "

"""Results of an evaluation in a file: rows are written as they finish, and found again when it goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import FileError

KIND, VERSION = "aurakv-evaluation", 1

Key = Mapping[str, Any]


def text_key(ids: Tensor) -> str:
    """Names the token ids of a text."""
    numbers = ",".join(map(str, ids.flatten().tolist()))
    return hashlib.sha256(numbers.encode()).hexdigest()[:16]


class Results:
    """Rows with their keys. Without a path they live in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.facts, self.entries = _read(path)

    def find(self, key: Key) -> dict[str, Any] | None:
        """The row that was measured under exactly this key."""
        return next((entry["row"] for entry in self.entries if entry["key"] == key), None)

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        self.entries = [entry for entry in self.entries if entry["key"] != key]
        self.entries.append({"key": dict(key), "row": dict(row)})

    def save(self) -> None:
        """The file is replaced as a whole: it is never seen half written."""
        if self.path is None:
            return
        document = {"kind": KIND, "version": VERSION, "facts": self.facts, "entries": self.entries}
        lines = json.dumps(document, indent=1, ensure_ascii=False)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(lines + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path} must be the JSON file of an earlier evaluation: {error}") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    good = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("key"), dict) and isinstance(entry.get("row"), dict)
        for entry in entries
    )
    if not good or document.get("kind") != KIND or document.get("version") != VERSION:
        raise FileError(f"{path} must be a file of {KIND} version {VERSION}")
    return dict(document.get("facts") or {}), entries or []

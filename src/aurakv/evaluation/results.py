"""Results of long work in a file: rows are written as they finish, and found again when it goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.policy import Policy
from ..errors import FileError

KIND, VERSION = "aurakv-evaluation", 1
MARKS = ("weights", "policy")  # in keys: what a name stands for. Rows of earlier versions have none
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
_PASSING = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"}  # of no effect on results

Key = Mapping[str, Any]


def text_key(ids: Tensor) -> str:
    """Names the token ids of a text."""
    return _digest(",".join(map(str, ids.flatten().tolist())))


def policy_key(policy: Policy) -> str:
    """Names the contents of a policy."""
    return _digest(policy.dumps())


def model_key(model: Any) -> str:
    """Names the config of a model and its weights, whose bits are summed: the same in any order and on any device."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in _PASSING}
    weights = [
        (name, list(weight.shape), int(weight.detach().view(_BITS[weight.element_size()]).sum(dtype=torch.int64)))
        for name, weight in sorted(model.named_parameters())
    ]
    return _digest(json.dumps([config, weights], sort_keys=True, default=str))


class Results:
    """Rows with their keys. Without a path they live in memory."""

    def __init__(self, path: Path | None = None, kind: str = KIND) -> None:
        self.path, self.kind = path, kind
        self.facts: dict[str, Any] = {}
        self.entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.facts, self.entries = _read(path, kind)

    def find(self, key: Key, unmarked: bool = False) -> dict[str, Any] | None:
        """The row that was measured under exactly this key or, if there is none, under this key without its marks."""
        keys = [dict(key), *([_unmarked(key)] if unmarked else [])]
        return next((entry["row"] for each in keys for entry in self.entries if entry["key"] == each), None)

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """In the place of what was measured under this key, or without its marks."""
        self.entries = [entry for entry in self.entries if entry["key"] not in (key, _unmarked(key))]
        self.entries.append({"key": dict(key), "row": dict(row)})

    def save(self) -> None:
        """The file is replaced as a whole: it is never seen half written."""
        if self.path is None:
            return
        document = {"kind": self.kind, "version": VERSION, "facts": self.facts, "entries": self.entries}
        lines = json.dumps(document, indent=1, ensure_ascii=False)
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_text(lines + "\n", encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unmarked(key: Key) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name not in MARKS}


def _read(path: Path, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} must be a JSON file of {kind}: {error}") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    good = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("key"), dict) and isinstance(entry.get("row"), dict)
        for entry in entries
    )
    if not good or document.get("kind") != kind or document.get("version") != VERSION:
        raise FileError(f"{path} must be a file of {kind} version {VERSION}")
    return dict(document.get("facts") or {}), entries or []

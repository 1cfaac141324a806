"""What a file of a cache says about itself: a flat JSON object, every field required, none unknown, all in range."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import FileError, InputError
from ..format.codec import DTYPE_NAMES, DTYPES, Format
from ..format.rotation import MAX_DIM
from .page_table import MAX_LENGTH, Kept
from .uncompressed import Uncompressed

KIND, VERSION = "aurakv-cache", 1
MAX_KV_HEADS = 2**16


Range = tuple[int, int]
_TEXTS = ("kind", "format", "storage", "exact_dtype", "checksum")
_NUMBERS: dict[str, Range] = {
    "version": (VERSION, VERSION),
    "key_dim": (1, MAX_DIM),
    "value_dim": (1, MAX_DIM),
    "kv_heads": (1, MAX_KV_HEADS),
    "page_size": (1, MAX_LENGTH),
    "exact_first": (0, MAX_LENGTH),
    "exact_recent": (0, MAX_LENGTH),
    "exact_rollback": (0, MAX_LENGTH),
}
_STORAGES: dict[str, dict[str, Range]] = {
    "contiguous": {},
    "ring": {
        "window": (1, MAX_LENGTH),
        "sinks": (0, MAX_LENGTH),
        "chunk": (1, MAX_LENGTH),
        "rollback": (0, MAX_LENGTH),
    },
    "paged": {"max_width": (0, MAX_LENGTH)},  # 0: as wide as needed
}


class Manifest(NamedTuple):
    """The description of a cache and a checksum for each tensor that holds it."""

    format: Format
    kv_heads: int
    page_size: int
    storage: str  # contiguous, ring or paged
    kept: Kept | None  # of a ring
    max_width: int | None  # of other tables
    uncompressed: Uncompressed
    checksums: dict[str, str]

    def text(self) -> str:
        format, uncompressed = self.format, self.uncompressed
        fields: dict[str, Any] = {
            "kind": KIND,
            "version": VERSION,
            "format": format.full_name,
            "key_dim": format.key.dim,
            "value_dim": format.value.dim,
            "kv_heads": self.kv_heads,
            "page_size": self.page_size,
            "storage": self.storage,
            "exact_first": uncompressed.first,
            "exact_recent": uncompressed.recent,
            "exact_dtype": DTYPE_NAMES[uncompressed.dtype],
            "exact_rollback": uncompressed.rollback,
            "checksums": self.checksums,
        }
        if self.kept is not None:
            fields |= self.kept._asdict()
        elif self.storage == "paged":
            fields["max_width"] = self.max_width or 0
        return _canonical({**fields, "checksum": _checksum(fields)})

    @classmethod
    def parse(cls, text: str) -> Manifest:
        fields = read_json(text)
        if not isinstance(fields, dict) or fields.get("kind") != KIND:
            raise FileError(f"it must describe itself as {KIND!r}")
        if type(fields.get("version")) is not int or fields["version"] != VERSION:
            raise FileError(f"its version must be {VERSION}, got {shown(fields.get('version'))}")
        if fields.get("checksum") != _checksum({name: value for name, value in fields.items() if name != "checksum"}):
            raise FileError("its description is corrupted: the checksum differs")
        storage = fields.get("storage")
        if not isinstance(storage, str) or storage not in _STORAGES:
            raise FileError(f"its storage must be one of {list(_STORAGES)}, got {shown(storage)}")
        numbers = {**_NUMBERS, **_STORAGES[storage]}
        same_names("fields", fields, {*_TEXTS, *numbers, "checksums"})
        for name in _TEXTS:
            if not isinstance(fields[name], str):
                raise FileError(f"its {name} must be a text, got {shown(fields[name])}")
        for name, (least, most) in numbers.items():
            if type(fields[name]) is not int or not least <= fields[name] <= most:
                raise FileError(f"its {name} must be a whole number from {least} to {most}, got {shown(fields[name])}")
        dtype = fields["exact_dtype"]
        if dtype not in DTYPES:
            raise FileError(f"its exact_dtype must be one of {list(DTYPES)}, got {shown(dtype)}")
        checksums = fields["checksums"]
        if not isinstance(checksums, dict):
            raise FileError(f"its checksums must be one for each tensor, got {shown(checksums)}")
        return cls(
            _parse_format(fields["format"], (fields["key_dim"], fields["value_dim"])),
            fields["kv_heads"],
            fields["page_size"],
            storage,
            Kept(*(fields[name] for name in Kept._fields)) if storage == "ring" else None,
            (fields["max_width"] or None) if storage == "paged" else 1,
            Uncompressed(fields["exact_first"], fields["exact_recent"], DTYPES[dtype], fields["exact_rollback"]),
            checksums,
        )


def read_json(text: str) -> Any:
    """JSON in which no name is given twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"its header is not JSON: {shown(str(error))}") from None


def same_names(what: str, given: Iterable[str], wanted: set[str]) -> None:
    missing, unknown = sorted(wanted - set(given)), sorted(set(given) - wanted)
    if missing or unknown:
        raise FileError(f"its {what} are not those of a cache: missing {missing}, unknown {shown(unknown)}")


def shown(value: object) -> str:
    """For an error: on one line and not longer than a sentence can bear."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 200 else text[:200] + "…"


def _parse_format(name: str, dims: tuple[int, int]) -> Format:
    if re.fullmatch(r"k\d{1,2}:.*/v\d{1,2}:.*", name, re.ASCII) is None:
        raise FileError(f"its format must be k<bits>:<options>/v<bits>:<options>, got {shown(name)}")
    try:
        format = Format.parse(name, dims)
    except InputError as error:
        raise FileError(f"its format is wrong: {shown(str(error))}") from None
    if name.count(":") != sum(4 if codec.coded else 1 for codec in (format.key, format.value)):
        raise FileError(f"its format must spell out every option, got {shown(name)}")
    return format


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is given twice")
    return fields


def _canonical(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields).encode()).hexdigest()

"""Which model this is, whatever its folder is called: its configuration, and bytes from every one of its weights.

Reading all weights of a large model takes minutes. A few bytes from each tensor tell two models apart just as well:
training, however short, changes all numbers of the tensors that it touches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FileError

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")  # the first kind that a folder has counts
_PIECES, _BYTES = 4, 64  # of a tensor, and of a piece
_FILE_PIECES = 4096  # of a file whose tensors are not listed at its beginning
_PASSING = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"}  # of no effect on keys
_MAX_HEADER = 512 * 2**20


def identity_of(model: Path | str, overrides: object = None, *, random: str | None = None) -> str:
    """Of a model in a folder, or in one GGUF file. `overrides` are changes to its configuration; `random` says how
    weights are drawn, always the same ones, where a model has no files of them."""
    path = Path(model)
    digest = hashlib.sha256(json.dumps(_config(path), sort_keys=True).encode())
    if overrides:
        digest.update(json.dumps(overrides, sort_keys=True, default=repr).encode())
    if random is not None:
        digest.update(f"random {random}".encode())
        return digest.hexdigest()[:32]
    for file in weight_files(path):
        with file.open("rb") as opened:
            for piece in _pieces(opened, file.suffix):
                digest.update(piece)
    return digest.hexdigest()[:32]


def weight_files(path: Path) -> list[Path]:
    """The files with the weights of a model, in one order."""
    if path.is_file():
        return [path]
    for suffix in _WEIGHTS:
        found = sorted(path.glob(f"*{suffix}"))
        if found:
            return found
    raise FileError(f"{path} has no weights: a model is a folder with files of the kinds {list(_WEIGHTS)}")


def _config(path: Path) -> dict[str, Any]:
    if path.is_file():
        return {}  # a GGUF file says it all itself
    try:
        read = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path / 'config.json'} cannot be read: {error}") from error
    return {name: value for name, value in dict(read).items() if name not in _PASSING}


def _pieces(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    if suffix == ".safetensors":
        length = int.from_bytes(file.read(8), "little")
        if length <= min(size, _MAX_HEADER):
            header = file.read(length)
            yield header
            for start, end in _tensors(header):
                yield from _samples(file, 8 + length + start, 8 + length + end, _PIECES)
            return
    yield size.to_bytes(8, "little")
    yield from _samples(file, 0, size, _FILE_PIECES)


def _tensors(header: bytes) -> list[tuple[int, int]]:
    try:
        listed = json.loads(header)
        return [tuple(entry["data_offsets"]) for name, entry in sorted(listed.items()) if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"a file of weights has a damaged header: {error!r:.100}") from error


def _samples(file: BinaryIO, start: int, end: int, count: int) -> Iterator[bytes]:
    """Pieces at equal distances, the first and the last bytes among them."""
    last = max(start, end - _BYTES)
    for i in range(count):
        file.seek(start + (last - start) * i // (count - 1))
        yield file.read(min(_BYTES, end - start))

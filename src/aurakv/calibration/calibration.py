"""Calibration: what the keys of a model teach, whatever format they will be stored in.

For each attention layer an offset and a scale per channel, and by how much attention moves at each width, with them and
without. `chosen` makes of it what every layer stores, and refuses what a model would not survive.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import FileError, InputError, short
from ..folders import cache_folder
from ..format.codec import Format
from .guard import LOST, ON_AVERAGE, more_than, wider, with_keys
from .policy import LayerPolicy, read_tensor, text_of

KIND, VERSIONS = "aurakv-calibration", (1, 2)  # 1: without weights
DEFAULT = "k4v4"  # where nobody names a format
BROKEN = 1.0  # nats by which the attention of one layer may move in a model that is served
WIDTHS = (2, 3, 4, 5, 6, 8)  # at which attention is measured
MOST_NATS = 1e30  # a number that is no measurement
MAX_BYTES = 256 * 2**20
_FIELDS = {"kind", "version", "model", "source", "first", "layers"}
_LAYER = {"kv_heads", "head_dim", "key_offset", "key_scale", "moved", "moved_plain"}


@dataclass(frozen=True)
class KeyCalibration:
    """Of one layer. Tensors are float32 [kv_heads, head_dim]; the offset is that of the scaled keys. With a key weight
    codes are fitted (`LayerPolicy`)."""

    key_offset: Tensor
    key_scale: Tensor
    moved: Mapping[int, float]  # nats by which attention on codes of a width moves …
    moved_plain: Mapping[int, float]  # … and without offset and scale
    key_weight: Tensor | None = None

    def nats(self, bits: int, plain: bool) -> float:
        return 0.0 if bits == 16 else (self.moved_plain if plain else self.moved)[bits]

    def policy(self, format: str, plain: bool) -> LayerPolicy:
        if plain:
            return LayerPolicy(format)
        tensors = {"key_offset": self.key_offset, "key_scale": self.key_scale, "key_weight": self.key_weight}
        whole = LayerPolicy(format, **tensors)
        return whole.with_format(format, self.key_scale.shape[1])


class Chosen(NamedTuple):
    """What the layers of a model store."""

    layers: dict[int, LayerPolicy]
    note: str | None = None  # what a user should know of it, in one sentence


@dataclass(frozen=True)
class Calibration:
    """Of the attention layers of a model, by their numbers."""

    layers: Mapping[int, KeyCalibration]
    source: str  # the text, and how many tokens of it
    first: int  # first tokens of a sequence that were uncompressed when movements were measured
    model: str = ""  # `identity_of` it; empty: not kept
    limited: int | None = None  # tokens, where an engine could not read as many as it wanted; 0: they were random ones

    def chosen(self, format: str | None, plain: bool = False, device_type: str = "cpu") -> Chosen:
        """The named format for all layers, or DEFAULT with wider keys where a layer needs them."""
        if format is None:
            return Chosen(self._widened(device_type))
        bits = self._bits(format)
        moved, mean = self._nats(bits, plain), self._mean(bits, plain)
        lost = [number for number, nats in moved.items() if nats > LOST]
        most = max(moved, key=lambda number: moved[number])
        if lost and (mean > LOST or moved[most] > BROKEN):
            raise InputError(
                f"keys do not survive {'plain:' if plain else ''}{format} in {len(lost)} of {len(self.layers)} layers"
                f" of this model (attention of layer {most} moves by {more_than(moved[most], LOST)} nats where"
                f" {LOST} are tolerated): {self._better(format, plain, device_type)} would keep them"
            )
        note = None
        if lost or mean > ON_AVERAGE:
            layers = f"layer {most}" if lost else "its layers"
            by, limit = (moved[most], LOST) if lost else (mean, ON_AVERAGE)
            note = (
                f"{format} costs this model some quality (attention of {layers} moves by {more_than(by, limit)} nats"
                f"{'' if lost else ' on average'}, more than {limit}):"
                f" {self._better(format, plain, device_type)} would not"
            )
        policies = {number: layer.policy(format, plain).on(device_type) for number, layer in self.layers.items()}
        return Chosen(policies, note)

    def _widened(self, device_type: str) -> dict[int, LayerPolicy]:
        """Keys of DEFAULT, wider in the layers that move most, until no layer is lost and the mean is small enough."""
        formats = dict.fromkeys(self.layers, DEFAULT)

        def nats(number: int) -> float:
            return self.layers[number].nats(self._bits(formats[number]), False)

        def widen(number: int) -> None:
            layer = self.layers[number]
            dim = layer.key_scale.shape[1]
            formats[number] = with_keys(formats[number], wider(self._bits(formats[number]), dim, device_type)[0])

        for number in formats:
            while nats(number) > LOST:
                widen(number)
        while sum(map(nats, formats)) > ON_AVERAGE * len(formats):
            widen(max(formats, key=nats))
        return {number: layer.policy(formats[number], False).on(device_type) for number, layer in self.layers.items()}

    def _better(self, format: str, plain: bool, device_type: str) -> str:
        """The narrowest format, calibrated, with these values and at least as wide keys that every layer survives."""
        bits = self._bits(format)
        dim = max(layer.key_scale.shape[1] for layer in self.layers.values())
        for width in [*([bits] if plain else []), *wider(bits, dim, device_type)]:
            if max(self._nats(width, False).values()) <= LOST and self._mean(width, False) <= ON_AVERAGE:
                break
        return with_keys(format, width)

    def _nats(self, bits: int, plain: bool) -> dict[int, float]:
        return {number: layer.nats(bits, plain) for number, layer in self.layers.items()}

    def _mean(self, bits: int, plain: bool) -> float:
        return sum(self._nats(bits, plain).values()) / len(self.layers)

    def _bits(self, format: str) -> int:
        return Format.parse(format, 64).key.bits

    # files

    def dumps(self) -> str:
        layers = {
            str(number): {
                "kv_heads": layer.key_scale.shape[0],
                "head_dim": layer.key_scale.shape[1],
                "key_offset": text_of(layer.key_offset),
                "key_scale": text_of(layer.key_scale),
                **({} if layer.key_weight is None else {"key_weight": text_of(layer.key_weight)}),
                "moved": {str(bits): nats for bits, nats in layer.moved.items()},
                "moved_plain": {str(bits): nats for bits, nats in layer.moved_plain.items()},
            }
            for number, layer in self.layers.items()
        }
        fields = {
            "kind": KIND,
            "version": VERSIONS[-1],
            "model": self.model,
            "source": self.source,
            "first": self.first,
            **({} if self.limited is None else {"limited": self.limited}),
        }
        return json.dumps({**fields, "layers": layers}, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Calibration:
        """From the text of a file; everything in it is checked."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileError(f"a calibration is a JSON object: {error}") from error
        if not isinstance(read, dict) or set(read) - {"limited"} != _FIELDS or read["kind"] != KIND:
            raise FileError(f"a calibration is a JSON object of kind {KIND!r} with the fields {sorted(_FIELDS)}")
        if read["version"] not in VERSIONS:
            raise FileError(f"this version reads calibrations of version {VERSIONS}, got {short(read['version'])}")
        layers, first, limited = read["layers"], read["first"], read.get("limited")
        if not isinstance(layers, dict) or not layers or not _natural(first):
            raise FileError("a calibration has layers, by their numbers, and a number of first tokens")
        if limited is not None and not _natural(limited):
            raise FileError(f"limited must be a number of tokens, got {short(limited)}")
        if not isinstance(read["source"], str) or not isinstance(read["model"], str):
            raise FileError("a calibration names its source and its model")
        return cls({_number(name): _layer(name, layer) for name, layer in layers.items()}, read["source"], first,
                   read["model"], limited)  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Calibration:
        try:
            if path.stat().st_size > MAX_BYTES:
                raise FileError(f"a calibration has at most {MAX_BYTES} bytes, got {path.stat().st_size}")
            return cls.loads(path.read_text("utf-8"))
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise FileError(f"{path} cannot be read: {error}") from error
        except FileError as error:
            raise FileError(f"{path}: {error}") from error

    @property
    def fitted(self) -> bool:
        return all(layer.key_weight is not None for layer in self.layers.values())

    @classmethod
    def kept(cls, model: str, fitted: bool) -> Calibration | None:
        """What was kept for the model of this identity, for codes that are fitted or the nearest ones."""
        try:
            return cls.load(kept_at(model, fitted))
        except FileError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def keep(self) -> Path:
        """For this user, under the identity of the model. The file is replaced as a whole."""
        path = kept_at(self.model, self.fitted)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(self.dumps(), "utf-8")
            os.replace(written, path)
        except OSError as error:
            raise FileError(f"{path} cannot be written: {error.strerror}") from error
        return path


def kept_at(model: str, fitted: bool) -> Path:
    return cache_folder() / "calibrations" / f"{model}{'-fitted' if fitted else ''}.json"


def _natural(read: Any) -> bool:
    return type(read) is int and 0 <= read < 2**31


def _number(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 6):
        raise FileError(f"layers of a calibration have numbers, got {short(name)}")
    return int(name)


def _layer(name: str, read: Any) -> KeyCalibration:
    if not isinstance(read, dict) or set(read) - {"key_weight"} != _LAYER:
        raise FileError(f"layer {name} of a calibration has {sorted(_LAYER)}, and possibly key_weight")
    shape = (read["kv_heads"], read["head_dim"])
    if not all(type(size) is int and 0 < size < 2**20 for size in shape):
        raise FileError(f"layer {name} of a calibration has KV heads and a head_dim, got {short(shape)}")
    offset, scale, weight = (
        read_tensor(f"{field} of layer {name}", read.get(field), shape)
        for field in ("key_offset", "key_scale", "key_weight")
    )
    if offset is None or scale is None or not bool((scale > 0).all()) or not bool(offset.isfinite().all()):
        raise FileError(f"layer {name} of a calibration has a finite key_offset and a positive key_scale")
    if weight is not None and not bool((weight > 0).all() & weight.isfinite().all()):
        raise FileError(f"key_weight of layer {name} of a calibration must be finite and positive")
    return KeyCalibration(offset, scale, _nats(name, read["moved"]), _nats(name, read["moved_plain"]), weight)


def _nats(name: str, read: Any) -> dict[int, float]:
    good = isinstance(read, dict) and set(read) == {str(bits) for bits in WIDTHS}
    if not good or not all(type(nats) in (int, float) and 0 <= nats < MOST_NATS for nats in read.values()):
        raise FileError(f"layer {name} of a calibration says how far attention moves at the widths {list(WIDTHS)}")
    return {int(bits): float(nats) for bits, nats in read.items()}

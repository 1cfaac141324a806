"""Policy: what every KV layer of a model gets. Formats, key offsets and key scales are numbers measured on that model.

A policy is one small JSON file; `Policy.load` takes a path or the name of a policy that comes with the package.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import whole
from ..errors import FileError, InputError, short
from ..format import fit as fitting
from ..format.codec import Format
from ..format.rotation import MAX_DIM
from .key_scale import levelled

KIND, VERSION = "aurakv-policy", 3
FIRST, ROLLBACK = (
    4,
    32,
)  # of a model without a policy: uncompressed first tokens; tokens that can be cropped beyond a window
FITTED_ON = ("cpu",)  # devices on which codes are fitted; GPUs are to be timed with four at once (docs/lab/gpu.md)
MOST_FITTED = 6  # bits: at 8 there is nothing to gain, and nearest codes of almost equal vectors are almost equal
_FOLDER = Path(__file__).parent / "policies"
MAX_BYTES = 64 * 2**20  # of a file
_LIMITS = {"layers": (1, 10_000), "kv_heads": (1, 2**16), "head_dim": (1, MAX_DIM)}  # of a model
_UNCOMPRESSED = {"first": (0, 2**20), "recent": (0, 2**20)}
_FIELDS = {"kind", "version", "model", "source", "first", "recent", "layers"}
_TENSORS = ("key_offset", "value_offset", "key_scale", "key_weight")
_OLD_NAMES: dict[int, dict[str, str]] = {
    1: {"key_scale": "balance"},
    2: {},
    VERSION: {},
}  # of fields of a layer, in each version of files


@dataclass(frozen=True)
class LayerPolicy:
    """One KV layer. Keys are multiplied by `key_scale` and queries divided by it, which leaves every score as it is;
    `key_offset` belongs to the scaled keys. With a `key_weight`, what the squared error of each channel of a scaled key
    costs, codes are fitted (format/fit.py): those of keys by these weights, those of values by equal ones. Tensors are
    float32 [kv_heads, head_dim]."""

    format: str
    key_offset: Tensor | None = None
    value_offset: Tensor | None = None
    key_scale: Tensor | None = None
    key_weight: Tensor | None = None

    def fits(self, format: Format, kv_heads: int, device: torch.device | str) -> tuple[Tensor | None, Tensor | None]:
        """How a cache of this layer rounds keys and values."""
        if self.key_weight is None:
            return None, None
        key = None
        if format.key.bits <= MOST_FITTED:
            # a GPU waits too long for one coordinate after the other
            at_once = torch.device(device).type == "cuda" and format.key.dim <= fitting.MOST_AT_ONCE
            key = fitting.fit(format.key, self.key_weight, at_once).to(device)
        return key, fitting.equal(kv_heads, device) if format.value.bits <= MOST_FITTED else None

    def on(self, device_type: str, fitted: bool | None = None) -> LayerPolicy:
        """What a cache on such a device takes: where codes of keys are the nearest ones, another scale is best.

        fitted: whether codes are fitted; None: as is the default there."""
        if self.key_weight is None or self.key_scale is None:
            return self
        fitted = device_type in FITTED_ON if fitted is None else fitted
        if fitted and Format.parse(self.format, self.key_scale.shape[1]).key.bits <= MOST_FITTED:
            return self
        change = levelled(self.key_weight.pow(1 / 6))  # statistics.py has both scales
        offset = None if self.key_offset is None else self.key_offset * change
        weight = torch.ones_like(self.key_weight) if fitted else None  # values are still fitted
        return replace(self, key_offset=offset, key_scale=self.key_scale * change, key_weight=weight)

    def with_format(self, name: str, head_dim: int) -> LayerPolicy:
        """The same layer at another format; sides at 16 bits have no offset, keys at 16 bits no key_scale."""
        format = Format.parse(name, head_dim)
        key, value = format.key.coded, format.value.coded
        return LayerPolicy(
            name,
            key_offset=self.key_offset if key else None,
            value_offset=self.value_offset if value else None,
            key_scale=self.key_scale if key else None,
            key_weight=self.key_weight if key else None,
        )


@dataclass(frozen=True)
class Policy:
    """Formats, offsets and uncompressed tokens of all attention layers of a model with these dimensions."""

    kv_heads: int
    head_dim: int
    layers: tuple[LayerPolicy, ...]
    first: int = 0
    recent: int = 0
    source: str = ""  # the model and text the numbers come from

    def __post_init__(self) -> None:
        given = {"layers": len(self.layers), "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for name, limits in {**_LIMITS, **_UNCOMPRESSED}.items():
            number = whole(name, given.get(name, getattr(self, name, None)), *limits)
            if name != "layers":
                object.__setattr__(self, name, number)
        for number, layer in enumerate(self.layers):
            format = Format.parse(layer.format, self.head_dim)
            for name in _TENSORS:
                _check(f"{name} of layer {number}", getattr(layer, name), (self.kv_heads, self.head_dim))
            for name, codec in (("key_offset", format.key), ("value_offset", format.value)):
                if getattr(layer, name) is not None and not codec.coded:
                    raise InputError(f"{name} of layer {number} has no meaning for vectors stored at 16 bits")
            for name, tensor in (("key_scale", layer.key_scale), ("key_weight", layer.key_weight)):
                if tensor is not None and not bool((tensor.half() > 0).all()):  # in files, too
                    raise InputError(f"{name} of layer {number} must be positive, in float16")

    @property
    def bytes_per_token(self) -> int:
        """Codes and scales of one token in all layers, without the few uncompressed tokens."""
        return self.kv_heads * sum(Format.parse(layer.format, self.head_dim).bytes_per_token for layer in self.layers)

    def check_model(self, layers: int, kv_heads: int | None, head_dim: int | None) -> None:
        """Refuse a model of other dimensions; None: not known."""
        made, got = (len(self.layers), self.kv_heads, self.head_dim), (layers, kv_heads, head_dim)
        if any(b is not None and a != b for a, b in zip(made, got, strict=True)):
            raise InputError(
                f"this policy is for a model of {made[0]} KV layers, {made[1]} KV heads and head_dim {made[2]},"
                f" got {got[0]}, {got[1]} and {got[2]}"
            )

    # files

    @classmethod
    def find(cls, name: str | Path) -> Policy | None:
        """The policy that a user means where formats are allowed, too; None: it is the name of no policy."""
        if isinstance(name, Path) or name.endswith(".json") or name in shipped():
            return cls.load(name)
        return None

    @classmethod
    def load(cls, source: str | Path) -> Policy:
        """From a .json file, or by the name of one that comes with the package (`shipped`)."""
        if isinstance(source, str) and source in shipped():
            return cls.loads((_FOLDER / f"{source}.json").read_text("utf-8"))
        path = Path(source)
        if path.suffix != ".json":
            raise InputError(f"a policy is a .json file or one of {shipped()}, got {short(str(source))}")
        try:
            if path.stat().st_size > MAX_BYTES:
                raise FileError(f"a policy has at most {MAX_BYTES} bytes, got {path.stat().st_size}")
            return cls.loads(path.read_text("utf-8"))
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror}") from error
        except FileError as error:
            raise FileError(f"{path}: {error}") from error
        except ValueError as error:  # no UTF-8, or no name that files can have
            raise FileError(f"{short(str(path))} cannot be read: {error}") from error

    @classmethod
    def loads(cls, text: str) -> Policy:
        """From the text of a file; everything in it is checked."""
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileError(f"a policy is a JSON object: {error}") from error
        if not isinstance(read, dict) or set(read) != _FIELDS or read["kind"] != KIND:
            raise FileError(f"a policy is a JSON object of kind {KIND!r} with the fields {sorted(_FIELDS)}")
        version = read["version"]
        if type(version) is not int or version not in _OLD_NAMES:
            raise FileError(f"this version reads policies of version 1 to {VERSION}, got {short(version)}")
        model, layers = read["model"], read["layers"]
        if not isinstance(model, dict) or set(model) != set(_LIMITS) or not isinstance(read["source"], str):
            raise FileError(f"a policy has a text source and a model with {list(_LIMITS)}")
        if not isinstance(layers, list) or model["layers"] != len(layers):
            raise FileError("a policy lists as many layers as its model has")
        try:
            for name, value in (*model.items(), *((name, read[name]) for name in _UNCOMPRESSED)):
                whole(name, value, *{**_LIMITS, **_UNCOMPRESSED}[name])
            shape = (model["kv_heads"], model["head_dim"])
            parsed = tuple(_layer(number, layer, shape, version) for number, layer in enumerate(layers))
            return cls(*shape, parsed, read["first"], read["recent"], read["source"])
        except FileError:
            raise
        except InputError as error:
            raise FileError(f"this policy cannot be used: {error}") from error

    def dumps(self) -> str:
        layers = [
            {"format": _spelled_out(layer.format, self.head_dim)}
            | {name: text_of(tensor) for name in _TENSORS if (tensor := getattr(layer, name)) is not None}
            for layer in self.layers
        ]
        model = {"layers": len(self.layers), "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        fields = {"kind": KIND, "version": VERSION, "source": self.source, "model": model}
        return json.dumps({**fields, "first": self.first, "recent": self.recent, "layers": layers}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Tensors are rounded to float16: they need not be exact, only the same for every token."""
        Path(path).write_text(self.dumps(), "utf-8")


def format_of(name: str, head_dim: int | tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Format:
    """Format.parse where policies are allowed, too: what looks like neither may be either, mistyped."""
    try:
        return Format.parse(name, head_dim, dtype)
    except InputError as error:
        if re.match(r"k\d", str(name)):
            raise
        raise InputError(f"{error}; a policy is a .json file or one of {shipped()}") from None


def shipped() -> list[str]:
    """The names of the policies that come with the package."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def _layer(number: int, read: Any, shape: tuple[int, int], version: int) -> LayerPolicy:
    fields = {name: _OLD_NAMES[version].get(name, name) for name in _TENSORS}  # as the file has them
    if (
        not isinstance(read, dict)
        or not isinstance(read.get("format"), str)
        or set(read) - {"format", *fields.values()}
    ):
        raise FileError(
            f"layer {number} of a policy has a format and possibly {list(fields.values())}, got {read!r:.80}"
        )
    tensors = {
        name: read_tensor(f"{field} of layer {number}", read.get(field), shape) for name, field in fields.items()
    }
    return LayerPolicy(_shortened(read["format"], shape[1]), **tensors)


def _spelled_out(name: str, head_dim: int) -> str:
    """With every option of sides that have codes: the defaults behind a short name may change. 16 bits stay as they
    are, because they take the dtype of the model."""
    format = Format.parse(name, head_dim)
    sides = zip(key_and_value(name), "kv", (format.key, format.value), strict=True)
    return "/".join(f"{letter}{codec.name}" if codec.coded else text for text, letter, codec in sides)


def _shortened(name: str, head_dim: int) -> str:
    """The other way round."""
    format = Format.parse(name, head_dim)
    sides = zip(key_and_value(name), key_and_value(format.name), (format.key, format.value), strict=True)
    key, value = (short if codec.coded else text for text, short, codec in sides)
    return f"{key}/{value}" if ":" in key else key + value


def key_and_value(name: str) -> tuple[str, str]:
    """What the name of a format says of keys and of values."""
    key, value = re.fullmatch(r"(k.*?)/?(v\d.*)", name).groups()  # type: ignore[union-attr]  # the name of a format
    return key, value


def text_of(tensor: Tensor) -> str:
    return base64.b64encode(tensor.to(torch.float16).numpy().astype("<f2").tobytes()).decode("ascii")


def read_tensor(name: str, text: object, shape: tuple[int, int]) -> Tensor | None:
    if text is None:
        return None
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 2 * math.prod(shape):
        raise FileError(f"{name} must be base64 of {math.prod(shape)} float16 numbers")
    return torch.from_numpy(np.frombuffer(raw, "<f2").astype(np.float32)).view(shape)


def _check(name: str, tensor: object, shape: Sequence[int]) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.shape != tuple(shape):
        raise InputError(f"{name} must be float32 {list(shape)} (KV heads, head_dim)")
    if not bool(tensor.isfinite().all()) or float(tensor.abs().max()) > torch.finfo(torch.float16).max:
        raise InputError(f"{name} must be finite and in the range of float16")

"""Codec, Format, Codes: what a stored vector is and how many bytes it takes.

x̂ = offset + scale · Rᵀ · levels[codes], the same for keys and values. The grammar of format names is in docs/format.md.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arguments import index, instance, shown, whole
from ..errors import InputError, cut, short
from . import levels as level_tables
from . import names
from .names import BITS
from .rotation import MAX_DIM, PLAIN, SEEDED, UNROTATED, base_order, chosen_signs, named_signs, rotation

Side = Literal["key", "value"]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}  # as names spell them
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SCALES = ("l2", "lsq")
_SIGNS = (PLAIN, UNROTATED, "signs<hex>")
_ROTATION = {"seed", "signs"}  # one of them says which signs
_NUMBER = r"-?\d+(\.\d+)?(e[+-]?\d+)?"


class Codes(NamedTuple):
    """Stored vectors: packed codes with their scales, or at 16 bits the vectors themselves."""

    data: Tensor  # [..., row_bytes] uint8
    scale: Tensor | None  # [...] in the codec's dtype; None at 16 bits


@dataclass(frozen=True)
class Codec:
    """How one vector of `dim` coordinates is stored. `Codec.key` and `Codec.value` fill in the defaults of a side and
    width, which are not those here."""

    dim: int
    bits: int
    table: str | level_tables.Levels = "lloyd-max"
    scale: str = "l2"
    dtype: torch.dtype = torch.float16  # of the scale; at 16 bits of the vector itself
    seed: int = 0
    signs: str | Sequence[int] = SEEDED  # of the rotation: the seed's, "plain" (all +1), or ±1, which are kept as a
    # text of hexadecimal digits; "unrotated": there is no rotation, the caller rotates
    levels: level_tables.Levels = field(init=False, repr=False, compare=False)
    name: str = field(init=False, repr=False, compare=False)  # every option spelled out, whatever side it is on

    def __post_init__(self) -> None:
        for name in ("dim", "bits", "seed"):
            number = index(getattr(self, name))
            if number is not None:
                object.__setattr__(self, name, number)
        if index(self.bits) not in BITS:
            raise InputError(f"bits must be one of {list(BITS)}, got {shown(self.bits)}")
        if self.bits == 16:
            whole("head_dim", self.dim, 1, MAX_DIM)
            if self.dtype not in DTYPE_NAMES:
                raise InputError(f"vectors are stored as one of {list(DTYPES)}, got {self.dtype}")
            for name, none in (
                ("table", ""),
                ("scale", ""),
                ("seed", 0),
                ("signs", ""),
            ):  # 16-bit vectors have no codes
                object.__setattr__(self, name, none)
            object.__setattr__(self, "levels", ())
            object.__setattr__(self, "name", f"16:{DTYPE_NAMES[self.dtype]}")
            return
        base_order(self.dim)
        if self.scale not in _SCALES:
            raise InputError(f"scale must be one of {list(_SCALES)}, got {short(self.scale)}")
        if self.dtype not in (torch.float16, torch.float32):
            raise InputError(f"scales are stored as f16 or f32, got {DTYPE_NAMES.get(self.dtype, self.dtype)}")
        whole("seed", self.seed, 0, 2**64 - 1)
        object.__setattr__(self, "signs", named_signs(self.dim, self.signs))
        if self.signs != SEEDED:
            object.__setattr__(self, "seed", 0)  # nothing comes from it
        if not isinstance(self.table, str):
            object.__setattr__(self, "table", level_tables.check_levels(self.table, self.bits))
        levels = _named_levels(self.table, self.bits) if isinstance(self.table, str) else self.table
        object.__setattr__(self, "levels", levels)
        options = (_table_name(self.table), self.scale, DTYPE_NAMES[self.dtype], _signs_name(self))
        object.__setattr__(self, "name", ":".join((str(self.bits), *options)))

    @classmethod
    def key(cls, dim: int, bits: int, **options: object) -> Codec:
        return cls(dim, bits, **{**default_options("key", bits), **options})  # type: ignore[arg-type]

    @classmethod
    def value(cls, dim: int, bits: int, **options: object) -> Codec:
        return cls(dim, bits, **{**default_options("value", bits), **options})  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash((self.dim, self.name))  # fast: every call looks its codecs up, and a text remembers its hash

    @property
    def coded(self) -> bool:
        """False at 16 bits: no rotation, no codes, no scale."""
        return self.bits != 16

    @property
    def rotates(self) -> bool:
        """False at 16 bits and where the caller rotates."""
        return self.coded and self.signs != UNROTATED

    def sign_list(self) -> list[int]:
        """The signs ±1 of a codec that rotates."""
        return chosen_signs(self.dim, self.seed, str(self.signs))

    def unrotated(self) -> Codec:
        """The same codes without the rotation: decodes to R x̂. For callers who rotate themselves."""
        return dataclasses.replace(self, signs=UNROTATED) if self.coded else self

    @property
    def row_bytes(self) -> int:
        return self.dim * self.bits // 8 if self.coded else self.dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return self.dtype.itemsize if self.coded else 0

    @property
    def bytes_per_vector(self) -> int:
        return self.row_bytes + self.scale_bytes

    def level_tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _constant(self.levels, dtype, device)

    def boundary_tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _constant(level_tables.boundaries(self.levels), dtype, device)

    def rotate(self, x: Tensor) -> Tensor:
        """R x over the last dimension; x itself at 16 bits and where the caller rotates."""
        return x @ rotation(self.dim, self.seed, x.dtype, x.device, str(self.signs)).T if self.rotates else x

    def unrotate(self, y: Tensor) -> Tensor:
        """Rᵀ y over the last dimension; y itself at 16 bits and where the caller rotates."""
        return y @ rotation(self.dim, self.seed, y.dtype, y.device, str(self.signs)) if self.rotates else y


class PageLayout(NamedTuple):
    """Byte offsets inside the piece of a page that belongs to one KV head."""

    key_codes: int
    key_scales: int
    value_codes: int
    value_scales: int
    bytes: int


@dataclass(frozen=True)
class Format:
    """A key codec and a value codec. `name` says everything that is not default and parses back."""

    key: Codec
    value: Codec
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        instance("key", self.key, Codec)
        instance("value", self.value, Codec)
        key, value = _side_name("key", self.key), _side_name("value", self.value)
        object.__setattr__(self, "name", f"{key}/{value}" if ":" in key else key + value)

    def __hash__(self) -> int:
        return hash((self.key.dim, self.value.dim, self.name))

    @classmethod
    def parse(cls, name: str, head_dim: int | tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Format:
        """The format called `name`, e.g. "k4v4", "k8:lsq/v3:f32", for one head_dim or (key dim, value dim).

        Options are a level table (`level_tables.TABLES`), l2 or lsq, f16 or f32 and the signs of the rotation (a seed,
        plain, unrotated or given ones): docs/format.md, section 3.
        `dtype` is what 16-bit sides store unless the name says so.
        """
        key_bits, key_options, value_bits, value_options = names.parts(name)
        both = index(head_dim)
        dims = head_dim if both is None else (both, both)
        if not (isinstance(dims, tuple) and len(dims) == 2):
            raise InputError(f"head_dim must be a whole number or a pair (key dim, value dim), got {shown(head_dim)}")
        return cls(
            _parse_side("key", dims[0], int(key_bits), key_options.split(":")[1:], dtype),
            _parse_side("value", dims[1], int(value_bits), value_options.split(":")[1:], dtype),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def full_name(self) -> str:
        """With every option of both sides: defaults may change, what this says does not."""
        return f"k{self.key.name}/v{self.value.name}"

    def unrotated(self) -> Format:
        """Both sides without their rotation, for callers who rotate themselves."""
        return _unrotated(self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one KV head: codes and scales of key and value.

        Pages of a multiple of 8 tokens hold exactly this; others pad each of their four parts to 16 bytes.
        """
        return self.key.bytes_per_vector + self.value.bytes_per_vector

    @property
    def compression(self) -> float:
        """How many times smaller than 16 bits per coordinate."""
        return 2 * (self.key.dim + self.value.dim) / self.bytes_per_token

    def layout(self, page_size: int) -> PageLayout:
        """[K codes of all tokens | K scales | V codes | V scales], each part aligned to 16 bytes."""
        return _layout(self.key, self.value, page_size)


def default_options(side: Side, bits: int) -> dict[str, object]:
    """What a codec of this side and width is unless its name says otherwise."""
    if bits == 16:
        return {"dtype": torch.bfloat16}
    small = "int8" if side == "key" else "cubic"
    return {
        "table": small if bits <= 4 else "poly7" if bits in level_tables.POLY7 else "lloyd-max",
        "scale": "l2" if side == "key" else "lsq",
        "dtype": torch.float16,
        "seed": 0 if side == "key" else 1,
    }


@functools.lru_cache(maxsize=256)
def parse_format(name: str, key_dim: int, value_dim: int) -> Format:
    """Format.parse, remembered: operators of torch.library carry formats by name."""
    return Format.parse(name, (key_dim, value_dim))


@functools.lru_cache(maxsize=256)
def unknown_width(format: Format | None, widths: tuple[int, ...]) -> str | None:
    """What a backend with kernels for these widths says about a format that needs another one."""
    for bits in () if format is None else (format.key.bits, format.value.bits):
        if bits not in widths:
            return f"it has no kernels for {bits} bits, only for {list(widths)}"
    return None


@functools.lru_cache(maxsize=256)
def both_sides(codec: Codec) -> Format:
    """A format of this codec alone, for who chooses a backend by formats."""
    return Format(codec, codec)


def parse_codec(name: str, dim: int) -> Codec:
    """The codec with this full `Codec.name`."""
    bits, *options = name.split(":")
    return _parse_side("key", dim, int(bits), options, torch.bfloat16)


@functools.lru_cache(maxsize=256)
def _unrotated(format: Format) -> Format:
    return Format(format.key.unrotated(), format.value.unrotated())


@functools.cache
def _named_levels(name: str, bits: int) -> level_tables.Levels:
    return level_tables.table(name, bits)


@functools.lru_cache(maxsize=256)
def _constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached: must not become an inference tensor
        return torch.tensor(values, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _layout(key: Codec, value: Codec, page_size: int) -> PageLayout:
    offsets = [0]
    for size in (key.row_bytes, key.scale_bytes, value.row_bytes, value.scale_bytes):
        offsets.append(offsets[-1] + -(-size * page_size // 16) * 16)
    return PageLayout(*offsets)


def _table_name(table: str | level_tables.Levels) -> str:
    return table if isinstance(table, str) else "[" + ",".join(str(np.float32(x)) for x in table) + "]"


def _signs_name(codec: Codec) -> str:
    if codec.signs == SEEDED:
        return f"seed{codec.seed}"
    return str(codec.signs) if codec.signs in (PLAIN, UNROTATED) else f"signs{codec.signs}"


def _side_name(side: Side, codec: Codec) -> str:
    default = default_options(side, codec.bits)
    options = []
    if codec.table != default.get("table", ""):
        options.append(_table_name(codec.table))
    if codec.scale != default.get("scale", ""):
        options.append(codec.scale)
    if codec.dtype != default["dtype"]:
        options.append(DTYPE_NAMES[codec.dtype])
    if codec.coded and (codec.signs != SEEDED or codec.seed != default["seed"]):
        options.append(_signs_name(codec))
    return ":".join([f"{side[0]}{codec.bits}", *options])


def _parse_side(side: Side, dim: int, bits: int, names: Sequence[str], dtype: torch.dtype) -> Codec:
    options: dict[str, object] = {}
    for name in names:
        setting: object
        if name in DTYPES:
            field_name, setting = "dtype", DTYPES[name]
        elif bits != 16 and name in _SCALES:
            field_name, setting = "scale", name
        elif bits != 16 and name in level_tables.TABLES:
            field_name, setting = "table", name
        elif bits != 16 and re.fullmatch(r"seed\d{1,20}", name, re.ASCII):
            field_name, setting = "seed", int(name[4:])
        elif bits != 16 and name in (PLAIN, UNROTATED):
            field_name, setting = "signs", name
        elif bits != 16 and re.fullmatch(r"signs[0-9a-f]+", name):
            field_name, setting = "signs", name[5:]
        elif bits != 16 and name.startswith("[") and name.endswith("]"):
            field_name, setting = "table", _parse_levels(name)
        else:
            tables = [table for table in level_tables.TABLES if bits in level_tables.widths(table)]
            allowed = list(DTYPES) if bits == 16 else [*tables, "[levels]", *_SCALES, "f16", "f32", "seed<n>", *_SIGNS]
            raise InputError(f"an option of {side[0]}{bits} is one of {allowed}, got {short(name)}")
        if field_name in options or (field_name in _ROTATION and _ROTATION & options.keys()):
            what = "signs" if field_name in _ROTATION else field_name
            raise InputError(f"{side[0]}{bits} names its {what} twice: {cut(':'.join(names))}")
        options[field_name] = setting
    if bits == 16:
        options.setdefault("dtype", dtype)
    return (Codec.key if side == "key" else Codec.value)(dim, bits, **options)


def _parse_levels(text: str) -> tuple[float, ...]:
    numbers = text[1:-1].split(",")
    if not all(re.fullmatch(_NUMBER, x, re.ASCII) for x in numbers):
        raise InputError(f"levels must be decimal numbers separated by commas, got {short(text)}")
    return tuple(float(x) for x in numbers)

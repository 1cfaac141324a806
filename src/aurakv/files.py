"""Caches as files: safetensors with one JSON description under the metadata key "aurakv" (docs/format.md).

A file holds each page once, however many sequences share it, and nothing but tokens that are held: unused rows are 0.
Nothing in a file is trusted: what `load` returns has passed the constructors of caches and every check below.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .cache import Exact, KVCache
from .codec import Format
from .errors import AuraError, FileError, InputError
from .pages import allocate, copy_rows, parts
from .pool import PagePool
from .rotation import MAX_DIM
from .table import MAX_LENGTH, Table, round_up

KIND, VERSION = "aurakv-cache", 1

_METADATA = "aurakv"
_MAX_HEADER = 2**16  # two tables of 256 levels are 8 KiB
_MAX_KV_HEADS = 2**16
_COPY_BYTES = 2**26  # pages leave a device in pieces of about this size
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Range = tuple[int, int]
_TEXTS = ("kind", "format", "storage", "exact_dtype", "checksum")
_NUMBERS: dict[str, Range] = {
    "version": (VERSION, VERSION),
    "key_dim": (1, MAX_DIM),
    "value_dim": (1, MAX_DIM),
    "kv_heads": (1, _MAX_KV_HEADS),
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


def save(cache: KVCache, path: str | os.PathLike[str], seqs: Sequence[int] | None = None) -> None:
    """Write a cache, or the chosen sequences of it in that order, to a file that appears whole or not at all.

    Room that was only reserved is not kept. An append that did not fit is reported (CapacityError) before anything is
    written.
    """
    _safetensors()
    table, exact = cache._table, cache._exact_table
    chosen = list(range(cache.seqs)) if seqs is None else list(seqs)
    for seq in chosen:
        table.check_seq(seq)
    cache.sync()
    if exact is not None and exact.lengths != table.lengths:
        raise InputError("a cache cannot be saved whose exact tokens were left behind by appends to its pages")
    lengths = [table.lengths[seq] for seq in chosen]
    page_size = table.pool.page_size
    if table.contiguous:
        page_size = round_up(max([1, *lengths]), 64)
    tensors = {"lengths": torch.tensor(lengths, dtype=torch.int32), **_pack(table, chosen, page_size, "")}
    if exact is not None:
        tensors |= _pack(exact, chosen, exact.pool.page_size, "exact_")
    for name in ("key_offset", "value_offset"):
        offset = getattr(cache.pool, name)
        if offset is not None:
            tensors[name] = offset.cpu()
    _write(Path(path), tensors, _describe(cache, page_size, tensors))


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    backend: str | None = None,
    *,
    spare_pages: int | None = None,
) -> KVCache:
    """The cache that `save` wrote, on any device. A file that is anything else is refused with a FileError.

    A paged cache gets a pool of its own: the pages it holds and `spare_pages` more (default 0) for what will be
    appended or copied on write. Contiguous caches and rings grow by themselves and take no spare pages.
    """
    library = _safetensors()
    if spare_pages is not None:
        checks.whole("spare_pages", spare_pages, 0)
    device = torch.empty(0, device=device).device
    with _refusing(path):
        description, tensors = _read(library, path)
    if spare_pages is not None and description.storage != "paged":
        raise InputError(f"spare_pages are for paged caches, got {spare_pages} for a {description.storage} one")
    with _refusing(path):
        return _build(description, tensors, device, backend, spare_pages or 0)


class _Description(NamedTuple):
    """What a file says about its cache, in range but not yet compared with its tensors."""

    format: Format
    kv_heads: int
    page_size: int
    storage: str
    options: dict[str, int]  # of the storage
    exact: Exact
    checksums: dict[str, str]


def _describe(cache: KVCache, page_size: int, tensors: dict[str, Tensor]) -> str:
    table, format, exact = cache._table, cache.format, cache.exact
    fields: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "format": f"k{format.key.name}/v{format.value.name}",  # all spelled out: defaults may change, files not
        "key_dim": format.key.dim,
        "value_dim": format.value.dim,
        "kv_heads": cache.pool.kv_heads,
        "page_size": page_size,
        "exact_first": exact.first,
        "exact_recent": exact.recent,
        "exact_dtype": _DTYPE_NAMES[exact.dtype],
        "exact_rollback": exact.rollback,
        "checksums": {name: _digest(tensor) for name, tensor in tensors.items()},
    }
    if table.kept is not None:
        fields |= {"storage": "ring", **table.kept._asdict()}
    elif table.contiguous:
        fields |= {"storage": "contiguous"}
    else:
        fields |= {"storage": "paged", "max_width": table.max_width or 0}
    text = _canonical({**fields, "checksum": _checksum(fields)})
    _parse(text)  # whatever load would refuse is refused now
    return text


def _parse(text: str) -> _Description:
    fields = _json(text)
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise FileError(f"it must describe itself as {KIND!r}")
    if type(fields.get("version")) is not int or fields["version"] != VERSION:
        raise FileError(f"its version must be {VERSION}, got {_shown(fields.get('version'))}")
    checksum = _checksum({name: value for name, value in fields.items() if name != "checksum"})
    if fields.get("checksum") != checksum:
        raise FileError("its description is corrupted: the checksum differs")
    storage = fields.get("storage")
    if not isinstance(storage, str) or storage not in _STORAGES:
        raise FileError(f"its storage must be one of {list(_STORAGES)}, got {_shown(storage)}")
    numbers = {**_NUMBERS, **_STORAGES[storage]}
    _same_names("fields", fields, {*_TEXTS, *numbers, "checksums"})
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise FileError(f"its {name} must be a text, got {_shown(fields[name])}")
    for name, (least, most) in numbers.items():
        if type(fields[name]) is not int or not least <= fields[name] <= most:
            raise FileError(f"its {name} must be a whole number from {least} to {most}, got {_shown(fields[name])}")
    if fields["exact_dtype"] not in _DTYPES:
        raise FileError(f"its exact_dtype must be one of {list(_DTYPES)}, got {_shown(fields['exact_dtype'])}")
    checksums = fields["checksums"]
    if not isinstance(checksums, dict) or not all(isinstance(value, str) for value in checksums.values()):
        raise FileError("its checksums must be a text for each tensor")
    format = _parse_format(fields["format"], (fields["key_dim"], fields["value_dim"]))
    exact = Exact(
        fields["exact_first"], fields["exact_recent"], _DTYPES[fields["exact_dtype"]], fields["exact_rollback"]
    )
    options = {name: fields[name] for name in _STORAGES[storage]}
    return _Description(format, fields["kv_heads"], fields["page_size"], storage, options, exact, checksums)


def _parse_format(name: str, dims: tuple[int, int]) -> Format:
    if re.fullmatch(r"k\d{1,2}:.*/v\d{1,2}:.*", name, re.ASCII) is None:
        raise FileError(f"its format must be k<bits>:<options>/v<bits>:<options>, got {_shown(name)}")
    try:
        format = Format.parse(name, dims)
    except InputError as error:
        raise FileError(f"its format is wrong: {_shown(str(error))}") from None
    options = 2 + sum(3 for codec in (format.key, format.value) if codec.coded)
    if name.count(":") != options:
        raise FileError(f"its format must spell out every option, got {_shown(name)}")
    return format


def _pack(table: Table, chosen: list[int], page_size: int, prefix: str) -> dict[str, Tensor]:
    """The pages that the sequences use, each once, with a table of their own."""
    format, pool = table.pool.format, table.pool
    reach = [table.lengths[seq] if table.kept is None else table.highest[seq] for seq in chosen]
    filled, width = _entries(table, reach, page_size)
    rows = [table.rows[seq][:count] for seq, count in zip(chosen, filled, strict=True)]
    index: dict[int, int] = {}  # page of the pool -> page of the file
    held: list[int] = []  # rows of a page that hold tokens
    for row, last in zip(rows, reach, strict=True):
        if min(row, default=0) < 0:
            raise InputError("a cache cannot be saved whose lengths were raised beyond the pages it has")
        for entry, page in enumerate(row):
            if page not in index:
                index[page] = len(held)
                held.append(0)
            held[index[page]] = max(held[index[page]], min(page_size, last - entry * page_size))
    data = torch.zeros(len(held), pool.kv_heads, format.layout(page_size).bytes, dtype=torch.uint8)
    step = max(1, _COPY_BYTES // pool.data[:1].nbytes if pool.num_pages else 1)
    source = torch.tensor(list(index), dtype=torch.int64)
    for at in range(0, len(held), step):
        piece = pool.data[source[at : at + step].to(pool.device)].cpu()
        copy_rows(format, (piece, pool.page_size), (data[at : at + step], page_size))
    for page, count in enumerate(held):
        if count < page_size:  # freed memory of others never gets into a file
            for codes in parts(format, data[page : page + 1], page_size):
                for part in codes:
                    if part is not None:
                        part[:, :, count:] = 0
    entries = [[index[page] for page in row] + [-1] * (width - len(row)) for row in rows]
    tensors = {"table": torch.tensor(entries, dtype=torch.int32).view(len(rows), width), "pages": data}
    if table.kept is not None:
        tensors["highest"] = torch.tensor(reach, dtype=torch.int32)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _build(
    description: _Description, tensors: dict[str, Tensor], device: torch.device, backend: str | None, spare: int
) -> KVCache:
    """An empty cache as described, which then takes over the sequences once everything about them is checked."""
    format, kv_heads = description.format, description.kv_heads
    names = {"lengths", "table", "pages"} | ({"highest"} if description.storage == "ring" else set())
    if description.exact.first or description.exact.recent:
        names |= {"exact_table", "exact_pages", "exact_highest"}
    offsets = {"key_offset": format.key, "value_offset": format.value}
    _same_names("tensors", tensors, names | (tensors.keys() & offsets.keys()))
    _same_names("checksums", description.checksums, set(tensors))
    for name in sorted(tensors):
        dtype = torch.float32 if name in offsets else torch.uint8 if name.endswith("pages") else torch.int32
        if tensors[name].dtype != dtype:
            raise FileError(f"its tensor {name!r} must be {dtype}, got {tensors[name].dtype}")
        if _digest(tensors[name]) != description.checksums[name]:
            raise FileError(f"its tensor {name!r} is corrupted: the checksum differs")
    for name, codec in offsets.items():
        if name in tensors:
            _expect(tensors, name, kv_heads, codec.dim)
            if not bool(tensors[name].isfinite().all()):
                raise FileError(f"its {name} must be finite")
    seqs = _expect(tensors, "lengths", None)[0]
    given = {name: tensors[name].to(device, copy=True) if name in tensors else None for name in offsets}
    cache = _empty_cache(description, given, device, backend)
    lengths = tensors["lengths"].tolist()
    if min(lengths, default=0) < 0:
        raise FileError(f"its lengths must not be negative, got {min(lengths)}")
    page_size = description.page_size
    if description.storage == "contiguous" and page_size != round_up(max([1, *lengths]), 64):
        raise FileError(f"a contiguous cache of at most {max([1, *lengths])} tokens has another page_size, {page_size}")
    plans = [_plan(cache._table, page_size, tensors, "", lengths, seqs)]
    if cache._exact_table is not None:
        size = cache._exact_table.pool.page_size
        plans.append(_plan(cache._exact_table, size, tensors, "exact_", lengths, seqs))
    for table, plan, room in zip(cache._tables, plans, (spare, 0), strict=False):
        pages = plan.pages.shape[0]
        data = allocate(table.pool.format, plan.page_size, pages + room, kv_heads, device)
        data[:pages] = plan.pages
        table.restore(data, plan.page_size, plan.rows, list(lengths), plan.highest)
        for seq, length in enumerate(lengths):
            table.check_rollback(seq, length)  # the window of the last token is still there
        table.pages.check()
        table.pages.check_values()
    return cache


class _Plan(NamedTuple):
    """The checked contents of one table."""

    page_size: int
    pages: Tensor
    rows: list[list[int]]
    highest: list[int]


def _plan(
    table: Table, page_size: int, tensors: dict[str, Tensor], prefix: str, lengths: list[int], seqs: int
) -> _Plan:
    """Pages and table entries of some sequences: every entry that has a token names a page, and no other does."""
    highest = lengths
    if table.kept is not None:
        _expect(tensors, f"{prefix}highest", seqs)
        highest = tensors[f"{prefix}highest"].tolist()
        if any(high < length for high, length in zip(highest, lengths, strict=True)):
            raise FileError(f"its {prefix}highest must not be below the lengths")
    filled, width = _entries(table, highest, page_size)
    if max(filled, default=0) > width:
        raise FileError(f"its sequences must have at most {width * page_size} tokens, got {max(lengths)}")
    layout = table.pool.format.layout(page_size)
    _expect(tensors, f"{prefix}table", seqs, width)
    count = _expect(tensors, f"{prefix}pages", None, table.pool.kv_heads, layout.bytes)[0]
    entries = tensors[f"{prefix}table"][:, : width if seqs else 0].clone()  # no sequences: a width that costs nothing
    used = torch.arange(entries.shape[1]) < torch.tensor(filled, dtype=torch.int64)[:, None]
    if bool((entries[~used] != -1).any()):
        raise FileError(f"its {prefix}table must be -1 where a sequence has no tokens")
    named = entries[used].long()
    if named.numel() and (int(named.min()) < 0 or int(named.max()) >= count):
        raise FileError(f"its {prefix}table names pages outside 0 … {count - 1}")
    entry = used.nonzero()[:, 1]
    at = torch.full((count,), -1)
    at[named] = entry
    if bool((at < 0).any()):
        raise FileError(f"its {prefix}table leaves pages unused")
    if bool((at[named] != entry).any()):  # forks share a page at one and the same entry
        raise FileError(f"its {prefix}table names a page at two different entries")
    return _Plan(page_size, tensors[f"{prefix}pages"], entries.tolist(), list(highest))


def _entries(table: Table, reach: list[int], page_size: int) -> tuple[list[int], int]:
    """How many leading table entries each sequence uses, and how wide its table is."""
    filled = [-(-last // page_size) for last in reach]
    if table.kept is not None and table.max_width is not None:  # a ring that has wrapped uses all
        filled = [min(count, table.max_width) for count in filled]
    return filled, table.max_width or max([1, *filled])


def _empty_cache(
    description: _Description, offsets: dict[str, Tensor | None], device: torch.device, backend: str | None
) -> KVCache:
    """A cache of this kind with no sequences, hence without pages."""
    format, kv_heads, page_size, storage, options, exact, _ = description
    if storage == "ring":
        return KVCache.ring(
            format,
            seqs=0,
            kv_heads=kv_heads,
            device=device,
            page_size=page_size,
            exact=exact,
            backend=backend,
            **options,
            **offsets,
        )
    if storage == "contiguous":
        return KVCache.contiguous(format, 0, kv_heads, 0, device, exact=exact, backend=backend, **offsets)
    pool = PagePool(format, 0, page_size, kv_heads, device, **offsets)
    return KVCache.paged(pool, 0, options["max_width"] * page_size or None, exact=exact, backend=backend)


def _expect(tensors: dict[str, Tensor], name: str, *shape: int | None) -> torch.Size:
    """The shape of a tensor, which must have these sizes where they are given."""
    given = tensors[name].shape
    if len(given) != len(shape) or any(b not in (None, a) for a, b in zip(given, shape, strict=True)):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise FileError(f"its tensor {name!r} must have the shape [{wanted}], got {list(given)}")
    return given


def _read(library: ModuleType, path: str | os.PathLike[str]) -> tuple[_Description, dict[str, Tensor]]:
    """The description and the tensors, which are mapped, not read yet."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise FileError(f"the header of a cache has at most {_MAX_HEADER} bytes, got {size}")
        header = _json(file.read(size).decode("utf-8", "replace"))  # the library does not see names given twice
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.keys() != {_METADATA} or not isinstance(metadata[_METADATA], str):
        raise FileError(f"its metadata must be a text called {_METADATA!r} and nothing else")
    description = _parse(metadata[_METADATA])
    try:
        with library.safe_open(path, "pt") as opened:
            return description, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError:
        raise
    except Exception as error:
        raise FileError(f"it is not a whole safetensors file: {_shown(str(error))}") from None


def _write(path: Path, tensors: dict[str, Tensor], text: str) -> None:
    """Through a temporary file in the same folder, so that `path` is the old file or the new one, never half."""
    from safetensors.torch import save_file

    temporary = path.with_name(f".aurakv-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        try:
            save_file(tensors, temporary, {_METADATA: text})
        except Exception as error:
            raise OSError(f"cannot write {path}: {error}") from error
        os.chmod(temporary, mode)  # the library may have made it private
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise InputError("files of caches need the package safetensors: pip install aurakv[files]") from None
    return safetensors


@contextlib.contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever aurakv finds wrong is the fault of the file."""
    try:
        yield
    except (AuraError, RecursionError) as error:
        raise FileError(f"{os.fspath(path)} is not a cache that can be loaded: {error}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"its header is not JSON: {_shown(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is given twice")
    return fields


def _same_names(what: str, given: Iterable[str], wanted: set[str]) -> None:
    missing, unknown = sorted(wanted - set(given)), sorted(set(given) - wanted)
    if missing or unknown:
        raise FileError(f"its {what} are not those of a cache: missing {missing}, unknown {_shown(unknown)}")


def _canonical(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"

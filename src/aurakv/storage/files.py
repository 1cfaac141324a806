"""Caches as files: safetensors with one JSON description, the manifest, under the metadata key "aurakv".

A file holds each page once, however many sequences share it, and nothing but tokens that are held: unused rows are 0.
Nothing in a file is trusted: what `load` returns has passed the constructors of caches and every check below.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends, checks
from ..arguments import instance, usable_device, whole
from ..errors import AuraError, BackendError, FileError, InputError, counted, short
from ..format.fit import check_fit
from .cache import KVCache
from .manifest import Manifest, read_json, same_names, shown
from .page_table import PageTable, round_up
from .pages import allocate, copy_rows, parts
from .pool import PagePool
from .uncompressed import Uncompressed

_METADATA = "aurakv"
_MAX_HEADER = 2**16  # two tables of 256 levels are 8 KiB
MAX_NOTE = 2**20  # other texts in the metadata
_COPY_BYTES = 2**26  # pages leave a device in pieces of about this size
_CONSTANT = {  # tensors of a layer, not of its tokens
    "key_offset": torch.float32,
    "value_offset": torch.float32,
    "key_fit": torch.float16,
    "value_fit": torch.float16,
}


def save(cache: KVCache, path: str | os.PathLike[str], seqs: Sequence[int] | None = None) -> None:
    """Write a cache, or the chosen sequences of it in that order, to a file that appears whole or not at all.

    Room that was only reserved is not kept. An append that did not fit is reported (CapacityError) before anything is
    written.
    """
    instance("cache", cache, KVCache)
    write(cache, path, list(range(cache.seqs)) if seqs is None else checks.listed("seqs", seqs))


def write(
    cache: KVCache, path: str | os.PathLike[str], chosen: list[int], notes: Mapping[str, str] | None = None
) -> None:
    """`save`, with other texts in the metadata: `load` refuses what has any."""
    _safetensors()
    table, uncompressed = cache.page_table, cache.uncompressed_table
    for seq in chosen:
        table.check_seq(seq)
    cache.sync()
    lengths = [table.lengths[seq] for seq in chosen]
    page_size = table.pool.page_size
    if table.contiguous:
        page_size = round_up(max([1, *lengths]), 64)
    tensors = {"lengths": torch.tensor(lengths, dtype=torch.int32), **_pack(table, chosen, page_size, "")}
    _stored_table(table, page_size, tensors, "", lengths)  # what load would refuse is never written
    if uncompressed is not None:
        held = cache.uncompressed.held(lengths)
        size = _uncompressed_page_size(cache, held)
        tensors |= _pack(uncompressed, chosen, size, "exact_")
        _stored_table(uncompressed, size, tensors, "exact_", held)
    tensors |= {name: constant.cpu() for name, constant in cache.pool.constants.items()}
    storage = "ring" if table.kept is not None else "contiguous" if table.contiguous else "paged"
    text = Manifest(
        cache.format,
        cache.pool.kv_heads,
        page_size,
        storage,
        table.kept,
        table.max_width,
        Uncompressed() if uncompressed is None else cache.uncompressed,
        {name: _digest(tensor) for name, tensor in tensors.items()},
    ).text()
    Manifest.parse(text)
    _write(Path(path), tensors, {_METADATA: text, **(notes or {})})


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
    return read(path, device, backend, spare_pages)[0]


def read(
    path: str | os.PathLike[str],
    device: torch.device | str,
    backend: str | None,
    spare_pages: int | None,
    noted: frozenset[str] = frozenset(),
) -> tuple[KVCache, dict[str, str]]:
    """`load`, for a file whose metadata holds these texts too."""
    library = _safetensors()
    if spare_pages is not None:
        spare_pages = whole("spare_pages", spare_pages, 0)
    if backend is not None:
        backends.why_not(backend)  # refuses a name that does not exist
    device = usable_device(device)
    with refusing(path):
        manifest, tensors, notes = _read(library, path, noted)
    if spare_pages is not None and manifest.storage != "paged":
        raise InputError(f"spare_pages are for paged caches, got {spare_pages} for a {manifest.storage} one")
    with refusing(path):
        return _build(manifest, tensors, device, backend, spare_pages or 0), notes


def _pack(table: PageTable, chosen: list[int], page_size: int, prefix: str) -> dict[str, Tensor]:
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
    manifest: Manifest, tensors: dict[str, Tensor], device: torch.device, backend: str | None, spare: int
) -> KVCache:
    """An empty cache as described, which takes over the sequences once everything about them is checked."""
    _check_tensors(manifest, tensors)
    kv_heads, page_size, lengths = manifest.kv_heads, manifest.page_size, tensors["lengths"].tolist()
    if min(lengths, default=0) < 0:
        raise FileError(f"its lengths must not be negative, got {min(lengths)}")
    longest = max([1, *lengths])
    if manifest.storage == "contiguous" and page_size != round_up(longest, 64):
        raise FileError(f"its page_size must be {round_up(longest, 64)} for at most {longest} tokens, got {page_size}")
    pool = PagePool(
        manifest.format,
        0,
        page_size,
        kv_heads,
        device,
        growable=manifest.storage != "paged",
        **{name: tensors[name].to(device) for name in _CONSTANT if name in tensors},
    )
    cache = KVCache(PageTable(pool, 0, manifest.max_width, manifest.kept), manifest.uncompressed, backend)
    plans, held = (
        [_stored_table(cache.page_table, page_size, tensors, "", lengths)],
        manifest.uncompressed.held(lengths),
    )
    if cache.uncompressed_table is not None:
        plans.append(
            _stored_table(cache.uncompressed_table, _uncompressed_page_size(cache, held), tensors, "exact_", held)
        )
    for table, plan, room, tokens in zip(cache.page_tables, plans, (spare, 0), (lengths, held), strict=False):
        pages = plan.pages.shape[0]
        data = allocate(table.pool.format, plan.page_size, pages + room, kv_heads, device)
        data[:pages] = plan.pages
        table.restore(data, plan.page_size, plan.rows, list(tokens), plan.highest)
        table.pages.check()
        table.pages.check_values()
    return cache


def _uncompressed_page_size(cache: KVCache, held: list[int]) -> int:
    table = cache.uncompressed_table
    assert table is not None
    return table.pool.page_size if table.kept is not None else cache.uncompressed.page_size(max(held, default=0))


def _check_tensors(manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """All that belong to such a cache and no others, of the right types and as they were written."""
    names = {"lengths", "table", "pages"} | ({"highest"} if manifest.kept is not None else set())
    if manifest.uncompressed.first or manifest.uncompressed.recent:
        names |= {"exact_table", "exact_pages"} | ({"exact_highest"} if manifest.uncompressed.recent else set())
    offsets = {"key_offset": manifest.format.key, "value_offset": manifest.format.value}
    same_names("tensors", tensors, names | (tensors.keys() & _CONSTANT))
    same_names("checksums", manifest.checksums, set(tensors))
    for name in sorted(tensors):
        dtype = _CONSTANT.get(name, torch.uint8 if name.endswith("pages") else torch.int32)
        if tensors[name].dtype != dtype:
            raise FileError(f"its tensor {short(name)} must be {dtype}, got {tensors[name].dtype}")
        if _digest(tensors[name]) != manifest.checksums[name]:
            raise FileError(f"its tensor {short(name)} is corrupted: the checksum differs")
    _expect(tensors, "lengths", None)
    for name in sorted(tensors.keys() & offsets.keys()):
        _expect(tensors, name, manifest.kv_heads, offsets[name].dim)
    for name, codec in (("key_fit", manifest.format.key), ("value_fit", manifest.format.value)):
        try:
            check_fit(name, tensors.get(name), codec, manifest.kv_heads, torch.device("cpu"))
        except InputError as error:
            raise FileError(f"its {error}") from error


class _StoredTable(NamedTuple):
    """The checked contents of one table."""

    page_size: int
    pages: Tensor
    rows: list[list[int]]
    highest: list[int]


def _stored_table(
    table: PageTable, page_size: int, tensors: dict[str, Tensor], prefix: str, lengths: list[int]
) -> _StoredTable:
    """Pages and table entries of some sequences: every entry that has a token names a page, and no other does."""
    highest, seqs = lengths, len(lengths)
    if table.kept is not None:
        _expect(tensors, f"{prefix}highest", seqs)
        highest = tensors[f"{prefix}highest"].tolist()
        for length, high in zip(lengths, highest, strict=True):
            if high < length or high != table.lowered(length, high) or not table.holds_window(length, high):
                raise FileError(f"its {prefix}highest cannot be {high} for a sequence of {counted(length, 'token')}")
    filled, width = _entries(table, highest, page_size)
    if max(filled, default=0) > width:
        raise FileError(f"its sequences must have at most {width * page_size} tokens, got {max(lengths)}")
    layout = table.pool.format.layout(page_size)
    _expect(tensors, f"{prefix}table", seqs, width)
    count = _expect(tensors, f"{prefix}pages", None, table.pool.kv_heads, layout.bytes)[0]
    entries = tensors[f"{prefix}table"][:, : width if seqs else 0]  # no sequences: a width that costs nothing
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
    return _StoredTable(page_size, tensors[f"{prefix}pages"], entries.tolist(), list(highest))


def _entries(table: PageTable, reach: list[int], page_size: int) -> tuple[list[int], int]:
    """How many leading table entries each sequence uses, and how wide its table is."""
    filled = [-(-last // page_size) for last in reach]
    if table.kept is not None and table.max_width is not None:  # a ring that has wrapped uses all
        filled = [min(count, table.max_width) for count in filled]
    return filled, table.max_width or max([1, *filled])


def _expect(tensors: dict[str, Tensor], name: str, *shape: int | None) -> torch.Size:
    """The shape of a tensor, which must have these sizes where they are given."""
    given = tensors[name].shape
    if len(given) != len(shape) or any(b not in (None, a) for a, b in zip(given, shape, strict=True)):
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        raise FileError(f"its tensor {short(name)} must have the shape [{wanted}], got {list(given)}")
    return given


def _read(
    library: ModuleType, path: str | os.PathLike[str], noted: frozenset[str]
) -> tuple[Manifest, dict[str, Tensor], dict[str, str]]:
    """The manifest, the tensors and other texts; pages are mapped, not read yet."""
    limit = _MAX_HEADER + len(noted) * MAX_NOTE
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > limit:
            raise FileError(f"the header of a cache has at most {limit} bytes, got {size}")
        header = read_json(file.read(size).decode("utf-8", "replace"))  # the library does not see names given twice
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    names = {_METADATA, *noted}
    texts = metadata if isinstance(metadata, dict) else {}
    if texts.keys() != names or not all(isinstance(text, str) for text in texts.values()):
        called = " and ".join(repr(name) for name in sorted(names))
        raise FileError(f"its metadata must be a text called {called} and nothing else")
    manifest = Manifest.parse(texts[_METADATA])
    notes = {name: texts[name] for name in noted}
    try:
        with library.safe_open(path, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            # What decides about memory must not change under our hands; what pages hold is harmless.
            return manifest, {name: x if name.endswith("pages") else x.clone() for name, x in tensors.items()}, notes
    except OSError:
        raise
    except Exception as error:
        raise FileError(f"it is not a whole safetensors file: {shown(str(error))}") from None


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Through a temporary file in the same folder, so that `path` is the old file or the new one, never half."""
    from safetensors.torch import save_file

    if not path.parent.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise FileError(f"{path} cannot be written: it is a folder")
    temporary = path.with_name(f".aurakv-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        try:
            save_file(tensors, temporary, metadata)
        except Exception as error:
            raise OSError(f"cannot write {path}: {error}") from error
        os.chmod(temporary, mode)  # the library may have made it private
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the name of the temporary file
    finally:
        temporary.unlink(missing_ok=True)


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError:
        raise InputError("files of caches need the package safetensors: pip install aurakv[files]") from None
    return safetensors


@contextlib.contextmanager
def refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever aurakv finds wrong is the fault of the file, but not what a backend cannot do that was asked for."""
    try:
        yield
    except BackendError:
        raise
    except (AuraError, RecursionError) as error:
        raise FileError(f"{os.fspath(path)} is not a cache that can be loaded: {error}") from None
    except OSError as error:
        raise FileError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from error


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()

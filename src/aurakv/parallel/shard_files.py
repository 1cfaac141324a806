"""Sharded caches as files: each rank writes its own part, an ordinary file of a cache with one more text, the shard.

All files of one save carry the same number, so that parts of different saves are never put together.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import usable_device
from ..errors import AuraError, FileError, PeerError
from ..format.codec import DTYPE_NAMES, DTYPES
from ..storage.files import MAX_NOTE, read, refusing, write
from ..storage.manifest import read_json, same_names, shown
from ..storage.page_table import MAX_LENGTH, Kept
from ..storage.uncompressed import Uncompressed
from .group import Group
from .placement import Share
from .sharded_cache import ShardedCache, Whole

_NOTE, _KIND, _VERSION = "aurakv-shard", "aurakv-shard", 1
_NUMBERS = {
    "version": (_VERSION, _VERSION),
    "number": (0, 2**63 - 1),
    "ranks": (1, 2**20),
    "rank": (0, 2**20),
    "block": (1, MAX_LENGTH),
    "chunk": (1, MAX_LENGTH),
    "max_tokens": (0, MAX_LENGTH),  # 0: as many as there is room for
    "window": (0, MAX_LENGTH),  # 0: no ring
    "sinks": (0, MAX_LENGTH),
    "rollback": (0, MAX_LENGTH),
    "exact_first": (0, MAX_LENGTH),
    "exact_recent": (0, MAX_LENGTH),
    "exact_rollback": (0, MAX_LENGTH),
}
_LISTS = ("lengths", "highest", "homes")
_OTHERS = ("kind", "growing", "exact_dtype", "checksum")


def save_shards(cache: ShardedCache, folder: str | os.PathLike[str]) -> None:
    """Write the part of each rank to a file of its own in a folder that all ranks see, or each its own folder.

    Returns when all ranks have written, and raises on all of them when one has not.
    """
    group, device = cache._group, cache.local.pool.device
    Path(folder).mkdir(parents=True, exist_ok=True)
    number = group.numbers(secrets.randbits(63), device, "saving a sharded cache")[0]
    failure: Exception | None = None
    try:
        text = _text(cache, number)
        if len(text) > MAX_NOTE:
            raise FileError(f"the sequences of a sharded cache take at most {MAX_NOTE} bytes to list, got {len(text)}")
        write(cache.local, _path(folder, group), list(range(cache.seqs)), {_NOTE: text})
    except (AuraError, OSError) as error:
        failure = error
    _all_fine(group, failure, device, "save")


def load_shards(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    backend: str | None = None,
    *,
    spare_pages: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> ShardedCache:
    """The cache that `save_shards` wrote, with as many ranks as then. Raises on all ranks when one part is wrong."""
    members = Group(group)
    path, where = _path(folder, members), usable_device(device)
    failure: Exception | None = None
    try:
        local, notes = read(path, device, backend, spare_pages, frozenset({_NOTE}))
        with refusing(path):
            fields = _parse(notes[_NOTE])
            share = Share(fields["block"], members.size)
            whole = _whole(fields)
            if (fields["rank"], fields["ranks"]) != (members.rank, members.size):
                raise FileError(
                    f"it is the part of rank {fields['rank']} of {fields['ranks']},"
                    f" got rank {members.rank} of {members.size}"
                )
            table, uncompressed = local.page_table, share.uncompressed(whole.uncompressed, whole.chunk)
            same = table.kept == (None if whole.kept is None else share.kept(whole.kept))
            if (
                not same
                or (uncompressed if uncompressed.first or uncompressed.recent else Uncompressed()) != local.uncompressed
            ):
                raise FileError("its shard and its cache keep different tokens")
            if fields["block"] % local.pool.page_size or any(len(fields[name]) != local.seqs for name in _LISTS):
                raise FileError("its shard and its cache have different pages or sequences")
    except (AuraError, OSError) as error:
        failure = error
    _all_fine(members, failure, where, "load")
    if fields["growing"]:
        local.pool.growable = True  # a pool of its own
    cache = ShardedCache(local, whole, members, fields["homes"])
    cache._lengths, cache._highest = list(fields["lengths"]), list(fields["highest"])
    counts = [cache.share(seq).count(length) for seq, length in enumerate(cache._lengths)]
    failure = None if counts == local.lengths else FileError(f"{path} has other tokens than its shard says")
    _all_fine(members, failure, where, "load")
    numbers = members.numbers(fields["number"], where, "loading a sharded cache")
    if len(set(numbers)) != 1:
        raise FileError(f"the parts of the ranks in {os.fspath(folder)} come from different saves")
    cache.check()
    return cache


def _path(folder: str | os.PathLike[str], group: Group) -> Path:
    return Path(folder) / f"rank-{group.rank}-of-{group.size}.safetensors"


def _all_fine(group: Group, failure: Exception | None, device: torch.device, what: str) -> None:
    """The error of this rank, or the news that another has one."""
    flags = group.numbers(int(failure is not None), device, f"to {what} a sharded cache")
    if failure is not None:
        raise failure
    if any(flags):
        others = [rank for rank, flag in enumerate(flags) if flag]
        raise PeerError(f"the ranks {others} could not {what} their parts of a sharded cache")


def _text(cache: ShardedCache, number: int) -> str:
    whole, kept = cache.whole, cache.whole.kept
    uncompressed = whole.uncompressed
    fields: dict[str, Any] = {
        "kind": _KIND,
        "version": _VERSION,
        "number": number,
        "ranks": cache._group.size,
        "rank": cache._group.rank,
        "block": whole.block,
        "chunk": whole.chunk,
        "max_tokens": whole.max_tokens or 0,
        "window": 0 if kept is None else kept.window,
        "sinks": 0 if kept is None else kept.sinks,
        "rollback": 0 if kept is None else kept.rollback,
        "growing": kept is None and cache.local.pool.growable,
        "exact_first": uncompressed.first,
        "exact_recent": uncompressed.recent,
        "exact_dtype": DTYPE_NAMES[uncompressed.dtype],
        "exact_rollback": uncompressed.rollback,
        "lengths": cache._lengths,
        "highest": cache._highest,
        "homes": cache._homes,
    }
    return json.dumps({**fields, "checksum": _checksum(fields)})


def _parse(text: str) -> dict[str, Any]:
    fields = read_json(text)
    if not isinstance(fields, dict) or fields.get("kind") != _KIND:
        raise FileError(f"its shard must describe itself as {_KIND!r}")
    if fields.get("version") != _VERSION:
        raise FileError(f"the version of its shard must be {_VERSION}, got {shown(fields.get('version'))}")
    same_names("fields of the shard", fields, {*_NUMBERS, *_LISTS, *_OTHERS})
    if fields["checksum"] != _checksum({name: value for name, value in fields.items() if name != "checksum"}):
        raise FileError("its shard is corrupted: the checksum differs")
    for name, (least, most) in _NUMBERS.items():
        if type(fields[name]) is not int or not least <= fields[name] <= most:
            raise FileError(f"its {name} must be a whole number from {least} to {most}, got {shown(fields[name])}")
    for name in _LISTS:
        most = fields["ranks"] - 1 if name == "homes" else MAX_LENGTH
        if type(fields[name]) is not list or not all(type(x) is int and 0 <= x <= most for x in fields[name]):
            raise FileError(f"its {name} must be whole numbers from 0 to {most}, got {shown(fields[name])}")
    if type(fields["growing"]) is not bool or fields["exact_dtype"] not in DTYPES:
        raise FileError(f"its shard has no such values: {shown([fields['growing'], fields['exact_dtype']])}")
    if any(high < length for length, high in zip(fields["lengths"], fields["highest"], strict=False)):
        raise FileError("its sequences must not be longer than they ever were")
    return fields


def _whole(fields: dict[str, Any]) -> Whole:
    kept = Kept(fields["window"], fields["sinks"], fields["chunk"], fields["rollback"]) if fields["window"] else None
    uncompressed = Uncompressed(
        fields["exact_first"], fields["exact_recent"], DTYPES[fields["exact_dtype"]], fields["exact_rollback"]
    )
    return Whole(fields["block"], fields["chunk"], kept, uncompressed, fields["max_tokens"] or None)


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

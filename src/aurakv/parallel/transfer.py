"""A sequence moves to another process in its stored bytes, so that prefill and decode can live apart.

The sender describes the cache with the manifest of files. The receiver compares it with its own cache and answers
before any page is sent. Pages travel in the layout of docs/format.md, cut by their size alone, and each side finds its
own slots: a contiguous cache can send to a paged one. Nothing is decoded; codes and scales arrive bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AuraError, CapacityError, FileError, InputError, PeerError, counted
from ..format.codec import Format
from ..storage.cache import KVCache
from ..storage.manifest import Manifest, read_json, same_names, shown
from ..storage.page_table import MAX_LENGTH, PageTable
from ..storage.pages import parts
from ..storage.uncompressed import Uncompressed
from .group import Group

_MAGIC, _VERSION = 0x6175_7261_6B76, 1  # "aurakv"
_MAX_TEXT = 2**16
_PIECE_BYTES = 2**24  # of pages that travel at once
_SENDING, _RECEIVING = "sending a sequence", "receiving a sequence"


def send(cache: KVCache, seq: int, dst: int, group: dist.ProcessGroup | None = None) -> None:
    """Send a sequence to rank `dst` of a group, which calls `receive`. Returns when it has arrived; it also stays here.

    What the receiver refuses is raised as PeerError with its sentence.
    """
    members = Group(group)
    members.check_peer("dst", dst)
    device = cache.pool.device
    wire = _Wire(members, dst, members.wire(device), _SENDING)
    try:
        text = _describe(cache, seq)
    except AuraError as error:
        wire.say(_refusal(error))
        raise
    wire.say(text)
    _answer(wire, f"rank {dst} refused sequence {seq}")
    for table in cache.page_tables:
        for run in _runs(table, seq):
            for page, piece in _pieces(table, run, wire.device):
                _copy(table, seq, piece, page, out=True)
                wire.send(page.data)
    _answer(wire, f"rank {dst} lost sequence {seq}")


def receive(cache: KVCache, seq: int, src: int, group: dist.ProcessGroup | None = None) -> int:
    """Receive what rank `src` sends into an empty sequence of a cache of the same format; its length.

    Format, heads, dimensions, offsets and uncompressed tokens must be the same, of rings also what they keep. What does
    not fit is refused on both sides and leaves the sequence empty.
    """
    members = Group(group)
    members.check_peer("src", src)
    wire = _Wire(members, src, members.wire(cache.pool.device), _RECEIVING)
    text = wire.listen()
    try:
        sent = _parse(text, src)
        _compare(sent, cache, seq)
        _make_room(cache, seq, sent)
    except PeerError:
        raise  # the sender knows
    except AuraError as error:
        wire.say(_refusal(error))
        raise
    try:
        wire.say("{}")
        for table in cache.page_tables:
            for run in _runs(table, seq):
                for page, piece in _pieces(table, run, wire.device):
                    wire.receive(page.data)
                    _copy(table, seq, piece, page, out=False)
        wire.say("{}")
    except BaseException:
        cache.free(seq)
        raise
    return sent.length


class _Sent(NamedTuple):
    """What a sender says about its sequence."""

    manifest: Manifest
    length: int
    highest: list[int]  # of each table


class _Wire:
    """Texts and tensors between two ranks."""

    def __init__(self, group: Group, peer: int, device: torch.device, what: str) -> None:
        self.group, self.peer, self.device, self.what = group, peer, device, what

    def send(self, x: Tensor) -> None:
        self.group.send(x, self.peer, self.what)

    def receive(self, x: Tensor) -> None:
        self.group.receive(x, self.peer, self.what)

    def say(self, text: str) -> None:
        data = text.encode()
        if len(data) > _MAX_TEXT:
            raise InputError(f"the description of a cache has at most {_MAX_TEXT} bytes, got {len(data)}")
        self.send(torch.tensor([_MAGIC, len(data)], device=self.device))
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device))

    def listen(self) -> str:
        head = torch.empty(2, dtype=torch.int64, device=self.device)
        self.receive(head)
        magic, size = head.tolist()
        if magic != _MAGIC or not 0 < size <= _MAX_TEXT:
            raise PeerError(f"rank {self.peer} sent something that is not a sequence of aurakv")
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.receive(data)
        return bytes(data.cpu().numpy()).decode("utf-8", "replace")


def _describe(cache: KVCache, seq: int) -> str:
    table, pool = cache.page_table, cache.pool
    table.check_seq(seq)
    cache.sync()
    storage = "ring" if table.kept is not None else "contiguous" if table.contiguous else "paged"
    manifest = Manifest(
        cache.format,
        pool.kv_heads,
        pool.page_size,
        storage,
        table.kept,
        table.max_width,
        Uncompressed() if cache.uncompressed_table is None else cache.uncompressed,
        {name: _digest(constant) for name, constant in cache.pool.constants.items()},
    )
    highest = [each.highest[seq] for each in cache.page_tables]
    fields = {"version": _VERSION, "manifest": manifest.text(), "length": table.lengths[seq], "highest": highest}
    return json.dumps(fields)


def _parse(text: str, src: int) -> _Sent:
    fields = read_json(text)
    if isinstance(fields, dict) and fields.keys() == {"error"}:
        raise PeerError(f"rank {src} could not send: {shown(fields['error'])}")
    version = fields.get("version") if isinstance(fields, dict) else None
    if type(version) is not int or version != _VERSION:
        raise FileError(f"transfers must have the version {_VERSION}, got {shown(version)}")
    same_names("fields", fields, {"version", "manifest", "length", "highest"})
    length, highest = fields["length"], fields["highest"]
    for number in (length, *(highest if isinstance(highest, list) else [None])):
        if type(number) is not int or not 0 <= number <= MAX_LENGTH:
            raise FileError(f"lengths must be whole numbers from 0 to {MAX_LENGTH}, got {shown(number)}")
    if not isinstance(fields["manifest"], str):
        raise FileError(f"the manifest must be a text, got {shown(fields['manifest'])}")
    return _Sent(Manifest.parse(fields["manifest"]), length, highest)


def _compare(sent: _Sent, cache: KVCache, seq: int) -> None:
    """Refuse what is not stored here byte for byte as there."""
    table, manifest, uncompressed = cache.page_table, sent.manifest, cache.uncompressed_table
    table.check_seq(seq)
    if cache.lengths[seq]:
        raise InputError(f"sequence {seq} must be empty to receive one, got {counted(cache.lengths[seq], 'token')}")
    ring = (table.kept, table.pool.page_size) if table.kept is not None else (None, 0)
    checksums = {name: _digest(constant) for name, constant in cache.pool.constants.items()}
    for name, ours, theirs in (
        ("format", cache.format.full_name, manifest.format.full_name),
        ("dimensions", _dims(cache.format), _dims(manifest.format)),
        ("KV heads", table.pool.kv_heads, manifest.kv_heads),
        ("uncompressed tokens", Uncompressed() if uncompressed is None else cache.uncompressed, manifest.uncompressed),
        ("ring", ring, (manifest.kept, manifest.page_size) if manifest.kept is not None else (None, 0)),
        ("offsets", checksums, manifest.checksums),
        ("tables", len(cache.page_tables), len(sent.highest)),
    ):
        if ours != theirs:
            raise InputError(f"both caches must have the same {name}: {shown(ours)} here, got {shown(theirs)}")
    for each, high, length in zip(cache.page_tables, sent.highest, _lengths(cache, sent), strict=False):
        if high < length or high != each.lowered(length, high) or not each.holds_window(length, high):
            raise FileError(f"a sequence of {counted(sent.length, 'token')} cannot have been {high} long")


def _make_room(cache: KVCache, seq: int, sent: _Sent) -> None:
    """Pages for the sequence in every table, or in none."""
    try:
        for table, high in zip(cache.page_tables, sent.highest, strict=True):
            new = [high if each == seq else 0 for each in range(cache.seqs)]
            table.make_room([sum(new[:i]) for i in range(cache.seqs + 1)])
    except CapacityError:
        cache.free(seq)
        raise
    for table, high, length in zip(cache.page_tables, sent.highest, _lengths(cache, sent), strict=False):
        table.place(seq, length, high)


def _lengths(cache: KVCache, sent: _Sent) -> tuple[int, int]:
    """Tokens of the sequence in the table of codes and in that of uncompressed tokens."""
    return sent.length, cache.uncompressed.held([sent.length])[0]


def _answer(wire: _Wire, what: str) -> None:
    answer = read_json(wire.listen())
    if answer != {}:
        raise PeerError(f"{what}: {shown(answer.get('error') if isinstance(answer, dict) else answer)}")


def _runs(table: PageTable, seq: int) -> list[range]:
    """The positions that are held: in a ring the pinned ones and the most recent ones."""
    length = table.lengths[seq]
    if table.kept is None:
        return [range(length)]
    pinned = min(length, table.pinned * table.pool.page_size)
    return [range(pinned), range(min(length, max(pinned, table.highest[seq] - table.pages.wrap)), length)]


class _Page(NamedTuple):
    """A page that travels: its bytes, and how many tokens it has room for."""

    data: Tensor  # [1, kv_heads, bytes]
    tokens: int


def _pieces(table: PageTable, run: range, device: torch.device) -> Iterator[tuple[_Page, range]]:
    """Pages for a run of positions, and the positions of each. Their size follows from the format on both sides."""
    format, heads = table.pool.format, table.pool.kv_heads
    per_token = format.layout(64).bytes * heads // 64 + 1
    tokens = max(16, _PIECE_BYTES // per_token // 16 * 16)
    for start in range(run.start, run.stop, tokens):
        piece = range(start, min(start + tokens, run.stop))
        data = torch.zeros(1, heads, format.layout(len(piece)).bytes, dtype=torch.uint8, device=device)
        yield _Page(data, len(piece)), piece


def _copy(table: PageTable, seq: int, piece: range, page: _Page, out: bool) -> None:
    """Positions of a sequence to or from a page that travels; what lies together is copied together."""
    pool = table.pool
    size = pool.page_size
    travelling = parts(pool.format, page.data, page.tokens)
    stored = parts(pool.format, pool.data, size)
    at = piece.start
    while at < piece.stop:
        stop = min(piece.stop, (at // size + 1) * size)
        here = table.page_at(seq, at)
        near, far = slice(at % size, at % size + stop - at), slice(at - piece.start, stop - piece.start)
        for ours, theirs in zip(stored, travelling, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                if a is not None and b is not None:
                    source, target = (a[here, :, near], b[0, :, far]) if out else (b[0, :, far], a[here, :, near])
                    target.copy_(source)
        at = stop


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def _dims(format: Format) -> tuple[int, int]:
    return format.key.dim, format.value.dim


def _refusal(error: Exception) -> str:
    return json.dumps({"error": shown(str(error))})

"""Pages: a page table over one tensor of bytes. Contiguous, ring and paged caches differ only in the table."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import instance
from ..errors import InputError
from ..format.codec import Codec, Codes, Format
from ..format.fit import check_fit

_HUGE, _MADV_HUGEPAGE = 2**21, 14
SPARE_BYTES = 64  # behind the last page, so that kernels may read past the last row


Number = TypeVar("Number", int, Tensor)


def table_entry(page: Number, pinned: int, width: int) -> Number:
    """The slot rule: page p = position // page_size of a sequence is table entry p while p < pinned, else
    pinned + (p − pinned) mod (width − pinned)."""
    turn = max(1, width - pinned)
    return page - (page >= pinned) * ((page - pinned) // turn) * turn


@dataclass(frozen=True)
class Pages:
    """What attention reads: the stored tokens of some sequences. `table_entry` says where a token is."""

    format: Format
    page_size: int
    data: Tensor  # [pages, kv_heads, page bytes] uint8, a piece as Format.layout says, or with padding behind it
    table: Tensor  # [seqs, width] int32 page indices; −1 where no page is allocated
    lengths: Tensor  # [seqs] int32: tokens appended so far
    overflow: Tensor  # [1] int32: set by an append that did not fit and therefore wrote nothing
    ring: bool = False  # whether positions beyond the table wrap; otherwise an append must fit
    pinned: int = 0  # leading table entries that never wrap
    key_offset: Tensor | None = None  # [kv_heads, dim] float32, subtracted before rotation
    value_offset: Tensor | None = None
    key_fit: Tensor | None = None  # how appended keys are rounded (format/fit.py); None: to the nearest levels
    value_fit: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # what was found out

    def __getstate__(self) -> dict[str, object]:
        """What a copy takes over: not what backends remember about these tensors, such as their addresses."""
        return {each.name: self.__dict__[each.name] for each in fields(self)} | {"memo": {"trusted": self.trusted}}

    @property
    def trusted(self) -> bool:
        """Whether the contents are looked after by who made it, a cache or an engine; a changed copy is not."""
        return bool(self.memo.get("trusted"))

    def trust(self) -> Pages:
        self.memo["trusted"] = True
        return self

    @property
    def kv_heads(self) -> int:
        return self.data.shape[1]

    @property
    def seqs(self) -> int:
        return self.table.shape[0]

    @property
    def wrap(self) -> int:
        """How many positions lie between two tokens that share a slot of the ring."""
        return (self.table.shape[1] - self.pinned) * self.page_size

    def read(self) -> tuple[int, list[int]]:
        """The overflow flag and the lengths. Waits for a GPU; on the CPU it is made for the pace of single tokens."""
        memory = self.memo.get("lengths")
        if memory is None:
            if self.data.device.type != "cpu":
                return int(self.overflow), self.lengths.tolist()
            memory = [(ctypes.c_int32 * len(x)).from_address(x.data_ptr()) for x in (self.overflow, self.lengths)]
            self.memo["lengths"] = memory
        return memory[0][0], memory[1][:]

    def slots(self, seq: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Page index and row inside the page of each position."""
        entry = table_entry(positions // self.page_size, self.pinned, self.table.shape[1])
        return self.table[seq, entry].long(), positions % self.page_size

    def key_parts(self) -> Codes:
        """The keys of all pages: data [pages, kv_heads, page_size, row_bytes], scale [pages, kv_heads, page_size]."""
        return parts(self.format, self.data, self.page_size)[0]

    def value_parts(self) -> Codes:
        return parts(self.format, self.data, self.page_size)[1]

    def stored(self, seq: int, positions: Tensor) -> tuple[Codes, Codes]:
        """Keys and values at these positions as they are stored: [n, kv_heads, …]."""
        page, row = self.slots(seq, positions)

        def gather(part: Codes) -> Codes:
            return Codes(part.data[page, :, row], None if part.scale is None else part.scale[page, :, row])

        return gather(self.key_parts()), gather(self.value_parts())

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, kv_heads, page_size, dim] of pages of 16 bits."""
        keys, values = self.key_parts().data, self.value_parts().data
        return keys.view(self.format.key.dtype), values.view(self.format.value.dtype)

    def unrotated(self) -> Pages:
        """The same bytes for a caller who rotates: vectors are R x̂, and so are the offsets."""
        f = self.format
        offsets = [
            None if offset is None else codec.rotate(offset).contiguous()
            for codec, offset in ((f.key, self.key_offset), (f.value, self.value_offset))
        ]
        pages = replace(self, format=f.unrotated(), key_offset=offsets[0], value_offset=offsets[1])
        return pages.trust() if self.trusted else pages

    def check(self) -> None:
        """Refuse a description that does not fit its tensors, or, on the CPU, contents that are out of range.

        A `trusted` description comes from a cache that looks after its contents. On a GPU contents are not read.
        """
        if "checked" not in self.memo:
            self._check()
            self.memo["checked"] = True
        if not self.trusted and self.data.device.type == "cpu":
            self.check_values()

    def _check(self) -> None:
        layout = self.format.layout(self.page_size) if self.page_size > 0 else None
        if layout is None:
            raise InputError(f"page_size must be positive, got {self.page_size}")
        if self.data.dtype != torch.uint8 or self.data.ndim != 3 or self.data.shape[2] < layout.bytes:
            raise InputError(
                f"page data of {self.format} with {self.page_size} tokens a page is"
                f" uint8 [pages, kv_heads, at least {layout.bytes}],"
                f" got {self.data.dtype} {list(self.data.shape)}"
            )
        if not self.data.is_contiguous() or self.data.data_ptr() % 16 or (self.data.shape[2] - layout.bytes) % 16:
            raise InputError("page data must be contiguous and aligned to 16 bytes")
        for name, tensor, ndim in (
            ("table", self.table, 2),
            ("lengths", self.lengths, 1),
            ("overflow", self.overflow, 1),
        ):
            if tensor.dtype != torch.int32 or tensor.ndim != ndim or not tensor.is_contiguous():
                raise InputError(
                    f"{name} must be contiguous int32 with {ndim} dimensions, got {tensor.dtype} {list(tensor.shape)}"
                )
            if tensor.device != self.data.device:
                raise InputError(f"{name} must be on {self.data.device} like the page data, got {tensor.device}")
        if self.lengths.shape[0] != self.seqs or self.overflow.shape[0] != 1:
            raise InputError(f"{self.seqs} table rows need {self.seqs} lengths and 1 overflow flag")
        if not 0 <= self.pinned <= self.table.shape[1] or (self.ring and self.pinned == self.table.shape[1]):
            raise InputError(
                f"pinned entries must leave room in a table of width {self.table.shape[1]}, got {self.pinned}"
            )
        check_offset("key_offset", self.key_offset, self.format.key, self.kv_heads, self.data.device)
        check_offset("value_offset", self.value_offset, self.format.value, self.kv_heads, self.data.device)
        check_fit("key_fit", self.key_fit, self.format.key, self.kv_heads, self.data.device)
        check_fit("value_fit", self.value_fit, self.format.value, self.kv_heads, self.data.device)

    def check_values(self) -> None:
        """Refuse tables, lengths and offsets whose contents are out of range. Waits for the device."""
        width, size = self.table.shape[1] if self.seqs else 0, self.page_size
        bad = (self.lengths < 0) | (self.lengths > (2**31 - 1 if self.ring else width * size))
        if bool(bad.any()):
            seq = int(bad.int().argmax())
            most = "2^31 - 1" if self.ring else width * size
            raise InputError(f"length of sequence {seq} must be from 0 to {most}, got {int(self.lengths[seq])}")
        used = torch.arange(width, device=self.table.device) < ((self.lengths.long() + (size - 1)) // size)[:, None]
        lowest = torch.where(used, 0, -1)
        bad = ((self.table[:, :width] < lowest) | (self.table[:, :width] >= self.data.shape[0])).any(1)
        if bool(bad.any()):
            seq = int(bad.int().argmax())
            raise InputError(f"the table of sequence {seq} names pages outside 0 … {self.data.shape[0] - 1}")
        check_finite("key_offset", self.key_offset)
        check_finite("value_offset", self.value_offset)


@torch.inference_mode(False)  # pages outlive the mode they are made in
def allocate(format: Format, page_size: int, num_pages: int, kv_heads: int, device: torch.device) -> Tensor:
    """Uninitialised page data with spare bytes behind it."""
    size = format.layout(page_size).bytes
    total = num_pages * kv_heads * size
    data = torch.empty(total + SPARE_BYTES, dtype=torch.uint8, device=device)
    if data.device.type == "cpu":
        _ask_for_huge_pages(data)
    return data[:total].view(num_pages, kv_heads, size)


def _ask_for_huge_pages(data: Tensor) -> None:
    """Tell Linux to back fresh memory with pages of 2 MiB: attention jumps from page to page of the cache, and looking
    up addresses takes a good part of its time otherwise. Elsewhere, or if the system declines, nothing happens."""
    start = -(-data.data_ptr() // _HUGE) * _HUGE
    size = (data.data_ptr() + data.nbytes - start) // _HUGE * _HUGE
    if size > 0 and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)


def parts(format: Format, data: Tensor, page_size: int) -> tuple[Codes, Codes]:
    """Views of the keys and values in page data [pages, kv_heads, bytes]."""
    layout = format.layout(page_size)

    def part(codec: Codec, codes_at: int, scales_at: int) -> Codes:
        rows = data[:, :, codes_at : codes_at + page_size * codec.row_bytes].unflatten(-1, (page_size, codec.row_bytes))
        if not codec.coded:
            return Codes(rows, None)
        return Codes(rows, data[:, :, scales_at : scales_at + page_size * codec.scale_bytes].view(codec.dtype))

    return (
        part(format.key, layout.key_codes, layout.key_scales),
        part(format.value, layout.value_codes, layout.value_scales),
    )


def copy_rows(format: Format, source: tuple[Tensor, int], target: tuple[Tensor, int]) -> None:
    """Copy pages (data, page_size) into pages of another size, as many rows as both have."""
    rows = min(source[1], target[1])
    for a, b in zip(parts(format, *source), parts(format, *target), strict=True):
        b.data[:, :, :rows] = a.data[:, :, :rows]
        if a.scale is not None and b.scale is not None:
            b.scale[:, :, :rows] = a.scale[:, :, :rows]


def check_offset(name: str, offset: Tensor | None, codec: Codec, kv_heads: int, device: torch.device) -> None:
    if offset is None:
        return
    instance(name, offset, Tensor)
    if not codec.coded:
        raise InputError(f"{name} has no meaning for vectors stored at 16 bits")
    if offset.dtype != torch.float32 or offset.shape != (kv_heads, codec.dim) or not offset.is_contiguous():
        raise InputError(
            f"{name} must be contiguous float32 [{kv_heads}, {codec.dim}] (KV heads, dim),"
            f" got {offset.dtype} {list(offset.shape)}"
        )
    if offset.requires_grad:
        raise InputError(f"{name} requires grad and aurakv computes no gradients: detach it")
    if offset.device != device:
        raise InputError(f"{name} must be on {device} like the data, got {offset.device}")


def check_finite(name: str, offset: Tensor | None) -> None:
    """Waits for the device."""
    if offset is not None and not bool(offset.isfinite().all()):
        raise InputError(f"{name} must be finite")

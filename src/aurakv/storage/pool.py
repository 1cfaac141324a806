"""PagePool: the pages of one layer, counted by how many table entries name them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..arguments import instance, usable_device, whole
from ..errors import CapacityError, InputError, counted
from ..format.codec import Format
from ..format.fit import check_fit
from .pages import allocate, check_finite, check_offset, copy_rows

MAX_PAGES = 2**31 - 1  # page indices are int32


class PagePool:
    """Hands out pages, shares them between sequences and takes them back. `growable` pools never run out."""

    def __init__(
        self,
        format: Format,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        device: torch.device | str = "cpu",
        *,
        key_offset: Tensor | None = None,
        value_offset: Tensor | None = None,
        key_fit: Tensor | None = None,
        value_fit: Tensor | None = None,
        growable: bool = False,
    ) -> None:
        instance("format", format, Format)
        num_pages = whole("num_pages", num_pages, 0)
        page_size, kv_heads = whole("page_size", page_size, 1), whole("kv_heads", kv_heads, 1)
        if num_pages > MAX_PAGES:
            raise InputError(f"num_pages must be at most {MAX_PAGES}, got {num_pages}")
        device = usable_device(device)
        check_offset("key_offset", key_offset, format.key, kv_heads, device)
        check_offset("value_offset", value_offset, format.value, kv_heads, device)
        check_finite("key_offset", key_offset)
        check_finite("value_offset", value_offset)
        check_fit("key_fit", key_fit, format.key, kv_heads, device)
        check_fit("value_fit", value_fit, format.value, kv_heads, device)
        check_finite("key_fit", key_fit)
        check_finite("value_fit", value_fit)
        self.format, self.page_size, self.growable = format, page_size, growable
        self.key_offset, self.value_offset = key_offset, value_offset
        self.key_fit, self.value_fit = key_fit, value_fit
        self.data = _allocate(format, page_size, num_pages, kv_heads, device)
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # taken from the end: lowest index first

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def kv_heads(self) -> int:
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def bytes_held(self) -> int:
        return self.data.untyped_storage().nbytes() + sum(x.nbytes for x in self.constants.values())

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors of the layer, not of its tokens, by their names: those that there are."""
        every = {
            "key_offset": self.key_offset,
            "value_offset": self.value_offset,
            "key_fit": self.key_fit,
            "value_fit": self.value_fit,
        }
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def need(self, pages: int, spare: int = 0) -> None:
        """Make sure that this many pages can be taken, or refuse with nothing changed. Growth adds spare ones."""
        missing = pages - len(self._free)
        if missing <= 0:
            return
        if not self.growable:
            raise CapacityError(f"the pool needs {pages} free pages, got {len(self._free)} of {self.num_pages}")
        self._replace(self.page_size, self.num_pages + missing + spare)

    def take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def references(self, page: int) -> int:
        """How many table entries name this page."""
        return self._references[page]

    def copy(self, page: int) -> int:
        """A page of its own with the same contents, in exchange for one reference to the shared one."""
        fresh = self.take()
        self.data[fresh] = self.data[page]
        self.release([page])
        return fresh

    def restore(self, data: Tensor, page_size: int, references: list[int]) -> None:
        """Become a pool with these pages, each named by so many table entries (a cache from a file)."""
        self.data, self.page_size, self._references = data, page_size, references
        self._free = [page for page in range(len(references) - 1, -1, -1) if not references[page]]

    def resize_pages(self, page_size: int) -> None:
        """Give every page room for more tokens (contiguous caches: a page is a sequence)."""
        self._replace(page_size, self.num_pages)

    def _replace(self, page_size: int, num_pages: int) -> None:
        if num_pages > MAX_PAGES:
            raise CapacityError(f"a pool has at most {MAX_PAGES} pages, needs {num_pages}")
        fresh = _allocate(self.format, page_size, num_pages, self.kv_heads, self.device)
        old = self.num_pages
        if page_size == self.page_size:
            fresh[:old] = self.data
        else:
            copy_rows(self.format, (self.data, self.page_size), (fresh[:old], page_size))
        self.data, self.page_size = fresh, page_size
        self._references += [0] * (num_pages - old)
        self._free = [*range(num_pages - 1, old - 1, -1), *self._free]


def _allocate(format: Format, page_size: int, num_pages: int, kv_heads: int, device: torch.device) -> Tensor:
    """Memory for so many pages, or one sentence where the device has not that much."""
    size = format.layout(page_size).bytes * num_pages * kv_heads
    try:
        if size >= 2**62:  # more than any address
            raise MemoryError
        return allocate(format, page_size, num_pages, kv_heads, device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        raise CapacityError(
            f"{num_pages:,} × {page_size:,} tokens (pages × page size) of {counted(kv_heads, 'KV head')} must fit"
            f" into the memory of {device}, got {size:,} bytes"
        ) from error

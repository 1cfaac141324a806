"""Launches that write new tokens into pages: `claim` finds room and advances lengths, then each side is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...attention.step import Rows
from ...format.codec import Codec, Codes
from ...storage.pages import Pages
from . import source
from .kernels import Kernels, aligned_codes, by_rows, encoder, numbers, optional, per_vector, slots, strides

Append = Callable[[Tensor, Tensor], None]


def prepare_append(
    kernels: Kernels,
    pages: Pages,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    factor: Tensor | None = None,
    counted: bool = False,
) -> Append:
    """Encodes and writes tokens like these; keys are multiplied by the factor [kv_heads, dim] first. `counted`: the
    lengths count them already."""
    claim = _prepare_claim(kernels, pages, rows, k.shape[0], counted)
    layout, format, starts = pages.format.layout(pages.page_size), pages.format, rows.starts.contiguous()

    def side(
        x: Tensor,
        codec: Codec,
        offset: Tensor | None,
        scaled: Tensor | None,
        fit: Tensor | None,
        codes_at: int,
        scales_at: int,
    ) -> Callable[[Tensor, Tensor], None]:
        x = by_rows(x)
        where = (
            slots(pages, x.shape[0]) | strides(x) | {"HEADS": pages.kv_heads, "CODES": codes_at, "SCALES": scales_at}
        )
        given = numbers(**where, HAS_OFFSET=offset is not None, HAS_FACTOR=scaled is not None)
        library, fits, teams = encoder(kernels, x, codec, fit)
        more, kernel = (optional(offset, x), optional(scaled, x), *fits, starts), library.append

        def write(x: Tensor, base: Tensor) -> None:
            tensors = by_rows(x), *more, base, pages.table, pages.data
            per_vector(kernel, tensors, given, x.shape[0] * pages.kv_heads, teams=teams)

        return write

    key_at, value_at = (layout.key_codes, layout.key_scales), (layout.value_codes, layout.value_scales)
    write_key = side(k, format.key, pages.key_offset, factor, pages.key_fit, *key_at)
    write_value = side(v, format.value, pages.value_offset, None, pages.value_fit, *value_at)

    def run(k: Tensor, v: Tensor) -> None:
        if k.shape[0]:
            base = claim()
            write_key(k, base)
            write_value(v, base)

    return run


def append_codes(kernels: Kernels, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
    tokens, layout = keys.data.shape[0], pages.format.layout(pages.page_size)
    if tokens == 0:
        return
    base, starts = _prepare_claim(kernels, pages, rows, tokens, False)(), rows.starts.contiguous()
    sides = (
        (keys, pages.format.key, layout.key_codes, layout.key_scales),
        (values, pages.format.value, layout.value_codes, layout.value_scales),
    )
    for codes, codec, codes_at, scales_at in sides:
        given = slots(pages, tokens) | {"HEADS": pages.kv_heads, "CODES": codes_at, "SCALES": scales_at}
        given |= {"ROW": codec.row_bytes, "SCALE": codec.scale_bytes}
        sizes = {
            "threads": (codec.bytes_per_vector, tokens * pages.kv_heads),
            "group_size": (min(codec.bytes_per_vector, 256), 1),
        }
        tensors = *aligned_codes(codes), starts, base, pages.table, pages.data
        kernels.library(source.claim()).copy_rows(*tensors, numbers(**given), **sizes, arg_casts={6: "int32"})


def _prepare_claim(kernels: Kernels, pages: Pages, rows: Rows, tokens: int, counted: bool) -> Callable[[], Tensor]:
    """Lengths advance where there is room, and the old ones come back; −1 where there is none."""
    claim, starts = kernels.library(source.claim()).claim, rows.starts.contiguous()
    given = numbers(**slots(pages, tokens), COUNTED=counted)

    def run() -> Tensor:
        base = torch.empty(max(1, pages.seqs), dtype=torch.int32, device=starts.device)
        tensors = starts, pages.table, pages.lengths, pages.overflow, base
        claim(*tensors, given, threads=32, group_size=32, arg_casts={5: "int32"})
        return base

    return run

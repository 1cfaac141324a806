"""Cases of unpacked sequences, in a module that a process without pytest can import."""

from __future__ import annotations

import torch
from torch import Tensor

from aurakv.attention import ops
from aurakv.format.codec import Codec, Codes, Format
from aurakv.storage.pages import Pages, allocate

HEADS, SEQS, WIDTH = 2, 3, 4
PADDED = {"wide": 16, "large": 48}  # bytes behind what each head has of a page, as where an engine pads blocks
# widths, tables, dims, page sizes and sides of 16 bits, with offsets and key scales or without
CASES = {
    "plain": ("k4v4", 64, 32, False),
    "changed": ("k4v4", 64, 16, True),
    "narrow": ("k3v2", 128, 64, True),
    "wide": ("k8v5", 96, 48, True),
    "wide-6": ("k6v8:lloyd-max", 80, 16, False),
    "tables": ("k4:lloyd-max/v4:minifloat", 128, 64, False),
    "large": ("k4v4", 256, 64, True),
    "16-bit-keys": ("k16v4", 80, 16, True),
    "16-bit": ("k16v16", 64, 32, True),
}


def make_pages(case: str, device: str) -> tuple[Pages, Tensor | None]:
    name, dim, page_size, changed = CASES[case]
    torch.manual_seed(len(case))
    format = Format.parse(name, dim)
    lengths = [1, page_size + 5, WIDTH * page_size]
    table = torch.randperm(SEQS * WIDTH).int().view(SEQS, WIDTH)
    sides = format.key, format.value
    data = allocate(format, page_size, SEQS * WIDTH, HEADS, torch.device("cpu"))
    data = torch.nn.functional.pad(data, (0, PADDED.get(case, 0))).random_(0, 256)
    offsets = [1.5 * torch.randn(HEADS, dim) if changed and side.coded else None for side in sides]
    pages = Pages(
        format,
        page_size,
        data,
        table,
        torch.zeros(SEQS, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        key_offset=offsets[0],
        value_offset=offsets[1],
    )
    k, v = (torch.randn(sum(lengths), HEADS, dim) for _ in range(2))
    v[-3, 1, 5] = torch.nan  # of the last sequence
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    ops.append(pages, k, v, starts, backend="reference")
    scale = torch.rand(HEADS, dim) + 0.5 if changed else None
    on = torch.device(device)
    moved = Pages(
        format,
        page_size,
        pages.data.to(on),
        table.to(on),
        pages.lengths.to(on),
        pages.overflow.to(on),
        key_offset=None if offsets[0] is None else offsets[0].to(on),
        value_offset=None if offsets[1] is None else offsets[1].to(on),
    )
    return moved, None if scale is None else scale.to(on)


def decoded(codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
    scale = None if codes.scale is None else codes.scale.cpu()
    given = None if offset is None else offset.cpu()
    return ops.decode(Codes(codes.data.cpu(), scale), codec, given, dtype=torch.float64, backend="reference")


def check(case: str, device: str, dtype: torch.dtype) -> None:
    """All of the middle sequence, the tail of the last one; the first sequence of the table is none of them."""
    from aurakv.backends.triton.unpack import launch

    pages, scale = make_pages(case, device)
    format, dim = pages.format, pages.format.key.dim
    lengths, tail = pages.lengths.tolist(), 20
    counts = [lengths[1], tail]
    begins = torch.tensor([0, lengths[2] - tail], dtype=torch.int32, device=device)
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    room = sum(counts)
    for offset in (True, False):
        keys, values = (torch.full((room + 3, HEADS, dim), 7.0, dtype=dtype, device=device) for _ in range(2))
        tiles = launch.tiles([counts[0] + 64, counts[1] + 9])  # upper bounds
        launch.unpack(pages, 1, begins, starts, tiles, keys, values, scale, offset)
        at = 0
        for seq, begin, count in ((1, 0, counts[0]), (2, lengths[2] - tail, counts[1])):
            k, v = pages.stored(seq, begin + torch.arange(count, device=device))
            expected_k = decoded(k, format.key, pages.key_offset if offset else None)
            expected_k = expected_k if scale is None else expected_k / scale.cpu().double()
            expected_v = decoded(v, format.value, pages.value_offset)
            bad = expected_v.isnan().any(-1)
            assert bad.any() == (seq == 2)
            for out, expected in ((keys, expected_k), (values, expected_v)):
                got = out[at : at + count].cpu().double()
                assert (got[~bad] - expected[~bad]).norm() <= 3e-3 * expected[~bad].norm(), (case, seq)
            assert keys[at : at + count].cpu()[bad].isnan().all(), "a damaged value is seen in the key"
            assert values[at : at + count].isfinite().all()
            at += count
        assert bool((keys[room:] == 7).all() and (values[room:] == 0).all()), "zeros behind the last sequence"
    keys, values = keys.fill_(7), values.fill_(7)
    launch.unpack(pages, 1, begins, starts, tiles, keys[: room - 5], values[: room - 5], scale)
    assert bool((keys[room - 5 :] == 7).all() and (values[room - 5 :] == 7).all()), "nothing behind the room"

"""The decode and extend kernels compiled for each kind of GPU, exactly as their launchers would, without a GPU: what
they need fits, they do not spill, and tiles travel as that GPU can. Run with -s to see the figures."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import pytest
import torch

from tests.helpers.gpu import WHY_NOT_COMPILED

if WHY_NOT_COMPILED is not None:
    pytest.skip(WHY_NOT_COMPILED, allow_module_level=True)

import triton

from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Rows
from aurakv.backends.triton.common import target
from aurakv.backends.triton.decode import launch as decode
from aurakv.backends.triton.extend import launch as extend
from aurakv.checks import rows_of
from aurakv.format.codec import Codec, Format
from aurakv.storage.pages import Pages, allocate
from tests.helpers.compile_only import compiling, disassemble, main_loop

CAPABILITIES = [80, 86, 89, 90, 100, 120]
OWN = 1024  # bytes of shared memory that the system takes for a program
KIBIBYTES = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # of a multiprocessor
LLOYD_MAX, WIDE_SCALES = "k4:lloyd-max/v4:lloyd-max", "k4:f32/v4:f32"
# All that ptxas moves to the stack: bytes, and how many of a tile's 400 to 3080 instructions go there; nearly all for
# 12.0. By (capability, format, dimension, tokens of a page, group).
SPILLED = {
    (80, "k4v4", 128, 16, 8): (24, 0), (80, "k5v5", 512, 64, 8): (8, 0), (80, "k8v4", 512, 64, 8): (8, 0),
    (86, "k5v5", 512, 64, 8): (8, 0), (86, "k8v4", 512, 64, 8): (8, 0), (89, "k5v5", 512, 64, 8): (8, 0),
    (89, "k8v4", 512, 64, 8): (8, 0), (120, "k4v2", 64, 64, 4): (8, 0), (120, LLOYD_MAX, 64, 64, 4): (8, 0),
    (120, WIDE_SCALES, 64, 64, 4): (24, 0), (120, "k4v2", 64, 64, 8): (24, 1), (120, LLOYD_MAX, 64, 64, 8): (136, 43),
    (120, WIDE_SCALES, 64, 64, 8): (8, 0), (120, "k4v4", 128, 64, 4): (8, 0), (120, LLOYD_MAX, 128, 64, 4): (8, 0),
    (120, WIDE_SCALES, 128, 64, 4): (8, 0), (120, "k4/v4:minifloat", 128, 64, 4): (8, 0),
    (120, "k2v2", 128, 64, 4): (8, 0), (120, "k8v4", 128, 64, 4): (8, 0), (120, "k8v8", 128, 64, 4): (8, 0),
    (120, "k5v4", 128, 64, 4): (8, 0), (120, "k4v5", 128, 64, 4): (8, 0), (120, LLOYD_MAX, 128, 64, 8): (8, 0),
    (120, WIDE_SCALES, 128, 64, 8): (8, 0), (120, "k4v4", 128, 32, 16): (8, 0), (120, "k8v8", 128, 32, 16): (40, 4),
    (120, LLOYD_MAX, 256, 64, 4): (528, 232), (120, "k4v4", 256, 64, 4): (8, 0), (120, "k8v8", 256, 64, 4): (88, 17),
    (120, LLOYD_MAX, 256, 64, 8): (664, 312), (120, "k4v4", 512, 64, 4): (8, 0),
    (120, LLOYD_MAX, 512, 64, 4): (272, 69), (120, "k4v4", 512, 64, 8): (32, 2), (120, "k5v5", 512, 64, 8): (88, 1),
    (120, "k8v4", 512, 64, 8): (112, 0), (120, LLOYD_MAX, 512, 64, 8): (288, 81),
}  # fmt: skip
SPILLED_CALLS = {  # by (capability, format, dimension, call), see CALLS
    (120, "k4v4", 128, "first tokens"): (8, 0), (120, "k8v4", 128, "first tokens"): (8, 0),
    (120, "k4v4", 256, "first tokens"): (8, 0), (120, "k4v4", 128, "one launch"): (8, 0),
    (120, "k8v4", 128, "one launch"): (8, 0), (120, "k4v4", 256, "one launch"): (136, 0),
    (120, "k4v4", 128, "one launch with first tokens"): (8, 0),
    (120, "k8v4", 128, "one launch with first tokens"): (8, 0),
    (120, "k4v4", 256, "one launch with first tokens"): (8, 0), (120, "k4v4", 128, "several queries"): (8, 0),
    (120, "k8v4", 128, "several queries"): (40, 1), (120, "k4v4", 256, "several queries"): (72, 12),
    (120, "k4v4", 96, "several queries, window, soft cap"): (104, 0),
    (120, "k4v4", 128, "several queries, window, soft cap"): (8, 0),
    (120, "k8v4", 128, "several queries, window, soft cap"): (32, 6),
    (120, "k4v4", 256, "several queries, window, soft cap"): (8, 0), (120, "k4v4", 128, "soft cap"): (8, 0),
    (120, "k8v4", 128, "soft cap"): (8, 0), (120, "k4v4", 256, "soft cap"): (16, 0),
    (120, "k4v4", 128, "window"): (8, 0), (120, "k8v4", 128, "window"): (8, 0), (120, "k4v4", 256, "window"): (8, 0),
    (80, "k8v4", 128, "several queries with first tokens"): (8, 4),
    (120, "k4v4", 128, "several queries with first tokens"): (8, 0),
    (120, "k8v4", 128, "several queries with first tokens"): (32, 14),
    (120, "k4v4", 256, "several queries with first tokens"): (8, 0),
    (80, "k4v4", 128, "one launch, several queries with first tokens"): (136, 0),
    (80, "k3v3", 128, "one launch, several queries with first tokens"): (112, 0),
    (80, "k8v4", 128, "one launch, several queries with first tokens"): (264, 0),
    (80, "k4v4", 256, "one launch, several queries with first tokens"): (40, 0),
    (80, "k4v4", 96, "one launch, several queries with first tokens"): (112, 0),
    (86, "k4v4", 128, "one launch, several queries with first tokens"): (88, 0),
    (86, "k3v3", 128, "one launch, several queries with first tokens"): (96, 0),
    (86, "k8v4", 128, "one launch, several queries with first tokens"): (176, 0),
    (86, "k4v4", 256, "one launch, several queries with first tokens"): (40, 0),
    (86, "k4v4", 96, "one launch, several queries with first tokens"): (112, 0),
    (120, "k4v4", 128, "one launch, several queries with first tokens"): (296, 0),
    (120, "k3v3", 128, "one launch, several queries with first tokens"): (288, 4),
    (120, "k8v4", 128, "one launch, several queries with first tokens"): (312, 0),
    (120, "k4v4", 256, "one launch, several queries with first tokens"): (8, 0),
    (120, "k4v4", 96, "one launch, several queries with first tokens"): (184, 4),
}  # fmt: skip
EXTEND_SPILLED = {  # the kernel for many queries: by (capability, format, dimension), of a tile's 500 to 1000
    (80, "k4v5", 64): (16, 0), (80, "k5v4", 64): (16, 0), (86, "k5v4", 64): (8, 0), (89, "k5v4", 64): (8, 0),
    (100, "k5v4", 64): (16, 0), (120, "k5v4", 64): (16, 0), (80, "k6v6", 64): (16, 0), (86, "k6v6", 64): (8, 0),
    (89, "k6v6", 64): (8, 0), (100, "k6v6", 64): (16, 0), (120, "k6v6", 64): (16, 0), (80, "k8v4", 64): (16, 0),
    (86, "k8v4", 64): (16, 0), (89, "k8v4", 64): (16, 0), (100, "k8v4", 64): (16, 0), (120, "k8v4", 64): (16, 0),
    (80, "k8v8", 64): (16, 0), (100, "k8v8", 64): (16, 0), (120, "k8v8", 64): (16, 0), (80, "k2v2", 128): (48, 0),
    (86, "k2v2", 128): (64, 0), (89, "k2v2", 128): (64, 0), (100, "k2v2", 128): (64, 0), (120, "k2v2", 128): (64, 0),
    (80, "k3v3", 128): (48, 0), (86, "k3v3", 128): (64, 0), (89, "k3v3", 128): (64, 0), (100, "k3v3", 128): (72, 0),
    (120, "k3v3", 128): (120, 1), (80, "k4/v4:minifloat", 128): (48, 0), (86, "k4/v4:minifloat", 128): (64, 0),
    (89, "k4/v4:minifloat", 128): (64, 0), (100, "k4/v4:minifloat", 128): (72, 0),
    (120, "k4/v4:minifloat", 128): (96, 0), (80, "k4v4", 128): (48, 0), (86, "k4v4", 128): (64, 0),
    (89, "k4v4", 128): (64, 0), (100, "k4v4", 128): (72, 0), (120, "k4v4", 128): (96, 0), (80, "k4v5", 128): (64, 0),
    (86, "k4v5", 128): (64, 0), (89, "k4v5", 128): (64, 0), (100, "k4v5", 128): (64, 0), (120, "k4v5", 128): (152, 5),
    (80, "k5v4", 128): (160, 10), (100, "k5v4", 128): (144, 6), (80, "k6v6", 128): (160, 10),
    (100, "k6v6", 128): (168, 8), (80, "k8v4", 128): (144, 10), (100, "k8v4", 128): (136, 6),
    (80, "k8v8", 128): (144, 10), (100, "k8v8", 128): (160, 6),
}  # fmt: skip
MERGE_SPILLED = {(90, 512, 16): 1160, (100, 512, 16): 1176}  # bytes, by (capability, dimension, warps)
NONE = (0, 0)
PIECES = [  # rows in pieces, tables of any levels, scales of float32
    ("k4v2", 64), ("k2v2", 64), ("k3v3", 64), ("k5v5", 64), ("k6v6", 64), (LLOYD_MAX, 64), (WIDE_SCALES, 64),
    ("k4v4", 80), ("k3v3", 80), ("k5v5", 80), ("k8v8", 80), ("k4v4", 96), ("k2v2", 96), ("k6v6", 96), ("k8v4", 96),
    (LLOYD_MAX, 128), ("k3:lloyd-max/v3:lloyd-max", 128), (WIDE_SCALES, 128), (LLOYD_MAX, 256),
    ("k4v4", 512), ("k3v3", 512), ("k5v5", 512), ("k8v4", 512), (LLOYD_MAX, 512),
]  # fmt: skip
FORMATS = ["k4v4", "k4/v4:minifloat", "k3v3", "k2v2", "k8v4", "k8v8", "k5v4", "k6v6", "k4v5"]


def make_pages(name: str | Format, dim: int, tokens: int, page_size: int) -> Pages:
    format, width = name if isinstance(name, Format) else Format.parse(name, dim), -(-tokens // page_size)
    return Pages(
        format, page_size, allocate(format, page_size, width, 8, torch.device("cpu")),
        torch.zeros(1, width, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip


class Call(NamedTuple):
    """What a launcher is asked for."""

    queries: int = 1  # of the sequence
    tokens: int = 8192  # that its pages hold
    scoring: Scoring = Scoring()
    offset: bool = False  # of keys
    first: bool = False  # first tokens uncompressed, keys with a scale


PLAIN = Call()
FIRST = Scoring(first=4)
CALLS = {
    "one launch": Call(tokens=64),
    "one launch with first tokens": Call(tokens=64, scoring=FIRST, first=True),
    "several queries": Call(queries=4),
    "window": Call(scoring=Scoring(window=1000, sinks=4)),
    "soft cap": Call(scoring=Scoring(softcap=30.0), offset=True),
    "first tokens": Call(scoring=FIRST, first=True),
    "several queries with first tokens": Call(4, scoring=FIRST, first=True),
    "one launch, several queries with first tokens": Call(4, tokens=64, scoring=FIRST, first=True),
    "several queries, window, soft cap": Call(4, scoring=Scoring(window=1000, sinks=4, softcap=30.0), offset=True),
}


def check_decode(tmp_path, capability, name, dim=128, page_size=64, group=4, call="plain"):
    asked = CALLS.get(call, PLAIN)
    pages = make_pages(name, dim, asked.tokens, page_size)
    if asked.offset:
        pages = dataclasses.replace(pages, key_offset=torch.zeros(8, dim))
    q = torch.empty(asked.queries, 8 * group, dim, dtype=torch.bfloat16)
    where = rows_of("starts", None if asked.queries == 1 else [0, asked.queries], 1, asked.queries, q.device)
    vectors = Codec(dim, 16, dtype=torch.bfloat16)
    beside = make_pages(Format(vectors, vectors), dim, 4, 4) if asked.first else None
    key_scale = torch.ones(8, dim) if asked.first else None

    with compiling(capability) as seen:
        assert decode.why_not_call(q, pages, asked.scoring, "fast") is None
        assert beside is None or decode.serves_uncompressed(beside, asked.scoring)
        options = asked.scoring, None, None, beside, key_scale
        decode.prepare(q, pages, where, pages.lengths, *options)(q, None)
        rows = decode._plan(pages, asked.queries, group, asked.queries > 1, None).rows
        tile = decode._tile(pages, rows)
        residents = decode._residents(target.target_of(q.device), pages.format, rows, tile)
    assert ("merge_pieces" in seen) != call.startswith("one launch")
    if "merge_pieces" in seen:
        check_merge(tmp_path, *seen["merge_pieces"], capability, dim)
    kernel, _ = seen["decode_attention"]
    usage = disassemble(kernel.asm["cubin"], tmp_path, "-res-usage")
    code, loop = main_loop(disassemble(kernel.asm["cubin"], tmp_path))
    registers, stack, static = map(int, re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)[0])
    shared = static + kernel.metadata.shared - (OWN if capability >= 90 else 0)  # which cuobjdump adds there
    copies = [text for text in code if "LDGSTS" in text]
    bulk = capability >= 90 and page_size >= 32
    print(
        f"sm_{capability} {name} d{dim} pages of {page_size}, {call}: tiles of {tile}, {residents} programs,"
        f" {registers} registers, {shared} bytes, {len(loop)} instructions a tile,"
        f" {32 * len(loop) / tile / dim / 2:.2f} a code"
    )
    spills = sum(bool(re.search(r"\b(LDL|STL)\b", code[i])) for i in loop)
    print(f"{stack} bytes of stack, {spills} spills in the loop")
    named = SPILLED.get((capability, name, dim, page_size, group), NONE)
    named = named if call == "plain" else SPILLED_CALLS.get((capability, name, dim, call), NONE)
    check_spills((stack, spills), named, (128, 12))
    assert registers * 32 * residents <= 65536
    assert static % 128 == 0
    few = 1 if residents == 8 else 0  # 8 of which 7 fit at a time
    assert (shared + OWN) * (residents - few) <= KIBIBYTES[capability] * 1024
    assert not any(re.search(r"\[R\d+\+UR", text.split("desc")[0]) for text in copies), "illegal, see lane_copies"
    if bulk:
        assert not copies
        assert any("UTMALDG" in text or "UBLKCP" in text for text in code)
    else:
        each = -(-tile // page_size) if page_size < tile else 1  # pages of a tile
        sides = [tile // each * side.row_bytes for side in (pages.format.key, pages.format.value)]
        assert sum(i in loop for i, text in enumerate(code) if text in copies) == each * (
            sum(-(-size // 512) for size in sides) + 2
        )


def check_spills(found, named, elsewhere):
    """Bytes of stack and instructions of the loop that go there: as named with the ptxas of Triton 3.6; others move a
    little more or less."""
    if triton.__version__.startswith("3.6."):
        assert found == named
    else:
        assert all(x <= max(most) for x, *most in zip(found, named, elsewhere, strict=True))


def check_merge(tmp_path, kernel, warps, capability, dim):
    """Without a spill beyond those named, and within what a multiprocessor has."""
    usage = disassemble(kernel.asm["cubin"], tmp_path, "-res-usage")
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    print(f"sm_{capability} merge: {warps} warps, {registers} registers, {stack} bytes of stack")
    check_spills((stack,), (MERGE_SPILLED.get((capability, dim, warps), 0),), (96,))
    assert registers * 32 * warps <= 65536
    assert kernel.metadata.shared <= 48 * 1024


@pytest.mark.parametrize("capability", [80, 86, 120])
def test_decode(tmp_path, capability):
    check_decode(tmp_path, capability, "k4v4")


def loop_of_decode(tmp_path, scoring, capability, name, group):
    """Bytes of stack, all instructions and those of a usual turn of the loop."""
    pages = make_pages(name, 128, 8192, 64)
    q = torch.empty(1, 8 * group, 128, dtype=torch.bfloat16)
    with compiling(capability) as seen:
        decode.attend(q, pages, rows_of("starts", None, 1, 1, q.device), pages.lengths, scoring, None, None, None)
    cubin = seen["decode_attention"][0].asm["cubin"]
    stack = re.findall(r"STACK:(\d+)", disassemble(cubin, tmp_path, "-res-usage"))[0]
    return int(stack), *main_loop(disassemble(cubin, tmp_path))


@pytest.mark.parametrize(
    ("capability", "name", "group"),
    [(90, "k4v4", 4), (90, "k4v4", 8), (90, "k4/v4:minifloat", 4), (80, "k4v4", 4)],
)
def test_a_threshold_costs_little(tmp_path, capability, name, group):
    """No register too many, no reduction of its own, and one jump over all that reads and multiplies values."""
    _, _, without = loop_of_decode(tmp_path, Scoring(), capability, name, group)
    stack, code, loop = loop_of_decode(tmp_path, Scoring(threshold=1e-5), capability, name, group)
    assert stack == 0
    assert len(loop) <= len(without) + 25, "of 900 to 1200"
    (reduction,) = [i for i in loop if "REDUX" in code[i]]
    values = [i for i in loop if i > reduction and re.search("HMMA|LDSM", code[i])]
    jumps = [(i, re.search(r"BRA .*0x([0-9a-f]+)", code[i])) for i in loop]
    jumps = [(i, int(to[1], 16) // 16) for i, to in jumps if to]  # an instruction is 16 bytes
    skipped = [to - i for i, to in jumps if i < values[0] and values[-1] < to <= loop[-1]]
    print(f"{len(loop) - len(without)} instructions more than {len(without)}, a tile that drops out {skipped} fewer")
    assert skipped
    assert max(skipped) > 0.4 * len(loop)


@pytest.mark.parametrize(("capability", "name", "dim"), [(80, "k4v4", 96), (90, "k3v3", 64), (80, WIDE_SCALES, 128)])
def test_decode_of_pieces(tmp_path, capability, name, dim):
    check_decode(tmp_path, capability, name, dim)


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "dim"), PIECES)
@pytest.mark.parametrize("group", [4, 8])
def test_every_piece(tmp_path, capability, name, dim, group):
    check_decode(tmp_path, capability, name, dim, group=group)


@pytest.mark.parametrize(("capability", "name"), [(80, "k3v3")])
def test_decode_in_pages_of_16(tmp_path, capability, name):
    check_decode(tmp_path, capability, name, page_size=16)


@pytest.mark.full
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_width(tmp_path, capability, name):
    check_decode(tmp_path, capability, name)


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 86, 120])
@pytest.mark.parametrize("name", ["k4v4", "k3v3", "k8v8"])
@pytest.mark.parametrize(("dim", "page_size", "group"), [(128, 16, 8), (256, 64, 4), (128, 32, 16)])
def test_other_shapes(tmp_path, capability, name, dim, page_size, group):
    check_decode(tmp_path, capability, name, dim, page_size, group)


@pytest.mark.parametrize(
    ("capability", "name", "call"),
    [(80, "k4v4", "several queries"), (86, "k4v4", "first tokens"), (120, "k4v4", "one launch with first tokens")],
)
def test_decode_of_calls(tmp_path, capability, name, call):
    check_decode(tmp_path, capability, name, call=call)


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 86, 120])
@pytest.mark.parametrize(("name", "dim"), [("k4v4", 128), ("k3v3", 128), ("k8v4", 128), ("k4v4", 256), ("k4v4", 96)])
@pytest.mark.parametrize("call", CALLS)
def test_every_call(tmp_path, capability, name, dim, call):
    check_decode(tmp_path, capability, name, dim, call=call)


def check_extend(tmp_path, capability, name, dim=128):
    pages = make_pages(name, dim, 8192, 64)
    q = torch.empty(512, 32, dim, dtype=torch.bfloat16)
    where = Rows(torch.tensor([0, 512], dtype=torch.int32))

    with compiling(capability) as seen:
        assert extend.why_not_call(q, pages, Scoring(), "fast") is None
        extend.attend(q, pages, where, pages.lengths, Scoring(), None, None, None)
        rows = extend._rows(pages)
        residents = extend._residents(pages, rows)
    kernel, _ = seen["extend_warps_kernel"]
    code, loop = main_loop(disassemble(kernel.asm["cubin"], tmp_path))
    spills = sum(bool(re.search(r"\b(LDL|STL)\b", code[i])) for i in loop)
    print(f"sm_{capability} {name} d{dim}: {rows} rows, {residents} programs, {kernel.metadata.shared} bytes,"
          f" {len(loop)} instructions a tile of {extend.WARP_KEYS} keys, {spills} spills")  # fmt: skip
    assert (kernel.metadata.shared + OWN) * residents <= KIBIBYTES[capability] * 1024
    assert sum("MMA" in code[i] for i in loop) >= rows * dim // 128
    wide = max(pages.format.key.bits, pages.format.value.bits) > 4
    usage = disassemble(kernel.asm["cubin"], tmp_path, "-res-usage")
    stack = int(re.findall(r"STACK:(\d+)", usage)[0])
    print(f"{stack} bytes of stack")
    check_spills((stack, spills), EXTEND_SPILLED.get((capability, name, dim), NONE), (256, 12 if wide else 2))


@pytest.mark.parametrize(("capability", "name"), [(80, "k4v4"), (86, "k8v4")])
def test_extend(tmp_path, capability, name):
    check_extend(tmp_path, capability, name)


@pytest.mark.full
@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c != 90])  # which has the kernel of warp groups
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [64, 128])
def test_extend_every_width(tmp_path, capability, name, dim):
    if extend.why_not_format(Format.parse(name, dim)) is None:
        check_extend(tmp_path, capability, name, dim)

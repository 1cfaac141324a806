"""Kernels compile ahead for GPUs that are not here, exactly as the launchers would launch them; registers and spills.

Run with -s to see the figures.
"""

import contextlib
import dataclasses
import re

import pytest
import torch

from aurakv import checks
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Rows
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from tests.helpers.gpu import WHY_NOT_COMPILED

if WHY_NOT_COMPILED is not None:
    pytest.skip(WHY_NOT_COMPILED, allow_module_level=True)

import triton

from aurakv.backends.triton.append import grids
from aurakv.backends.triton.append import launch as store
from aurakv.backends.triton.common import results, specialise, target
from aurakv.backends.triton.extend import launch as extend
from aurakv.backends.triton.portable import launch as attention
from aurakv.backends.triton.unpack import launch as unpack
from tests.helpers.compile_only import CompileOnly, disassemble, resources


@pytest.fixture
def compile_for(monkeypatch, tmp_path):
    assumed = contextlib.ExitStack()

    def start(capability):
        assumed.enter_context(target.assuming(divmod(capability, 10)))
        seen = {}
        for module, names in ((attention, ("attend_kernel", "prepare_kernel")), (results, ("finish_kernel",)),
                              (extend, ("extend_kernel", "extend_warps_kernel")),
                              (extend, ("prepare_integers_kernel", "prepare_kernel")), (unpack, ("unpack_kernel",)),
                              (store, ("append_kernel", "append_codes_kernel", "encode_kernel"))):  # fmt: skip
            for name in names:
                kernel = getattr(module, name)
                kernel = kernel.kernel if isinstance(kernel, CompileOnly) else kernel
                monkeypatch.setattr(module, name, CompileOnly(kernel, capability, seen))
        monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
        return seen

    def report(seen, capability, label):
        for name, (compiled, warps) in seen.items():
            registers, stack, spills = resources(compiled.asm["cubin"], tmp_path)
            print(
                f"sm_{capability} {label} {name}: {warps} warps, {registers} registers, {stack} bytes of stack,"
                f" {spills} spills in the main loop"
            )
            yield name, spills

    start.report = report
    with assumed:
        yield start


def pages_of(name, dim, seqs, tokens, page_size, kv_heads=2):
    width, device = -(-tokens // page_size), torch.device("cpu")
    format = Format.parse(name, dim)
    return Pages(
        format,
        page_size,
        allocate(format, page_size, seqs * width, kv_heads, device),
        torch.zeros(seqs, width, dtype=torch.int32),
        torch.zeros(seqs, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )


# in a main loop; Triton 3.8 moves a few registers of the portable kernel to memory
MOST_SPILLS = 8 if triton.__version__.startswith("3.8.") else 0


def launch_attend(pages, queries, scoring=None, precision="fast", group=4, dtype=torch.bfloat16):
    tokens = pages.seqs * queries
    q = torch.empty(tokens, pages.kv_heads * group, pages.format.key.dim, dtype=dtype)
    starts = torch.arange(pages.seqs + 1, dtype=torch.int32) * queries
    attention.attend(q, pages, Rows(starts), pages.lengths, scoring or Scoring(), None, None, precision, None)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_decode(compile_for, capability):
    """Decode without a spill, on every generation."""
    seen = compile_for(capability)
    launch_attend(pages_of("k4v4", 128, 2, 8192, 64), 1)
    assert set(seen) == {"prepare_kernel", "attend_kernel", "finish_kernel"}
    for name, spills in compile_for.report(seen, capability, "k4v4"):
        assert spills <= MOST_SPILLS, name


@pytest.mark.parametrize(("name", "dim"), [("k8v4", 128), ("k2v2", 64), ("k5v6", 96), ("k16v3", 128)])
def test_decode_without_spills(compile_for, name, dim):
    seen = compile_for(90)
    launch_attend(pages_of(name, dim, 2, 8192, 24), 1)
    for kernel, spills in compile_for.report(seen, 90, f"{name} d{dim}"):
        assert spills == 0, kernel


def test_short_context_is_one_launch(compile_for):
    seen = compile_for(90)
    launch_attend(pages_of("k4v4", 128, 3, 256, 256), 1)
    assert set(seen) == {"attend_kernel"}
    list(compile_for.report(seen, 90, "short"))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_extend(compile_for, capability):
    seen = compile_for(capability)
    launch_attend(pages_of("k4v4", 128, 1, 8192, 64), 512)
    list(compile_for.report(seen, capability, "extend"))


@pytest.mark.parametrize(
    ("name", "dim", "page"),
    [("k4v4", 128, 64), ("k3v2", 64, 8192), ("k2/v4:minifloat", 128, 128), ("k8v4", 128, 64), ("k5v6", 64, 64)],
)
def test_extend_on_hopper(compile_for, tmp_path, name, dim, page):
    """Warp-group products overlap with everything else: they are not serialised. No spills."""
    seen = compile_for(90)
    pages = pages_of(name, dim, 1, 8192, page)
    q = torch.empty(512, 8, dim, dtype=torch.bfloat16)
    assert extend.why_not_shape(q, pages, Scoring(), "fast") is None
    starts = torch.tensor([0, 512], dtype=torch.int32)
    extend.attend(q, pages, Rows(starts), pages.lengths, Scoring(window=3000, sinks=4), None, None, None)
    prepare = "prepare_kernel" if pages.format.key.bits > 4 else "prepare_integers_kernel"
    assert set(seen) == {prepare, "extend_kernel", "finish_kernel"}
    for kernel, spills in compile_for.report(seen, 90, f"{name} d{dim}"):
        assert spills == 0, kernel
    text = disassemble(seen["extend_kernel"][0].asm["cubin"], tmp_path)
    assert text.count("GMMA") > 2 * text.count("WARPGROUP.DEPBAR"), "each product is waited for"


@pytest.mark.parametrize(("capability", "name", "dim"), [(80, "k4v4", 128), (90, "k4v4", 128), (90, "k8v5", 96)])
def test_unpack(compile_for, capability, name, dim):
    """On Hopper the matrices that rotate back stay in shared memory, beside those of two more programs."""
    seen = compile_for(capability)
    keys = torch.zeros(128, 2, dim, dtype=torch.bfloat16)
    begins, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    unpack.unpack(pages_of(name, dim, 1, 128, 64), 0, begins, starts, 2, keys, keys.clone())
    assert seen["unpack_kernel"][0].metadata.shared <= 76_000
    for kernel, spills in compile_for.report(seen, capability, f"{name} d{dim}"):
        assert spills <= 4, kernel  # of a loop of a thousand instructions


@pytest.mark.parametrize(("name", "dim"), [("k4v3", 512), ("k3v5", 16), ("k5v3", (576, 512)), ("k6v8", 256)])
@pytest.mark.parametrize("precision", ["fast", "float32"])
def test_sums_are_long_enough(compile_for, name, dim, precision):
    """See LEAST_TILE of the backend: a sum over fewer elements than operands are laid out for goes wrong silently."""
    seen = compile_for(90)
    launch_attend(pages_of(name, dim, 2, 512, 16), 1, precision=precision)
    assert "attend_kernel" in seen


@pytest.mark.parametrize(
    ("capability", "most", "dim"),
    [(80, 166_912, 64), (80, 166_912, 128), (80, 166_912, 512), (90, 232_448, 128), (90, 232_448, (576, 512))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_raw_tiles_fit_into_shared_memory(compile_for, capability, most, dim, dtype):
    """Also where queries have another type than the 16-bit vectors, so that products run in float32."""
    seen = compile_for(capability)
    launch_attend(pages_of("k16v16", dim, 2, 512, 16), 600, dtype=dtype)
    assert seen["attend_kernel"][0].metadata.shared <= most


def test_everything_at_once(compile_for):
    seen = compile_for(90)
    scoring = Scoring(window=100, sinks=4, softcap=30.0, first=2, recent=5, threshold=1e-3)
    launch_attend(pages_of("k3v5", (192, 128), 2, 4096, 24), 3, scoring, "float32", group=3)
    list(compile_for.report(seen, 90, "everything"))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_append(compile_for, capability):
    seen = compile_for(capability)
    pages = pages_of("k4v4", 128, 4, 1024, 1024)
    x = torch.empty(4, 2, 128, dtype=torch.bfloat16)
    store.append(pages, x, x, Rows(torch.arange(5, dtype=torch.int32)))
    codes = [store.encode(x, codec, None) for codec in (pages.format.key, pages.format.value)]
    store.append_codes(pages, *codes, Rows(torch.arange(5, dtype=torch.int32)))
    assert set(seen) == {"append_kernel", "encode_kernel", "append_codes_kernel"}
    list(compile_for.report(seen, capability, "k4v4"))
    centred = dataclasses.replace(pages, key_offset=torch.empty(2, 128))
    rows = Rows(torch.arange(5, dtype=torch.int32))
    store.prepare_append(centred, x, x, rows, torch.empty(2, 128))(k=x, v=x)
    list(compile_for.report(seen, capability, "k4v4 with offset and key_scale"))


@pytest.mark.parametrize("name", ["k4v4", "k8v5"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_append_of_a_token(compile_for, tmp_path, capability, name):
    """A program for each sequence, which meets no other one: it counts nothing in memory that they share."""
    seen = compile_for(capability)
    pages = pages_of(name, 128, 4, 1024, 64, kv_heads=8)
    x = torch.empty(4, 8, 128, dtype=torch.bfloat16)
    store.append(pages, x, x, checks.rows_of("starts", None, 4, 4, x.device))
    compiled, _ = seen["append_kernel"]
    assert resources(compiled.asm["cubin"], tmp_path)[1] <= 16, "it spills"
    assert "atom.global.add" not in re.sub(r"\.(gpu|acq_rel|relaxed)", "", compiled.asm["ptx"])
    list(compile_for.report(seen, capability, f"{name}, a token"))


@pytest.mark.parametrize(("capability", "most"), [(80, 166_912), (90, 232_448)])
def test_long_appends_fit_into_shared_memory(compile_for, capability, most):
    """Also of float32 vectors, whose tiles are twice as large."""
    for dim in (128, 256):
        seen = compile_for(capability)
        pages = pages_of("k4v4", dim, 1, 16384, 64)
        x = torch.empty(16384, 2, dim)
        store.append(pages, x, x, Rows(torch.tensor([0, 16384], dtype=torch.int32)))
        assert seen["append_kernel"][0].metadata.shared <= most


@pytest.mark.parametrize(("capability", "dim"), [(80, 128), (90, 64), (90, 128), (90, 256), (100, 128)])
def test_long_appends(compile_for, capability, dim):
    """16-bit vectors of up to 128 coordinates need no other warp and stay in registers."""
    seen = compile_for(capability)
    pages = pages_of("k4v4", dim, 3, 8192, 64)
    x = torch.empty(16384, 2, dim, dtype=torch.bfloat16)
    store.append(pages, x, x, Rows(torch.tensor([0, 8000, 8000, 16384], dtype=torch.int32)))
    assert seen["append_kernel"][1] == (4 if dim == 256 else 1)
    for name, spills in compile_for.report(seen, capability, f"k4v4 d{dim}"):
        assert dim == 256 or spills == 0, name


@pytest.mark.parametrize("name", ["k8v6", "k5:int8/v8:cubic", "k4v2"])
def test_cells_give_codes(name):
    """What codes.quantise does with a grid, in float32: the codes of a search, next to boundaries, too."""
    for codec in (Format.parse(name, 128).key, Format.parse(name, 128).value):
        grid = grids.wide_cells(codec.levels)
        assert grid is not None
        bounds = codec.boundary_tensor(torch.float32, torch.device("cpu"))
        near = [torch.nextafter(bounds, torch.full_like(bounds, far)) for far in (-9.0, 9.0)]
        z = torch.cat([bounds, *near, 2 * torch.randn(100_000), torch.tensor([0.0, 1e30, -1e30, 50.0, -50.0])])
        place = (z * grid.slope + grid.start) * (len(grid.bounds) - 2) + 0.5
        cell = place.clamp(0, len(grid.bounds) - 1.5).int()
        code = torch.tensor(grid.below)[cell] + (z > torch.tensor(grid.bounds)[cell])
        assert torch.equal(code, torch.bucketize(z, bounds))


def test_widths_use_instructions_they_should():
    """Up to 4 bits tables become byte permutations, wider ones arithmetic; tables of users may have to be looked up."""

    def how(name):
        return specialise.side(Format.parse(name, 128).key, False, torch.bfloat16)

    assert all(how(f"k{bits}v4").asm for bits in (2, 3, 4))
    assert how("k8:cubic/v4").coef
    assert not how("k8:cubic/v4").asm
    assert [how(f"k{bits}v4").coef[0] for bits in (5, 6, 8)] == [7, 7, 7]
    assert [how(f"k{bits}:lloyd-max/v4").coef[0] for bits in (5, 6, 8)] == [0, 0, 0]
    assert not how("k4:[-4,-3,-2,-1.5,-1,-0.5,-0.2,0,0.1,0.3,0.6,1,1.5,2,3,5]/v4").asm

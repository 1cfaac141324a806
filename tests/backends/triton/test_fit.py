"""Fitted codes in Triton: against the reference, interpreted and on a GPU; compiled for GPUs that are not here."""

import collections
import contextlib
import dataclasses
import re

import pytest
import torch

from aurakv import checks
from aurakv.attention.step import Rows
from aurakv.format import fit as fitting
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from tests.backends.triton.test_interpreter import interpret, needs_triton, run
from tests.helpers.gpu import EMULATED, compiles, on_real_gpu

# In float64 the reference finds the best of scales that differ by less than sums in float32 do at 8 bits.
ENCODE = """
import sys
import numpy
import torch
numpy.seterr(all="ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
from aurakv.backends import _load
from aurakv.backends.triton.common import target
from aurakv.backends.triton.common.codes import INTERPRETED
from aurakv.format import fit as fitting
from aurakv.format.codec import Codec
from aurakv.format.packing import unpack
torch.set_default_device(target.device_type() if torch.cuda.is_available() else "cpu")
reference, triton = _load("reference"), _load("triton")

def kept(x, codes, codec, offset, fit):
    # mixed² / energy: how much of a vector the codes hold
    lower, cost = fitting.split(fit, codec.dim, torch.float64)
    y = codec.rotate((x - offset).double())
    level = codec.level_tensor(torch.float64, x.device)[unpack(codes.data, codec.bits)]
    z, at = (torch.einsum("hij,...hj->...hi", lower, each) for each in (y, level))
    return (cost * z * at).sum(-1).square() / (cost * at.square()).sum(-1)

dim, bits, side, n = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
options = {"table": (-2.0, -1.3, -0.7, -0.2, 0.3, 0.30003, 0.30006, 1.5)} if side == "searched" else {}  # no grid
codec = Codec.value(dim, bits) if side == "value" else Codec.key(dim, bits, **options)
x, offset = torch.randn(n, 2, dim) * torch.randn(n, 2, 1).exp(), 0.1 * torch.randn(2, dim)
weights = torch.rand(2, dim) ** 4 + 0.01
fits = [fitting.equal(2, x.device), fitting.fit(codec, weights)]
if not INTERPRETED.value:
    fits.append(fitting.fit(codec, weights, at_once=True))
for fit in fits:
    wanted, got = reference.encode(x.double(), codec, offset, fit), triton.encode(x, codec, offset, fit)
    same = (wanted.data == got.data).all(-1)
    assert same.float().mean() >= 0.99, same.float().mean()
    torch.testing.assert_close(got.scale[same], wanted.scale[same], rtol=1e-3, atol=0)
    a, b = (kept(x, codes, codec, offset, fit)[~same] for codes in (wanted, got))
    assert ((a - b).abs() <= 0.02 * a).all()
    nearest = reference.encode(x.double(), codec, offset)
    assert (nearest.data != got.data).any(-1).float().mean() > 0.5  # it is not what rounding gives
    odd = torch.randn(4, 2, dim)
    odd[0], odd[1, 0, 3], odd[2], odd[3] = 0, torch.nan, 1e-22 * odd[2], 1e30 * odd[3]
    wanted, got = (backend.encode(odd, codec, None, fit) for backend in (reference, triton))
    torch.testing.assert_close(got.scale, wanted.scale, rtol=2e-3, atol=1e-7, equal_nan=True)
    assert got.scale[1, 0].isnan() and not got.scale[0].any()
"""

APPEND = """
import dataclasses
import sys
import torch
torch.set_num_threads(1)
torch.manual_seed(3)
from aurakv.attention import ops
from aurakv.backends.triton.common import target
from aurakv.format import fit as fitting
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

DEVICE = torch.device(target.device_type() if torch.cuda.is_available() else "cpu")
torch.set_default_device(DEVICE)
LENGTHS = [0, 5, 14]  # pages of 8: the second one fills its last page, the last one goes beyond the table
STARTS = [0, 3, 22, 26]
CASES = {
    "one by one": [("k4v3", "k", "", False, True), ("k3v4", "kv", "", True, False), ("k16v4", "v", "", False, True),
                   ("k4v4", "", "", True, False)],
    "at once": [("k4v3", "k", "k", False, True), ("k3v4", "kv", "kv", True, False)],
    "at once or not": [("k2v16", "k", "k", False, False), ("k4v4", "kv", "v", False, False),
                       ("k6v4", "k", "k", False, True),  # keys of other dimensions than values
                       ("k4v8", "k", "k", False, False)],  # values that no fit has, with a wide table
}
for name, weights, at_once, ring, offset in CASES[sys.argv[1]]:
    format = Format.parse(name, (32, 64) if name == "k6v4" else 32)
    def fit(side, codec):
        if side in weights:
            return fitting.fit(codec, torch.rand(2, codec.dim) + 0.01, side in at_once)
        return fitting.equal(2, DEVICE) if codec.coded and codec.bits < 8 else None
    pages = Pages(format, 8, allocate(format, 8, 9, 2, DEVICE).fill_(0),
                  torch.randperm(9).view(3, 3).to(torch.int32), torch.tensor(LENGTHS, dtype=torch.int32),
                  torch.zeros(1, dtype=torch.int32), ring=ring, pinned=int(ring),
                  key_fit=fit("k", format.key), value_fit=fit("v", format.value))
    if not ring:
        pages.table[2, 2] = -1
    if offset and format.value.coded:
        pages = dataclasses.replace(pages, value_offset=torch.randn(2, format.value.dim))
    k, v = (torch.randn(26, 2, 2 * codec.dim)[..., ::2] for codec in (format.key, format.value))
    found = []
    for backend in ("reference", "triton"):
        copy = dataclasses.replace(
            pages, data=pages.data.clone(), lengths=pages.lengths.clone(), overflow=pages.overflow.clone()
        )
        ops.append(copy, k, v, STARTS, backend=backend)
        assert copy.lengths.tolist() == [3, 24, 18 if ring else 14], name
        assert int(copy.overflow) == (not ring)
        found.append(copy.data)
    assert (found[0] == found[1]).float().mean() > 0.99 and found[1].any(), name
    if weights == "k" and format.value.coded:  # one by one
        copy = dataclasses.replace(
            pages, data=pages.data.clone(), lengths=pages.lengths.clone(), overflow=pages.overflow.clone()
        )
        for i in range(3):
            ops.append(copy, k[[i, i + 3]], v[[i, i + 3]], [0, 1, 2, 2], backend="triton")
        ops.append(copy, k[6:22], v[6:22], [0, 0, 16, 16], backend="triton")
        assert copy.lengths.tolist() == [3, 24, 14] and torch.equal(copy.data, found[1])
"""


ENCODED = [
    (64, 4, "key", 17),
    (80, 3, "value", 16),
    (128, 2, "key", 16),
    (64, 8, "key", 16),
    (32, 5, "value", 16),
    (32, 3, "searched", 8),
    pytest.param(256, 4, "key", 8, marks=pytest.mark.full),
]
encoded = pytest.mark.parametrize(("dim", "bits", "side", "vectors"), ENCODED)


@needs_triton
@encoded
def test_encode(dim, bits, side, vectors):
    interpret(ENCODE, str(dim), str(bits), side, str(vectors))


@needs_triton
def test_append():
    interpret(APPEND, "one by one")


@pytest.mark.skipif(not EMULATED, reason="lanes of a warp need a GPU, or an emulated one")
@pytest.mark.parametrize("fits", ["at once", "at once or not"])
def test_append_at_once(fits):
    interpret(APPEND, fits)


@on_real_gpu
@encoded
def test_encode_on_a_gpu(dim, bits, side, vectors):
    run(ENCODE, str(dim), str(bits), side, str(40 * vectors))


@on_real_gpu
@pytest.mark.parametrize("fits", ["one by one", "at once", "at once or not"])
def test_append_on_a_gpu(fits):
    run(APPEND, fits)


def fitted_pages(name, dim, kv_heads=8, seqs=64, at_once=False):
    format = Format.parse(name, dim)
    return Pages(
        format,
        64,
        allocate(format, 64, seqs, kv_heads, torch.device("cpu")),
        torch.zeros(seqs, 1, dtype=torch.int32),
        torch.zeros(seqs, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        key_fit=fitting.fit(format.key, torch.rand(kv_heads, format.key.dim) + 0.1, at_once),
        value_fit=fitting.equal(kv_heads) if format.value.coded else None,
    )


@pytest.fixture
def compiled(monkeypatch):
    """Compiles what launchers of appends launch: {kernel: (compiled, warps)}."""
    from aurakv.backends.triton.append import fit_launch, launch
    from aurakv.backends.triton.common import target
    from tests.helpers.compile_only import CompileOnly

    assumed = contextlib.ExitStack()

    def start(capability):
        seen = {}
        for module, name in ((launch, "append_kernel"), (launch, "encode_kernel"),
                             (fit_launch, "encode_fitted_kernel")):  # fmt: skip
            monkeypatch.setattr(module, name, CompileOnly(getattr(module, name), capability, seen))
        for module in (launch, fit_launch):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        assumed.enter_context(target.assuming(divmod(capability, 10)))
        return seen

    with assumed:
        yield start


def loops(sass):
    """Instructions between a jump back and where it leads to."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    for at, text in code:
        jump = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            yield [other for where, other in code if int(jump[1], 16) <= where <= at]


def loop_over_blocks(sass):
    """Instructions of the loop that rounds 16 coordinates: the shortest with their multiply-adds and products."""
    products = (body for body in loops(sass) if any("MMA" in x and "HFMA2" not in x for x in body))
    return min((body for body in products if sum("FFMA" in x for x in body) >= 150), key=len)


def loop_over_tiles(sass):
    """Instructions of the loop that rounds 16 coordinates, four at once: the innermost one with products over 8."""
    return min((body for body in loops(sass) if any("HMMA.1688." in text for text in body)), key=len)


@compiles
@pytest.mark.parametrize(
    ("capability", "name", "dim"),
    [
        (80, "k4v4", 128),
        (90, "k4v4", 128),
        (90, "k8v8", 128),
        (90, "k5v16", 64),
        (90, "k4v4", 256),
        (80, "k3v2", 512),
        (90, "k2v2", 80),
    ],
)
def test_compiled_append(compiled, tmp_path, capability, name, dim):
    """The loop that takes the time keeps everything in registers."""
    from aurakv.backends.triton.append import launch
    from tests.helpers.compile_only import disassemble, resources

    seen = compiled(capability)
    pages = fitted_pages(name, dim)
    x = torch.empty(64, 8, dim, dtype=torch.bfloat16)
    launch.append(pages, x, x, checks.rows_of("starts", None, 64, 64, x.device))
    kernel, warps = seen["append_kernel"]
    assert set(seen) == {"append_kernel"}
    body = loop_over_blocks(disassemble(kernel.asm["cubin"], tmp_path))
    registers, stack, _ = resources(kernel.asm["cubin"], tmp_path)
    counts = collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for text in body)
    print(f"sm_{capability} {name} d{dim}: {warps} warps, {registers} registers, {stack} bytes of stack,"
          f" {len(body)} instructions for 16 coordinates of {4 * warps} vectors: {counts.most_common(12)}")  # fmt: skip
    assert not counts["LDL"] + counts["STL"]
    assert len(body) <= 900
    assert stack <= 200, "more than what does not change in the loop"
    assert kernel.metadata.shared <= 100_000


@compiles
@pytest.mark.parametrize(
    ("capability", "name", "dim", "most"),
    [
        (80, "k4v4", 128, 250),
        (90, "k4v4", 128, 250),
        (90, "k3v2", 64, 240),
        pytest.param(86, "k2v4", 96, 250, marks=pytest.mark.full),
        pytest.param(120, "k4v4", 128, 260, marks=pytest.mark.full),
        pytest.param(90, "k6v4", 80, 260, marks=pytest.mark.full),
    ],
)
def test_compiled_at_once(compiled, tmp_path, capability, name, dim, most):
    """The loop that takes the time keeps everything in registers, and its two look-ups do not wait for each other."""
    from aurakv.backends.triton.append import launch
    from tests.helpers.compile_only import disassemble, resources

    seen = compiled(capability)
    pages = fitted_pages(name, dim, at_once=True)
    x = torch.empty(64, 8, dim, dtype=torch.bfloat16)
    launch.append(pages, x, x, checks.rows_of("starts", None, 64, 64, x.device))
    kernel, warps = seen["append_kernel"]
    assert warps == 2
    body = loop_over_tiles(disassemble(kernel.asm["cubin"], tmp_path))
    registers, stack, _ = resources(kernel.asm["cubin"], tmp_path)
    counts = collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0] for text in body)
    print(f"sm_{capability} {name} d{dim}: {registers} registers, {stack} bytes of stack, {len(body)} instructions for"
          f" 16 coordinates of two vectors: {counts.most_common(12)}")  # fmt: skip
    assert counts["HMMA"] == 4 + 2 * (dim // 16 - 1)
    assert not counts["FSETP"], "comparisons share few predicates"
    assert not counts["LDL"] + counts["STL"]
    assert len(body) <= most
    assert stack <= 100, "what does not change in the loop"


@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_scales(compiled, tmp_path, capability):
    """Equal weights need no other kernel than appends without a fit; encode has one of its own for weights."""
    from aurakv.backends.triton.append import launch
    from tests.helpers.compile_only import resources

    seen = compiled(capability)
    pages = fitted_pages("k4v4", 128)
    equal = dataclasses.replace(pages, key_fit=fitting.equal(8))
    x = torch.empty(64, 8, 128, dtype=torch.bfloat16)
    launch.append(equal, x, x, checks.rows_of("starts", None, 64, 64, x.device))
    assert set(seen) == {"append_kernel"}
    assert resources(seen["append_kernel"][0].asm["cubin"], tmp_path)[2] == 0
    long = torch.empty(4096, 8, 128, dtype=torch.bfloat16)
    launch.append(equal, long, long, Rows(torch.arange(65, dtype=torch.int32) * 64))
    assert seen["append_kernel"][1] == 4
    launch.encode(x, pages.format.key, None, pages.key_fit)
    assert set(seen) == {"append_kernel", "encode_fitted_kernel"}

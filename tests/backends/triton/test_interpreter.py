"""The Triton backend in the interpreter on the CPU, for a chosen set of cases."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from aurakv.backends.triton.common.target import capability
from tests.helpers.gpu import EMULATED

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
# Small, and together through every path: storage, masks, caps, sinks, damage, offsets, splits, 16 bits and codes.
INTERPRETED = [
    ("splits-7", "fast"),
    ("window-sinks-cap-logits", "float32"),
    ("damaged-value", "fast"),
    ("damaged-value-16", "fast"),
    ("uncompressed-cap-logits-offset", "fast"),
    ("ring-pinned-pages", "fast"),
    ("offset-5-bits", "float32"),
    ("width-k6v16", "fast"),
    ("width-k3v8", "fast"),
    ("width-k8v4", "fast"),
    ("bfloat16", "fast"),
    ("threshold", "fast"),
]
RUN_CASE = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy
import torch
numpy.seterr(all="ignore")
torch.set_num_threads(1)
from aurakv.testing import CASES, run
case = next(case for case in CASES if case.name == sys.argv[1])
run(case, "triton", precision=sys.argv[2])
"""
OPERATIONS = """
import numpy, torch
numpy.seterr(all="ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
from aurakv.backends import _load
from aurakv.format.codec import Codec
reference, triton = _load("reference"), _load("triton")

def close(a, b):
    a, b = a.double(), b.double()
    assert torch.equal(a.isnan(), b.isnan())
    assert (a - b).nan_to_num(0).norm() <= 2e-6 * a.nan_to_num(0).norm()

for dim, bits, has_offset in ((64, 4, True), (80, 5, False), (96, 16, False), (64, 3, False)):
    codec = Codec.value(dim, bits) if bits != 16 else Codec(dim, 16, dtype=torch.bfloat16)
    x = torch.randn(21, 2, dim)
    x[5, 1, 2] = torch.nan
    offset = torch.randn(2, dim) if has_offset else None
    codes = reference.encode(x, codec, offset)
    for rotated in (False, True):
        close(*(b.decode(codes, codec, offset, rotated, torch.float32) for b in (reference, triton)))
    q = torch.randn(3, 6, dim)
    close(reference.scores(q.double(), codes, codec, offset), triton.scores(q, codes, codec, offset))
    weights = torch.rand(3, 6, 21)
    weights[:2, :, 5] = 0
    for threshold in (-float("inf"), 0.1):
        truth = reference.values(weights.double(), codes, codec, offset, threshold)
        close(truth, triton.values(weights, codes, codec, offset, threshold))
"""
APPEND_CODES = """
import torch
torch.set_num_threads(1)
from aurakv.attention import ops
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

format = Format.parse("k4v16", 64)
def make(width):
    return Pages(format, 16, allocate(format, 16, 8, 2, torch.device("cpu")).fill_(0),
                 torch.tensor([[3, 1, 6], [2, 0, -1]], dtype=torch.int32), torch.tensor([14, 30], dtype=torch.int32),
                 torch.zeros(1, dtype=torch.int32))
torch.manual_seed(31)  # no coordinate of these is within 5e-4 of where its code would change
x = torch.randn(9, 2, 64)
keys, values = (ops.encode(x, codec, backend="reference") for codec in (format.key, format.value))
for starts, overflow in (([0, 7, 9], 0), ([0, 4, 9], 1)):  # five more tokens do not fit sequence 1
    a, b, c = make(3), make(3), make(3)
    ops.append_codes(a, keys, values, starts, backend="reference")
    ops.append_codes(b, keys, values, starts, backend="triton")
    ops.append(c, x, x, starts, backend="triton")
    for got in (b, c):
        assert torch.equal(a.lengths, got.lengths) and int(got.overflow) == overflow == int(a.overflow)
        assert torch.equal(a.data, got.data)
"""
APPEND_TOKENS = """
import dataclasses
import torch
torch.set_num_threads(1)
from aurakv.attention import ops
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate

LENGTHS = [0, 15, 16, 47, 48, 32]  # the fifth has no room but in a ring, the last one lacks the page
torch.manual_seed(9)
for name, dim, heads, ring, offset in (("k4v4", 64, 2, False, False), ("k8v3", 128, 16, True, True),
                                       ("k16v5", 32, 17, False, False), ("k4v2", (256, 64), 3, True, False)):
    format = Format.parse(name, dim)
    table = torch.randperm(18).view(6, 3).to(torch.int32)
    table[5, 2] = -1
    pages = Pages(format, 16, allocate(format, 16, 18, heads, torch.device("cpu")).fill_(0), table,
                  torch.tensor(LENGTHS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), ring=ring,
                  pinned=int(ring))
    if offset:
        pages = dataclasses.replace(pages, key_offset=torch.randn(heads, format.key.dim))
    k, v = (torch.randn(6, heads, 2 * codec.dim)[:, :, ::2] for codec in (format.key, format.value))
    found = []
    for backend in ("reference", "triton"):
        copy = dataclasses.replace(
            pages, data=pages.data.clone(), lengths=pages.lengths.clone(), overflow=pages.overflow.clone()
        )
        ops.append(copy, k, v, backend=backend)
        assert copy.lengths.tolist() == [n + (i != 5 and (ring or n < 48)) for i, n in enumerate(LENGTHS)], name
        assert int(copy.overflow) == 1
        found.append(copy.data)
    assert (found[0] == found[1]).float().mean() > 0.999 and found[1].any(), name
"""


def interpret(script: str, *arguments: str) -> None:
    """On the emulated GPU where there is one: what is compiled then, instead of what is interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(not EMULATED)), "CUDA_VISIBLE_DEVICES": ""}
    if EMULATED:
        script = f"from tests.helpers.ptx.driver import start\nstart({capability(torch.device('cpu'))})\n{script}"
    run(script, *arguments, environment=environment)


def run(script: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """In a process of its own; without an environment on the GPU that is there."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize(("case", "precision"), INTERPRETED)
def test_interpreted_case(case, precision):
    interpret(RUN_CASE, case, precision)


@needs_triton
def test_interpreted_operations():
    interpret(OPERATIONS)


@needs_triton
@pytest.mark.parametrize("script", [APPEND_CODES, APPEND_TOKENS], ids=["codes", "tokens"])
def test_interpreted_append(script):
    interpret(script)

"""Unpacked sequences are what `Codec.decode` says of their codes, wherever they lie and wherever they go."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from aurakv.format.codec import Format
from tests.helpers.gpu import DEVICE, on_gpu
from tests.helpers.unpacked import CASES, check

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
INTERPRETED = ("wide", "16-bit-keys")  # the others on a GPU only: they take long


@needs_triton
def test_interpreted() -> None:
    code = "import torch, numpy; numpy.seterr(all='ignore'); torch.set_num_threads(1)\n"
    code += f"from tests.helpers.unpacked import check\nfor case in {INTERPRETED!r}: check(case, 'cpu', torch.bfloat16)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check(case, DEVICE, dtype)


@needs_triton
def test_says_why_not() -> None:
    from aurakv.backends.triton.unpack.launch import why_not_format

    for name, dim in (("k4v4", 80), ("k2v8", 256), ("k16v3", 96), ("k5:lloyd-max/v6:cubic", 64)):
        assert why_not_format(Format.parse(name, dim)) is None
    assert "same dim" in (why_not_format(Format.parse("k4v4", (128, 64))) or "")
    assert "rotates" in (why_not_format(Format.parse("k4v4", 64).unrotated()) or "")
    for tiny in ("[-1e-6,-1e-7,1e-7,1e-6]", "[-1e6,-1,1,1e6]"):
        assert "largest level" in (why_not_format(Format.parse(f"k2v2:{tiny}", 64)) or "")

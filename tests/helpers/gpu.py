"""Where tests of GPU kernels run: on a GPU, on an emulated one (`pytest --emulate 8.0`), or, compiled only, nowhere."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from aurakv import backends
from aurakv.backends.triton.common import target

EMULATED = target.device_type() == "cpu"
DEVICE = "cpu" if EMULATED else "cuda"
REASON = backends.why_not("triton", None, DEVICE)
on_gpu = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")
on_real_gpu = pytest.mark.skipif(
    EMULATED or REASON is not None, reason=f"{REASON or 'needs a GPU that is not emulated'}"
)


WHY_NOT_COMPILED = (
    "triton is not installed"
    if importlib.util.find_spec("triton") is None
    else "the interpreter compiles nothing"
    if os.environ.get("TRITON_INTERPRET") == "1"
    else "an emulated GPU gets no machine code"
    if EMULATED
    else None
)
compiles = pytest.mark.skipif(WHY_NOT_COMPILED is not None, reason=f"{WHY_NOT_COMPILED}")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)

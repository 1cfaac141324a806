"""Where tests of GPU kernels run: on a GPU, or on an emulated one (`pytest --emulate 8.0`)."""

from __future__ import annotations

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


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)

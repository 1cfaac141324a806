"""What the GPU benchmark compares with: other packages' kernels, called as they want to be."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import gpu_rivals  # noqa: E402

# Triton's interpreter runs vLLM's kernels on a CPU; vLLM itself wants Triton off there.
RUN = """
import sys, torch, triton, triton.language as tl
import vllm.triton_utils as utils
utils.HAS_TRITON, utils.triton, utils.tl = True, triton, tl
sys.path.insert(0, sys.argv[1])
import gpu_rivals
torch.manual_seed(0)
q = torch.randn(2, 8, 128, dtype=torch.float16)
k, v = torch.randn(2, 2, 128, 2, 128, dtype=torch.float16)
for call in gpu_rivals.RIVALS[sys.argv[2]][1](q, k, v):
    print("error", gpu_rivals.error(call(), q, k, v))
"""


def test_pages_in_random_order() -> None:
    x = torch.arange(2 * 192 * 3).view(2, 192, 3)
    where = gpu_rivals.paged(2, 192, torch.device("cpu"))
    pages = where.put(x)
    assert pages.shape == (6, 64, 3)
    assert sorted(where.table.flatten().tolist()) == list(range(6))
    for seq in range(2):
        assert torch.equal(torch.cat([pages[i] for i in where.table[seq]]), x[seq])
    with pytest.raises(ValueError, match="multiple of 64, got 100"):
        gpu_rivals.paged(1, 100, torch.device("cpu"))


@pytest.mark.parametrize("name", list(gpu_rivals.RIVALS))
def test_says_what_is_missing(name: str) -> None:
    package = gpu_rivals.RIVALS[name][0]
    assert gpu_rivals.why_not(name) == (None if find_spec(package) else f"{package} is not installed")


@pytest.mark.skipif(find_spec("vllm") is None or find_spec("triton") is None, reason="needs vLLM and Triton")
@pytest.mark.parametrize(("name", "bound"), [("fp8, vLLM Triton", 0.05), ("4 bits, vLLM TurboQuant", 0.2)])
def test_vllm_kernels_agree_with_attention(name: str, bound: float) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", RUN, BENCHMARKS, name], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    errors = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("error")]
    assert len(errors) == 3
    assert max(errors) < bound

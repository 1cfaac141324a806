"""The device "mps" without an Apple GPU: what a Mac would refuse before any kernel runs."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.errors import InputError
from aurakv.testing import CASES, run
from tests.backends.metal import emulator
from tests.helpers.pretended_mps import pretending

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))


ROOT = Path(__file__).parents[3]
FOR_APPLE_GPUS = (  # of what `pytest -m mps` chooses, a part that takes a minute
    "tests/backends/metal", "tests/backends/test_widths.py", "tests/backends/test_sparse_values.py",
    "tests/format/test_signs.py", "tests/storage/test_cache.py", "tests/storage/test_slots.py",
)  # fmt: skip


def test_it_refuses_what_the_device_refuses():
    with pretending():
        x = torch.randn(3, device="mps")
        assert (x + 1).device == x.view(3, 1).device == copy.deepcopy(x).device == torch.device("mps:0")
        assert x.cpu().device == torch.device("cpu")
        assert torch.zeros(2).to(x).device == x.device
        assert torch.zeros(3).copy_(x).device == torch.device("cpu")
        for wrong in (x.double, lambda: torch.zeros(2, dtype=torch.float64, device="mps"), x.numpy):
            with pytest.raises(TypeError, match="an Apple GPU"):
                wrong()
        with pytest.raises(RuntimeError, match="on mps:0 and on the CPU"):
            x + torch.ones(3)
    assert not torch.backends.mps.is_available()


@pytest.mark.parametrize(
    "name",
    ["uncompressed-ring", "damaged-value",
     *(pytest.param(case.name, marks=pytest.mark.full) for case in CASES[::9])],
)  # fmt: skip
def test_conformance(name):
    with pretending():
        run(next(case for case in CASES if case.name == name), "metal", "mps")


def test_it_is_chosen_and_refuses_float64():
    with pretending():
        format = kv.Format.parse("k4v4", 64)
        assert backends.select(None, format, torch.device("mps")).name == "metal"
        codes = kv.encode(torch.randn(5, 2, 64, device="mps"), format.key)
        assert kv.decode(codes, format.key).device == torch.device("mps:0")
        for backend in (None, "metal", "reference"):
            with pytest.raises(InputError, match="dtype must be float32, float16 or bfloat16 on an Apple GPU"):
                kv.decode(codes, format.key, dtype=torch.float64, backend=backend)


@pytest.mark.parametrize("tokens", [40, pytest.param(90, marks=pytest.mark.full)])
def test_transformers_take_it_through_attach(tokens):
    """A long prompt is measured, which takes float64 elsewhere."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from aurakv.hf import AuraCache, attach
    from tests.hf.small_models import left_padded, logits, made

    inputs = left_padded(2, tokens)
    ids, mask, cut = inputs["input_ids"], inputs["attention_mask"], [tokens - 4, 3, 1]
    with pretending():
        model = copy.deepcopy(made("llama")[1]).to("mps")  # that one is shared by all tests
        there = ids.to("mps"), cut, mask.to("mps")
        got = logits(model, attach(model, "k4v4"), *there).cpu()
        want = logits(model, AuraCache(model.config, "k4v4", backend="reference"), *there).cpu()
    real = mask.bool()
    assert (got - want)[real].norm() < 1e-3 * want[real].norm()


@pytest.mark.full
def test_the_tests_for_an_apple_gpu_pass_here():
    """As pretended_mps.py says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.helpers.pretended_mps_plugin",
         "-m", "mps and not full", "-k", "not compile and not inductor and not threads", *FOR_APPLE_GPUS],
        cwd=ROOT, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    told = done.stdout.splitlines()[-1]
    assert int(re.match(r"(\d+) passed", told)[1]) >= 80, told
    assert "skipped" not in told

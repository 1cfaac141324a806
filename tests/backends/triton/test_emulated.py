"""Kernels from the PTX that GPUs would get, on an emulated GPU: the tests that need one, a part of them by default."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.helpers.gpu import EMULATED
from tests.helpers.ptx import why_not

if why_not() is not None or EMULATED:
    pytest.skip(why_not() or "this run is emulated", allow_module_level=True)

ROOT = Path(__file__).parents[3]
LARGE = "../test_conformance.py::test_case[triton-dim-576-512]"  # its tiles take more than 100 KB
# Small, and together through every kernel: decode with and without pieces, merge, appends, extend, unpack, portable.
CHOSEN = [
    "test_decode.py::test_groups[4-k4v4]",
    "test_decode.py::test_groups[12-k3v3]",
    "test_decode.py::test_flat_rows[4-333-k5v4]",
    "test_decode.py::test_contiguous_of_any_size[8]",
    "test_decode.py::test_lengths[lengths3-16]",
    "test_decode.py::test_ring_with_pinned_pages",
    "test_decode_scoring.py::test_offsets[True-True-4]",
    "test_decode_shapes.py::test_pieces[4-16-k4v4-96]",
    "test_decode_shapes.py::test_tables_of_any_levels[64-4-k4:lloyd-max/v4:lloyd-max]",
    "test_decode_shapes.py::test_tables_of_any_levels[128-4-k2:[-1.0,-0.982,-0.948,-0.898]/v2:[-1.0,-0.982,-0.948,-0.898]]",
    "test_decode_shapes.py::test_scales_of_float32[80-8-32-k3:f32/v8:f32]",
    "test_decode_first.py::test_one_query_of_each_sequence[64-8-dtype1]",
    "test_decode_first.py::test_several_queries[False-128-4]",
    "test_extend.py::test_extend[window-near-sinks]",
    "test_extend.py::test_extend[k5v6-d64]",
    "test_unpack.py::test_on_a_gpu[plain-dtype0]",
    "test_backend.py::test_steps_of_a_cache[k4v4-fast-8]",
    "test_fit.py::test_encode[64-4-key-17]",
    "test_fit.py::test_append_at_once[at once]",
    "../test_conformance.py::test_case[triton-damaged-value]",
    LARGE,
    "../test_conformance.py::test_case[triton-window-sinks-cap-logits]",
]
FILES = [
    "test_decode.py",
    "test_decode_scoring.py",
    "test_decode_extremes.py",
    "test_decode_first.py",
    "test_decode_shapes.py",
    "test_extend.py",
    "test_backend.py",
    "test_unpack.py",
    "test_fit.py",
    "test_interpreter.py",
    "../test_conformance.py",
]


def emulate(capability: str, *tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--emulate", capability]
    places = [f"tests/backends/triton/{test}".replace("triton/../", "") for test in tests]
    options = ["--backend", "triton", "-m", "not full"]
    done = subprocess.run([*command, *options, *places], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " skipped" not in done.stdout or len(tests) == 1, done.stdout[-2000:]


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_chosen(capability: str) -> None:
    emulate(capability, *CHOSEN)


def test_pairs_of_float32() -> None:
    """Which kernels have from 10.0 on."""
    emulate("12.0", "test_decode.py::test_groups[4-k4v4]", "test_decode.py::test_groups[12-k3v3]")


@pytest.mark.full
@pytest.mark.parametrize("capability", ["8.6", "12.0"])
def test_chosen_on_others(capability: str) -> None:
    """With 100 KB of shared memory, and so other tiles and fewer programs."""
    emulate(capability, *(test for test in CHOSEN if test != LARGE))


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "capability"),
    [
        *itertools.product(FILES, ["8.0", "9.0"]),
        ("test_decode.py", "8.6"),
        *itertools.product(["test_decode.py", "test_decode_shapes.py", "test_extend.py"], ["12.0"]),
    ],
)
def test_everything(file: str, capability: str) -> None:
    emulate(capability, file)

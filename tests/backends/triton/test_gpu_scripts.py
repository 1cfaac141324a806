"""What is run by hand on a GPU: it takes everything that needs one, and only what the kernels serve."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tools import gpu_conformance

TESTS = Path(__file__).parents[2]
NEEDS_A_GPU = re.compile(r"^@(on_gpu|on_real_gpu|GPU)$|skipif\(not torch\.cuda\.is_available\(\)", re.MULTILINE)


def test_conformance_has_every_module_whose_tests_need_a_gpu():
    files = [path for path in TESTS.rglob("test_*.py") if NEEDS_A_GPU.search(path.read_text(encoding="utf-8"))]
    found = {".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in files}
    assert sorted(gpu_conformance.MODULES) == sorted(found)


def test_conformance_runs_what_is_named_in_its_order(monkeypatch):
    tests = ["tests.a:test_x:0", "tests.b:test_y:0", "tests.b:test_y:1"]
    monkeypatch.setattr(gpu_conformance, "MODULES", ("tests.a", "tests.b"))
    monkeypatch.setattr(gpu_conformance, "tests_of", lambda module: [name for name in tests if module in name])
    jobs = gpu_conformance.jobs(["test_y:1", "tests.", "cover "])
    assert jobs[:3] == [("test", name, "") for name in (tests[2], tests[0], tests[1])]
    assert {job[0] for job in jobs[3:]} == {"cover"}
    assert {job[2] for job in gpu_conformance.jobs([" float32"])} == {"float32"}
    assert len(gpu_conformance.jobs([])) == len(gpu_conformance.jobs(["fast", "float32", "test "]))

"""What is run by hand on a GPU: it takes everything that needs one, and only what the kernels serve."""

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter knows no Gluon", allow_module_level=True)

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

import gpu_decode  # noqa: E402

from aurakv.backends.triton.decode import launch  # noqa: E402
from aurakv.format.codec import Format  # noqa: E402
from tests.backends.triton.decode_cases import launches  # noqa: E402
from tests.helpers import ptx  # noqa: E402
from tests.helpers.gpu import EMULATED  # noqa: E402
from tools import gpu_conformance  # noqa: E402

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


def test_decode_times_only_what_the_kernel_serves():
    parser = gpu_decode.make_parser()
    for line in itertools.chain.from_iterable(gpu_decode.LINES.values()):
        args = parser.parse_args(line.split())
        for name in args.formats:
            assert launch.why_not_format(Format.parse(name, args.dim)) is None, line


@pytest.mark.full
@pytest.mark.skipif(ptx.why_not() is not None or EMULATED, reason=f"{ptx.why_not() or 'this run is emulated'}")
def test_what_is_timed_is_right_on_an_emulated_gpu(monkeypatch):
    """With every way, and with a threshold at which all tiles but the first drop out."""
    from tests.helpers.ptx.driver import emulating

    line = "--pages 64 --seqs 1 --group 2 --tokens 130 --dim 64 --peak --threshold 0 1e-5 --ways own 8.0 portable"
    args = gpu_decode.make_parser().parse_args([*line.split(), "--formats", "k4v4"])
    monkeypatch.setattr(gpu_decode, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu_decode, "SHAPES", [(1, 1, 2, 130)])
    torch.manual_seed(0)
    with emulating((9, 0)):
        call = gpu_decode.make_call(args, 0, "k4v4", 64)
        for threshold in args.threshold:
            truth = gpu_decode.wanted(call, gpu_decode.scoring_of(args, 0.0))
            for way in args.ways:
                with gpu_decode.going(way), launches() as ran:
                    wrong = gpu_decode.error(call, gpu_decode.scoring_of(args, threshold), truth)
                assert 0 < wrong < 6e-3, (way, threshold)
                assert ran == ["decode_attention"] * (way != "portable")
        value = call.pages.value_parts().scale
        page, row = call.pages.slots(0, torch.arange(64, 130))
        value[page, :, row] = torch.nan
        dropped = [
            bool(gpu_decode.decode(call, gpu_decode.scoring_of(args, threshold)).isfinite().all())
            for threshold in args.threshold
        ]
        assert dropped == [False, True]

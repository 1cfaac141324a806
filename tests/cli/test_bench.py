"""aurakv bench and info: what is timed, what is refused, what this machine has."""

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
import aurakv
from aurakv.backends.triton.common import target
from tests.helpers import ptx
from tests.helpers.gpu import WHY_NOT_COMPILED, compiles

FEW = ("--tokens", "64,200", "--rounds", 1, "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--device", "cpu")


@pytest.fixture
def choosing():
    """Backends are chosen anew, and after the test again: a GPU is assumed meanwhile."""
    aurakv.backends._best.cache_clear()
    yield
    aurakv.backends._best.cache_clear()


def test_bench(answer, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "bench.png"
    found = answer("bench", *FEW, "--formats", "k4v4,k2v2", "--page", 64, "--plot", picture)
    rows = [(row["tokens"], row["method"]) for row in found["rows"]]
    assert rows == [(n, method) for n in (64, 200) for method in ("torch bf16", "k4v4", "k2v2")]
    for row in found["rows"]:
        assert row["us"] > 0
        if row["method"] == "k4v4":
            size = aurakv.Format.parse("k4v4", 64).bytes_per_token * 2 * row["tokens"]
            assert row["GB/s"] == pytest.approx(size / row["us"] / 1e3, abs=0.06)
            assert row["of read bandwidth"] == pytest.approx(row["GB/s"] * 1e9 / found["bandwidth"], abs=0.001)
    assert picture.read_bytes().startswith(b"\x89PNG")
    slowest = next(row for row in found["rows"] if (row["tokens"], row["method"]) == (200, "k2v2"))
    assert found["line"].startswith(f"aurakv {aurakv.__version__}, torch {torch.__version__}")
    assert slowest["runs"] == aurakv.backends.select(None, aurakv.Format.parse("k2v2", 64), torch.device("cpu")).name
    assert found["line"].endswith(f"; k2v2 {slowest['us']:.1f} µs ×{slowest['times bf16']} ({slowest['runs']})")


@pytest.mark.skipif(bool(ptx.why_not() or WHY_NOT_COMPILED), reason=f"{ptx.why_not() or WHY_NOT_COMPILED}")
@pytest.mark.parametrize(
    ("capability", "page", "kernel"),
    [((8, 6), 64, "decode kernel, tiles by copies of 16 bytes"), ((9, 0), 64, "decode kernel, tiles by TMA"),
     ((9, 0), 16, "decode kernel, tiles by copies of 16 bytes"), ((12, 0), 24, "portable kernel")],
)  # fmt: skip
def test_bench_names_the_kernel(answer, choosing, capability, page, kernel):
    """On emulated GPUs, which run what they name."""
    from tests.backends.triton.decode_cases import launches
    from tests.helpers.ptx.driver import emulating

    with emulating(capability), launches() as ran:
        found = answer("bench", *FEW, "--formats", "k4v4", "--page", page, "--backend", "triton", "--tokens", 200)
    assert found["line"].endswith(f" (triton, {kernel})")
    assert ("decode_attention" in ran) == kernel.startswith("decode")


def test_bench_times_nothing_wrong(refused, monkeypatch):
    from aurakv.testing.broken import OffByOneSlot

    wrong = OffByOneSlot()
    monkeypatch.setitem(aurakv.backends._registered, wrong.name, wrong)
    assert "nothing is timed" in refused("bench", *FEW, "--formats", "k4v4", "--backend", wrong.name)


def test_bench_refuses(refused, tmp_path):
    assert "multiple of --kv-heads" in refused("bench", "--heads", 5, "--kv-heads", 2)
    assert "k9v9 in --formats: bits must be one of" in refused("bench", *FEW, "--formats", "k4v4,k9v9")
    assert "backend must be one of" in refused("bench", *FEW, "--backend", "abacus")
    assert "a picture must end with" in refused("bench", *FEW, "--plot", tmp_path / "bench.txt")
    assert "must be a folder that exists" in refused("bench", *FEW, "--plot", tmp_path / "none" / "bench.png")
    assert "number of tokens" in refused("bench", "--tokens", "4K,,")


@pytest.mark.parametrize("command", ["bench", "demo", "generate", "eval", "tune"])
@pytest.mark.parametrize("number", ["0", "1025", "20000", "100000", "two"])
def test_threads_are_bounded(refused, command, number):
    """Many thousands end the process in OpenMP."""
    assert f"--threads: must be a whole number from 1 to 1024, got {number!r}" in refused(command, "--threads", number)


def test_info(answer, call):
    found = answer("info")
    cpu = found["devices"][-1]
    assert cpu["device"] == "cpu"
    assert cpu["backends"] == {name: aurakv.why_not(name) for name in aurakv.backends.names()}
    assert cpu["backends"][cpu["chosen"]] is None
    assert found["versions"]["torch"] == torch.__version__
    _, out, _ = call("info")
    for name, why in cpu["backends"].items():
        assert name in out
        assert why is None or why in out


@compiles
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_info_tells_what_a_gpu_gets(answer, choosing, capability):
    """Of a GPU that is assumed to be there."""
    with target.assuming(capability, "cpu", multiprocessors=4):
        found = answer("info")["devices"][-1]
    assert found["chosen"] == "triton"
    tiles, many = found["paths"]["triton"].split("; for many queries ")
    bulk = "TMA (by copies of 16 bytes in pages of 16 tokens)"
    assert tiles == "decode kernel, with tiles by " + (
        bulk if capability >= (9, 0) else "copies of 16 bytes (TMA needs compute capability 9.0)"
    )
    assert ("products of single warps" in many) == (capability != (9, 0))

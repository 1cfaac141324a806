"""Which kernels a process can have: a Triton without Gluon is told, a mistake of our own is raised."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import aurakv as kv
from aurakv.attention.scoring import Scoring
from aurakv.attention.step import Attention, Rows
from aurakv.backends.triton import backend, dispatch
from aurakv.backends.triton.common import target
from aurakv.errors import BackendError
from aurakv.format.codec import Format
from aurakv.storage.pages import Pages, allocate
from tests.helpers.ptx import library as ptx


@pytest.fixture(autouse=True)
def fresh():
    target.why_no_gluon.cache_clear()
    yield
    target.why_no_gluon.cache_clear()


@pytest.mark.parametrize("path", ["decode", "extend"])
def test_an_import_error_of_our_own_is_raised(monkeypatch, path):
    monkeypatch.setattr(dispatch, "why_no_gluon_paths", lambda: None)
    package = importlib.import_module(f"aurakv.backends.triton.{path}")
    monkeypatch.delattr(package, "launch", raising=False)
    monkeypatch.setitem(sys.modules, f"aurakv.backends.triton.{path}.launch", None)
    with pytest.raises(ImportError):
        getattr(dispatch, f"{path}_path")()


def test_a_triton_without_gluon_is_told(monkeypatch):
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: None if name.endswith("gluon") else object())
    assert "Gluon" in target.why_no_gluon()
    monkeypatch.setattr(dispatch, "why_no_gluon_paths", target.why_no_gluon)
    assert dispatch.decode_path() is None
    sentence = backend.path(torch.device("cpu"))
    assert sentence.startswith("with the portable kernels only: this Triton has no Gluon")


@pytest.mark.parametrize(("chosen", "way"), [("8.0", "16 bytes"), ("8.9", "16 bytes"), ("9.0", "TMA"), ("12.0", "TMA")])
def test_what_a_gpu_gets_is_told(monkeypatch, chosen, way):
    monkeypatch.setattr(dispatch, "why_no_gluon_paths", lambda: None)
    with target.assuming(target.parsed(chosen)):
        sentence = backend.path(torch.device("cuda"))
    assert way in sentence.split("(")[0]
    assert ("in pages of 16 tokens" in sentence) == (way == "TMA")
    assert sentence.endswith("products of warp groups") == (chosen == "9.0")


@pytest.mark.parametrize(
    ("chosen", "page_size", "queries", "name"),
    [
        ("8.0", 64, 1, "decode kernel, tiles by copies of 16 bytes"),
        ("9.0", 64, 1, "decode kernel, tiles by TMA"),
        ("9.0", 16, 1, "decode kernel, tiles by copies of 16 bytes"),
        ("12.0", 32, 4, "decode kernel, tiles by TMA"),
        ("8.6", 64, 128, "extend kernel, products of single warps"),
        ("9.0", 64, 128, "extend kernel, products of warp groups"),
        ("10.0", 64, 128, "extend kernel, products of single warps"),
        ("9.0", 24, 1, "portable kernel"),
        ("7.5", 64, 1, "portable kernel"),
    ],
)
def test_the_kernel_of_a_call_is_named(monkeypatch, chosen, page_size, queries, name):
    """As `attend` takes it."""
    monkeypatch.setattr(dispatch, "why_no_gluon_paths", lambda: None)
    format, taken = Format.parse("k4v4", 128), []
    pages = Pages(
        format, page_size, allocate(format, page_size, 12, 2, torch.device("cpu")),
        torch.zeros(1, 12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    q, rows = torch.zeros(queries, 8, 128, dtype=torch.bfloat16), Rows(torch.tensor([0, queries], dtype=torch.int32))
    for path in (dispatch.decode_path(), dispatch.extend_path(), dispatch.portable):
        monkeypatch.setattr(path, "attend", lambda *args, path=path: taken.append(path))
    with target.assuming(target.parsed(chosen), "cpu", multiprocessors=4):
        assert backend.kernel(q, Attention(pages, rows, Scoring())) == name
        dispatch.attend(q, Attention(pages, rows, Scoring()))
    (path,) = taken
    assert path.__name__.split(".")[-2] == name.split()[0]


@pytest.mark.skipif(ptx.why_not() is not None, reason=f"{ptx.why_not()}")
def test_what_shared_memory_does_not_hold_is_told():
    from tests.helpers.ptx.driver import emulating

    format = Format.parse("k4v4", (576, 512))
    cache = kv.KVCache.contiguous(format, 1, 1, capacity=64, backend="reference")
    cache.append(torch.randn(20, 1, 576), torch.randn(20, 1, 512))
    rows = Rows(torch.tensor([0, 1], dtype=torch.int32))
    with emulating((8, 6)):
        asked = Attention(cache.pages, rows, Scoring(), precision="float32")
        for q in (torch.randn(1, 2, 576), torch.randn(1, 2, 576).bfloat16()):
            with pytest.raises(BackendError, match=r"takes 13\d{4} bytes of shared memory, and this GPU has 101376"):
                backend.attend(q, asked)
        out = backend.attend(q, replace(asked, precision="fast")).out
    wanted = cache.attend(q.float()).out
    assert float((out - wanted).norm() / wanted.norm()) < 0.02

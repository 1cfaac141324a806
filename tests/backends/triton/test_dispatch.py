"""Which kernels a process can have: a Triton without Gluon is told, a mistake of our own is raised."""

import importlib
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from aurakv.backends.triton import backend, dispatch
from aurakv.backends.triton.common import target


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
    assert sentence.endswith("products of warp groups") == (chosen == "9.0")

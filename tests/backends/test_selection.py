"""A backend asked for by name runs, or says why not."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import aurakv as kv
from aurakv import backends
from aurakv.errors import BackendError, InputError
from tests.helpers.refusals import check, queries, tokens


def test_a_backend_that_cannot_run_is_not_replaced(world, monkeypatch):
    monkeypatch.setattr(backends, "_registered", {})
    name = "cannot"
    backends.register(SimpleNamespace(name=name, why_not=lambda format, device: f"{format} is not for it"))
    calls = (
        lambda w: kv.attend(queries(2), w.paged.pages, backend=name),
        lambda w: kv.append(w.contiguous.pages, *tokens(2), backend=name),
        lambda w: kv.KVCache.paged(w.pool, 1, backend=name),
    )
    for call in calls:
        check(world, call, BackendError, "'cannot'", "k4v3", "cpu", "is not for it")


def test_a_file_is_not_blamed_for_a_backend(world, tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    kv.save(world.ring, path, torch.tensor([1, 0]))
    assert kv.load(path).lengths == world.ring.lengths[::-1]
    check(world, lambda w: kv.load(path, backend="foo"), InputError, "backend must be one of", "'foo'")
    check(world, lambda w: kv.load(tmp_path / "none", backend="foo"), InputError, "backend", "'foo'")
    check(world, lambda w: kv.save(w.ring, path, torch.tensor([True, False])), InputError, "seqs", "whole numbers")
    check(world, lambda w: kv.save(w.ring, path, 1), InputError, "seqs must be whole numbers", "got 1")
    check(world, lambda w: kv.save("cache", path), InputError, "cache must be a KVCache", "'cache'")
    monkeypatch.setattr(backends, "_registered", {})
    backends.register(SimpleNamespace(name="cannot", why_not=lambda format, device: None if format is None else "no"))
    check(world, lambda w: kv.load(path, backend="cannot"), BackendError, "'cannot' cannot run k4v3", "cpu", "no")

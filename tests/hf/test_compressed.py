"""Compressed caches: pieces do not matter, more bits are closer, nothing is kept twice."""

import copy
import gc

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache  # noqa: E402
from tests.hf.small_models import MODELS, ROUTED, dynamic, generate, logits, made, prompt  # noqa: E402


@pytest.mark.parametrize("name", sorted(MODELS.keys() - ROUTED))
@pytest.mark.parametrize("options", [{}, {"first": 2, "recent": 5}], ids=["codes", "uncompressed tokens"])
def test_pieces_do_not_matter(name, options):
    """One prefill, chunks and single tokens see the same compressed history."""
    ours = copy.deepcopy(made(name)[1]).double()  # rounding must not move a vector to other codes
    ids = prompt(2, 30)
    expected = logits(ours, AuraCache(ours.config, "k4v3", **options), ids, (30,))
    for steps in ((17, 13), (16, *[1] * 14)):
        got = logits(ours, AuraCache(ours.config, "k4v3", **options), ids, steps)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - ROUTED))
def test_more_bits_are_closer(name):
    model, ours = made(name)
    ids = prompt(2, 90)
    steps = (80, *[1] * 10)
    expected = logits(model, dynamic(model), ids, steps)
    error = {
        format: float((logits(ours, AuraCache(ours.config, format), ids, steps) - expected).norm())
        for format in ("k2v2", "k4v4", "k8v8", "k16v16")
    }
    assert error["k2v2"] > error["k4v4"] > error["k8v8"] > error["k16v16"]
    assert error["k8v8"] < 0.1 * float(expected.norm())


def test_formats_per_layer():
    _, ours = made("lfm2-hybrid")
    assert [layer.format for layer in AuraCache(ours.config, "k4v4").compressed] == ["k4v4"]
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4", layers={0: "k8v8", -1: "k16v16"})
    generate(ours, cache, {"input_ids": prompt()})
    assert [layer.format for layer in cache.compressed] == ["k8v8", "k16:f32/v16:f32"]
    chosen = AuraCache(ours.config, lambda layer, count: "k8v4" if layer < count - 1 else "k3v3")
    assert [layer.format for layer in chosen.compressed] == ["k8v4", "k3v3"]
    assert "k3v3" in repr(chosen)


def test_layers_that_stay_uncompressed_keep_no_second_copy():
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4", layers={0: "k16v16"}, first=4, recent=8)
    generate(ours, cache, {"input_ids": prompt()})
    plain = AuraCache(ours.config, "k16v16")
    generate(ours, plain, {"input_ids": prompt()})
    assert cache.compressed[0].bytes_held == plain.compressed[0].bytes_held


def test_bytes_are_those_of_the_codes():
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4")
    generate(ours, cache, {"input_ids": prompt(2, 640)}, new=129)
    tokens = 640 + 128
    codes = tokens * 2 * sum(layer.cache.format.bytes_per_token * 2 for layer in cache.compressed)
    uncompressed = 4 * 2 * 2 * 2 * 2 * 16 * 4  # tokens, sequences, layers, KV heads, both sides, dim, bytes
    assert codes + uncompressed <= cache.bytes_held <= 1.02 * codes + uncompressed


def test_windows_do_not_grow():
    _, ours = made("mistral")
    sizes = []
    for length in (200, 800):
        cache = AuraCache(ours.config, "k4v4")
        logits(ours, cache, prompt(1, length), (length,))
        sizes.append(cache.bytes_held)
    assert sizes[0] == sizes[1]


def test_no_full_precision_mirror():
    """Every tensor that appeared with the cache and outlives a forward is counted in bytes_held."""
    _, ours = made("llama")
    gc.collect()
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    cache = AuraCache(ours.config, "k4v4")
    logits(ours, cache, prompt(2, 600), (500, 1, 99))
    gc.collect()
    new = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in new}
    assert cache.bytes_held <= sum(storages.values()) <= cache.bytes_held + 20_000
    uncompressed = 600 * 2 * 2 * 2 * 2 * 16 * 4  # tokens, sequences, layers, KV heads, both sides, dim, bytes
    assert sum(storages.values()) < uncompressed / 5

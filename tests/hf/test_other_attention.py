"""Attention functions that are not ours see decoded tensors."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache, register  # noqa: E402
from tests.hf.small_models import dynamic, generate, left_padded, logits, made, prompt  # noqa: E402


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gemma4", "gpt-oss"])
@pytest.mark.parametrize("format", ["k16v16", "k4v4"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_attention_functions_decode(name, format, implementation):
    model, ours = made(name)
    if implementation == "sdpa" and name in ("gemma2", "gpt-oss"):
        pytest.skip("the model does not serve sdpa")
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    other = copy.deepcopy(model)
    other.set_attn_implementation(implementation)
    steps = (9, 1, 1, 12, 1, 6)
    options = {"first": 0}  # other functions see padding as tokens, so their first tokens are others
    expected = logits(ours, AuraCache(ours.config, format, precision="float32", **options), ids, steps, mask)
    cache = AuraCache(ours.config, format, **options)
    with pytest.warns(UserWarning, match="not 'aurakv'") as caught:
        got = logits(other, cache, ids, steps, mask)
    assert len(caught) == 1, "it says so once"
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-3, rtol=2e-3)


def test_changing_the_attention_function_in_between():
    model, ours = made("gemma3")
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    expected = logits(ours, AuraCache(ours.config, "k4v4"), ids, (20, 1, 1, 18), mask)
    cache = AuraCache(ours.config, "k4v4")
    first = logits(ours, cache, ids[:, :20], (20,), mask)
    with pytest.warns(UserWarning, match="not 'aurakv'"):
        rest = logits(model, cache, ids, (1, 1, 18), mask, at=20)
    got = torch.cat([first, rest], 1)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-3, rtol=2e-3)


def test_uncompressed_tokens_while_decoding_the_cache():
    """With every token uncompressed a two-bit cache equals an uncompressed one, on codes and decoded."""
    model, ours = made("llama")
    ids, steps = prompt(2, 30), (20, *[1] * 10)
    expected = logits(model, dynamic(model), ids, steps)
    for uncompressed in ({"recent": 64}, {"first": 30}, {"first": 10, "recent": 20}):
        got = logits(ours, AuraCache(ours.config, "k2v2", **uncompressed), ids, steps)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
        with pytest.warns(UserWarning, match="not 'aurakv'"):
            got = logits(model, AuraCache(model.config, "k2v2", **uncompressed), ids, steps)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_tokens_that_nobody_looked_at_are_kept():
    """`update` alone stores, like that of other caches."""
    _, ours = made("gemma3")
    k, v = torch.randn(2, 2, 2, 50, 16)
    for layer in (0, 1):
        cache = AuraCache(ours.config, "k16v16")
        cache.update(k[:, :, :30], v[:, :, :30], layer)
        assert cache.get_seq_length(layer) == 30
        keys, values = cache.update(k[:, :, 30:], v[:, :, 30:], layer)
        assert keys.shape == values.shape
        with pytest.warns(UserWarning, match="not 'aurakv'"):
            assert torch.equal(keys[:], k[:, :, -keys.shape[2] :])
        assert torch.equal(values[:], v[:, :, -values.shape[2] :])
        assert keys.shape[2] == (29 if layer == 0 else 50)
        assert cache.get_seq_length(layer) == 50


def test_registering_is_explicit():
    from transformers import AttentionInterface, AttentionMaskInterface

    register()
    register()
    assert "aurakv" in AttentionInterface()
    assert "aurakv" in AttentionMaskInterface()


def test_nothing_warns_on_codes():
    _, ours = made("gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(ours, AuraCache(ours.config, "k4v4"), left_padded(), new=4)

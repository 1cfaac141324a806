"""What transformers does to a cache: crop, select, copy, reset."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.errors import CapacityError  # noqa: E402
from aurakv.hf import AuraCache, attach  # noqa: E402
from aurakv.hf.layer import AuraLayer  # noqa: E402
from aurakv.hf.padding import Padding  # noqa: E402
from tests.hf.small_models import dynamic, generate, left_padded, logits, made, prompt  # noqa: E402


def test_padding_in_the_middle():
    """A second turn padded on the left: the padding lies between stored tokens and is never stored."""
    model, ours = made("llama")
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[0, 12:17], mask[1, :4] = 0, 0
    expected = logits(model, dynamic(model), ids, (12, 18), mask)
    cache = AuraCache(ours.config, "k16v16")
    got = logits(ours, cache, ids, (12, 10, 8), mask)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-4, rtol=2e-4)
    assert cache.lengths == [25, 26]
    cache.crop(-15)  # columns 15 … 29: two of the padding columns stay
    assert (cache.lengths, cache.get_seq_length()) == ([12, 11], 15)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1)[:, 15:]
        again = ours(ids[:, 15:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(again[mask[:, 15:].bool()], got[:, 15:][mask[:, 15:].bool()], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_crop(name):
    _, ours = made(name)
    ids = prompt(2, 40)
    cache = AuraCache(ours.config, "k4v4", recent=3)
    logits(ours, cache, ids, (40,))
    cache.crop(-9)
    assert cache.get_seq_length() == 31
    with torch.no_grad():
        got = ours(ids[:, 31:], past_key_values=cache).logits
    expected = logits(ours, AuraCache(ours.config, "k4v4", recent=3), ids, (40,))[:, 31:]
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


def test_crop_beyond_the_recent_tokens():
    """Those that are no longer held uncompressed come back from codes, in every layer."""
    _, ours = made("llama")
    ids = prompt(2, 200)
    cache = AuraCache(ours.config, "k4v4", recent=3)
    logits(ours, cache, ids, (200,))
    cache.crop(-90)
    assert cache.get_seq_length() == 110
    for layer in cache.compressed:
        for used, coded in zip(layer.cache.decode(1, query=110), layer.cache.decode(1), strict=True):
            torch.testing.assert_close(used[4:], coded[4:])
    with torch.no_grad():
        ours(ids[:, 110:112], past_key_values=cache)
    for used, coded in zip(layer.cache.decode(1, query=112), layer.cache.decode(1), strict=True):
        torch.testing.assert_close(used[4:110], coded[4:110])
        assert not torch.allclose(used[110:], coded[110:]), "the new ones are as they came"


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_crop_beyond_what_a_window_keeps(name):
    """Refused for all layers or none, also where only some have a window."""
    _, ours = made(name)
    cache = AuraCache(ours.config, "k4v4", rollback=0)
    logits(ours, cache, prompt(1, 400), (400,))
    with pytest.raises(CapacityError, match="rolled back"):
        cache.crop(-300)
    assert all(layer.cache.lengths == [400] for layer in cache.compressed)
    assert cache.get_seq_length() == 400


def test_crop_that_another_layer_refuses():
    """A convolution that does not record what it forgets stands behind the attention layer."""
    config = transformers.Lfm2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["full_attention", "conv"], pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = attach(model, "k4v4")
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache)
    with pytest.raises(RuntimeError, match="past states"):
        cache.crop(-3)
    assert cache.lengths == [20]


@pytest.mark.parametrize(
    ("change", "lengths"),
    [
        (lambda cache: cache.batch_repeat_interleave(2), [5, 5, 5, 5]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [5]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [5, 5]),
    ],
)
def test_sequences_that_nobody_has_attended_to(change, lengths):
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k8v8")
    k = torch.randn(2, 2, 5, 16)
    for layer in range(len(cache.layers)):
        cache.update(k, k, layer)
    change(cache)
    assert cache.lengths == lengths


def test_deepcopy():
    """A prompt prefilled once, continued twice."""
    _, ours = made("gemma3")
    ids = prompt(2, 40)
    cache = AuraCache(ours.config, "k4v4", recent=3)
    logits(ours, cache, ids[:, :20], (20,))
    clone = copy.deepcopy(cache)
    data = {layer.cache.pool.data.data_ptr() for layer in (*cache.compressed, *clone.compressed)}
    assert len(data) == 2 * len(cache.compressed)
    expected = logits(ours, AuraCache(ours.config, "k4v4", recent=3), ids, (20, 20))[:, 20:]
    for each in (cache, clone):
        with torch.no_grad():
            got = ours(ids[:, 20:], past_key_values=each).logits
        torch.testing.assert_close(got, expected)


def test_batch_repeat_and_select():
    _, ours = made("gemma3")
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    cache = AuraCache(ours.config, "k4v4", first=2)
    expected = logits(ours, AuraCache(ours.config, "k4v4", first=2), ids, (20, 20), mask)[:, 20:]
    logits(ours, cache, ids[:, :20], (20,), mask)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 4, 5]))
    index = [0, 1, 1]
    assert cache.lengths == [20, 12, 12]
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1)[index, 20:]
        inputs = {"attention_mask": mask[index], "position_ids": positions}
        got = ours(ids[index, 20:], past_key_values=cache, **inputs).logits
    torch.testing.assert_close(got, expected[index], atol=2e-3, rtol=2e-3)


def test_reset():
    _, ours = made("gemma3")
    cache = AuraCache(ours.config, "k4v4")
    expected = generate(ours, cache, left_padded())
    cache.reset()
    assert (cache.get_seq_length(), cache.bytes_held, cache.lengths) == (0, 0, [])
    assert torch.equal(generate(ours, cache, left_padded()), expected)


def test_padding():
    padding = Padding(2)
    padding.add(3, torch.tensor([[True, True, True], [False, False, True]]))
    padding.add(2, None)
    padding.add(4, None)
    assert padding.total == 9
    assert padding.columns(0).tolist() == list(range(9))
    assert padding.columns(1).tolist() == list(range(2, 9))
    kept = padding.copy()
    assert padding.crop(7) == [7, 7]
    assert (padding.total, padding.columns(1).tolist()) == (2, [])
    assert padding.crop(2) == [2, 0]
    assert (padding.total, kept.total) == (0, 9)
    kept.select([1, 0, 1])
    assert [kept.columns(seq).tolist()[0] for seq in range(3)] == [2, 0, 2]
    assert kept.crop(9) == [7, 9, 7]


def test_layers_are_named_by_their_own_tokens():
    _, ours = made("llama")
    cache = AuraCache(ours.config)
    tokens = [int(layer.token) for each in (cache, copy.deepcopy(cache)) for layer in each.compressed]
    assert len(set(tokens)) == 4
    assert all(isinstance(layer, AuraLayer) for layer in cache.layers)

"""AuraCache with policies, and with the offsets and key scales it takes from the first tokens by itself."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.calibration.policy import LayerPolicy, Policy  # noqa: E402
from aurakv.errors import FileError, InputError  # noqa: E402
from aurakv.hf import AuraCache, attach  # noqa: E402
from tests.hf.small_models import generate, left_padded, logits, made, prompt  # noqa: E402


def measured_policy(ours, ids, format="k4v4", **options) -> Policy:
    """What a cache takes from these tokens, as a policy."""
    cache = AuraCache(ours.config, format)
    logits(ours, cache, ids, (ids.shape[1],))
    layers = []
    for layer in cache.compressed:
        assert layer.key_scale is not None
        offset, key_scale = (x.half().float() for x in (layer.cache.pool.key_offset, layer.key_scale))
        layers.append(LayerPolicy(format, offset, None, key_scale))  # float16, as in files
    return Policy(2, 16, tuple(layers), **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral"])
def test_policy_in_every_way(name, tmp_path):
    """One prefill, pieces, padding and another attention function see the same numbers with a policy."""
    model, ours = made(name)
    policy = measured_policy(made("llama")[1], prompt(2, 100), first=3, recent=2)
    policy.save(tmp_path / "p.json")
    ours = copy.deepcopy(ours).double()
    ids = prompt(2, 40)
    expected = logits(ours, AuraCache(ours.config, policy), ids, (40,))
    for source, steps in ((tmp_path / "p.json", (17, 23)), (str(tmp_path / "p.json"), (20, *[1] * 20))):
        cache = AuraCache(ours.config, source)
        got = logits(ours, cache, ids, steps)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert cache.compressed[0].cache.uncompressed[:2] == (3, 2)
    cache = AuraCache(ours.config, policy, first=0, recent=0)
    expected = logits(ours, cache, ids, (40,))
    other = copy.deepcopy(model).double()
    with pytest.warns(UserWarning, match="not 'aurakv'"):
        got = logits(other, AuraCache(ours.config, policy, first=0, recent=0), ids, (20, 1, 19))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_policy_must_fit_and_layers_can_differ():
    _, ours = made("llama")
    policy = measured_policy(ours, prompt(2, 100))
    with pytest.raises(InputError, match="this policy is for a model of 1 KV layers"):
        AuraCache(ours.config, Policy(2, 16, policy.layers[:1]))
    cache = AuraCache(ours.config, policy, layers={0: "k8v8", 1: "k16v16"})
    logits(ours, cache, prompt(2, 30), (30,))
    one, two = cache.compressed
    assert torch.equal(one.cache.pool.key_offset, policy.layers[0].key_offset)
    assert one.key_scale is not None
    assert two.cache.pool.key_offset is None
    assert two.key_scale is None
    with pytest.raises(InputError, match="a format name is"):
        AuraCache(ours.config, "no-such-policy")
    with pytest.raises(InputError, match=r"got 'smollm2-135'; a policy is a .json file or one of \['gemma"):
        AuraCache(ours.config, "smollm2-135")
    with pytest.raises(InputError, match="attach needs a model of transformers, got LlamaConfig"):
        attach(ours.config, "k4v4")
    with pytest.raises(InputError, match=r"got 9$"):
        AuraCache(ours.config, "k9v9")
    with pytest.raises(FileError, match="cannot be read"):
        AuraCache(ours.config, "missing.json")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_centring_is_taken_once_and_kept(name):
    _, ours = made(name)
    ids = prompt(2, 120)
    cache = AuraCache(ours.config, "k4v4")
    plain = AuraCache(ours.config, "k4v4", calibrate=False, first=0)
    logits(ours, cache, ids[:, :100], (100,))
    logits(ours, plain, ids[:, :100], (100,))
    offsets = [layer.cache.pool.key_offset for layer in cache.compressed]
    assert all(offset is not None for offset in offsets)
    assert all(layer.cache.pool.key_offset is None and layer.key_scale is None for layer in plain.compressed)
    clone = copy.deepcopy(cache)
    rest = logits(ours, cache, ids, (10, 10), at=100)
    assert torch.equal(logits(ours, clone, ids, (10, 10), at=100), rest)
    for layer, offset in zip(cache.compressed, offsets, strict=True):
        assert layer.cache.pool.key_offset is offset
    cache.crop(-20)
    torch.testing.assert_close(logits(ours, cache, ids, (10, 10), at=100), rest, atol=2e-3, rtol=2e-3)
    cache.reset()
    logits(ours, cache, ids[:, :30], (30,))
    assert all(layer.cache.pool.key_offset is None for layer in cache.compressed), "30 tokens of 2 are too few"


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"do_sample": True}])
def test_generation_with_centring(options):
    _, ours = made("gemma3")
    inputs = left_padded(1 if "prompt_lookup_num_tokens" in options else 3, 60)
    torch.manual_seed(0)
    cache = AuraCache(ours.config, "k8v8")
    out = generate(ours, cache, inputs, new=12, **options)
    assert out.shape[1] == 72
    assert all(layer.cache.pool.key_offset is not None for layer in cache.compressed)


def test_compiled_with_centring():
    _, ours = made("llama")
    ids = prompt(2, 100)
    expected = logits(ours, AuraCache(ours.config, "k4v4"), ids, (96, 1, 1, 1, 1))
    compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        got = logits(compiled, AuraCache(ours.config, "k4v4"), ids, (96, 1, 1, 1, 1))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_damaged_token_damages_only_what_sees_it():
    _, ours = made("llama")
    embedding = ours.model.embed_tokens.weight
    ids = prompt(1, 100)
    ids[0, 80] = 127
    ids[0, :80] = ids[0, :80].clamp(max=126)
    kept = embedding.data[127].clone()
    embedding.data[127] = torch.nan
    try:
        got = logits(ours, AuraCache(ours.config, "k4v4"), ids, (100,))
    finally:
        embedding.data[127] = kept
    assert bool(got[:, :80].isfinite().all())
    assert bool(got[:, 80:].isnan().all())


def test_an_option_of_old_is_named_by_its_new_name():
    config = made("llama")[1].config
    with pytest.raises(InputError, match="the option centre of AuraCache is called calibrate"):
        AuraCache(config, "k4v4", centre=False)
    with pytest.raises(TypeError, match="no option center"):
        AuraCache(config, "k4v4", center=False)


def test_a_policy_needs_layers_that_are_alike():
    _, ours = made("gemma4")
    assert [layer.format for layer in AuraCache(ours.config, layers={-1: "k8v8"}).compressed] == ["k4v4"] * 3 + ["k8v8"]
    with pytest.raises(InputError, match="got layers with 2 KV heads of 16 and 2 KV heads of 32"):
        AuraCache(ours.config, "smollm2-135m")

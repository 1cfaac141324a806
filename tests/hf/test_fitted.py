"""Codes that are fitted to what queries read, and nearest ones: what `AuraCache(fitted=)` asks for."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.calibration.policy import LayerPolicy, Policy
from aurakv.errors import InputError
from aurakv.hf import AuraCache
from tests.hf.small_models import dynamic, logits, made, prompt


def test_fitted_codes_are_the_default_on_a_cpu_and_lose_less():
    model, ours = made("llama")
    ids, found = prompt(2, 200), {}
    expected = logits(model, dynamic(model), ids, (200,))
    for fitted in (None, True, False):
        cache = AuraCache(ours.config, "k3v3", fitted=fitted)
        found[fitted] = logits(ours, cache, ids, (120, 80))
        assert all((layer.cache.pages.key_fit is None) == (fitted is False) for layer in cache.compressed)
    assert torch.equal(found[None], found[True])
    lost = {fitted: float((got - expected).square().mean()) for fitted, got in found.items()}
    assert lost[True] < 0.9 * lost[False]


def test_a_policy_with_weights_may_have_nearest_codes():
    _, ours = made("llama")
    config, ids = ours.config, prompt(1, 100)
    heads, dim = config.num_key_value_heads, config.head_dim
    layer = LayerPolicy("k3v3", key_scale=torch.rand(heads, dim) + 0.5, key_weight=torch.rand(heads, dim) + 0.1)
    policy = Policy(heads, dim, (layer,) * config.num_hidden_layers)
    for fitted in (None, True, False):
        cache = AuraCache(config, policy, fitted=fitted)
        logits(ours, cache, ids, (100,))
        assert all((each.cache.pages.key_fit is None) == (fitted is False) for each in cache.compressed)


@pytest.mark.parametrize("options", [{"format": "k4v4", "calibrate": False}, {"format": "without weights"}])
def test_what_cannot_be_fitted_is_refused(options):
    _, ours = made("llama")
    config = ours.config
    if options["format"] == "without weights":
        layers = (LayerPolicy("k4v4"),) * config.num_hidden_layers
        options = {"format": Policy(config.num_key_value_heads, config.head_dim, layers)}
    AuraCache(config, **options, fitted=False)
    with pytest.raises(InputError, match="fitted=True needs what queries read"):
        AuraCache(config, **options, fitted=True)
    with pytest.raises(InputError, match="fitted must be"):
        AuraCache(config, "k4v4", fitted=1)

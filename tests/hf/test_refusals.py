"""What AuraCache refuses, and with which sentence."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from aurakv.errors import InputError  # noqa: E402
from aurakv.hf import AuraCache, attach  # noqa: E402
from tests.hf.small_models import made, prompt  # noqa: E402


def test_keys_and_values_of_different_calls_are_refused():
    """DiffLlama splits its values before attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("diffllama", vocab_size=128, num_key_value_heads=2, head_dim=16, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad(), pytest.raises(InputError, match="keys and values of one update"):
        model(prompt(1, 8), past_key_values=attach(model, "k8v8"))


@pytest.mark.parametrize(
    ("config_class", "extra", "sentence"),
    [
        ("DeepseekV3Config", {}, "latent"),
        ("MambaConfig", {}, "nothing to compress|no attention layers"),
        ("Mamba2Config", {}, "nothing to compress|no attention layers"),
        ("RwkvConfig", {}, "inside the model"),
        ("RecurrentGemmaConfig", {}, "inside the model"),
        ("T5Config", {}, "decoder-only"),
        ("WhisperConfig", {}, "decoder-only"),
    ],
)
def test_models_that_cannot_be_served(config_class, extra, sentence):
    config = getattr(transformers, config_class)(**extra)
    with pytest.raises(InputError, match=sentence) as error:
        AuraCache(config, "k4v4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"format": "k7v4"}, "bits must be one of"),
        ({"format": "4 bits"}, "format name"),
        ({"layers": {2: "k8v8"}}, "attention layers 0 … 1"),
        ({"layers": {0: "k9v9"}}, "bits must be one of"),
        ({"layers": {True: "k8v8"}}, "attention layers 0 … 1 .*got True"),
        ({"layers": ["k8v8"]}, "layers must be a mapping such as .*, got \\['k8v8'\\]"),
        ({"layers": {0: "k8v8", -2: "k4v4"}}, "layers name attention layer 0 twice, the second time as -2"),
        ({"format": "recent16:k4v4"}, "use 'k4v4' and recent=16"),
        ({"format": "recent:k4v4"}, "recent<n>: needs a whole number"),
        ({"calibrate": "no"}, "calibrate must be a bool, got 'no'"),
        ({"first": -1}, "first must be"),
        ({"recent": 1.5}, "recent must be"),
        ({"rollback": -1}, "rollback must be"),
        ({"precision": "best"}, "precision must be"),
    ],
)
def test_wrong_options(options, sentence):
    with pytest.raises(InputError, match=sentence):
        AuraCache(made("llama")[1].config, **options)


def test_refused_calls():
    _, ours = made("llama")
    with pytest.raises(InputError, match="config of a model"):
        AuraCache({"hidden_size": 64})
    ids = prompt(2, 8)
    cache = AuraCache(ours.config, "k4v4")
    with pytest.raises(InputError, match="requires grad"):
        ours(ids, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(InputError, match="mask of your own"):
            ours(ids, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool), past_key_values=cache)
        assert cache.get_seq_length() == 0, "a refused call stored something"
        ours(ids, past_key_values=cache)
        with pytest.raises(InputError, match="batch of 1"):
            ours(ids[:1], past_key_values=cache)
        with pytest.raises(InputError, match="past and new"):
            ours(ids, attention_mask=torch.ones(2, 8), past_key_values=cache)
        hidden = torch.ones(2, 16)
        hidden[1, 2] = 0
        with pytest.raises(InputError, match="must show the"):
            ours(ids, attention_mask=hidden, past_key_values=cache)
        with pytest.raises(InputError, match="output_attentions"):
            ours.model.layers[0].self_attn(
                torch.zeros(1, 1, 64), (torch.ones(1, 1, 16),) * 2, None, output_attentions=True
            )
    assert cache.get_seq_length() == 8
    with pytest.raises(InputError, match="backend must be one of"):
        AuraCache(ours.config, "k4v4", backend="abacus")


def test_caches_of_other_models():
    ids = prompt(1, 8)
    mistral, llama = made("mistral")[1], made("llama")[1]
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            with pytest.raises(InputError, match="another model"):
                llama(ids, attention_mask=mask, past_key_values=AuraCache(mistral.config))
            with pytest.raises(InputError, match="another model"):
                mistral(ids, attention_mask=mask, past_key_values=AuraCache(llama.config))
        small = copy.deepcopy(llama.config)
        small.num_hidden_layers = 1
        with pytest.raises(InputError, match="a model of 1 layer"):
            llama(ids, past_key_values=AuraCache(small))

"""Progress within a forward pass."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache
from aurakv.hf.progress import forward
from tests.hf.small_models import made, prompt


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "qwen3"])
def test_each_layer_is_a_part(name):
    _, model = made(name)
    ids, told = prompt(2, 30), []
    with torch.no_grad():
        out = forward(model, told.append, 30.0, ids, past_key_values=AuraCache(model.config, "k4v4"))
        expected = model(ids, past_key_values=AuraCache(model.config, "k4v4"))
    assert torch.equal(out.logits, expected.logits)
    assert len(told) == model.config.num_hidden_layers + 1
    assert sum(told) == pytest.approx(30.0)
    assert min(told) > 0


def test_nothing_is_left_behind_by_a_pass_that_fails():
    _, model = made("llama")
    told = []
    with pytest.raises(ValueError), torch.no_grad():
        forward(model, told.append, 1.0, None)
    with torch.no_grad():
        model(prompt(1, 5))
    assert told == []


def test_a_model_without_numbered_layers():
    told = []
    assert forward(torch.nn.Identity(), told.append, 7.0, 3) == 3
    assert told == [7.0]
    assert forward(torch.nn.Identity(), None, 7.0, 3) == 3

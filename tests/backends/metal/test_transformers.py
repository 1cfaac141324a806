"""transformers through the Metal backend: `attach` alone on an Apple GPU; in the emulator the backend is named."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache, attach
from tests.hf.small_models import left_padded, logits, made


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_equal_those_of_the_reference(name, metal):
    """A padded batch: a prompt long enough to be measured for offsets, a chunk, single tokens."""
    backend, device = metal
    model = made(name)[1].to(device)
    inputs = left_padded(2, 90)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    steps = [84, 3, 1, 1, 1]
    cache = attach(model, "k4v4", **({} if device == "mps" else {"backend": backend}))
    got = logits(model, cache, ids.to(device), steps, mask.to(device)).cpu()
    model.to("cpu")
    want = logits(model, AuraCache(model.config, "k4v4", backend="reference"), ids, steps, mask)
    real = mask.bool()
    assert (got - want)[real].norm() < 1e-3 * want[real].norm()
    assert torch.equal(got[:, -1].argmax(-1), want[:, -1].argmax(-1))

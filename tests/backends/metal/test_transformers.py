"""transformers through the Metal backend: `attach` without another word."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache, attach
from tests.hf.small_models import left_padded, logits, made

SHORT = 40, [36, 3, 1]
LONG = 90, [84, 3, 1, 1, 1]  # a prompt long enough to be measured for offsets


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("llama", SHORT), pytest.param("llama", LONG, marks=pytest.mark.full),
     pytest.param("gemma3", LONG, marks=pytest.mark.full)],
)  # fmt: skip
def test_logits_equal_those_of_the_reference(name, lengths, by_itself):
    """A padded batch: a prompt, a chunk, single tokens."""
    device, sources = by_itself
    model = made(name)[1].to(device)
    inputs = left_padded(2, lengths[0])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    there = ids.to(device), lengths[1], mask.to(device)
    got = logits(model, attach(model, "k4v4"), *there).cpu()
    assert device == "mps" or any("kernel void attend_rows" in source for source in sources)
    want = logits(model, AuraCache(model.config, "k4v4", backend="reference"), *there).cpu()  # codes there are nearest
    real = mask.bool()
    assert (got - want)[real].norm() < 1e-3 * want[real].norm()
    assert torch.equal(got[:, -1].argmax(-1), want[:, -1].argmax(-1))

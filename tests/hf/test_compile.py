"""The forward pass of a model under torch.compile."""

import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache  # noqa: E402
from tests.hf.small_models import logits, made, prompt  # noqa: E402


@pytest.mark.parametrize("name", ["gemma3", "gemma4", pytest.param("gpt-oss", marks=pytest.mark.full)])
def test_compile_without_graph_breaks(name):
    _, ours = made(name)
    ids = prompt(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected = logits(ours, AuraCache(ours.config, "k4v4"), ids, (20, 1, 1, 1, 1), mask)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=None)
    for _ in range(2):  # a second cache must not be mistaken for the first
        got = logits(compiled, AuraCache(ours.config, "k4v4"), ids, (20, 1, 1, 1, 1), mask)
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.full  # half a minute of compiling
def test_a_pickled_cache_is_its_own_under_compile():
    _, ours = made("llama")
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    cache = AuraCache(ours.config, "k4v4")
    with torch.no_grad():
        compiled(prompt(2, 20), past_key_values=cache)
        other = pickle.loads(pickle.dumps(cache))
        compiled(prompt(2, 1), past_key_values=other)
    assert cache.lengths == [20, 20]
    assert other.lengths == [21, 21]


@pytest.mark.skipif(" " in torch.__file__, reason="torch's Inductor does not quote paths, and this one has a space")
def test_compile_with_inductor():
    _, ours = made("llama")
    ids = prompt(2, 24)
    expected = logits(ours, AuraCache(ours.config, "k4v4"), ids, (20, 1, 1, 1, 1))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=None)
    for _ in range(2):
        cache = AuraCache(ours.config, "k4v4")
        got = logits(compiled, cache, ids, (20, 1, 1, 1, 1))
        assert (got - expected).norm() < 1e-3 * expected.norm()  # keys differ in rounding, so a code may be another
        assert cache.lengths == [24, 24]

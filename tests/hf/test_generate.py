"""Small random models of many architectures generate with AuraCache what they generate with DynamicCache."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.hf import AuraCache  # noqa: E402
from tests.hf.small_models import MODELS, dynamic, generate, left_padded, logits, made, prompt  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_dynamic_cache(name):
    model, ours = made(name)
    for inputs in ({"input_ids": prompt(1)}, left_padded()):
        cache = AuraCache(ours.config, "k16v16")
        expected = generate(model, dynamic(model), inputs)
        assert torch.equal(generate(ours, cache, inputs), expected)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        assert cache.lengths == (mask.sum(1) + 23).tolist(), "padding is stored"
        assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 23


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [(30,), (9, 1, 1, 12, 1, 6)], ids=["once", "chunks"])
def test_logits_equal_dynamic_cache(name, steps):
    model, ours = made(name)
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    expected = logits(model, dynamic(model), ids, steps, mask)
    got = logits(ours, AuraCache(ours.config, "k16v16"), ids, steps, mask)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gemma4", "gpt-oss"])
def test_without_cache_and_with_other_caches(name):
    """The attention function also serves plain tensors."""
    model, ours = made(name)
    inputs = left_padded(2, 30)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, got = (m(**inputs, use_cache=False).logits for m in (model, ours))
    torch.testing.assert_close(got[mask], expected[mask], atol=2e-4, rtol=2e-4)
    assert torch.equal(generate(ours, dynamic(ours), inputs), generate(model, dynamic(model), inputs))
    static = {"cache_implementation": "static", "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(**inputs, **static), model.generate(**inputs, **static))


def test_gradients_without_cache():
    _, ours = made("llama")
    ours.zero_grad()
    ours(prompt(), labels=prompt(), use_cache=False).loss.backward()
    assert ours.model.layers[0].self_attn.k_proj.weight.grad.norm() > 0
    ours.zero_grad()


def test_sampling():
    model, ours = made("qwen3")
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20}
    torch.manual_seed(3)
    expected = generate(model, dynamic(model), left_padded(), **options)
    torch.manual_seed(3)
    assert torch.equal(generate(ours, AuraCache(ours.config, "k16v16"), left_padded(), **options), expected)


def test_several_returned_sequences():
    model, ours = made("llama")
    options = {"do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(3)
    expected = generate(model, dynamic(model), left_padded(), **options)
    torch.manual_seed(3)
    assert torch.equal(generate(ours, AuraCache(ours.config, "k16v16"), left_padded(), **options), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_beam_search(name):
    model, ours = made(name)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "new": 12}
    expected = generate(model, dynamic(model), left_padded(), **options)
    cache = AuraCache(ours.config, "k16v16")
    assert torch.equal(generate(ours, cache, left_padded(), **options), expected)
    generate(ours, AuraCache(ours.config, "k4v4", first=2, recent=4), left_padded(), **options)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma4"])
def test_prompt_lookup(name):
    model, ours = made(name)
    inputs = {"input_ids": prompt(1, 8).repeat(1, 4)}
    options = {"prompt_lookup_num_tokens": 5, "new": 40}
    expected = generate(model, dynamic(model), inputs, new=40)
    assert torch.equal(generate(ours, AuraCache(ours.config, "k16v16"), inputs, **options), expected)
    expected = generate(ours, AuraCache(ours.config, "k4v4", calibrate=False), inputs, new=40)
    assert torch.equal(generate(ours, AuraCache(ours.config, "k4v4", calibrate=False), inputs, **options), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_assisted_generation(name):
    model, ours = made(name)
    assistant = copy.deepcopy(ours)
    assistant.generation_config.num_assistant_tokens = 6
    for parameter in list(assistant.parameters())[:3]:
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": prompt(1)}
    expected = generate(model, dynamic(model), inputs, new=40)
    cache = AuraCache(ours.config, "k16v16")
    assert torch.equal(generate(ours, cache, inputs, new=40, assistant_model=assistant), expected)
    assert cache.get_seq_length() == 24 + 39


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_chunked_prefill(name):
    model, ours = made(name)
    expected = generate(model, dynamic(model), left_padded())
    got = generate(ours, AuraCache(ours.config, "k16v16"), left_padded(), prefill_chunk_size=7)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
def test_multi_turn(name):
    model, ours = made(name)
    inputs = left_padded()
    for make in (lambda: AuraCache(ours.config, "k16v16"), lambda: AuraCache(ours.config, "k8v8", calibrate=False)):
        theirs, cache = dynamic(model), make()
        first = generate(ours, cache, inputs, new=10)
        generate(model, theirs, inputs, new=10)
        ids = torch.cat([first, prompt(3, 6, seed=5)], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 16, dtype=torch.long)], 1)
        turn = {"input_ids": ids, "attention_mask": mask}
        second = generate(ours, cache, turn, new=10)
        assert torch.equal(second, generate(ours, make(), turn, new=10)), "a second turn differs from a fresh cache"
        if cache.compressed[0].format == "k16v16":
            assert torch.equal(second, generate(model, theirs, turn, new=10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    model, ours = (copy.deepcopy(m).to(dtype) for m in made("qwen3"))
    cache = AuraCache(ours.config, "k16v16")
    ids = prompt(2, 30)
    got, expected = logits(ours, cache, ids, (30,)), logits(model, dynamic(model), ids, (30,))
    truth = logits(made("qwen3")[0], dynamic(model), ids, (30,))
    assert (got - truth).norm() <= 2 * (expected - truth).norm()
    assert cache.compressed[0].cache.format.key.dtype == dtype

"""transformers models with AuraCache: small random models of many architectures against DynamicCache."""

import copy
import gc
import pickle
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from aurakv.errors import CapacityError, InputError  # noqa: E402
from aurakv.hf import AuraCache, attach, register  # noqa: E402
from aurakv.hf.layer import AuraLayer  # noqa: E402
from aurakv.hf.padding import Padding  # noqa: E402
from tests.hf.small_models import MODELS, ROUTED, dynamic, generate, left_padded, logits, made, prompt  # noqa: E402

# the same numbers as DynamicCache when nothing is compressed


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


# compressed


@pytest.mark.parametrize("name", sorted(MODELS.keys() - ROUTED))
@pytest.mark.parametrize("options", [{}, {"first": 2, "recent": 5}], ids=["codes", "uncompressed tokens"])
def test_pieces_do_not_matter(name, options):
    """One prefill, chunks and single tokens see the same compressed history."""
    ours = copy.deepcopy(made(name)[1]).double()  # rounding must not move a vector to other codes
    ids = prompt(2, 30)
    expected = logits(ours, AuraCache(ours.config, "k4v3", **options), ids, (30,))
    for steps in ((17, 13), (16, *[1] * 14)):
        got = logits(ours, AuraCache(ours.config, "k4v3", **options), ids, steps)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - ROUTED))
def test_more_bits_are_closer(name):
    model, ours = made(name)
    ids = prompt(2, 90)
    steps = (80, *[1] * 10)
    expected = logits(model, dynamic(model), ids, steps)
    error = {
        format: float((logits(ours, AuraCache(ours.config, format), ids, steps) - expected).norm())
        for format in ("k2v2", "k4v4", "k8v8", "k16v16")
    }
    assert error["k2v2"] > error["k4v4"] > error["k8v8"] > error["k16v16"]
    assert error["k8v8"] < 0.1 * float(expected.norm())


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


def test_formats_per_layer():
    _, ours = made("lfm2-hybrid")
    assert [layer.format for layer in AuraCache(ours.config, "k4v4").compressed] == ["k4v4"]
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4", layers={0: "k8v8", -1: "k16v16"})
    generate(ours, cache, {"input_ids": prompt()})
    assert [layer.format for layer in cache.compressed] == ["k8v8", "k16:f32/v16:f32"]
    chosen = AuraCache(ours.config, lambda layer, count: "k8v4" if layer < count - 1 else "k3v3")
    assert [layer.format for layer in chosen.compressed] == ["k8v4", "k3v3"]
    assert "k3v3" in repr(chosen)


def test_layers_that_stay_uncompressed_keep_no_second_copy():
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4", layers={0: "k16v16"}, first=4, recent=8)
    generate(ours, cache, {"input_ids": prompt()})
    plain = AuraCache(ours.config, "k16v16")
    generate(ours, plain, {"input_ids": prompt()})
    assert cache.compressed[0].bytes_held == plain.compressed[0].bytes_held


# ways to generate


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


def test_keys_and_values_of_different_calls_are_refused():
    """DiffLlama splits its values before attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("diffllama", vocab_size=128, num_key_value_heads=2, head_dim=16, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad(), pytest.raises(InputError, match="keys and values of one update"):
        model(prompt(1, 8), past_key_values=attach(model, "k8v8"))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    model, ours = (copy.deepcopy(m).to(dtype) for m in made("qwen3"))
    cache = AuraCache(ours.config, "k16v16")
    ids = prompt(2, 30)
    got, expected = logits(ours, cache, ids, (30,)), logits(model, dynamic(model), ids, (30,))
    uncompressed = logits(made("qwen3")[0], dynamic(model), ids, (30,))
    assert (got - uncompressed).norm() <= 2 * (expected - uncompressed).norm()
    assert cache.compressed[0].cache.format.key.dtype == dtype


# memory


def test_bytes_are_those_of_the_codes():
    _, ours = made("llama")
    cache = AuraCache(ours.config, "k4v4")
    generate(ours, cache, {"input_ids": prompt(2, 640)}, new=129)
    tokens = 640 + 128
    codes = tokens * 2 * sum(layer.cache.format.bytes_per_token * 2 for layer in cache.compressed)
    uncompressed = 4 * 2 * 2 * 2 * 2 * 16 * 4  # tokens, sequences, layers, KV heads, both sides, dim, bytes
    assert codes + uncompressed <= cache.bytes_held <= 1.02 * codes + uncompressed


def test_windows_do_not_grow():
    _, ours = made("mistral")
    sizes = []
    for length in (200, 800):
        cache = AuraCache(ours.config, "k4v4")
        logits(ours, cache, prompt(1, length), (length,))
        sizes.append(cache.bytes_held)
    assert sizes[0] == sizes[1]


def test_no_full_precision_mirror():
    """Every tensor that appeared with the cache and outlives a forward is counted in bytes_held."""
    _, ours = made("llama")
    gc.collect()
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    cache = AuraCache(ours.config, "k4v4")
    logits(ours, cache, prompt(2, 600), (500, 1, 99))
    gc.collect()
    new = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in before]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in new}
    assert cache.bytes_held <= sum(storages.values()) <= cache.bytes_held + 20_000
    uncompressed = 600 * 2 * 2 * 2 * 2 * 16 * 4  # tokens, sequences, layers, KV heads, both sides, dim, bytes
    assert sum(storages.values()) < uncompressed / 5


# errors


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
        with pytest.raises(InputError, match="a model of 1 layers"):
            llama(ids, past_key_values=AuraCache(small))


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


# padding


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

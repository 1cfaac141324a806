"""Models whose keys 4 bits cannot hold: the default survives, plain codes do not, and somebody says so."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config  # noqa: E402

from aurakv.attention.scoring import Scoring  # noqa: E402
from aurakv.calibration.guard import ON_AVERAGE, Check, more_than  # noqa: E402
from aurakv.calibration.policy import LayerPolicy  # noqa: E402
from aurakv.hf import AuraCache, register  # noqa: E402
from aurakv.hf.key_guard import KeyGuard  # noqa: E402

NAMES, DIM, LENGTH = 16, 64, 200
BIAS = {2: 850.0, 9: -700.0, 20: 620.0, 41: 780.0, 62: -900.0}  # channel -> bias; 2, 9 and 41 turn fast with RoPE


def recall_model(bias: dict[int, float]):
    """One Qwen2 layer that looks things up: a token (name, answer) is found by its name, and the answer predicted.

    Names are codes in channels that RoPE hardly turns. Queries are small, not zero, in the channels with a bias.
    """
    config = Qwen2Config(
        vocab_size=NAMES * NAMES, hidden_size=DIM, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=DIM, rope_theta=1e6, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    attention = model.model.layers[0].self_attn
    for norm in (
        model.model.layers[0].input_layernorm,
        model.model.layers[0].post_attention_layernorm,
        model.model.norm,
    ):
        norm.weight.fill_(1.0)
    for token in range(NAMES * NAMES):
        name, answer = divmod(token, NAMES)
        model.model.embed_tokens.weight[token, name] = 1.0
        model.model.embed_tokens.weight[token, NAMES + answer] = 1.0
    size = (2 / DIM) ** -0.5  # of an embedding's ones behind the norm
    slow = [channel for channel in range(DIM) if channel % 32 >= 16]
    for head in range(2):
        code = torch.zeros(DIM, NAMES)
        code[slow] = torch.randn(len(slow), NAMES, generator=generator).sign()
        attention.k_proj.weight[head * DIM : (head + 1) * DIM, :NAMES] = 2 * code / size
        query = code.clone()
        query[list(bias)] = 0.01 * torch.randn(len(bias), NAMES, generator=generator)
        for group in range(2):
            at = (2 * head + group) * DIM
            attention.q_proj.weight[at : at + DIM, :NAMES] = query / size
        for channel, number in bias.items():
            attention.k_proj.bias[head * DIM + channel] = number
        attention.v_proj.weight[head * DIM : head * DIM + NAMES, NAMES : 2 * NAMES] = torch.eye(NAMES) / size
    for head in range(4):
        attention.o_proj.weight[2 * NAMES : 3 * NAMES, head * DIM : head * DIM + NAMES] = 3 * torch.eye(NAMES)
    model.lm_head.weight[:NAMES, 2 * NAMES : 3 * NAMES] = torch.eye(NAMES)
    register()
    return model


def tokens() -> torch.Tensor:
    """Each name has one answer throughout, so that whoever finds the name knows it."""
    generator = torch.Generator().manual_seed(1)
    answers = torch.randint(0, NAMES, (2, NAMES), generator=generator)
    names = torch.randint(0, NAMES, (2, LENGTH), generator=generator)
    return names * NAMES + answers.gather(1, names)


def agreement(model, cache, ids, prompt: int = 150, attention: str = "aurakv") -> float:
    """How often the model finds what it would find, reading `prompt` tokens at once and then one by one."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits.argmax(2)
        assert torch.equal(expected, ids % NAMES), "the model itself finds every name"
        model.set_attn_implementation(attention)
        first = model(ids[:, :prompt], past_key_values=cache).logits
        rest = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(prompt, LENGTH)]
    return float((torch.cat([first, *rest], 1).argmax(2) == expected).float().mean())


def test_default_survives_a_key_bias_that_breaks_plain_codes():
    model, ids = recall_model(BIAS), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default = AuraCache(model.config)
        kept = agreement(model, default, ids)
    assert kept >= 0.95
    assert default.lost == []
    plain = AuraCache(model.config, "k4v4", first=0, calibrate=False)
    with pytest.warns(UserWarning, match=r"keys do not survive k4v4 .* would keep them"):
        assert agreement(model, plain, ids) < 0.5
    assert len(plain.lost) == 1
    print(kept, default, plain.lost)


def test_without_offsets_the_default_takes_wider_keys():
    """Where the mean does not help, layers get as many bits as they need; nothing is said, nothing is lost."""
    model, ids = recall_model(BIAS), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = AuraCache(model.config, first=0, calibrate=False)
        assert agreement(model, cache, ids) >= 0.95
    assert cache.compressed[0].cache.format.key.bits > 4
    assert cache.compressed[0].cache.format.value.bits == 4


def test_nothing_is_said_about_keys_that_survive():
    model, ids = recall_model({}), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"format": "k4v4", "first": 0, "calibrate": False}, {"format": "k8v8"}, {}):
            cache = AuraCache(model.config, **options)
            assert agreement(model, cache, ids) >= 0.95
            assert cache.lost == []
            assert cache.compressed[0].cache.format.key.bits == (8 if options.get("format") == "k8v8" else 4)


def test_damage_is_no_reason_to_widen():
    model, ids = recall_model({}), tokens()
    model.model.layers[0].self_attn.k_proj.bias[0] = torch.nan
    model.set_attn_implementation("aurakv")
    cache = AuraCache(model.config)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, past_key_values=cache)
    assert cache.compressed[0].cache.format.key.bits == 4
    assert cache.lost == []


@pytest.mark.parametrize("seqs", [1, 2])
@pytest.mark.parametrize("prompt", [1, 40, 63, 67])
def test_a_short_prompt_is_looked_at_when_more_has_come(prompt, seqs):
    """Until then its tokens stay uncompressed, so that each is compressed once."""
    model, ids = recall_model(BIAS), tokens()[:seqs]
    for format in ("auto", "k4v4"):
        cache = AuraCache(model.config, format)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert agreement(model, cache, ids, prompt) >= 0.95
        layer = cache.compressed[0]
        assert layer.tokens.calibration.held is None
        assert layer.key_scale is not None
        assert layer.format == "k4v4"
        assert layer.cache.lengths == [LENGTH] * seqs
    plain = AuraCache(model.config, "k4v4", first=0, calibrate=False)
    with pytest.warns(UserWarning, match=r"keys do not survive k4v4 in layer 0 .* would keep them"):
        assert agreement(model, plain, ids, prompt) < 0.6
    assert len(plain.lost) == 1


@pytest.mark.parametrize("change", ["crop", "select", "copy"])
def test_held_tokens_follow_the_cache(change):
    model, ids = recall_model(BIAS), tokens()
    model.set_attn_implementation("aurakv")
    cache, expected = AuraCache(model.config), AuraCache(model.config)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=expected)
        if change == "crop":
            model(ids.flip(1)[:, :50], past_key_values=cache)
            cache.crop(-50)
            model(ids[:, :45], past_key_values=cache)
            cache.crop(-5)
        elif change == "select":
            model(ids.flip(0)[:, :40], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
        else:
            model(ids[:, :40], past_key_values=cache)
            cache = copy.deepcopy(cache)
        logits = [
            torch.cat([model(ids[:, at : at + 1], past_key_values=x).logits for at in range(40, LENGTH)])
            for x in (cache, expected)
        ]
    assert torch.equal(*logits)
    assert torch.equal(cache.compressed[0].key_scale, expected.compressed[0].key_scale)


@pytest.mark.parametrize("prompt", [30, 150])
def test_without_queries_the_keys_themselves_are_judged(prompt):
    """Another attention function shows no queries: a few loud channels among the keys are reason enough."""
    model, ids = recall_model(BIAS), tokens()
    cache = AuraCache(model.config)
    with pytest.warns(UserWarning, match="without a look at queries"):
        assert agreement(model, cache, ids, prompt, "sdpa") >= 0.95
    assert cache.compressed[0].cache.format.key.bits > 4
    with pytest.warns(UserWarning, match=r"keys do not survive k4v4 .* of what most channels vary by"):
        agreement(model, AuraCache(model.config, "k4v4"), ids, prompt, "sdpa")
    quiet, ids = recall_model({}), tokens()
    cache = AuraCache(quiet.config)
    agreement(quiet, cache, ids, prompt, "sdpa")
    assert cache.compressed[0].cache.format.key.bits == 4


def biased_model(layers: int):
    """Random, with a bias on all keys: no layer loses them alone."""
    config = Qwen2Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rope_theta=1e6, max_position_embeddings=1024, initializer_range=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.copy_(24 * torch.randn(layer.self_attn.k_proj.bias.shape))
    register()
    model.set_attn_implementation("aurakv")
    return model


@pytest.mark.parametrize("layers", [2, 6])
def test_layers_that_lose_too_much_together(layers):
    model, ids = biased_model(layers), torch.randint(0, 256, (1, 256), generator=torch.Generator().manual_seed(3))
    cache, wide, auto = (AuraCache(model.config, format) for format in ("k4v4", "k8v4", "auto"))
    with torch.no_grad(), pytest.warns(UserWarning, match=f"keys do not survive k4v4 .* its {layers} layers") as caught:
        model(ids, past_key_values=cache)
    assert len(caught) == 1
    assert cache.lost == [str(caught[0].message)]
    assert "nats on average where 0.045 are tolerated): k5v4 would keep them" in cache.lost[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, past_key_values=wide)
        model(ids, past_key_values=auto)
    assert (wide.lost, auto.lost) == ([], [])
    assert [layer.cache.format.name for layer in auto.compressed] == ["k5v4"] * layers
    cache.reset()
    assert cache.lost == []


def test_predictions_that_moved_while_no_layer_lost_its_keys():
    """Each layer alone is within its limit, and predictions move by more than 0.15 nats: the guard speaks of all."""
    model, ids = biased_model(2), torch.randint(0, 256, (1, 256), generator=torch.Generator().manual_seed(3))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)
    model.set_attn_implementation("aurakv")

    def moved(cache: AuraCache) -> float:
        with torch.no_grad():
            parts = [model(ids[:, :200], past_key_values=cache).logits]
            parts += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(200, 256)]
        return float((expected.exp() * (expected - torch.cat(parts, 1).log_softmax(-1))).sum(-1).mean())

    narrow, wide, auto = (AuraCache(model.config, format) for format in ("k4v4", "k8v4", "auto"))
    with pytest.warns(UserWarning, match="keys do not survive k4v4 in this model"):
        assert moved(narrow) > 0.15
    assert moved(wide) < 0.05
    assert moved(auto) < 0.1
    assert wide.lost == auto.lost == []


def test_the_order_of_layers_does_not_matter():
    """Layers come one by one, in pipelines in any order; what one of them moves by is no reason to widen another."""
    generator, layer = torch.Generator().manual_seed(4), LayerPolicy("k4v4")
    checks = {}
    for index, size in enumerate((1.0, 8.0, 12.0, 0.5)):  # the larger the queries are, the more errors of keys count
        k, q = (torch.randn(2, 200, 64, generator=generator) for _ in range(2))
        checks[index] = Check(k, size * q, Scoring())
    movements = [checks[index].moved(layer) for index in checks]
    assert movements[3] < movements[0] < ON_AVERAGE < movements[1] < movements[2]
    chosen = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        guard = KeyGuard("auto", 4, widen=True)
        formats = {index: guard.judge(index, layer, checks[index]) for index in order}
        chosen.append([formats[index].format for index in range(4)])
        assert max(checks[index].moved(formats[index]) for index in order) <= ON_AVERAGE
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[0][0] == chosen[0][3] == "k4v4" != chosen[0][1]


def test_a_measure_is_shown_with_the_digits_that_exceed_the_limit():
    assert [more_than(x, 0.25) for x in (0.2501, 0.26, 3.14159)] == ["0.2501", "0.26", "3.1"]


def test_a_cache_that_begins_anew_forgets_what_was_said():
    model, ids = recall_model(BIAS), tokens()
    cache = AuraCache(model.config, "k4v4", first=0, calibrate=False)
    with pytest.warns(UserWarning, match="keys do not survive"):
        agreement(model, cache, ids)
    cache.reset()
    assert cache.lost == []
    agreement(model, cache, ids)
    assert len(cache.lost) == 1

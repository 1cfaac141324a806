"""Tuning: bits go where they help, within a size, and what was measured is not measured again."""

import copy
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import aurakv as kv  # noqa: E402
from aurakv.calibration import tune  # noqa: E402
from aurakv.calibration.policy import Policy  # noqa: E402
from aurakv.calibration.tune import choose, refined  # noqa: E402
from aurakv.errors import InputError  # noqa: E402
from aurakv.evaluation import measure  # noqa: E402
from aurakv.evaluation.results import Results  # noqa: E402
from aurakv.hf import AuraCache  # noqa: E402
from aurakv.hf.observe import observe  # noqa: E402
from tests.hf.small_models import made, prompt  # noqa: E402


def Layer(key, value, share=1.0):
    """Losses at 4 bits; other widths follow their squared error."""
    return tune.Layer({4: key}, {4: value}, share)


def size(layers, formats, dim=64) -> float:
    return sum(x.share * kv.Format.parse(name, dim).bytes_per_token for x, name in zip(layers, formats, strict=True))


def loss(layers, formats) -> float:
    sides = [kv.Format.parse(name, 64) for name in formats]
    return sum(x.loss(side.key.bits, side.value.bits) for x, side in zip(layers, sides, strict=True))


def test_bits_go_where_they_help():
    layers = [Layer(0.1, 0.001), Layer(0.001, 0.1), Layer(0.001, 0.001)]
    formats = choose(layers, 64, budget=3 * 68)
    assert size(layers, formats) <= 3 * 68
    first, second, third = (kv.Format.parse(name, 64) for name in formats)
    assert first.key.bits > first.value.bits
    assert second.value.bits > second.key.bits
    assert third.bytes_per_token < first.bytes_per_token
    assert choose([Layer(0.1, 0.1)] * 4, 64, budget=4 * 68) == ["k4v4"] * 4


def test_close_to_the_best_choice():
    """Against all combinations of a few widths."""
    generator = random.Random(0)
    widths = (3, 4, 5)
    names = [f"k{a}v{b}" for a, b in itertools.product(widths, widths)]
    for _ in range(10):
        layers = [Layer(10 ** generator.uniform(-3, -1), 10 ** generator.uniform(-3, -1)) for _ in range(3)]
        budget = generator.uniform(3 * 56, 3 * 80)
        fitting = [each for each in itertools.product(names, repeat=3) if size(layers, each) <= budget]
        best = min(loss(layers, each) for each in fitting)
        chosen = choose(layers, 64, budget=budget, widths=widths)
        assert size(layers, chosen) <= budget
        assert loss(layers, chosen) <= 1.6 * best
        smallest = choose(layers, 64, kl=2 * best, widths=widths)
        assert loss(layers, smallest) <= 2 * best
        assert size(layers, smallest) <= 1.15 * min(size(layers, x) for x in fitting if loss(layers, x) <= 2 * best)


def test_a_window_costs_little():
    layers = [Layer(0.01, 0.01), Layer(0.01, 0.01, 0.1)]
    full, windowed = (kv.Format.parse(name, 64).bytes_per_token for name in choose(layers, 64, budget=1.1 * 68))
    assert windowed > full


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "either a size or a KL"),
        ({"budget": 1.0, "kl": 1.0}, "either a size or a KL"),
        ({"budget": 30.0}, "smallest formats take"),
        ({"kl": 1e-9}, "widest formats lose"),
    ],
)
def test_goals_that_cannot_be_met(options, sentence):
    with pytest.raises(InputError, match=sentence):
        choose([Layer(0.1, 0.1)], 64, **options)


def test_observing_changes_nothing():
    _, ours = made("gemma3")
    ids = prompt(1, 100)
    before = ours.config._attn_implementation
    seen = observe(ours, ids, chunk=30)
    assert ours.config._attn_implementation == before
    assert {number: x.moments.keys for number, x in seen.items()} == {0: 96, 1: 96}
    cache = AuraCache(ours.config, "k4v4")
    with torch.no_grad():
        ours(ids, past_key_values=cache)
    layer, policy = cache.compressed[0], seen[0].moments.layer("k4v4")  # the next one reads what this one compressed
    torch.testing.assert_close(layer.cache.pool.key_offset, policy.key_offset, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.key_scale, policy.key_scale, atol=1e-4, rtol=1e-4)


def test_tuning_a_small_model(tmp_path, monkeypatch):
    _, ours = made("llama")
    ours = copy.deepcopy(ours)
    ours.model.layers[0].self_attn.q_proj.weight.data *= 3  # sharp attention: its keys need bits
    ids = prompt(1, 160)
    policy = tune.calibrated(ours, ids, source="random tokens")
    assert (policy.kv_heads, policy.head_dim, policy.first) == (2, 16, 4)
    state = Results(tmp_path / "state", tune.STATE)
    steps: list[tuple[str, int, int]] = []
    layers = tune.sensitivities(ours, policy, ids[:, :100], 4096, state, lambda *step: steps.append(step))
    assert steps[-1] == ("layers alone", 8, 8)
    assert all(x.share == 1 for x in layers)
    assert all(x.key[3] > x.key[4] > 0 and x.value[3] > x.value[4] > 0 for x in layers)
    assert layers[0].key[4] > layers[1].key[4]
    assert layers[0].loss(4, 4) == layers[0].key[4] + layers[0].value[4]
    monkeypatch.setattr(measure, "compare", None)  # nothing is measured a second time
    again = Results(tmp_path / "state", tune.STATE)
    assert tune.sensitivities(ours, policy, ids[:, :100], 4096, again) == layers
    monkeypatch.undo()
    names = [entry["key"]["name"] for entry in again.entries]
    assert sorted(names) == ["k3 0", "k3 1", "k4 0", "k4 1", "v3 0", "v3 1", "v4 0", "v4 1"]
    other = tune.sensitivities(ours, policy, ids[:, 1:101], 4096, again)
    assert other != layers, "another text"
    assert len(again.entries) == 16
    formats = choose(layers, 16, budget=2 * 20)
    chosen = tune.tuned(policy, formats)
    chosen.save(tmp_path / "p.json")
    caches = {
        "tuned": lambda: AuraCache(ours.config, tmp_path / "p.json"),
        "plain": lambda: AuraCache(ours.config, "k4v4", first=0, calibrate=False),
    }
    rows = {row.name: row for row in measure.compare(ours, prompt(1, 200, seed=4), caches)}
    assert Policy.load(tmp_path / "p.json").bytes_per_token <= 2 * 2 * 20
    assert rows["tuned"].kl < rows["plain"].kl
    with pytest.raises(InputError, match="at least 64 tokens"):
        tune.calibrated(ours, ids[:, :10])


def test_a_bad_choice_gets_better_in_rounds():
    """Bits move to the layer that needs them, within the size; a choice that nothing nearby beats stays."""
    _, ours = made("llama")
    ours = copy.deepcopy(ours)
    ours.model.layers[0].self_attn.q_proj.weight.data *= 3
    ids = prompt(1, 160)
    policy = tune.tuned(tune.calibrated(ours, ids), ["k2v4", "k4v2"])
    steps: list[tuple[str, int, int]] = []
    better = refined(ours, policy, ids, 4096, 2 * 16, lambda *step: steps.append(step))
    assert steps[-1] == ("widths nearby", 7, 7), "as it is, two down and four up"
    assert better.bytes_per_token <= policy.bytes_per_token
    loss = {
        name: measure.compare(ours, ids, {name: lambda p=each: AuraCache(ours.config, p)})[1].kl
        for name, each in {"before": policy, "after": better}.items()
    }
    assert loss["after"] < loss["before"]
    for _ in range(8):
        before, better = better, refined(ours, better, ids, 4096, 2 * 16)
    assert better is before


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gradients_foresee_what_layers_alone_lose(name, monkeypatch):
    """Of every side of every layer, as far as so small a model allows; the model stays as it was."""
    _, ours = made(name)
    ids = torch.randperm(ours.config.vocab_size, generator=torch.Generator().manual_seed(0))[None, :128]
    policy = tune.calibrated(ours, ids)
    before = ours.config._attn_implementation
    steps: list[tuple[str, float, int]] = []
    foreseen = tune.foreseen(ours, policy, ids, 4096, 32, None, lambda *step: steps.append(step))
    assert steps[-1] == ("gradients", 32, 32)
    assert ours.config._attn_implementation == before
    assert all(each.requires_grad and each.grad is None for each in ours.parameters())
    measured = tune.sensitivities(ours, policy, ids, 4096)
    ratios = []
    for near, real in zip(foreseen, measured, strict=True):
        assert near.share == real.share
        for side in ("key", "value"):
            losses = [getattr(near, side)[bits] for bits in tune.WIDTHS]
            assert losses == sorted(losses, reverse=True)
            ratios += [getattr(near, side)[bits] / loss for bits, loss in getattr(real, side).items()]
    assert all(0.3 < ratio < 3 for ratio in ratios), ratios
    assert 0.7 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.4
    state = Results(kind=tune.STATE)
    assert foreseen == tune.foreseen(ours, policy, ids, 4096, 32, state), "the same samples"
    monkeypatch.setattr(tune, "gradients", None)  # nothing is computed a second time
    assert foreseen == tune.foreseen(ours, tune.tuned(policy, ["k3v2"] * 2), ids, 4096, 32, state), "for any size"


def test_gradients_read_a_text_in_pieces(monkeypatch):
    """A last piece too short to speak for a text is left out; first tokens, which stay uncompressed, lose nothing."""
    _, ours = made("llama")
    ids = prompt(1, 160)
    policy = tune.calibrated(ours, ids)
    monkeypatch.setattr(tune, "_PIECE", 70)
    assert tune.foreseen(ours, policy, ids, 4096, 1) == tune.foreseen(ours, policy, ids[:, :140], 4096, 1)
    assert tune.foreseen(ours, policy, ids[:, :140], 4096, 1) != tune.foreseen(ours, policy, ids[:, :70], 4096, 1)
    for layer in tune.foreseen(ours, replace(policy, first=160), ids, 4096, 1):
        assert set(layer.key.values()) == set(layer.value.values()) == {0.0}
    with pytest.raises(InputError, match="uncompressed"):
        tune.foreseen(ours, replace(policy, recent=16), ids, 4096, 1)

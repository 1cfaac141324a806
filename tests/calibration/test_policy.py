"""Policies: what a file may say, and offsets and key scales measured from keys and queries."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.calibration.guard import wider
from aurakv.calibration.policy import LayerPolicy, Policy, shipped
from aurakv.calibration.statistics import Moments, Turns, measured
from aurakv.errors import FileError, InputError


def made() -> Policy:
    generator = torch.Generator().manual_seed(3)
    offset = torch.randn(2, 32, generator=generator).half().float()
    key_scale = torch.rand(2, 32, generator=generator).half().float() + 0.5
    layers = (
        LayerPolicy("k4v4", key_offset=offset, key_scale=key_scale.half().float(), key_weight=key_scale.half().float()),
        LayerPolicy("k5v3", value_offset=-offset),
        LayerPolicy("k16v4"),
    )
    return Policy(2, 32, layers, first=4, recent=2, source="a test")


def same(a: Policy, b: Policy) -> bool:
    for x, y in zip(a.layers, b.layers, strict=True):
        for field in dataclasses.fields(x):
            left, right = getattr(x, field.name), getattr(y, field.name)
            if not (torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right):
                return False
    return all(getattr(a, name) == getattr(b, name) for name in ("kv_heads", "head_dim", "first", "recent", "source"))


def test_round_trip(tmp_path):
    policy = made()
    policy.save(tmp_path / "p.json")
    assert same(Policy.load(tmp_path / "p.json"), policy)
    assert same(Policy.load(str(tmp_path / "p.json")), policy)
    assert policy.bytes_per_token == 2 * ((16 + 2) * 2 + (20 + 2) + (12 + 2) + 64 + (16 + 2))


def test_version_1_called_the_key_scale_balance():
    read = json.loads(made().dumps())
    assert read["version"] == 3
    read["version"] = 1
    with pytest.raises(FileError, match=r"layer 0 of a policy has a format and possibly .*'balance'"):
        Policy.loads(json.dumps(read))
    for layer in read["layers"]:
        if "key_scale" in layer:
            layer["balance"] = layer.pop("key_scale")
    assert same(Policy.loads(json.dumps(read)), made())


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies_load(name):
    policy = Policy.load(name)
    assert policy.source
    assert all(layer.key_offset is not None for layer in policy.layers if not layer.format.startswith("k16"))


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies_are_as_small_as_they_say(name):
    """Codes at most 3% larger than those of one width in all layers."""
    policy = Policy.load(name)
    last = name.rpartition("-")[2]
    size = last if last.startswith("k") else "k4v4"
    if name.startswith("smollm2"):  # layers with a window count less
        uniform = len(policy.layers) * policy.kv_heads * kv.Format.parse(size, policy.head_dim).bytes_per_token
        assert policy.bytes_per_token <= 1.03 * uniform
    assert f"--size {size} " in policy.source


def test_model_must_fit():
    made().check_model(3, 2, 32)
    made().check_model(3, None, None)
    for other in ((4, 2, 32), (3, 1, 32), (3, 2, 64)):
        with pytest.raises(InputError, match="is for a model of 3 KV layers, 2 KV heads and head_dim 32, got"):
            made().check_model(*other)


def change(path: list, value: object):
    read = json.loads(made().dumps())
    at = read
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(read)


BAD = {
    "no JSON": ("{", "is a JSON object"),
    "deep": ("[" * 100_000, "JSON object"),
    "a list": ("[]", "of kind 'aurakv-policy'"),
    "other kind": (change(["kind"], "x"), "of kind 'aurakv-policy'"),
    "missing": (change(["first"], KeyError), "with the fields"),
    "more": (change(["last"], 4), "with the fields"),
    "version": (change(["version"], 4), "of version 1 to 3, got 4"),
    "version true": (change(["version"], True), "of version 1 to 3, got True"),
    "old field": (change(["layers", 1, "balance"], "AAAA"), "layer 1 of a policy has a format"),
    "source": (change(["source"], 5), "text source"),
    "model": (change(["model"], []), "a model with"),
    "model field": (change(["model", "head_dim"], KeyError), "a model with"),
    "heads": (change(["model", "kv_heads"], 10**30), "kv_heads must be a whole number from 1"),
    "heads true": (change(["model", "kv_heads"], True), "kv_heads must be a whole number"),
    "dim": (change(["model", "head_dim"], 33), "base64 of 66 float16"),
    "layers": (change(["model", "layers"], 4), "as many layers as its model"),
    "layer list": (change(["layers"], {"0": 1}), "as many layers as its model"),
    "first": (change(["first"], -1), "first must be a whole number from 0"),
    "recent": (change(["recent"], 1.5), "recent must be a whole number from 0"),
    "layer": (change(["layers", 1], "k4v4"), "layer 1 of a policy has a format"),
    "layer field": (change(["layers", 1, "bits"], 4), "layer 1 of a policy has a format"),
    "format": (change(["layers", 1, "format"], "k7v4"), "bits must be one of"),
    "tensor": (change(["layers", 0, "key_offset"], "AAAA"), "key_offset of layer 0 must be base64 of 64 float16"),
    "base64": (change(["layers", 0, "key_scale"], "é" * 99), "key_scale of layer 0 must be base64"),
    "number": (change(["layers", 0, "key_scale"], 7), "key_scale of layer 0 must be base64"),
    "not finite": (change(["layers", 0, "key_offset"], "AHwA" * 42 + "AHw="), "key_offset of layer 0 must be"),
    "negative": (change(["layers", 0, "key_scale"], "AAAA" * 42 + "AAA="), "key_scale of layer 0 must be positive"),
    "16 bits": (change(["layers", 0, "format"], "k16v4"), "no meaning for vectors stored at 16 bits"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused(what, tmp_path):
    text, sentence = BAD[what]
    file = tmp_path / "p.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=sentence):
        Policy.load(file)


@pytest.mark.parametrize("name", ["key_scale", "key_weight"])
def test_what_a_file_would_not_keep_positive(name):
    with pytest.raises(InputError, match=f"{name} of layer 0 must be positive, in float16"):
        Policy(1, 64, (LayerPolicy("k4v4", **{name: torch.full((1, 64), 1e-8)}),))


def test_bad_sources(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        Policy.load(tmp_path / "none.json")
    (tmp_path / "p.json").write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="cannot be read"):
        Policy.load(tmp_path / "p.json")
    with pytest.raises(InputError, match=r"is a \.json file or one of"):
        Policy.load("k4v4")
    with pytest.raises(InputError, match="must be float32"):
        Policy(2, 32, (LayerPolicy("k4v4", key_offset=torch.zeros(32)),))
    with pytest.raises(InputError, match="range of float16"):
        Policy(1, 32, (LayerPolicy("k4v4", key_offset=torch.full((1, 32), 1e6)),))


# what is measured


def biased(tokens: int = 400, kv_heads: int = 2, group: int = 2, dim: int = 64):
    """Keys with a mean and loud channels that queries hardly look at."""
    generator = torch.Generator().manual_seed(0)
    loud = torch.ones(dim)
    loud[::8] = 20.0
    mean = 15 * torch.randn(kv_heads, dim, generator=generator)
    k = torch.randn(tokens, kv_heads, dim, generator=generator) * loud + mean
    q = torch.randn(tokens, kv_heads * group, dim, generator=generator) / loud
    return q, k


def score_error(q, k, layer: LayerPolicy) -> float:
    """Of the differences between keys, which is what softmax sees."""
    codec = kv.Format.parse(layer.format, k.shape[2]).key
    key_scale = torch.ones(k.shape[1:]) if layer.key_scale is None else layer.key_scale
    codes = kv.encode(k * key_scale, codec, layer.key_offset)
    group = q.shape[1] // k.shape[1]
    got = ops.scores(q / key_scale.repeat_interleave(group, 0), codes, codec, layer.key_offset, backend="reference")
    expected = torch.einsum("nhd,lhd->nhl", q, k.repeat_interleave(group, 1))
    error = got - expected
    return float((error - error.mean(2, keepdim=True)).norm() / (expected - expected.mean(2, keepdim=True)).norm())


def test_offset_and_balance_lower_the_error_of_scores():
    q, k = biased()
    half = Moments()
    half.add(k[:200], q[:200])
    centred = Moments()
    centred.add(k[:200])
    plain = score_error(q[200:], k[200:], LayerPolicy("k4v4"))
    mean_only = score_error(q[200:], k[200:], centred.layer("k4v4"))
    both = score_error(q[200:], k[200:], half.layer("k4v4"))
    assert mean_only < 0.8 * plain
    assert both < 0.4 * mean_only


def test_moments_add_up():
    q, k = biased()
    one, two = Moments(), Moments()
    one.add(k, q)
    for part in (slice(0, 10), slice(10, 400)):
        two.add(k[part], q[part])
    a, b = one.layer("k4v4"), two.layer("k4v4")
    torch.testing.assert_close(a.key_offset, b.key_offset)
    torch.testing.assert_close(a.key_scale, b.key_scale)
    torch.testing.assert_close(a.key_offset, k.mean(0) * a.key_scale, rtol=1e-4, atol=1e-4)


def turned(x: torch.Tensor, angles: torch.Tensor, start: int = 0) -> torch.Tensor:
    """RoPE as models apply it to x [tokens, heads, dim]: channel i goes with i + dim / 2."""
    angle = (start + torch.arange(len(x)))[:, None, None] * angles
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).float()


def test_moments_of_a_short_prompt_fit_a_long_text():
    angles = 1e5 ** -(torch.arange(32, dtype=torch.float64) / 32)
    q, k = biased()
    layers = [Moments(turns) for turns in (None, Turns.half(angles, 64, 8192))]
    for layer in layers:
        layer.add(turned(k[:200], angles), turned(q[:200], angles), torch.arange(200))
    stale, fitting = (
        score_error(turned(q[200:], angles, 4000), turned(k[200:], angles, 4000), layer.layer("k4v4"))
        for layer in layers
    )
    assert fitting < 0.7 * stale


def test_turns_of_a_part_of_the_channels():
    angles = torch.tensor([1.0, 0.5])
    turns = Turns.half(angles, 8, 4096)
    x = torch.randn(5, 1, 8)
    whole = turns.turn(x.double(), torch.zeros(5))
    torch.testing.assert_close(turns.channels(whole.real, whole.imag), x.double())
    back = turns.turn(torch.cat([turned(x[..., :4], angles), x[..., 4:]], -1).double(), torch.arange(5))
    torch.testing.assert_close(back, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(turns.mean_turn()[2:], torch.ones(2, dtype=torch.complex128)), "these do not turn"
    assert float(turns.mean_turn()[0].abs()) < 0.01, "a fast pair has no mean"


def test_dead_channels_and_damaged_tokens():
    q, k = biased()
    k[:, 0], q[:, 0] = 0.0, 0.0
    k[:, 1, 3], q[:, 2, 5] = 0.0, 0.0
    clean = Moments()
    clean.add(k, q)
    layer = clean.layer("k4v4")
    assert bool(layer.key_scale.isfinite().all())
    assert bool((layer.key_scale > 0).all())
    k, q = torch.cat([k, k[:2]]), torch.cat([q, q[:2]])
    k[-2, 0, 0], k[-1, 1, 1], q[-2, 0, 0], q[-1, 0, 0] = torch.nan, torch.inf, torch.nan, -torch.inf
    damaged = Moments()
    damaged.add(k, q)
    assert torch.equal(damaged.layer("k4v4").key_offset, layer.key_offset)
    assert torch.equal(damaged.layer("k4v4").key_scale, layer.key_scale)
    nothing = Moments()
    nothing.add(k[-2:], q[-2:])
    assert nothing.layer("k4v4") == LayerPolicy("k4v4")


def test_padding_and_first_tokens_do_not_count():
    q, k = (x[:120].transpose(0, 1)[None] for x in biased())
    expected = measured("k4v4", k, q)
    filler = torch.full((1, 1, 30, 1), 1e4)
    real = torch.cat([torch.zeros(1, 30, dtype=torch.bool), torch.ones(1, 120, dtype=torch.bool)], 1)
    wide = [torch.cat([filler.expand(-1, x.shape[1], -1, 64), x], 2) for x in (k, q)]
    got = measured("k4v4", *wide, real)
    assert torch.equal(got.key_offset, expected.key_offset)
    assert torch.equal(got.key_scale, expected.key_scale)
    sinks = k.clone()
    sinks[:, :, :4] = 1e4
    assert torch.equal(measured("k4v4", sinks, q).key_offset, expected.key_offset)
    assert measured("k4v4", k[:, :, :40], q[:, :, :40]) == LayerPolicy("k4v4"), "40 tokens are too few"


def test_names_of_shipped_policies_are_no_formats():
    for name in shipped():
        with pytest.raises(InputError, match="a format name is"):
            kv.Format.parse(name, 64)
        assert Path(name).suffix == ""


def test_the_policy_that_a_name_means(tmp_path):
    """None is a format; what looks like a policy and is none is refused."""
    path = tmp_path / "mine.json"
    Policy.load("smollm2-135m").save(path)
    for name in ("smollm2-135m", path, str(path)):
        found = Policy.find(name)
        assert found is not None
        assert found.dumps() == Policy.load("smollm2-135m").dumps()
    for name in ("k4v4", "auto", "plain:k4v4", ""):
        assert Policy.find(name) is None
    for name in (tmp_path / "mine", tmp_path / "none.json", "none.json"):
        with pytest.raises(InputError):
            Policy.find(name)


def test_the_default_ring_is_the_same_everywhere():
    """What plans and tuning count is what a cache of transformers' layers makes."""
    from aurakv.calibration.policy import ROLLBACK
    from aurakv.cli.fitting import Layer
    from aurakv.storage.page_table import Kept

    format = kv.Format.parse("k4v4", 64)
    for window in (1, 100, 512, 4096):
        ring = kv.KVCache.ring(format, 1, 2, window, rollback=ROLLBACK)
        kept = Kept.of(window, rollback=ROLLBACK)
        assert ring.page_table.kept == kept
        assert Layer(2, (64, 64), window).held(format, 2**20) == 2 * kept.width(64) * format.layout(64).bytes


def test_wider_keys():
    """GPUs skip widths that they read slowly."""
    cpu, gpu = "cpu", "cuda"
    assert wider(4, 64, cpu) == wider(4, 128, gpu) == wider(4, 256, gpu) == [5, 6, 8, 16]
    assert wider(3, 80, gpu) == [4, 8, 16]
    assert wider(5, 64, gpu) == [8, 16]
    assert wider(16, 64, cpu) == wider(16, 64, gpu) == [16]


def test_a_device_without_fitted_codes_gets_the_scale_that_is_best_for_nearest_ones():
    generator = torch.Generator().manual_seed(4)
    spread = torch.rand(2, 64, generator=generator) + 0.05
    k = torch.randn(4000, 2, 64, generator=generator) * spread + 1
    q = torch.randn(4000, 6, 64, generator=generator)
    moments = Moments()
    moments.add(k, q)
    fitted = moments.layer("k4v4")
    assert fitted.on("cpu") is fitted
    nearest = fitted.on("cuda")
    assert nearest.key_weight is None
    expected = (q.square().unflatten(1, (2, 3)).mean((0, 2)) / k.var(0, correction=0)).pow(0.25)
    expected = expected / expected.log().mean(-1, keepdim=True).exp()
    torch.testing.assert_close(nearest.key_scale, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(nearest.key_offset, k.mean(0) * expected, rtol=1e-3, atol=1e-4)
    assert LayerPolicy("k4v4").on("cuda") == LayerPolicy("k4v4")


def test_8_bits_are_not_fitted():
    weight = torch.rand(2, 64) + 0.1
    for name, fitted in (
        ("k4v4", (True, True)),
        ("k8v4", (False, True)),
        ("k6v8", (True, False)),
        ("k16v3", (False, True)),
    ):
        fits = LayerPolicy(name, key_weight=weight).fits(kv.Format.parse(name, 64), 2, "cpu")
        assert tuple(fit is not None for fit in fits) == fitted


def test_keys_that_are_not_fitted_have_the_scale_of_nearest_codes():
    """8 bits: on a CPU as on a GPU, except that values are still fitted; to ask twice changes nothing."""
    scale, weight = torch.rand(2, 64) + 0.5, torch.rand(2, 64) + 0.1
    given = {"key_offset": torch.randn(2, 64), "key_scale": scale, "key_weight": weight}
    nearest, ours = LayerPolicy("k8v4", **given).on("cuda"), LayerPolicy("k8v4", **given).on("cpu")
    assert torch.equal(ours.key_scale, nearest.key_scale)
    assert torch.equal(ours.key_offset, nearest.key_offset)
    assert not torch.equal(ours.key_scale, scale)
    assert [fit is None for fit in ours.fits(kv.Format.parse("k8v4", 64), 2, "cpu")] == [True, False]
    assert torch.equal(ours.on("cpu").key_scale, ours.key_scale)
    assert LayerPolicy("k6v4", **given).on("cpu").key_scale is scale

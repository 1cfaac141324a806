"""Calibrations: files, what is chosen from them, what is refused, and the identity they are kept under."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
import torch

from aurakv.calibration import calibration as calibrations
from aurakv.calibration.calibration import WIDTHS, Calibration, KeyCalibration
from aurakv.calibration.identity import identity_of
from aurakv.calibration.policy import text_of
from aurakv.errors import FileError, InputError


def layer(nats: dict[int, float], plain: dict[int, float] | None = None, heads: int = 2) -> KeyCalibration:
    torch.manual_seed(0)
    offset, scale = torch.randn(heads, 64).half().float(), (torch.rand(heads, 64) + 0.5).half().float()
    return KeyCalibration(offset, scale, nats, nats if plain is None else plain)


def falling(at_4: float) -> dict[int, float]:
    """Four times less with each bit, as errors of codes fall."""
    return {bits: at_4 * 4.0 ** (4 - bits) for bits in WIDTHS}


def made(*layers: KeyCalibration) -> Calibration:
    return Calibration(dict(enumerate(layers)), "a text", 4, "0" * 32)


def test_a_file_says_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrations, "cache_folder", lambda: tmp_path / "new")
    one = made(layer(falling(0.01)), layer(falling(0.02), falling(9.0), heads=4))
    assert Calibration.kept(one.model, False) is None
    path = one.keep()
    assert path.parent == tmp_path / "new" / "calibrations"
    other = Calibration.kept(one.model, False)
    assert other is not None
    assert (other.source, other.first, other.model) == ("a text", 4, "0" * 32)
    for number, kept in other.layers.items():
        assert torch.equal(kept.key_offset, one.layers[number].key_offset)
        assert torch.equal(kept.key_scale, one.layers[number].key_scale)
        assert kept.key_weight is None
        assert (kept.moved, kept.moved_plain) == (one.layers[number].moved, one.layers[number].moved_plain)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing is left beside it


def test_fitted_and_nearest_codes_are_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrations, "cache_folder", lambda: tmp_path)
    plain = made(layer(falling(0.02)))
    weight = (torch.arange(128.0).view(2, 64) + 1).half().float()
    fitted = made(dataclasses.replace(layer(falling(0.01)), key_weight=weight))
    assert (plain.fitted, fitted.fitted) == (False, True)
    assert plain.keep() != fitted.keep()
    found = Calibration.kept(fitted.model, True)
    assert found is not None
    assert torch.equal(found.layers[0].key_weight, weight)
    assert torch.equal(found.chosen("k4v4").layers[0].key_weight, weight)
    read = json.loads(fitted.dumps())
    read["layers"]["0"]["key_weight"] = text_of(-weight)
    with pytest.raises(FileError, match=r"key_weight of layer 0 .* must be finite and positive"):
        Calibration.loads(json.dumps(read))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.update(version=3), r"version \(1, 2\), got 3"),
        (lambda d: d.update(kind="aurakv-policy"), "of kind"),
        (lambda d: d.update(layers={}), "has layers"),
        (lambda d: d["layers"].update(x=d["layers"]["0"]), "have numbers"),
        (lambda d: d["layers"]["0"].update(kv_heads=3), "384 float16|192 float16"),
        (lambda d: d["layers"]["0"].update(key_scale=d["layers"]["0"]["key_offset"]), "positive key_scale"),
        (lambda d: d["layers"]["0"]["moved"].pop("4"), "at the widths"),
        (lambda d: d["layers"]["0"]["moved"].update({"4": float("nan")}), "at the widths"),
        (lambda d: d["layers"]["0"]["moved"].update({"4": 10**400}), "at the widths"),
        (lambda d: d["layers"]["0"]["moved"].update({"4": -1.0}), "at the widths"),
        (lambda d: d["layers"]["0"].pop("moved_plain"), "of a calibration has"),
        (lambda d: d.update(first=-4), "a number of first tokens"),
        (lambda d: d.update(first=True), "a number of first tokens"),
        (lambda d: d.update(limited=1.5), "limited must be a number of tokens"),
    ],
)
def test_damaged_files_are_refused(change, sentence):
    document = json.loads(made(layer(falling(0.01))).dumps())
    change(document)
    with pytest.raises(FileError, match=sentence):
        Calibration.loads(json.dumps(document))


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrations, "cache_folder", lambda: tmp_path)
    path = made(layer(falling(0.01))).keep()
    path.write_bytes(b"\xff")
    with pytest.raises(FileError, match="cannot be read"):
        Calibration.kept("0" * 32, False)
    monkeypatch.setattr(calibrations, "cache_folder", lambda: tmp_path / ("long" * 100))
    with pytest.raises(FileError, match="cannot be read"):
        Calibration.kept("0" * 32, False)


def test_a_file_says_that_an_engine_was_limited():
    for limited in (None, 0, 72):
        one = dataclasses.replace(made(layer(falling(0.01))), limited=limited)
        assert Calibration.loads(one.dumps()).limited == limited


def test_a_format_that_keys_survive_is_taken_as_it_is():
    chosen = made(layer(falling(0.01)), layer(falling(0.02))).chosen("k4v2")
    assert chosen.note is None
    assert [policy.format for policy in chosen.layers.values()] == ["k4v2"] * 2
    assert all(policy.key_offset is not None and policy.key_scale is not None for policy in chosen.layers.values())
    plain = made(layer(falling(0.01))).chosen("k4v4", plain=True).layers[0]
    assert plain.key_offset is None
    assert plain.key_scale is None
    wide = made(layer(falling(0.01))).chosen("k16v4").layers[0]
    assert (wide.key_offset, wide.key_scale) == (None, None)


def test_a_format_that_loses_keys_is_refused_with_one_that_does_not():
    lossy = made(layer(falling(0.01)), layer(falling(0.8)))
    with pytest.raises(InputError, match=r"do not survive k4v4 in 1 of 2 layers.*layer 1 moves by 0\.8.*: k6v4 would"):
        lossy.chosen("k4v4")
    with pytest.raises(InputError, match="k8v4 would"):
        lossy.chosen("k4v4", device_type="cuda")  # 5 and 6 bits of dimension 64 are slow there
    biased = made(layer(falling(0.01), falling(50.0)))
    with pytest.raises(InputError, match=r"do not survive plain:k4v4.*: k4v4 would"):
        biased.chosen("k4v4", plain=True)


def test_small_losses_in_all_layers_are_said():
    note = made(*[layer(falling(0.1))] * 3).chosen("k4v4").note
    assert note is not None
    assert "0.1 nats on average" in note
    assert "k5v4 would not" in note


def test_one_layer_among_many_that_loses_some_is_said():
    """Qwen2.5-Coder-0.5B at 3 bits: one layer of 24 moves by 0.44 nats, and perplexity grows by 4 to 5%."""
    note = made(layer(falling(0.44)), *[layer(falling(0.03))] * 23).chosen("k4v4").note
    assert note == (
        "k4v4 costs this model some quality (attention of layer 0 moves by 0.44 nats, more than 0.25): k5v4 would not"
    )
    with pytest.raises(InputError, match=r"do not survive k4v4 in 1 of 24 layers.*layer 0 moves by 1\.1 nats"):
        made(layer(falling(1.1)), *[layer(falling(0.03))] * 23).chosen("k4v4")


def test_without_a_format_only_layers_that_need_it_are_wider():
    chosen = made(layer(falling(0.01)), layer(falling(0.8)), layer(falling(0.02))).chosen(None)
    assert [policy.format for policy in chosen.layers.values()] == ["k4v4", "k6v4", "k4v4"]
    hopeless = made(layer(dict.fromkeys(WIDTHS, 9.0))).chosen(None).layers[0]
    assert hopeless.format == "k16v4"
    assert hopeless.key_offset is None


def write_model(folder, numbers: list[float], config: dict | None = None) -> None:
    """A file of safetensors, from the definition of the format."""
    folder.mkdir(exist_ok=True)
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    header = json.dumps({"a": {"dtype": "F32", "shape": [len(numbers)], "data_offsets": [0, len(data)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))


def test_a_model_is_known_by_its_contents(tmp_path):
    numbers = [float(i) for i in range(1000)]
    write_model(tmp_path / "a", numbers)
    known = identity_of(tmp_path / "a")
    write_model(tmp_path / "b", numbers, {"model_type": "llama", "transformers_version": "5.0", "_name_or_path": "x"})
    assert identity_of(tmp_path / "b") == known
    write_model(tmp_path / "b", numbers, {"model_type": "llama", "rope_theta": 5.0})
    assert identity_of(tmp_path / "b") != known
    write_model(tmp_path / "b", [number + 1 for number in numbers])
    assert identity_of(tmp_path / "b") != known
    assert identity_of(tmp_path / "a", {"rope_theta": 5.0}) != known
    with pytest.raises(FileError, match="has no weights"):
        (tmp_path / "b" / "model.safetensors").unlink()
        identity_of(tmp_path / "b")
    drawn = identity_of(tmp_path / "b", random="float32")  # weights that an engine draws, always the same ones
    assert drawn == identity_of(tmp_path / "b", random="float32") != known
    assert drawn != identity_of(tmp_path / "b", random="bfloat16")

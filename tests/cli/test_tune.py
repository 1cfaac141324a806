"""aurakv tune on a small random model: a policy within the size, which the library loads, and what it refuses."""

import json

import pytest

pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


import aurakv as kv
from aurakv.calibration.policy import Policy
from aurakv.evaluation import builtin, measure

ARGS = ("--tokens", "300", "--probe", "100", "--threads", "1", "--device", "cpu")


def test_a_policy_within_the_size(answer, call, small, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(builtin()[:1000])
    out, state = tmp_path / "small.json", tmp_path / "state"
    args = ("tune", "--model", small, *ARGS, "--text", text, "--out", out, "--resume", state, "--first", "2")
    got = answer(*args, "--size", "k4v4", "--percent", "3", "--rounds", "2")
    policy = Policy.load(out)
    assert got["policy"] == str(out)
    assert got["formats"] == [layer.format for layer in policy.layers]
    assert policy.source == f"{small.name}, 300 tokens of text"
    assert policy.first == 2
    assert policy.bytes_per_token <= 1.03 * 2 * 2 * kv.Format.parse("k4v4", 16).bytes_per_token
    tuned, coded = got["check"]
    assert (tuned["name"], coded["name"]) == (str(out), "k4v4")
    assert tuned["tokens"] == coded["tokens"] == 200
    assert tuned["kl"] < coded["kl"]
    assert [(list(layer["key"]), list(layer["value"])) for layer in got["layers"]] == [(["4", "3"], ["4", "3"])] * 2

    measured = []
    compare = measure.compare
    monkeypatch.setattr(measure, "compare", lambda *a, **k: measured.append(len(a[2])) or compare(*a, **k))
    code, shown, _ = call(*args, "--kl", "0.5")
    assert (code, measured) == (0, [2]), "layers alone were in the file: only the check is measured"
    assert str(out) in shown
    assert "policy: " in shown
    assert Policy.load(out).bytes_per_token <= policy.bytes_per_token
    assert json.loads(state.read_text())["kind"] == "aurakv-tuning"


def test_a_wrong_size_is_refused_before_the_model_is_loaded(refused, small, monkeypatch):
    monkeypatch.setattr("aurakv.cli.loading.load", lambda *_: pytest.fail("the model was loaded"))
    assert "an option of k4 is one of" in refused("tune", "--model", small, "--size", "k4:bogus/v4")
    assert "--size must have codes for keys and values" in refused("tune", "--model", small, "--size", "k4v16")


def test_losses_foreseen_by_gradients(answer, refused, small, tmp_path):
    """At all widths, and the policy is within the size."""
    out = tmp_path / "small.json"
    got = answer("tune", "--model", small, *ARGS, "--out", out, "--size", "k3v2", "--percent", "40", "--gradients", "2")
    assert [[*layer["key"]] for layer in got["layers"]] == [["2", "3", "4", "5", "6", "8"]] * 2
    assert Policy.load(out).bytes_per_token <= 1.4 * 2 * 2 * kv.Format.parse("k3v2", 16).bytes_per_token
    assert "does not know which queries" in refused("tune", "--model", small, "--gradients", "2", "--recent", "4")


def test_recent_tokens_count(answer, small, tmp_path):
    """They lie in the policy, and beside the format in all layers that it is compared with, so that both take the same
    room for them."""
    out = tmp_path / "recent.json"
    args = ("tune", "--model", small, *ARGS, "--out", out, "--size", "k4v4", "--context", "2K", "--recent")
    tuned, uniform = answer(*args, "5")["check"]
    policy = Policy.load(out)
    assert (policy.first, policy.recent) == (4, 5)
    plain = 2 * 2 * kv.Format.parse("k4v4", 16).bytes_per_token
    assert plain * 0.9 <= policy.bytes_per_token <= plain
    assert tuned["bytes_per_token"] - policy.bytes_per_token == pytest.approx(uniform["bytes_per_token"] - plain)


def test_refusals(refused, small, tmp_path):
    model = ("--model", small, *ARGS)
    assert "--out must be a .json file" in refused("tune", *model, "--out", tmp_path / "policy.txt")
    assert "--percent must be from -50 to 400" in refused("tune", *model, "--percent", "500")
    for other in (("--percent", "0"), ("--rounds", "0")):
        assert "belong to --size" in refused("tune", *model, "--kl", "0.1", *other)
    assert "got 9" in refused("tune", *model, "--size", "k9v4")
    assert "--size must have codes" in refused("tune", *model, "--size", "k16v4")
    assert "cannot be read" in refused("tune", *model, "--text", tmp_path / "none.txt")
    assert "at least 64 tokens" in refused("tune", "--model", small, "--tokens", "20", "--device", "cpu")


def test_a_size_too_small_is_told_before_the_work(refused, answer, small, tmp_path, monkeypatch):
    compare = measure.compare
    monkeypatch.setattr(measure, "compare", None)
    options = ("tune", "--model", small, *ARGS, "--out", tmp_path / "p.json", "--size", "k2v2")
    said = refused(*options, "--percent", "-5")
    assert "--size k2v2 and --percent -5 are 22.8 bytes per token and KV head" in said
    assert "the smallest formats take 24.0: raise --percent or --size" in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(measure, "compare", compare)
    assert answer(*options)["formats"] == ["k2v2"] * 2


def test_a_policy_that_gains_nothing_is_told(call, small, tmp_path):
    """The smallest format leaves nothing to choose."""
    out = tmp_path / "p.json"
    code, shown, _ = call("tune", "--model", small, *ARGS, "--out", out, "--size", "k2v2")
    assert code == 0
    assert "k2v2 in all layers loses no more on this text" in " ".join(shown.split())


@pytest.mark.parametrize("contents", ["{}", "[1, 2]", '{"kind": "aurakv-tuning", "ver', '{"mark": {}, "kl": {}}', ""])
def test_only_its_own_state_is_overwritten(refused, small, tmp_path, monkeypatch, contents):
    monkeypatch.setattr(measure, "compare", None)  # refused before anything is measured
    state = tmp_path / "settings.json"
    state.write_text(contents)
    said = refused("tune", "--model", small, *ARGS, "--out", tmp_path / "p.json", "--resume", state)
    assert "settings.json must be a" in said
    assert "of aurakv-tuning" in said
    assert state.read_text() == contents
    assert list(tmp_path.iterdir()) == [state]


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_missing_folder_is_told_before_the_work(refused, small, tmp_path, monkeypatch, option):
    monkeypatch.setattr(measure, "compare", None)
    said = refused("tune", "--model", small, *ARGS, option, tmp_path / "none" / "p.json")
    assert "none must be a folder that exists, to save p.json in it" in said
    (tmp_path / "folder.json").mkdir()
    said = refused("tune", "--model", small, *ARGS, option, tmp_path / "folder.json")
    assert "folder.json must be a file, got a folder" in said

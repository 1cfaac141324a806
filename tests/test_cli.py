"""The command line as a user meets it: what it prints and refuses, and that its numbers are those of the library."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")

import aurakv
from aurakv import cli
from aurakv.cli import frame


@pytest.fixture
def call(capsys):
    """Run a command: (exit code, stdout, stderr)."""

    def run(*argv):
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(call):
    """The one sentence with which a command refuses."""

    def run(*argv):
        code, out, err = call(*argv)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith(("aurakv: ", "aurakv "))
        return line

    return run


@pytest.fixture
def answer(call):
    """The JSON document that a command prints."""

    def run(*argv):
        code, out, err = call(*argv, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


# frame


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in cli.COMMANDS])
def test_help_has_examples_that_parse(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    examples = [
        line.partition("  # ")[0].split() for line in out.partition("examples:\n")[2].splitlines() if line.strip()
    ]
    assert examples
    for first, *words in examples:
        assert first == "aurakv"
        cli.parser().parse_args(words)


def test_no_command(refused):
    assert "COMMAND" in refused()
    assert "choose from" in refused("nonsense")


def test_module_and_version():
    run = subprocess.run([sys.executable, "-m", "aurakv", "--version"], capture_output=True, text=True, timeout=120)
    assert run.stdout == f"aurakv {aurakv.__version__}\n"


def test_closed_pipe():
    command = f'"{sys.executable}" -m aurakv info | head -c 1'
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("text", "bytes"), [("1.5e9", 1_500_000_000), ("8GB", 8 * 10**9), ("8GiB", 8 * 2**30), ("8g", 8 * 2**30), ("7", 7)]
)
def test_sizes(text, bytes):
    assert frame.size(text) == bytes


def test_names():
    assert frame.names("k4v4, k2:[-1,0,1,2]/v4") == ["k4v4", "k2:[-1,0,1,2]/v4"]


def fail_with(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (aurakv.InputError("a sentence\n  over lines"), 2, "aurakv info: a sentence over lines"),
        (FileNotFoundError(2, "No such file", "there.txt"), 2, "aurakv info: there.txt: No such file"),
        (
            ModuleNotFoundError("no", name="matplotlib.pyplot"),
            2,
            'aurakv info: this needs the package matplotlib: pip install "aurakv[cli]"',
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line(call, monkeypatch, error, code, line):
    monkeypatch.setattr(cli.info, "run", fail_with(error))
    got, out, err = call("info")
    assert (got, out, err) == (code, "", line + "\n")


def test_defects_are_not_hidden(monkeypatch):
    monkeypatch.setattr(cli.info, "run", fail_with(ModuleNotFoundError("no", name="aurakv.nothing")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["info"])


# info


def test_info(answer, call):
    found = answer("info")
    cpu = found["devices"][-1]
    assert cpu["device"] == "cpu"
    assert cpu["backends"] == {name: aurakv.why_not(name) for name in aurakv.backends.names()}
    assert cpu["backends"][cpu["chosen"]] is None
    assert found["versions"]["torch"] == torch.__version__
    _, out, _ = call("info")
    for name, why in cpu["backends"].items():
        assert name in out
        assert why is None or why in out


# plan

SHAPE = ("--layers", 3, "--kv-heads", 2, "--head-dim", 64)


def test_plan_counts_what_a_cache_holds(answer):
    plan = answer(
        "plan", "--memory", "1GB", *SHAPE, "--window", 100, "--window-layers", 1, "--tokens", 640, "--format", "k4v3"
    )
    (row,) = plan["rows"]
    format = aurakv.Format.parse("k4v3", 64)
    caches = [
        aurakv.KVCache.ring(format, 1, 2, window=100, rollback=32),
        *(aurakv.KVCache.contiguous(format, 1, 2, capacity=640) for _ in range(2)),
    ]
    x = torch.randn(640, 2, 64)
    for cache in caches:
        cache.append(x, x, [0, 640])
    assert row["bytes_per_sequence"] == sum(cache.pool.data.nbytes for cache in caches)
    assert row["bytes_per_token"] == 2 * 2 * format.bytes_per_token
    assert row["sequences"] == 10**9 // row["bytes_per_sequence"]
    assert row["read_per_step"] == 2 * format.bytes_per_token * (2 * 640 + 100)
    assert row["seconds_per_step"] == pytest.approx(row["read_per_step"] / plan["bandwidth"])


def test_plan_finds_the_longest_sequence(answer):
    options = ("--memory", "1MiB", *SHAPE, "--format", "k4v4", "--bandwidth", "1GB")
    tokens = answer("plan", *options)["rows"][0]["tokens"]
    (fits,) = answer("plan", *options, "--tokens", tokens)["rows"]
    (over,) = answer("plan", *options, "--tokens", tokens + 1)["rows"]
    assert fits["bytes_per_sequence"] <= 2**20 < over["bytes_per_sequence"]
    assert (fits["sequences"], over["sequences"]) == (1, 0)


def test_plan_of_a_tiny_budget(answer):
    (row,) = answer("plan", "--memory", 10, *SHAPE, "--format", "k4v4", "--bandwidth", "1GB")["rows"]
    assert (row["tokens"], row["sequences"]) == (0, 0)


def test_plan_prints_every_number(call, answer):
    options = ("plan", "--memory", "1GB", "--bandwidth", "20GB")
    code, out, _ = call(*options)
    assert code == 0
    for row in answer(*options)["rows"]:
        (line,) = (line for line in out.splitlines() if row["format"] in line.split())
        assert f"{row['bytes_per_token']:,}" in line
        assert f"{row['tokens']:,}" in line


def test_plan_of_a_model(answer, refused, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from aurakv.hf import AuraCache

    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, sliding_window=128, max_position_embeddings=4096,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    plan = answer(
        "plan", "--memory", "1GB", "--model", tmp_path, "--tokens", 1024, "--format", "k4v4,k16v16", "--dtype", "f32"
    )
    for row in plan["rows"]:
        cache = AuraCache(config, row["format"])
        x = torch.randn(1, 1, 1024, 32)
        for layer in range(4):
            cache.update(x, x, layer)
        assert cache.get_seq_length() == 1024
        held = sum(layer.cache.pool.data.nbytes for layer in cache.compressed if layer.get_seq_length())
        assert row["bytes_per_sequence"] == held
    assert [(group["window"], group["count"]) for group in plan["layers"]] == [(128, 3), (None, 1)]


def test_plan_refuses(refused, tmp_path):
    assert "must be a size" in refused("plan", "--memory", "lots")
    assert "--memory" in refused("plan")
    assert "tokens such as" in refused("plan", "--memory", 1, "--tokens", "0")
    assert "bits must be one of" in refused("plan", "--memory", "1GB", "--format", "k9v4")
    assert "a format name is" in refused("plan", "--memory", "1GB", "--format", "four")
    assert "together" in refused("plan", "--memory", "1GB", "--layers", 3)
    assert "at most --layers" in refused("plan", "--memory", "1GB", *SHAPE, "--window", 9, "--window-layers", 4)
    assert "belong to --layers" in refused("plan", "--memory", "1GB", "--window", 9)
    assert "head_dim" in refused("plan", "--memory", "1GB", *SHAPE[:4], "--head-dim", 63)
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert "there is no folder" in refused("plan", "--memory", "1GB", "--model", tmp_path / "none")
    assert "must be a folder with a model" in refused("plan", "--memory", "1GB", "--model", tmp_path)

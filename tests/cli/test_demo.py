"""aurakv demo: its numbers are those of the caches, and its prompt fills what is asked for."""

import pytest

pytest.importorskip("rich", reason="rich is not installed")
from aurakv import cli
from aurakv.cli.screen import Screen


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

"""Arguments are checked before torch is imported, and no error repeats all of what it was given."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="rich is not installed")

from aurakv.cli import arguments

FAST = """
import json, sys, time
began = time.process_time()
from aurakv import cli
try:
    code = cli.main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "seconds": time.process_time() - began, "torch": "torch" in sys.modules}))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    {
        "": 0,
        "--help": 0,
        "eval --help": 0,
        "plan --memory lots": 2,
        "bench --heads 5 --kv-heads 2": 2,
        "bench --plot picture.txt": 2,
        "generate --prompt x --temperature 0 --seed 1": 2,
        "demo --formats k4v4,k4v4": 2,
        "eval --lengths 1K": 2,
        "tune --out policy.txt": 2,
        "plan --memory 1GB --layers 3": 2,
        "plan --memory 1GB --formats k4v4,k9v4": 2,
        "generate --prompt x --format k7v7": 2,
        "info --nonsense": 2,
    }.items(),
)
def test_help_and_wrong_arguments_need_no_torch(words, code):
    run = subprocess.run([sys.executable, "-c", FAST, *words.split()], capture_output=True, text=True, timeout=120)
    seen = json.loads(run.stdout.splitlines()[-1])
    assert (seen["code"], seen["torch"]) == (code, False), run.stderr
    assert seen["seconds"] < 0.5


@pytest.mark.parametrize("size", ["1e400GB", "1e19", "9e18TB", "1e99999", "８GB", "-1", "0"])
def test_sizes_that_are_none(refused, size):
    assert f"--memory: must be a size such as 512MB, 8GiB or 1.5e9, got {size!r}" in refused("plan", f"--memory={size}")


@pytest.mark.parametrize("option", ["--tokens", "--batch", "--threads"])
@pytest.mark.parametrize("number", ["４", "4" * 5000])
def test_numbers_are_of_ascii_digits_and_not_endless(refused, option, number):
    said = refused("bench", option, number)
    assert "must be a" in said
    assert len(said) < 400


LONG = "x" * 40_000


@pytest.mark.parametrize(
    "words",
    [
        (LONG,),
        ("info", LONG),
        ("plan", "--memory", LONG),
        ("plan", "--memory", "1GB", "--formats", LONG),
        ("plan", "--memory", "1GB", "--formats", f"k4:{LONG}/v4"),
        ("plan", "--memory", "1GB", "--formats", f"k4:[{'1,' * 20_000}]/v4"),
        ("plan", "--memory", "1GB", "--dtype", LONG),
        ("bench", "--formats", LONG),
        ("bench", "--backend", LONG, "--tokens", 64, "--rounds", 1),
        ("bench", "--device", LONG),
        ("bench", "--plot", LONG),
        ("demo", "--formats", f"{LONG},{LONG}"),
        ("eval", "--formats", f"{LONG},{LONG}"),
        ("generate", "--prompt", "x", "--model", LONG),
        ("generate", "--prompt", "x", "--model", f"{LONG}/{LONG}/x"),
    ],
    ids=lambda words: " ".join(str(word)[:12] for word in words),
)
def test_errors_do_not_repeat_all_they_were_given(refused, words):
    assert len(refused(*words)) < 1000


def test_what_does_not_fit_into_memory_is_one_sentence(refused):
    said = refused("bench", "--batch", 100_000_000, "--device", "cpu")
    assert "--batch and --tokens must fit into the" in said
    assert "got 100,000,000 × 65,536 tokens" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "--formats", "k4v4,foo"), "got 'foo'; a policy is a .json file or one of"),
        (("eval", "--formats", "none.json"), "none.json cannot be read"),
        (("generate", "--format", "k4v4x"), "got 'k4v4x'"),
        (("demo", "--formats", "k4:int8/v7"), "k4:int8/v7 in --formats: bits must be one of"),
        (("bench", "--formats", "smollm2-135m"), "a format name is k<bits>v<bits>"),
        (("plan", "--memory", "1GB", "--formats", "plain:k4v4"), "got 'plain:k4v4'"),
        (("plan", "--memory", "1GB", "--formats", "recent16:k4v4"), "this command takes k4v4 alone"),
        (("demo", "--formats", "recent16:k4v4"), "this command takes k4v4 alone"),
        (("bench", "--formats", "recent16:k4v4"), "this command takes k4v4 alone"),
        (("generate", "--format", "recent16:k4v4"), "use --format k4v4 --recent 16, got 'recent16:k4v4'"),
        (("tune", "--size", "recent16:k4v4"), "use --size k4v4 --recent 16, got 'recent16:k4v4'"),
        (("tune", "--size", "k4v9"), "k4v9 in --size: bits must be one of"),
        (("tune", "--size", "smollm2-135m"), "a format name is k<bits>v<bits>"),
        (("eval", "--formats", "recent16:quanto-4"), "recent<n>: belongs to formats and policies, got"),
        (("eval", "--formats", "recent16:k16v16"), "recent<n>: has no meaning for k16v16"),
        (("eval", "--formats", "plain:recent16:k4v4"), "as in recent16:k4v4 or recent16:plain:k4v4, got 'plain:rec"),
        (("eval", "--formats", "plain:"), "a format name is k<bits>v<bits>"),
        (("eval", "--formats", "recent"), "a format name is k<bits>v<bits>"),
    ],
    ids=lambda words: " ".join(words[:1]) if isinstance(words, tuple) else "",
)
def test_wrong_names_are_refused_without_torch(words, said):
    done = subprocess.run([sys.executable, "-c", FAST, *words], capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout)
    assert (found["code"], found["torch"]) == (2, False)
    assert said in done.stderr


def test_right_names_pass():
    names = ["k4v4", "plain:k3v3", "k8:lsq/v4:f32", "quanto-4", "auto", "smollm2-135m"]
    recent = [f"recent16:{name}" for name in names if name != "quanto-4"]
    arguments.check_formats([*names, *recent], others=["auto", "quanto-4"], prefixes=["plain:", "recent"])

"""The command line as a user meets it: what all commands share."""

import shlex
import subprocess
import sys

import pytest

pytest.importorskip("rich", reason="rich is not installed")
import aurakv
from aurakv import cli
from aurakv.cli import arguments
from aurakv.errors import InputError
from tools import make_cli_docs


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

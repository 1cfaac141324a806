"""What commands print at any width: every number is there, and no line is longer than the screen."""

import argparse
import io
import re

import pytest

pytest.importorskip("rich", reason="rich is not installed")

from rich.console import Console

from aurakv.cli import arguments, eval, screen, tune
from aurakv.cli.screen import Screen
from aurakv.errors import counted


@pytest.fixture
def printed():
    """What a screen of some width shows of a table."""

    def show(width, *table):
        made = Screen(argparse.Namespace(json=False))
        made.out = Console(file=io.StringIO(), width=width, highlight=False)
        made.table(*table)
        return made.out.file.getvalue()

    return show


COLUMNS = ("cache", ">perplexity", ">change", ">KL", ">same top choice", ">bytes/token", ">tokens from codes", "why")
WHY = "no " + "word " * 30 + "missing"
ROWS = [
    (
        "k4v4",
        "12.345",
        "+0.81%",
        "0.02613",
        "90.25%",
        "3,388",
        "1,024 (100% of reads)",
        "no " + "word " * 30 + "missing",
    ),
    ("turboquant_4bit_nc", "14.000", "+17.30%", "0.17512", "77.19%", "4,848", "900 (88% of reads)", ""),
]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_nothing_is_lost_at_any_width(printed, width):
    text = printed(width, "", COLUMNS, ROWS)
    assert max(map(len, text.splitlines())) <= width
    shown = " ".join(re.sub(r"[─\s]+", " ", text).split())
    for row in ROWS:
        for cell in row[:7]:
            assert cell in shown, f"{cell} at {width}"
    assert shown.count("word") == 30
    assert "missing" in shown
    assert "…" not in text


def test_rows_are_stacked_where_columns_do_not_fit(printed):
    assert "same top choice    90.25%" in printed(60, "", COLUMNS[:7], [row[:7] for row in ROWS])
    assert printed(120, "", COLUMNS[:2], [row[:2] for row in ROWS]).count("perplexity") == 1


@pytest.mark.parametrize("width", [60, 80])
def test_text_breaks_between_words(width):
    made = Screen(argparse.Namespace(json=False))
    made.out = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=True)
    path = "/a/long/path/that-is-copied" * 5
    made.say("several words in a row " * 9 + "\n" + path)
    *lines, last = made.out.file.getvalue().splitlines()
    assert all(line.startswith(("several", "words", "in", "a", "row")) and len(line) <= width for line in lines)
    assert last == path


def test_one_and_many():
    assert [counted(n, "thread") for n in (0, 1, 2, 1024)] == ["0 threads", "1 thread", "2 threads", "1,024 threads"]
    assert [counted(n, "query") for n in (1, 2)] == ["1 query", "2 queries"]


def test_progress_in_a_file_is_lines(capsys, monkeypatch):
    monkeypatch.setattr(screen, "LINE_SECONDS", 0)
    made = Screen(argparse.Namespace(json=True))
    with made.progress("silent", 2) as step:
        step()
    with made.progress("reading", 4, lines=True) as step:
        step()
        step(2, text="reading more")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(",")[0] for line in lines] == ["reading: 1 of 4", "reading more: 3 of 4"]


def test_names_and_numbers_are_those_of_the_library():
    """They are written down again so that commands are declared without torch."""
    from aurakv.calibration import policy
    from aurakv.evaluation import rivals
    from aurakv.format import codec
    from aurakv.hf import cache, cache_names

    assert tuple(codec.DTYPES) == arguments.DTYPES
    assert policy.FIRST == tune.FIRST
    assert cache_names.UNCOMPRESSED == arguments.UNCOMPRESSED
    assert cache.AUTO == arguments.AUTO
    assert policy.shipped() == arguments.shipped()
    assert tuple(rivals.names()) == eval.RIVALS

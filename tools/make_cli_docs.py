"""Write docs/cli.md from the command line itself: python tools/make_cli_docs.py"""

import argparse
from pathlib import Path

from aurakv import cli

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

INTRODUCTION = """\
# Command line

From a clone, `pip install ".[cli,hf]"` brings the command `aurakv` (also `python -m aurakv`). This page is made from
its `--help` by `make docs`.

Results go to stdout, progress to stderr. With `--json` stdout is one JSON document. A wrong argument, file or model is
one sentence on stderr and the exit code 2; Ctrl-C gives 130. The default model is SmolLM2-135M-Instruct, which comes
from a package on PyPI and is converted once; `--model` takes a local path or a hub id, and remote code is never run.

`--device mps` uses the [Metal backend](apple.md): emulated on Linux; not yet run on an Apple GPU.
"""


def page() -> str:
    parser = cli.parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = [INTRODUCTION, "| command | what it does |\n|---|---|"]
    for choice in commands._choices_actions:
        parts[-1] += f"\n| [`{choice.dest}`](#aurakv-{choice.dest}) | {choice.help} |"
    parts[-1] += "\n"
    for name, command in commands.choices.items():
        parts.append(f"## aurakv {name}\n\n```\n{_help(command)}```\n")
    return "\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    """--help at a fixed width, whatever the terminal; Python versions differ in the heading of options."""
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110, max_help_position=26)
    text = parser.format_help()
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The picture of the quality evidence: python benchmarks/quality/plot.py PICTURE RESULTS.json…

One panel for each file of results (`aurakv eval --resume`), in the order given.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aurakv.cli import eval_plot
from aurakv.evaluation.results import Results

TITLES = {
    "smollm2": "SmolLM2-135M",
    "gemma3": "Gemma-3-270m",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}


def main(picture: Path, files: list[Path]) -> None:
    panels = {}
    for file in files:
        entries = [entry for entry in Results(file).entries if entry["key"]["kind"] == "text"]
        model = entries[0]["key"]["model"]
        rows = [{"text": entry["key"]["text"], **entry["row"]} for entry in entries]
        panels[TITLES.get(model, model)] = rows
    eval_plot.save(panels, picture)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])

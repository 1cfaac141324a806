"""The tables of docs/lab/quality.md: python benchmarks/quality/tables.py RESULTS.json…

One table for each file of results (`aurakv eval --resume`), every text of it, and one of needles where there are any.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aurakv.evaluation.measure import REFERENCE
from aurakv.evaluation.results import Results


def losses(entries: list[dict[str, Any]]) -> Iterator[str]:
    texts: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for entry in entries:
        texts[entry["key"]["text"]][entry["key"]["format"]] = entry["row"]
    yield "| text | cache | perplexity | KL | same token | bytes per token |"
    yield "|---|---|---|---|---|---|"
    for text, rows in texts.items():
        base, label = rows.pop(REFERENCE)["perplexity"], text
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["bytes_per_token"]):
            change, size = row["perplexity"] / base - 1, row["bytes_per_token"]
            yield f"| {label} | `{name}` | {change:+.1%} | {row['kl']:.4f} | {row['top1']:.1%} | {size:,.0f} |"
            label = ""


def needles(entries: list[dict[str, Any]]) -> Iterator[str]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for entry in entries:
        each = entry["row"]["needles"]
        nll = sum(needle["nll"] for needle in each) / len(each)
        hits = sum(needle["found"] for needle in each)
        found[entry["key"]["format"]][entry["key"]["tokens"]] = f"{hits} of {len(each)} ({nll:.2f})"
    lengths = sorted({length for row in found.values() for length in row})
    yield "| cache | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |"
    yield "|---" * (len(lengths) + 1) + "|"
    for name, row in found.items():
        yield f"| `{name}` | " + " | ".join(row.get(length, "") for length in lengths) + " |"


def main(files: list[Path]) -> None:
    for file in files:
        kinds = defaultdict(list)
        for entry in Results(file).entries:
            kinds[entry["key"]["kind"]].append(entry)
        for kind, table in (("text", losses), ("needle", needles)):
            if kinds[kind]:
                print("", *table(kinds[kind]), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main([Path(name) for name in sys.argv[1:]])

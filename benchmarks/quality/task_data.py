"""The questions of benchmarks/quality/tasks.py: python benchmarks/quality/task_data.py SOURCES MODEL TARGET

SOURCES is the folder of `benchmarks/quality/prepare.py SOURCES tasks`. MODEL is the folder of a model: its tokenizer
measures the lengths of RULER, and its chat template wraps RULER's prompts. TARGET gets gsm8k.jsonl.gz and
ruler-LENGTH.jsonl.xz, with --samples of each of RULER's 13 tasks. It then has everything that tasks.py needs besides
the model, in some MB.

GSM8K: all 1,319 test questions. The prompt has five solved examples, the first five of the eight that chain-of-thought
prompting is known by, with their final answers written as in GSM8K (`#### 6`). An answer ends at an empty line or the
next question.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from task_questions import Question, write

LENGTHS = "4096,8192,16384,32768"
SHOTS = 5
NEW = 512  # tokens of an answer to GSM8K
STOP = ["Question:", "\n\n", "<|im_end|>", "</s>"]
_SAID = re.compile(r"\s*So the answer is (\S+?)\.$")


def gsm8k(requests: Path) -> Iterator[Question]:
    with gzip.open(requests, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            doc = line["doc"]
            right = doc["answer"].rsplit("####", 1)[1].strip()
            prompt = five_shots(line["request"]["context"])
            yield Question(f"gsm8k-{doc['id']}", "gsm8k", "gsm8k", prompt, [right], NEW, STOP)


def five_shots(context: str) -> str:
    """Of a prompt whose examples end with `So the answer is 6.`"""
    *solved, asked = context.split("\n\n")
    if len(solved) < SHOTS or not all(_SAID.search(each) for each in solved):
        raise SystemExit(f"expected at least {SHOTS} examples that say their answer, got {len(solved)}")
    return "\n\n".join([*(_SAID.sub(r"\n#### \1", each) for each in solved[:SHOTS]), asked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--lengths", default=LENGTHS, help=f"of RULER, in tokens (default {LENGTHS}; none: '')")
    parser.add_argument("--samples", type=int, default=20, help="of each of RULER's tasks and lengths")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    write(args.target / "gsm8k.jsonl.gz", gsm8k(args.sources / "gsm8k" / "requests.jsonl.gz"))
    lengths = [int(each) for each in args.lengths.split(",") if each]
    if lengths:
        import ruler

        tokenizer = tokenizer_of(args.model)
        sources = ruler.Sources(args.sources / "ruler")
        for length in lengths:
            made = ruler.questions(sources, tokenizer, length, args.samples)
            write(args.target / f"ruler-{length}.jsonl.xz", made)
            print(f"ruler-{length}: {args.samples} of each task", flush=True)


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=True)


if __name__ == "__main__":
    main()

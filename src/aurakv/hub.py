"""Models by name: folders, and ids on the hub as far as it can be reached. Needs neither torch nor transformers."""

from __future__ import annotations

import re
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path

from .errors import FileError, cut

PATIENCE = 2.0  # seconds for a connection, name look-up included: without a network each of them may hang for longer


def check(name: str | Path) -> str:
    """Refuse a model that neither is a folder nor can be an id, or was never downloaded and cannot be now.

    Returns why the hub cannot be asked for it, if that is so."""
    if Path(name).is_dir():
        return f"{name} is a folder"
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(name)):
        raise FileError(f"there is no folder {cut(str(name))} with a model")
    reason = why_unreachable()
    if reason and not _downloaded(str(name)):
        raise refusal(name, reason)
    return reason


def refusal(name: str | Path, reason: str) -> FileError:
    return FileError(
        f"{cut(str(name))} must be a folder with a model of transformers, or the id of one on the hub: {reason}"
    )


def why_unreachable() -> str:
    """Why the hub cannot be reached from here; empty if it can, or if a proxy is to be asked."""
    from huggingface_hub import constants

    address = urllib.parse.urlsplit(constants.ENDPOINT)
    host, port = address.hostname, address.port or 443
    if address.scheme in urllib.request.getproxies() or host is None:
        return ""
    reason = [f"no answer in {PATIENCE:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), PATIENCE).close()
            reason[0] = ""
        except OSError as error:
            reason[0] = error.strerror or str(error)

    attempt = threading.Thread(target=connect, daemon=True)  # a look-up has no time limit of its own
    attempt.start()
    attempt.join(PATIENCE)
    return f"{host} cannot be reached from here ({reason[0]})" if reason[0] else ""


def _downloaded(name: str) -> bool:
    """Whether the hub's cache has something of the model: whether it is enough, transformers will say."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()

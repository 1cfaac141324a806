"""Where files lie that aurakv makes for itself."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """In the cache folder of the platform: $XDG_CACHE_HOME, else ~/.cache. A relative one does not count."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "aurakv"

"""aurakv: a KV cache at 2-8 bits per coordinate, and attention computed directly on its packed codes."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import attention as attention
    from . import backends as backends
    from . import calibration as calibration
    from . import errors as errors
    from . import format as format
    from . import parallel as parallel
    from . import storage as storage
    from .attention.ops import append, attend, decode, encode
    from .attention.partial import Partial, merge, sink
    from .attention.scoring import Scoring
    from .backends import why_not
    from .calibration.policy import Policy
    from .format.codec import Codec, Codes, Format
    from .storage.cache import KVCache
    from .storage.files import load, save
    from .storage.pages import Pages
    from .storage.pool import PagePool

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "Codes",
    "Format",
    "KVCache",
    "PagePool",
    "Pages",
    "Partial",
    "Policy",
    "Scoring",
    "append",
    "attend",
    "decode",
    "encode",
    "load",
    "merge",
    "save",
    "sink",
    "why_not",
]

# Names are imported when they are first used, so that the command line answers before torch is loaded.
_HOMES = {
    "attention.ops": ("append", "attend", "decode", "encode"),
    "attention.partial": ("Partial", "merge", "sink"),
    "attention.scoring": ("Scoring",),
    "backends": ("why_not",),
    "calibration.policy": ("Policy",),
    "format.codec": ("Codec", "Codes", "Format"),
    "storage.cache": ("KVCache",),
    "storage.files": ("load", "save"),
    "storage.pages": ("Pages",),
    "storage.pool": ("PagePool",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = ("attention", "backends", "calibration", "errors", "format", "parallel", "storage")

# Names of 0.1 that live in their own module now.
_MOVED = {
    "errors": ("AuraError", "BackendError", "CapacityError", "FileError", "InputError", "PeerError"),
    "attention.ops": ("append_codes", "attend_dense", "attend_workspace", "scores", "values"),
    "parallel": ("ShardedCache", "all_merge", "load_shards", "receive", "save_shards", "send"),
}
_NEW = {name: f"aurakv.{home}.{name}" for home, names in _MOVED.items() for name in names}
_NEW["Exact"] = "aurakv.storage.uncompressed.Uncompressed"
_NEW |= {name: f"aurakv.attention.{name}" for name in ("ops", "partial", "scoring")}  # modules
_NEW |= {name: f"aurakv.calibration.{name}" for name in ("policy", "tune")}
_NEW |= {name: f"aurakv.format.{name}" for name in ("codec", "packing", "rotation")}
_NEW |= {name: f"aurakv.storage.{name}" for name in ("cache", "files", "legacy", "pages", "pool")}
_NEW |= {
    "calibrate": "aurakv.calibration.statistics",
    "codebook": "aurakv.format.levels",
    "library": "aurakv.attention.torch_ops",
    "table": "aurakv.storage.page_table",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        importlib.import_module(".attention.torch_ops", __name__)  # registers torch.ops.aurakv
        found: object = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    elif name in _PACKAGES:
        found = importlib.import_module(f".{name}", __name__)
    elif name in _NEW:
        sentence = f"aurakv.{name} is {_NEW[name]} now"
        # `from aurakv import …` would replace the sentence of an AttributeError by one of its own
        importing = sys._getframe(1).f_code.co_filename == "<frozen importlib._bootstrap>"
        raise ImportError(sentence, name=__name__) if importing else AttributeError(sentence)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES} - {"TYPE_CHECKING", "annotations", "importlib", "sys"})

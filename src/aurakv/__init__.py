"""aurakv: a KV cache at 2-8 bits per coordinate, and attention computed directly on its packed codes."""

from . import library  # noqa: F401  registers torch.ops.aurakv
from .backends import why_not
from .cache import KVCache
from .codec import Codec, Codes, Format
from .errors import AuraError, BackendError, CapacityError, FileError, InputError, PeerError
from .exact import Exact
from .files import load, save
from .ops import append, append_codes, attend, attend_dense, attend_workspace, decode, encode, scores, values
from .pages import Pages
from .parallel import ShardedCache, all_merge, load_shards, receive, save_shards, send
from .partial import Partial, merge, sink
from .pool import PagePool
from .scoring import Scoring

__version__ = "0.1.0"

__all__ = [
    "AuraError",
    "BackendError",
    "CapacityError",
    "Codec",
    "Codes",
    "Exact",
    "FileError",
    "Format",
    "InputError",
    "KVCache",
    "PagePool",
    "Pages",
    "Partial",
    "PeerError",
    "Scoring",
    "ShardedCache",
    "all_merge",
    "append",
    "append_codes",
    "attend",
    "attend_dense",
    "attend_workspace",
    "decode",
    "encode",
    "load",
    "load_shards",
    "merge",
    "receive",
    "save",
    "save_shards",
    "scores",
    "send",
    "sink",
    "values",
    "why_not",
]

"""aurakv: a KV cache at 2-8 bits per coordinate, and attention computed directly on its packed codes."""

from .attention import torch_ops  # noqa: F401  registers torch.ops.aurakv
from .attention.ops import append, append_codes, attend, attend_dense, attend_workspace, decode, encode, scores, values
from .attention.partial import Partial, merge, sink
from .attention.scoring import Scoring
from .backends import why_not
from .errors import AuraError, BackendError, CapacityError, FileError, InputError, PeerError
from .format.codec import Codec, Codes, Format
from .parallel import ShardedCache, all_merge, load_shards, receive, save_shards, send
from .storage.cache import KVCache
from .storage.files import load, save
from .storage.pages import Pages
from .storage.pool import PagePool
from .storage.uncompressed import Uncompressed

__version__ = "0.1.0"

__all__ = [
    "AuraError",
    "BackendError",
    "CapacityError",
    "Codec",
    "Codes",
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
    "Uncompressed",
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

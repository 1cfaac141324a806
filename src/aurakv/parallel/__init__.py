"""Several processes: a cache whose positions lie with the ranks of a group, and sequences that move between ranks."""

from .collective import all_merge
from .shard_files import load_shards, save_shards
from .sharded_cache import ShardedCache
from .transfer import receive, send

__all__ = ["ShardedCache", "all_merge", "load_shards", "receive", "save_shards", "send"]

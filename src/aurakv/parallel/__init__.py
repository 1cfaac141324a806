"""Several processes: a cache whose positions lie with the ranks of a group, and sequences that move between ranks."""

from .collective import all_merge
from .sharded import ShardedCache

__all__ = ["ShardedCache", "all_merge"]

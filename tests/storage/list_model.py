"""A model of caches that only knows lists of tokens and the slot rule of the specification."""

from __future__ import annotations

import copy

import torch

import aurakv as kv
from aurakv.storage.uncompressed import Uncompressed

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 64
MAX_SEQS = 4
BANK = 997  # different tokens; a token is its index here
FORMATS = ("k4v4", "k8v3:f32", "k16:f32/v2", "k3v16:f16", "k5:lsq/v6")
UNCOMPRESSED = (
    None,
    Uncompressed(first=3, recent=5, dtype=torch.float32, rollback=2),
    Uncompressed(first=20, dtype=torch.bfloat16),
    Uncompressed(recent=20, dtype=torch.float16, rollback=0),
)
LOGITS = torch.tensor([0.5, -torch.inf, 3.0, -1.0])
OPERATIONS = (
    *(["append"] * 4 + ["attend"] * 3 + ["truncate", "fork"] * 2),
    *("append_without_room", "reserve", "reorder", "free"),
)


class Ring:
    """Which position each slot of a ring holds: section 4 of the specification, one token at a time."""

    def __init__(self, page_size: int, window: int, sinks: int, chunk: int, rollback: int) -> None:
        self.page_size, self.window = page_size, window
        self.pinned = -(-sinks // page_size)
        self.width = self.pinned + -(-(window + chunk - 1 + rollback) // page_size) + 1
        self.slots: dict[tuple[int, int], int] = {}

    def write(self, position: int) -> None:
        page = position // self.page_size
        entry = page if page < self.pinned else self.pinned + (page - self.pinned) % (self.width - self.pinned)
        self.slots[entry, position % self.page_size] = position

    def truncate(self, length: int) -> None:
        self.slots = {slot: position for slot, position in self.slots.items() if position < length}

    def held(self) -> list[int]:
        return sorted(self.slots.values())

    def holds(self, start: int, stop: int) -> bool:
        return set(range(max(0, start), stop)) <= set(self.slots.values())


class First(Ring):
    """Room for the first tokens alone."""

    def __init__(self, count: int) -> None:
        self.count, self.window, self.slots = count, 0, {}

    def write(self, position: int) -> None:
        if position < self.count:
            self.slots[0, position] = position

    def holds(self, start: int, stop: int) -> bool:
        return True  # whatever is missing will be among the first tokens when it comes again


class Sequence:
    """The model of a sequence: its tokens in order, and what its rings (its own and the uncompressed tokens') hold."""

    def __init__(self, ring: Ring | None, uncompressed: Ring | None) -> None:
        self.tokens: list[int] = []
        self.ring, self.uncompressed = copy.deepcopy(ring), copy.deepcopy(uncompressed)

    @property
    def rings(self) -> list[Ring]:
        return [ring for ring in (self.ring, self.uncompressed) if ring is not None]

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            for ring in self.rings:
                ring.write(len(self.tokens))
            self.tokens.append(token)

    def can_truncate(self, length: int) -> bool:
        """The next query, at position `length`, must find its whole window."""
        return length == 0 or all(ring.holds(length - ring.window + 1, length) for ring in self.rings)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        for ring in self.rings:
            ring.truncate(length)

    def held(self) -> list[int]:
        return list(range(len(self.tokens))) if self.ring is None else self.ring.held()


class Side:
    """A cache and its model."""

    def __init__(self, cache: kv.KVCache, max_tokens: int | None = None) -> None:
        self.cache, self.max_tokens = cache, max_tokens
        kept, first, recent, rollback = (
            cache.page_table.kept,
            cache.uncompressed.first,
            cache.uncompressed.recent,
            cache.uncompressed.rollback,
        )
        ring = None if kept is None else Ring(cache.pool.page_size, *kept)
        uncompressed = Ring(16, recent, first, 16, rollback) if recent else First(first) if first else None
        self.model = [Sequence(ring, uncompressed) for _ in range(cache.seqs)]

"""Random operations on caches, as machines of hypothesis.

After every operation: the bytes of every held token of every sequence are those of its own vectors (no aliasing, right
copies on write), reference counts and free pages add up (no leak), and the device's tables are the host's.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import aurakv as kv
from aurakv.errors import CapacityError, InputError
from aurakv.storage.uncompressed import Uncompressed
from aurakv.testing import check_partial, poisoned
from aurakv.testing.oracle import History, Rule, attention
from tests.storage.list_model import (
    BANK,
    FORMATS,
    HEADS,
    KEY_DIM,
    KV_HEADS,
    LOGITS,
    MAX_SEQS,
    OPERATIONS,
    UNCOMPRESSED,
    VALUE_DIM,
    Sequence,
    Side,
)


class Machine(RuleBasedStateMachine):
    """Two caches of one kind; `build` makes them."""

    backend, device, page_size = "reference", "cpu", 8

    def build(self, format: kv.Format, uncompressed: Uncompressed | None) -> list[Side]:
        raise NotImplementedError

    @initialize(format=st.sampled_from(FORMATS), uncompressed=st.sampled_from(UNCOMPRESSED), offsets=st.booleans())
    def start(self, format: str, uncompressed: Uncompressed | None, offsets: bool) -> None:
        self.format = kv.Format.parse(format, (KEY_DIM, VALUE_DIM))
        generator = torch.Generator().manual_seed(7)

        def whole(
            *shape: int,
        ) -> torch.Tensor:  # rotations of small integers are exact, so batching changes no bit
            return torch.randint(-8, 9, shape, generator=generator).float().to(self.device)

        self.k, self.v = whole(BANK, KV_HEADS, KEY_DIM), whole(BANK, KV_HEADS, VALUE_DIM)
        self.key_offset = whole(KV_HEADS, KEY_DIM) if offsets and self.format.key.coded else None
        self.value_offset = whole(KV_HEADS, VALUE_DIM) if offsets and self.format.value.coded else None
        self.keys = kv.encode(self.k, self.format.key, self.key_offset, backend=self.backend)
        self.values = kv.encode(self.v, self.format.value, self.value_offset, backend=self.backend)
        with poisoned():
            self.sides = self.build(self.format, uncompressed)
        self.next = 0

    @rule(operation=st.sampled_from(OPERATIONS), seed=st.integers(0, 2**32 - 1))
    def operate(self, operation: str, seed: int) -> None:
        """One rule, and details from a seed: hypothesis would leave out kinds of operations and prefer small ones."""
        draw = random.Random(seed)
        getattr(self, operation)(draw, self.sides[draw.randrange(2)])

    # what the model says

    def ids(self, n: int) -> list[int]:
        """Tokens that were not used for a long time."""
        fresh = [(self.next + i) % BANK for i in range(n)]
        self.next = (self.next + n) % BANK
        return fresh

    def refused(self, side: Side, new: list[int]) -> bool:
        """Whether so many new tokens do not fit: more than a sequence may have, or more pages than there are."""
        if side.max_tokens is not None and any(
            n and len(seq.tokens) + n > side.max_tokens for n, seq in zip(new, side.model, strict=True)
        ):
            return True
        if side.cache.pool.growable:
            return False
        size, pool = side.cache.pool.page_size, side.cache.pool
        users = Counter(page for other in self.sides for row in other.cache.page_table.rows for page in row)
        free = pool.num_pages - len(users.keys() - {-1})
        for n, seq, row in zip(new, side.model, side.cache.page_table.rows, strict=True):
            old = len(seq.tokens)
            for entry in sorted({position // size for position in range(old, old + n)}):
                page = row[entry] if entry < len(row) else -1
                if page < 0:
                    free -= 1
                elif users[page] > 1:
                    users[page] -= 1
                    free -= 1
        return free < 0

    def bytes(self) -> list[object]:
        """Everything that a refused operation must leave alone."""
        state: list[object] = []
        for side in self.sides:
            for table in side.cache.page_tables:
                state += [table.pool.data.cpu().numpy().tobytes(), table.pages.table.tolist()]
                state += [table.pages.lengths.tolist(), copy.deepcopy(table.rows), list(table.lengths)]
                state += [list(table.highest), list(table.pool._references), list(table.pool._free)]
        return state

    # operations

    def append(self, draw: random.Random, side: Side) -> None:
        new, how = self.counts(draw, side), draw.choice(["append", "step", "codes", "pages"])
        starts = [0, *itertools.accumulate(new)]
        tokens = self.ids(starts[-1])
        k, v, cache = self.k[tokens], self.v[tokens], side.cache
        codes = [kv.Codes(c.data[tokens], c.scale if c.scale is None else c.scale[tokens]) for c in self.stored()]
        if len(cache.page_tables) > 1 and how in ("codes", "pages"):
            how = "append"
        q = self.queries(starts[-1])
        part = None
        refused, before = self.refused(side, new), self.bytes()
        try:
            with poisoned():
                if how == "append":
                    cache.append(k, v, starts)
                elif how == "step":
                    part = cache.step(q, k, v, torch.tensor(starts), sink_logits=LOGITS.to(self.device))
                elif how == "codes":
                    cache.append_codes(*codes, starts)
                else:  # as a captured graph does
                    cache.reserve(new)
                    kv.append(cache.pages, k, v, starts, backend=self.backend)
                    cache.sync()
        except CapacityError:
            assert refused
            assert self.bytes() == before
            return
        assert not refused
        for seq, (a, b) in zip(side.model, itertools.pairwise(starts), strict=True):
            seq.append(tokens[a:b])
        if part is not None:
            window = side.cache.page_table.kept
            rule = self.visibility(side, *((None, 0) if window is None else window[:2]))
            self.compare(side, part, q, starts, rule, LOGITS)

    def append_without_room(self, draw: random.Random, side: Side) -> None:
        """Straight to the pages: sequences that do not fit stay as they are, and the next host call says so."""
        new, cache, table = self.counts(draw, side), side.cache, side.cache.page_table
        shared = any(table.pool.references(page) > 1 for row in table.rows for page in row if page >= 0)
        if len(cache.page_tables) > 1 or shared:  # pages are written as they are: a user reserves first
            return
        starts = [0, *itertools.accumulate(new)]
        tokens = self.ids(starts[-1])
        size, room = cache.pool.page_size, [sum(page >= 0 for page in row) for row in table.rows]
        before = self.bytes()
        kv.append(cache.pages, self.k[tokens], self.v[tokens], starts, backend=self.backend)
        missed = False
        for seq, pages, (a, b) in zip(side.model, room, itertools.pairwise(starts), strict=True):
            entries = self.entries(seq, b - a, size)
            if entries and max(entries) >= pages:
                missed = True
            else:
                seq.append(tokens[a:b])
        if missed:
            with pytest.raises(CapacityError, match="did not fit"):
                cache.sync()
            cache.sync()  # reported once
        else:
            cache.sync()
            if not starts[-1]:
                assert self.bytes() == before

    def truncate(self, draw: random.Random, side: Side) -> None:
        seq = draw.randrange(side.cache.seqs)
        model = side.model[seq]
        length = max(0, len(model.tokens) - draw.choice([0, 1, 2, 3, 7, draw.randrange(100)]))
        if not model.can_truncate(length):
            before = self.bytes()
            with pytest.raises(CapacityError, match="rolled back"):
                side.cache.truncate(seq, length)
            assert self.bytes() == before
            return
        side.cache.truncate(seq, length)
        model.truncate(length)

    def free(self, draw: random.Random, side: Side) -> None:
        seq = draw.randrange(side.cache.seqs)
        side.cache.free(seq)
        side.model[seq].truncate(0)
        assert all(set(table.rows[seq]) == {-1} for table in side.cache.page_tables)

    def fork(self, draw: random.Random, side: Side) -> None:
        source, target = draw.randrange(side.cache.seqs), draw.randrange(side.cache.seqs)
        side.cache.fork(source, target)
        side.model[target] = copy.deepcopy(side.model[source])

    def reorder(self, draw: random.Random, side: Side) -> None:
        index = [draw.randrange(side.cache.seqs) for _ in range(draw.randint(1, MAX_SEQS))]
        side.cache.reorder(torch.tensor(index) if draw.random() < 0.5 else index)
        side.model = [copy.deepcopy(side.model[seq]) for seq in index]

    def reserve(self, draw: random.Random, side: Side) -> None:
        new = self.counts(draw, side)
        refused, before = self.refused(side, new), self.bytes()
        try:
            with poisoned():
                side.cache.reserve(new)
        except CapacityError:
            assert refused
            assert self.bytes() == before
        else:
            assert not refused

    def attend(self, draw: random.Random, side: Side) -> None:
        cache, kept = side.cache, side.cache.page_table.kept
        window, sinks, softcap = draw.choice([None, 1, 4, 11]), draw.choice([0, 2]), draw.choice([None, 2.0])
        scoring = None
        if kept is None or window is not None:
            if kept is not None:
                window, sinks = min(window or 0, kept.window), min(sinks, kept.sinks)
            scoring = kv.Scoring(window=window, sinks=sinks, softcap=softcap)
        elif kept is not None:
            window, sinks, softcap = kept.window, kept.sinks, None
        new = [min(draw.choice([0, 1, 2, 17, 1000]), len(seq.tokens)) for seq in side.model]
        starts = [0, *itertools.accumulate(new)]
        q = self.queries(starts[-1])
        held = True
        for n, seq in zip(new, side.model, strict=True):
            first, length = len(seq.tokens) - n + 1, len(seq.tokens)  # one after the first query
            if n and seq.ring is not None:
                held &= seq.ring.holds(first - window, length)
            if n and cache.uncompressed.recent:
                held &= seq.uncompressed.holds(first - cache.uncompressed.recent, length)
        before = self.bytes()
        if held:
            part = cache.attend(q, starts, scoring, precision="float32")
            self.compare(side, part, q, starts, self.visibility(side, window, sinks, softcap), None, "float32")
        else:
            with pytest.raises(InputError, match="no longer held"):
                cache.attend(q, starts, scoring)
        assert self.bytes() == before

    # invariants

    @invariant()
    def nothing_leaks(self) -> None:
        pools: dict[int, tuple[kv.PagePool, Counter[int]]] = {}
        for side in self.sides:
            for table in side.cache.page_tables:
                _, users = pools.setdefault(id(table.pool), (table.pool, Counter()))
                users.update(page for row in table.rows for page in row if page >= 0)
        for pool, users in pools.values():
            assert [users[page] for page in range(pool.num_pages)] == pool._references
            assert sorted([*pool._free, *users]) == list(range(pool.num_pages))
            assert pool.free_pages == pool.num_pages - len(users)

    @invariant()
    def device_is_host(self) -> None:
        for side in self.sides:
            lengths = [len(seq.tokens) for seq in side.model]
            assert side.cache.lengths == lengths
            assert side.cache.pages.data is side.cache.pool.data
            first, recent = side.cache.uncompressed[:2]
            for table in side.cache.page_tables:
                if table is not side.cache.page_table and not recent:
                    lengths = [min(first, length) for length in lengths]
                assert table.pages.lengths.tolist() == table.lengths == lengths
                assert table.pages.table.tolist() == table.rows
                assert int(table.pages.overflow) == 0
                table.pages.check()
                table.pages.check_values()

    @invariant()
    def every_token_is_its_own(self) -> None:
        for side in self.sides:
            for seq, model in enumerate(side.model):
                held = model.held()
                assert side.cache.positions(seq).tolist() == held
                tokens = [model.tokens[position] for position in held]
                for got, wanted in zip(side.cache.codes(seq), self.stored(), strict=True):
                    assert torch.equal(got.data, wanted.data[tokens])
                    assert got.scale is None or torch.equal(got.scale, wanted.scale[tokens])
                if model.uncompressed is not None:
                    table, dtype = side.cache.uncompressed_table, side.cache.uncompressed.dtype
                    held = model.uncompressed.held()
                    assert table.positions(seq).tolist() == held
                    tokens = [model.tokens[position] for position in held]
                    stored = table.pages.stored(seq, table.positions(seq))
                    for got, wanted in zip(stored, (self.k, self.v), strict=True):
                        assert torch.equal(got.data.contiguous().view(dtype), wanted[tokens].to(dtype))

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        for side in self.sides:
            for seq in range(side.cache.seqs):
                side.cache.free(seq)
        for side in self.sides:
            assert all(table.pool.free_pages == table.pool.num_pages for table in side.cache.page_tables)

    # helpers

    def options(self, uncompressed: Uncompressed | None) -> dict[str, object]:
        offsets = {"key_offset": self.key_offset, "value_offset": self.value_offset}
        return {"device": self.device, "uncompressed": uncompressed, "backend": self.backend, **offsets}

    def stored(self) -> tuple[kv.Codes, kv.Codes]:
        return self.keys, self.values

    def counts(self, draw: random.Random, side: Side) -> list[int]:
        """New tokens for each sequence."""
        return [draw.choice([0, 0, 1, 2, 5, draw.randrange(45)]) for _ in range(side.cache.seqs)]

    def queries(self, n: int) -> torch.Tensor:
        rows = torch.arange(n)[:, None, None] * 31 + torch.arange(HEADS)[:, None] * 7 + torch.arange(KEY_DIM) * 3
        return (torch.sin(rows.float()) / 4).to(self.device)

    def entries(self, seq: Sequence, n: int, size: int) -> set[int]:
        """PageTable entries that n more tokens of a sequence are written to."""
        old, ring = len(seq.tokens), seq.ring
        pages = {position // size for position in range(old, old + n)}
        if ring is None:
            return pages
        turn = ring.width - ring.pinned
        return {p if p < ring.pinned else ring.pinned + (p - ring.pinned) % turn for p in pages}

    def visibility(self, side: Side, window: int | None, sinks: int, softcap: float | None = None) -> Rule:
        uncompressed = side.cache.uncompressed
        return Rule(KEY_DIM**-0.5, True, window, sinks, softcap, uncompressed.first, uncompressed.recent)

    def compare(
        self,
        side: Side,
        part: kv.Partial,
        q: torch.Tensor,
        starts: list[int],
        rule: Rule,
        logits: torch.Tensor | None,
        precision: str = "fast",
    ) -> None:
        """The last query of each sequence against the dense oracle over the tokens of the model."""
        fast = kv.backends.fast_error(self.backend) if precision == "fast" else 0.0
        for seq, (model, (a, b)) in enumerate(zip(side.model, itertools.pairwise(starts), strict=True)):
            if a == b:
                continue
            tokens, dtype = model.tokens, side.cache.uncompressed.dtype
            keys, values = (
                kv.Codes(c.data[tokens].cpu(), c.scale if c.scale is None else c.scale[tokens].cpu())
                for c in self.stored()
            )
            offsets = (x if x is None else x.cpu() for x in (self.key_offset, self.value_offset))
            k, v = (
                kv.decode(codes, codec, offset, dtype=torch.float64, backend="reference")  # not on an Apple GPU
                for codes, codec, offset in zip(
                    (keys, values), (self.format.key, self.format.value), offsets, strict=True
                )
            )
            uncompressed = [x[tokens].to(dtype).cpu().double() for x in (self.k, self.v)]
            history = History(k, v, *uncompressed)
            truth, plain = (
                attention(q[b - 1 : b].cpu(), len(tokens), history, rule, logits, t)
                for t in (torch.float64, torch.float32)
            )
            got = kv.Partial(part.out[b - 1 : b].cpu(), part.lse[b - 1 : b].cpu())
            check_partial(got, truth, plain, fast, f"sequence {seq}")


class Paged(Machine):
    """Two caches that share a pool which is too small for what is asked of it; one has a limit on its sequences."""

    def build(self, format: kv.Format, uncompressed: Uncompressed | None) -> list[Side]:
        options = self.options(None)
        cache = {"uncompressed": uncompressed, "backend": options.pop("backend")}
        del options["uncompressed"]
        pool = kv.PagePool(format, -(-100 // self.page_size), self.page_size, KV_HEADS, **options)
        limit = -(-70 // self.page_size) * self.page_size
        return [
            Side(kv.KVCache.paged(pool, 3, **cache)),
            Side(kv.KVCache.paged(pool, 2, max_tokens=limit, **cache), limit),
        ]


class Contiguous(Machine):
    """Caches that grow from nothing and from some capacity."""

    def build(self, format: kv.Format, uncompressed: Uncompressed | None) -> list[Side]:
        return [
            Side(kv.KVCache.contiguous(format, 2, KV_HEADS, capacity, **self.options(uncompressed)))
            for capacity in (0, 70)
        ]


class Rings(Machine):
    """A ring with sinks and rollback, and the smallest one."""

    def build(self, format: kv.Format, uncompressed: Uncompressed | None) -> list[Side]:
        options = {"page_size": self.page_size, **self.options(uncompressed)}
        chunk, rollback = 1 + self.page_size // 2, self.page_size // 3
        return [
            Side(kv.KVCache.ring(format, 2, KV_HEADS, 11, 4, chunk=chunk, rollback=rollback, **options)),
            Side(kv.KVCache.ring(format, 2, KV_HEADS, 1, chunk=1, **options)),
        ]


MACHINES = [(Contiguous, 64), *((machine, page_size) for machine in (Paged, Rings) for page_size in (1, 3, 8, 16))]

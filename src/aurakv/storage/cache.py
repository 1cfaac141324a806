"""KVCache: the compressed keys and values of some sequences in one layer, and attention over them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends, checks
from ..arguments import instance, whole
from ..attention import ops
from ..attention.partial import Partial, in_dtype
from ..attention.scoring import Scoring
from ..attention.step import Step
from ..calibration.key_scale import scaled, scaled_keys
from ..checks import Starts
from ..errors import InputError
from ..format.codec import Codes, Format
from . import compiled, reading
from .attention_call import (
    Call,
    Prepared,
    check_queries,
    check_reach,
    check_step,
    in_pieces,
    longest,
    own_scoring,
    step_kind,
)
from .page_table import Kept, PageTable, round_up
from .pages import Pages
from .pool import PagePool
from .uncompressed import Uncompressed


class KVCache:
    """Made by KVCache.contiguous, KVCache.ring or KVCache.paged. It derives every position itself."""

    def __init__(self, table: PageTable, uncompressed: Uncompressed | None = None, backend: str | None = None) -> None:
        self.page_table, self.backend = table, backend
        self.uncompressed = Uncompressed.of(uncompressed)
        self.uncompressed_table = self.uncompressed.table(table)
        self._on_cpu = table.pool.device.type == "cpu"
        self.default_scoring = own_scoring(None, table.kept, self.uncompressed)
        self._prepared: Prepared | None = None  # the last step of single tokens
        for made in self.page_tables if backend is not None else []:  # now, not after an append has taken pages
            backends.select(backend, made.pool.format, made.pool.device)

    @classmethod
    def contiguous(
        cls,
        format: Format,
        seqs: int,
        kv_heads: int,
        capacity: int = 0,
        device: torch.device | str = "cpu",
        *,
        uncompressed: Uncompressed | None = None,
        key_offset: Tensor | None = None,
        value_offset: Tensor | None = None,
        key_fit: Tensor | None = None,
        value_fit: Tensor | None = None,
        backend: str | None = None,
    ) -> KVCache:
        """One big page per sequence, which grows when it is full. `capacity` tokens have room from the start."""
        seqs, capacity = whole("seqs", seqs, 0), whole("capacity", capacity, 0)
        pages, size = (seqs, round_up(capacity, 64)) if capacity else (0, 64)
        constant = {"key_offset": key_offset, "value_offset": value_offset, "key_fit": key_fit, "value_fit": value_fit}
        pool = PagePool(format, pages, size, kv_heads, device, growable=True, **constant)
        return cls(PageTable(pool, seqs, max_width=1), uncompressed, backend)

    @classmethod
    def ring(
        cls,
        format: Format,
        seqs: int,
        kv_heads: int,
        window: int,
        sinks: int = 0,
        device: torch.device | str = "cpu",
        *,
        page_size: int = 64,
        chunk: int | None = None,
        rollback: int = 0,
        uncompressed: Uncompressed | None = None,
        key_offset: Tensor | None = None,
        value_offset: Tensor | None = None,
        key_fit: Tensor | None = None,
        value_fit: Tensor | None = None,
        backend: str | None = None,
    ) -> KVCache:
        """The last `window` tokens of each sequence and its first `sinks`, in a fixed number of pages.

        `chunk` queries at once still see their whole windows (default window / 8, at least 16; `step` takes more in
        pieces), and a sequence can be truncated by up to `rollback` tokens.
        """
        seqs, kept = whole("seqs", seqs, 0), Kept.of(window, sinks, chunk, rollback)
        constant = {"key_offset": key_offset, "value_offset": value_offset, "key_fit": key_fit, "value_fit": value_fit}
        pool = PagePool(format, 0, page_size, kv_heads, device, growable=True, **constant)
        return cls(PageTable(pool, seqs, kept=kept), uncompressed, backend)

    @classmethod
    def paged(
        cls,
        pool: PagePool,
        seqs: int,
        max_tokens: int | None = None,
        *,
        uncompressed: Uncompressed | None = None,
        backend: str | None = None,
    ) -> KVCache:
        """Sequences in the pages of a pool that other caches may share. `max_tokens` fixes the width of the table."""
        instance("pool", pool, PagePool)
        seqs = whole("seqs", seqs, 0)
        if pool.growable:
            raise InputError("a paged cache needs a pool of fixed size")
        width = None if max_tokens is None else -(-whole("max_tokens", max_tokens, 1) // pool.page_size)
        return cls(PageTable(pool, seqs, width), uncompressed, backend)

    # what is there

    @property
    def format(self) -> Format:
        return self.page_table.pool.format

    @property
    def pool(self) -> PagePool:
        return self.page_table.pool

    @property
    def seqs(self) -> int:
        return len(self.page_table.rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens appended to each sequence so far."""
        self._refresh()
        return list(self.page_table.lengths)

    @property
    def pages(self) -> Pages:
        """What `attend` and `append` take. Valid until the cache grows, is reordered or widens its table."""
        return self.page_table.pages

    @property
    def bytes_held(self) -> int:
        """Every byte this cache occupies: its pages (all of a private pool), tables, offsets, uncompressed tokens."""
        return sum(table.bytes_held for table in self.page_tables)

    @property
    def saturated(self) -> int:
        """How many stored vectors had a scale beyond the range of its dtype."""
        return sum(reading.saturated(codes) for seq in range(self.seqs) for codes in self.codes(seq))

    def positions(self, seq: int) -> Tensor:
        """The positions of a sequence that are still held; in a ring the sinks and the most recent ones."""
        self._refresh()
        return self.page_table.positions(self.page_table.check_seq(seq))

    def codes(self, seq: int) -> tuple[Codes, Codes]:
        """Keys and values of a sequence as they are stored, [n, kv_heads, …] at `positions(seq)`."""
        return self.pages.stored(seq, self.positions(seq))

    def decode(
        self, seq: int, dtype: torch.dtype = torch.float32, *, query: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that the codes of a sequence stand for, [n, kv_heads, dim] at `positions(seq)`.

        With the position of a query, those that it uses uncompressed are the uncompressed ones.
        """
        return reading.decode(self, seq, dtype, query)

    # append and attend

    def append(self, k: Tensor, v: Tensor, starts: Starts = None) -> None:
        """Add tokens [tokens, kv_heads, dim]: sequence i gets rows starts[i]:starts[i+1].

        Without starts each gets one, a single sequence all of them."""
        if torch.compiler.is_compiling():
            return compiled.append(self, k, v, starts)
        checks.new_tokens(k, v, self.pages)
        bounds = self._bounds(starts, k.shape[0])
        self._refresh()
        self._make_room(bounds)
        self._append(k, v, bounds)
        self._append_uncompressed(k, v, bounds)

    def append_codes(self, keys: Codes, values: Codes, starts: Starts = None) -> None:
        """Add tokens that already are encoded, for a cache without uncompressed tokens."""
        if self.uncompressed_table is not None:
            raise InputError("codes cannot be appended to a cache that keeps uncompressed tokens: append the vectors")
        checks.new_codes(keys, values, self.pages)
        bounds = self._bounds(starts, keys.data.shape[0])
        self._refresh()
        self._make_room(bounds)
        ops.append_codes(self.pages, keys, values, bounds, backend=self.backend)
        self.page_table.advance(bounds)

    def attend(
        self,
        q: Tensor,
        starts: Starts = None,
        scoring: Scoring | None = None,
        *,
        sink_logits: Tensor | None = None,
        splits: int | None = None,
        precision: str = "fast",
        rotated: bool = False,
    ) -> Partial:
        """Attention of the last tokens of each sequence, q [tokens, heads, dim], over all it holds.

        Without a scoring everything is visible, in a ring its window and sinks. `rotated`: queries come as R q
        (`format.key.rotate`), and the output stays rotated.
        """
        if torch.compiler.is_compiling():
            compiled.check_rotated(rotated)
            return compiled.step(self, q, None, None, starts, scoring, None, sink_logits, splits, precision)
        call = Call(self._scoring(scoring), sink_logits, checks.splits(splits), precision)
        check_queries(q, self.pages, call)
        instance("rotated", rotated, bool)
        bounds = self._bounds(starts, q.shape[0])
        self._refresh()
        check_reach(bounds, call.scoring, self.page_tables)
        return reading.attend(self, q, bounds, call, rotated)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Starts = None,
        scoring: Scoring | None = None,
        *,
        key_scale: Tensor | None = None,
        sink_logits: Tensor | None = None,
        splits: int | None = None,
        precision: str = "fast",
    ) -> Partial:
        """Append tokens and attend with their queries. However many they are, each query sees its whole window.

        A `key_scale` [kv_heads, dim] changes no score: keys are stored multiplied, queries divided by it.
        """
        if torch.compiler.is_compiling():
            return compiled.step(self, q, k, v, starts, scoring, key_scale, sink_logits, splits, precision)
        kind = step_kind(q, k, v, scoring, splits, precision) if starts is None else None
        known = self._prepared
        if known is not None and known.serves(kind, sink_logits, key_scale) and known.has_room(self.page_table.lengths):
            part = known.run(q, k, v)
            self._advance(range(self.seqs + 1))
            return part
        call = Call(self._scoring(scoring), sink_logits, checks.splits(splits), precision, key_scale)
        check_step(q, k, v, self.pages, call)
        bounds = self._bounds(starts, k.shape[0])
        self._refresh()
        self._make_room(bounds)
        kept = self.page_table.kept
        if kept is None or longest(bounds) <= kept.chunk:
            return self._step(q, k, v, bounds, call, kind if k.shape[0] == self.seqs else None)
        return in_pieces(lambda q, k, v, piece: self._step(q, k, v, piece, call), q, k, v, bounds, kept.chunk)

    # change what is there

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Make room for this many more tokens in every sequence (or in each its own), so that no append has to."""
        new = checks.reserve(tokens, self.seqs)
        self._refresh()
        self._make_room([0, *itertools.accumulate(new)])

    def truncate(self, seq: int, length: int, *, from_codes: bool = False) -> None:
        """Forget the tokens of a sequence from position `length` on.

        Recent tokens that are no longer held uncompressed are refused, or come back `from_codes`, as accurate as these.
        """
        seq, length = self.check_truncate(seq, length, from_codes=from_codes)
        self._prepared = None
        uncompressed = self.uncompressed_table
        lost = uncompressed is not None and not uncompressed.holds_window(length, uncompressed.highest[seq])
        for table in self.page_tables:
            table.truncate(seq, min(length, table.lengths[seq]))
        if lost:
            reading.restore_recent(self, seq)

    def check_truncate(self, seq: int, length: int, *, from_codes: bool = False) -> tuple[int, int]:
        """Raise what `truncate` would raise and change nothing: for those who truncate several sequences or caches.

        Returns both as plain numbers.
        """
        instance("from_codes", from_codes, bool)
        self.sync()
        seq = self.page_table.check_seq(seq)
        length = checks.truncate(seq, length, self.page_table.lengths[seq])
        for table in [self.page_table] if from_codes else self.page_tables:
            table.check_rollback(seq, length)
        return seq, length

    def free(self, seq: int) -> None:
        """Give back the pages of a sequence; it stays as an empty one."""
        self.truncate(seq, 0)

    def fork(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of `source`. Pages are shared until one of the two writes to them."""
        source, target = self.page_table.check_seq(source), self.page_table.check_seq(target)
        self.reorder([source if seq == target else seq for seq in range(self.seqs)])

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence i becomes what sequence index[i] was. The index may repeat, drop or add sequences."""
        chosen = [self.page_table.check_seq(seq) for seq in checks.listed("index", index)]
        self.sync()
        self._prepared = None
        for table in self.page_tables:
            table.reorder(chosen)

    def sync(self) -> None:
        """Read the lengths from the device, after a captured graph or compiled function appended."""
        for table in self.page_tables:
            table.sync()
        uncompressed, lengths = self.uncompressed_table, self.page_table.lengths
        held = self.uncompressed.held(lengths)
        if uncompressed is not None and uncompressed.lengths != held:
            both = zip(lengths, held, uncompressed.lengths, strict=True)
            self.page_table.lengths = [length if h == e else e for length, h, e in both]
            self.page_table.publish()
            raise InputError(
                "this cache keeps uncompressed tokens, so tokens appended directly to its pages were dropped: append"
            )

    # inside

    def __getstate__(self) -> dict[str, object]:
        """What a copy takes over: not the addresses in a prepared step."""
        return {**self.__dict__, "_prepared": None}

    @torch.inference_mode(False)  # a copy that is made in inference mode lives on after it
    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made

    @property
    def page_tables(self) -> list[PageTable]:
        return [self.page_table] if self.uncompressed_table is None else [self.page_table, self.uncompressed_table]

    def _refresh(self) -> None:
        """On the CPU the lengths can be read at any time; on a GPU, appending and attending must not wait for them."""
        if self._on_cpu:
            self.sync()

    def _bounds(self, starts: Starts, tokens: int) -> list[int]:
        return checks.bounds("starts", starts, self.seqs, tokens)

    def _scoring(self, given: Scoring | None) -> Scoring:
        if given is not None:
            instance("scoring", given, Scoring)
        return self.default_scoring if given is None else own_scoring(given, self.page_table.kept, self.uncompressed)

    def _make_room(self, bounds: list[int]) -> None:
        self._prepared = None  # it would keep the memory of pages that have grown
        self.page_table.make_room(bounds)
        uncompressed = self.uncompressed_table
        if uncompressed is not None and not self.first_complete:  # its pool grows and never refuses
            counts = [len(rows) for rows in self.uncompressed.taken(bounds, uncompressed.lengths)]
            if any(counts):
                uncompressed.make_room([0, *itertools.accumulate(counts)])

    def _append(self, k: Tensor, v: Tensor, bounds: list[int]) -> None:
        ops.append(self.pages, k, v, bounds, backend=self.backend)
        self.page_table.advance(bounds)

    def _append_uncompressed(self, k: Tensor, v: Tensor, bounds: list[int]) -> None:
        uncompressed = self.uncompressed_table
        if uncompressed is None:
            return
        taken = self.uncompressed.taken(bounds, uncompressed.lengths)
        if not any(taken):  # the first tokens are complete
            return
        piece = [0, *itertools.accumulate(len(rows) for rows in taken)]
        if piece[-1] < k.shape[0]:
            at = torch.tensor([row for rows in taken for row in rows], device=k.device)
            k, v = k[at], v[at]
        ops.append(uncompressed.pages, k, v, piece, backend=self.backend)
        uncompressed.advance(piece)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], call: Call, kind: tuple[object, ...] | None = None
    ) -> Partial:
        table = self.uncompressed_table
        if table is not None and table.kept is not None and longest(bounds) > table.kept.chunk:
            return self._step_with_dense(q, k, v, bounds, call)
        ring = self.uncompressed.recent > 0
        if not ring and not self.first_complete:
            self._append_uncompressed(scaled_keys(k, call.key_scale), v, bounds)
            kind = None
        pages, rows = self.page_table.pages, checks.on_device(bounds, q.device)
        uncompressed = None if self.uncompressed_table is None else self.uncompressed_table.pages
        step = Step(pages, rows, *call, uncompressed=uncompressed, uncompressed_too=ring)
        run = backends.select(self.backend, self.format, self.pool.device, q.dtype).prepare_step(step, q, k, v)
        if kind is not None:  # what it needs besides the addresses of its arguments is kept for the next token
            limits = [table.page_ends() for table in (self.page_tables if ring else [self.page_table])]
            self._prepared = Prepared(kind, call, pages, [min(each) for each in zip(*limits, strict=True)], run)
        part = run(q, k, v)
        self._advance(bounds)
        return part

    def _step_with_dense(self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], call: Call) -> Partial:
        """Many new tokens: the uncompressed ones are among those held so far and the new ones themselves."""
        given = q.dtype
        q, k = scaled(q, k, call.key_scale)
        self._append(k, v, bounds)
        part = reading.attend_with_dense(self, q, k, v, bounds, call)
        self._append_uncompressed(k, v, bounds)
        return in_dtype(part, given)

    def _advance(self, bounds: Sequence[int]) -> None:
        """Follow what a step did."""
        self.page_table.advance(bounds)
        if self.uncompressed_table is not None and self.uncompressed.recent > 0:
            self.uncompressed_table.advance(bounds)

    @property
    def first_complete(self) -> bool:
        """Whether no token to come will be an uncompressed one."""
        uncompressed = self.uncompressed_table
        return uncompressed is None or (
            not self.uncompressed.recent and min(uncompressed.lengths, default=0) >= self.uncompressed.first
        )

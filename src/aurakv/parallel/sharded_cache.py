"""ShardedCache: one layer's keys and values of some sequences, each position with one rank of a process group."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import arguments, checks
from ..attention.partial import Partial, merge, sink
from ..attention.scoring import Scoring
from ..checks import Starts
from ..errors import CapacityError, InputError, counted
from ..format.codec import Format
from ..storage.attention_call import Call, check_queries, check_step, in_pieces, own_scoring
from ..storage.cache import KVCache
from ..storage.page_table import MAX_LENGTH, Kept, PageTable, round_up
from ..storage.pool import PagePool
from ..storage.uncompressed import Uncompressed
from .agreement import Found, together
from .attention import attend_share, sees_all_before
from .collective import merged
from .group import Group
from .placement import Share, own_rows


class Whole(NamedTuple):
    """What all ranks together are: the same on each of them."""

    block: int  # positions that stay together
    chunk: int  # queries that are attended at once where something is kept for a window only
    kept: Kept | None  # of a ring
    uncompressed: Uncompressed
    max_tokens: int | None


class ShardedCache:
    """Made by ShardedCache.growing, ShardedCache.ring or ShardedCache.paged, on every rank with the same arguments.

    Blocks of positions go round the ranks, beginning with another one for each sequence, so that no rank ever has more
    than a block of a sequence more than another. Every rank calls every method, with the same arguments: tokens and
    queries are replicated, each rank stores its own part and all get the same result.
    """

    def __init__(self, local: KVCache, whole: Whole, group: Group, homes: list[int] | None = None) -> None:
        self.local, self.whole, self._group = local, whole, group
        self._homes = [seq % group.size for seq in range(local.seqs)] if homes is None else homes
        self._shares = self._make_shares()
        self._lengths = [0] * local.seqs
        self._highest = [0] * local.seqs  # longest a sequence has been: what a window has left behind is overwritten
        self._agreed = [0] * local.seqs  # length up to which every rank is known to have pages of its own
        self.check()

    @classmethod
    def growing(
        cls,
        format: Format,
        seqs: int,
        kv_heads: int,
        device: torch.device | str = "cpu",
        *,
        block: int = 256,
        page_size: int | None = None,
        chunk: int = 256,
        uncompressed: Uncompressed | None = None,
        key_offset: Tensor | None = None,
        value_offset: Tensor | None = None,
        key_fit: Tensor | None = None,
        value_fit: Tensor | None = None,
        backend: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> ShardedCache:
        """Pages of a block each (or of page_size tokens) in memory that grows when it is full."""
        constant = {"key_offset": key_offset, "value_offset": value_offset, "key_fit": key_fit, "value_fit": value_fit}
        pool = PagePool(
            format, 0, block if page_size is None else page_size, kv_heads, device, growable=True, **constant
        )
        return cls._make(pool, seqs, Whole(block, chunk, None, Uncompressed.of(uncompressed), None), backend, group)

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
        block: int = 64,
        page_size: int | None = None,
        chunk: int = 256,
        rollback: int = 0,
        uncompressed: Uncompressed | None = None,
        key_offset: Tensor | None = None,
        value_offset: Tensor | None = None,
        key_fit: Tensor | None = None,
        value_fit: Tensor | None = None,
        backend: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> ShardedCache:
        """The last `window` tokens of each sequence and its first `sinks`; each rank has its part of them."""
        kept = Kept.of(window, sinks, chunk, rollback)
        constant = {"key_offset": key_offset, "value_offset": value_offset, "key_fit": key_fit, "value_fit": value_fit}
        pool = PagePool(
            format, 0, block if page_size is None else page_size, kv_heads, device, growable=True, **constant
        )
        return cls._make(
            pool, seqs, Whole(block, kept.chunk, kept, Uncompressed.of(uncompressed), None), backend, group
        )

    @classmethod
    def paged(
        cls,
        pool: PagePool,
        seqs: int,
        max_tokens: int | None = None,
        *,
        block: int = 256,
        chunk: int = 256,
        uncompressed: Uncompressed | None = None,
        backend: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> ShardedCache:
        """Sequences in the pages of a pool on each rank. Where one rank has no room for its part, all refuse."""
        arguments.instance("pool", pool, PagePool)
        if pool.growable:
            raise InputError("a paged cache needs a pool of fixed size")
        if max_tokens is not None:
            max_tokens = arguments.whole("max_tokens", max_tokens, 1)
        return cls._make(
            pool, seqs, Whole(block, chunk, None, Uncompressed.of(uncompressed), max_tokens), backend, group
        )

    @classmethod
    def _make(
        cls, pool: PagePool, seqs: int, whole: Whole, backend: str | None, group: dist.ProcessGroup | None
    ) -> ShardedCache:
        members, uncompressed = Group(group), whole.uncompressed
        seqs = arguments.whole("seqs", seqs, 0)
        block, chunk = arguments.whole("block", whole.block, 1), arguments.whole("chunk", whole.chunk, 1)
        whole = whole._replace(block=block, chunk=chunk)
        share = Share(whole.block, members.size)
        unit, reason = (
            (16, "with uncompressed tokens")
            if uncompressed.first or uncompressed.recent
            else (pool.page_size, "for these pages")
        )
        if whole.block % pool.page_size or whole.block % unit:
            unit = pool.page_size if whole.block % pool.page_size else unit
            raise InputError(f"block must be a multiple of {unit} {reason}, got {whole.block}")
        if whole.kept is not None:
            table = PageTable(pool, seqs, kept=share.kept(whole.kept))
        else:
            width = None if whole.max_tokens is None else -(-share.most(whole.max_tokens) // pool.page_size)
            table = PageTable(pool, seqs, width)
        return cls(KVCache(table, share.uncompressed(uncompressed, whole.chunk), backend), whole, members)

    # what is there

    @property
    def format(self) -> Format:
        return self.local.format

    @property
    def seqs(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens appended to each sequence so far, on all ranks together."""
        return list(self._lengths)

    @property
    def bytes_held(self) -> int:
        """Every byte that this rank holds."""
        return self.local.bytes_held

    def share(self, seq: int) -> Share:
        """Which positions of a sequence lie with this rank."""
        return self._shares[seq]

    def check(self) -> None:
        """Refuse, on all ranks, when their caches or lengths are not the same. Made once when a cache is; waits for
        all ranks."""
        pool = self.local.pool
        dims = self.format.key.dim, self.format.value.dim
        shape = (self.format.name, dims, pool.kv_heads, pool.page_size)
        said = (self.whole, shape, self._lengths, self._highest, self._homes)
        digest = hashlib.sha256(repr(said).encode())
        for name, constant in pool.constants.items():
            digest.update(name.encode() + constant.cpu().numpy().tobytes())
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        everyone = self._group.gather(mine.to(self._group.wire(pool.device)), "the check of a sharded cache").cpu()
        other = (everyone != mine).any(1).nonzero().flatten().tolist()
        if other:
            raise InputError(
                f"a sharded cache must be the same on all ranks, but that of rank {self._group.rank}"
                f" differs from that of {other} in its format, offsets, options or lengths"
            )

    # append and attend

    def append(self, k: Tensor, v: Tensor, starts: Starts = None) -> None:
        """Add tokens [tokens, kv_heads, dim]: sequence i gets rows starts[i]:starts[i+1].

        Without starts each gets one, a single sequence all of them."""

        def check() -> list[int]:
            checks.new_tokens(k, v, self.local.pages)
            return self._bounds(starts, k.shape[0])

        bounds = self._together("append", check, k, v)
        self._make_room([b - a for a, b in itertools.pairwise(bounds)])
        self._append(k, v, bounds)

    def attend(
        self,
        q: Tensor,
        starts: Starts = None,
        scoring: Scoring | None = None,
        *,
        sink_logits: Tensor | None = None,
        splits: int | None = None,
        precision: str = "fast",
    ) -> Partial:
        """Attention of the last tokens of each sequence, q [tokens, heads, dim], over what all ranks hold."""

        def check() -> tuple[list[int], Call]:
            call = self._call(scoring, sink_logits, splits, precision)
            check_queries(q, self.local.pages, call)
            bounds = self._bounds(starts, q.shape[0])
            for seq, length in enumerate(self._lengths):
                queries = bounds[seq + 1] - bounds[seq]
                if queries > length and call.scoring.causal:
                    raise InputError(f"sequence {seq} has {counted(length, 'token')}, got {counted(queries, 'query')}")
                if queries > self.whole.chunk and self._windowed:
                    raise InputError(
                        f"{counted(queries, 'query')} of sequence {seq} may reach back to tokens that are no longer"
                        f" held: attend with at most {counted(self.whole.chunk, 'query')}, or use step"
                    )
            return bounds, call

        bounds, call = self._together("attend", check, q)
        return self._finish(attend_share(self, q, bounds, call), sink_logits)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Starts = None,
        scoring: Scoring | None = None,
        *,
        sink_logits: Tensor | None = None,
        splits: int | None = None,
        precision: str = "fast",
    ) -> Partial:
        """Append tokens and attend with their queries. However many they are, each query sees its whole window."""

        def check() -> tuple[list[int], Call]:
            call = self._call(scoring, sink_logits, splits, precision)
            check_step(q, k, v, self.local.pages, call)
            return self._bounds(starts, k.shape[0]), call

        bounds, call = self._together("step", check, q, k, v)
        new = [b - a for a, b in itertools.pairwise(bounds)]
        self._make_room(new)
        if not self._windowed or max(new, default=0) <= self.whole.chunk:
            part = self._step(q, k, v, bounds, call)
        else:
            part = in_pieces(lambda q, k, v, piece: self._step(q, k, v, piece, call), q, k, v, bounds, self.whole.chunk)
        return self._finish(part, sink_logits)

    # change what is there

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Make room for this many more tokens in every sequence (or in each its own), so that no append has to."""
        new = self._together("reserve", lambda: checks.reserve(tokens, self.seqs))
        self._make_room(new)
        self.local.reserve(self._counts(new))

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens of a sequence from position `length` on."""
        seq = self.local.page_table.check_seq(seq)
        length = checks.truncate(seq, length, self._lengths[seq])
        if self._windowed and 0 < length < self._highest[seq] - self._rollback:
            raise CapacityError(
                f"sequence {seq} has been {self._highest[seq]} tokens long and can be rolled back by"
                f" {self._rollback}, got a truncate to {length}"
            )
        self.local.truncate(seq, self.share(seq).count(length))
        self._lengths[seq] = self._agreed[seq] = length
        self._highest[seq] = self._highest[seq] if length else 0

    def free(self, seq: int) -> None:
        """Give back the pages of a sequence; it stays as an empty one."""
        self.truncate(seq, 0)

    def fork(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of `source`. Pages are shared until one of the two writes to them."""
        source, target = self.local.page_table.check_seq(source), self.local.page_table.check_seq(target)
        self.reorder([source if seq == target else seq for seq in range(self.seqs)])

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence i becomes what sequence index[i] was. The index may repeat, drop or add sequences."""
        chosen = checks.listed("index", index)
        self.local.reorder(chosen)
        self._lengths = [self._lengths[seq] for seq in chosen]
        self._highest = [self._highest[seq] for seq in chosen]
        self._homes = [self._homes[seq] for seq in chosen]
        self._shares = self._make_shares()
        self._agreed = list(self._lengths)  # a page that is shared has to be copied first

    # inside

    @property
    def _windowed(self) -> bool:
        """Whether something is held for a window only: a ring, or the most recent tokens uncompressed."""
        return self.whole.kept is not None or self.whole.uncompressed.recent > 0

    @property
    def _rollback(self) -> int:
        kept, uncompressed = self.whole.kept, self.whole.uncompressed
        limits = [] if kept is None else [kept.rollback]
        return min([*limits, uncompressed.rollback] if uncompressed.recent else limits)

    def _together(self, what: str, check: Callable[[], Found], *given: Tensor) -> Found:
        """What was found right here, if all ranks make this call with tensors like these, at the same lengths."""
        said = f"{what} of a sharded cache"
        return together(self._group, said, check, lambda found: (*given, found, self._lengths))

    def _call(self, scoring: Scoring | None, sink_logits: Tensor | None, splits: int | None, precision: str) -> Call:
        own = own_scoring(scoring, self.whole.kept, self.whole.uncompressed)
        return Call(own, sink_logits, checks.splits(splits), precision)

    def _bounds(self, starts: Starts, tokens: int) -> list[int]:
        return checks.bounds("starts", starts, self.seqs, tokens)

    def _make_room(self, new: list[int]) -> None:
        """Room on every rank, or a refusal on every rank. Fixed pools may differ, so their ranks ask each other; only
        when a page begins, or one that was shared is written to."""
        totals = [length + n for length, n in zip(self._lengths, new, strict=True)]
        longest, most = max(totals, default=0), self.whole.max_tokens or MAX_LENGTH
        if longest > most:
            raise CapacityError(f"a sequence of this cache holds at most {most} tokens, got {longest}")
        pool = self.local.pool
        if pool.growable or all(total <= known for total, known in zip(totals, self._agreed, strict=True)):
            return  # what grows makes room when it is written to
        failure = ""
        try:
            self.local.reserve(self._counts(new))
        except CapacityError as error:
            failure = str(error)
        answers = self._group.numbers(int(bool(failure)), pool.device, "making room")
        full = [rank for rank, answer in enumerate(answers) if answer]
        if full:
            raise CapacityError(f"there is no room on the ranks {full}" + (f"; here {failure}" if failure else ""))
        self._agreed = [max(a, round_up(b, pool.page_size)) for a, b in zip(self._agreed, totals, strict=True)]

    def _counts(self, new: list[int]) -> list[int]:
        """How many of so many new tokens of each sequence come to this rank."""
        each = zip(self._shares, self._lengths, new, strict=True)
        return [share.count(length + n) - share.count(length) for share, length, n in each]

    def _make_shares(self) -> list[Share]:
        rank, ranks = self._group.rank, self._group.size
        return [Share(self.whole.block, ranks, (rank - home) % ranks) for home in self._homes]

    def _append(self, k: Tensor, v: Tensor, bounds: list[int]) -> None:
        rows, mine = own_rows(self._shares, self._lengths, bounds)
        if len(rows) == k.shape[0]:
            self.local.append(k, v, mine)
        elif rows:
            at = torch.tensor(rows, device=k.device)
            self.local.append(k[at], v[at], mine)
        self._advance(bounds)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], call: Call) -> Partial:
        if self._is_local(bounds, call.scoring):  # sinks are added once, to the result of all ranks
            part = self.local.step(q, k, v, None, call.scoring, splits=call.splits, precision=call.precision)
            self._advance(bounds)
            return part
        self._append(k, v, bounds)
        return attend_share(self, q, bounds, call)

    def _is_local(self, bounds: list[int], scoring: Scoring) -> bool:
        """Whether a step is one of the local cache: one token for each sequence, which comes here and sees all."""
        one_each = bounds == list(range(self.seqs + 1))
        return one_each and sees_all_before(scoring) and own_rows(self._shares, self._lengths, bounds)[1] == bounds

    def _advance(self, bounds: list[int]) -> None:
        for seq, (a, b) in enumerate(itertools.pairwise(bounds)):
            self._lengths[seq] += b - a
            self._highest[seq] = max(self._highest[seq], self._lengths[seq])

    def _finish(self, part: Partial, sink_logits: Tensor | None) -> Partial:
        part = merged(part, self._group)
        return part if sink_logits is None else merge(part, sink(sink_logits, part))

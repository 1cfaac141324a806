"""Run a case on a backend and compare every stored byte and every output with the oracle."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from .. import backends
from ..attention import ops
from ..attention.partial import Partial
from ..attention.scoring import Scoring
from ..backends import reference
from ..format.codec import Codec, Codes, Format
from ..format.packing import unpack
from ..storage import pages, pool
from ..storage.cache import KVCache
from ..storage.pool import PagePool
from ..storage.uncompressed import Uncompressed
from .cases import PHASES, Case
from .oracle import Answer, History, Rule, attention

EPS32 = torch.finfo(torch.float32).eps


def run(case: Case, backend: str, device: str = "cpu", precision: str = "fast") -> None:
    """Append and attend through all steps of a case; AssertionError on the first difference."""
    with poisoned():
        _Run(case, backend, device, precision).run()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh page memory holds NaN in every float, so that whoever reads what nobody wrote is found out."""

    def allocate(*args: object) -> Tensor:
        data = pages.allocate(*args)  # type: ignore[arg-type]
        return data.fill_(255)

    with mock.patch.object(pool, "allocate", allocate):
        yield


class _Run:
    def __init__(self, case: Case, backend: str, device: str, precision: str) -> None:
        self.case, self.backend, self.precision = case, backend, precision
        self.device = torch.device(device)
        self.rng = torch.Generator().manual_seed(sum(map(ord, case.name)))
        self.format = Format.parse(case.format, case.dims, dtype=case.dtype)
        self.steps = PHASES[case.phase]
        self.cache = self._make_cache()
        self.rule = Rule(
            case.dims[0] ** -0.5,
            case.causal,
            case.window,
            case.sinks,
            case.softcap,
            case.uncompressed[0],
            case.uncompressed[1],
        )
        self.logits = self._make_logits()
        empty = [torch.zeros(0, case.kv_heads, d, dtype=torch.float64) for d in case.dims]
        self.history = [History(empty[0], empty[1], empty[0], empty[1]) for _ in self.steps[0]]
        self.codes: list[list[tuple[Codes, Codes]]] = [[] for _ in self.steps[0]]

    def run(self) -> None:
        for number, new in enumerate(self.steps):
            starts = [0, *itertools.accumulate(new)]
            k, v = self._tokens(starts[-1])
            q = self._random(starts[-1], self.case.kv_heads * self.case.group, self.case.dims[0]) * self.case.stretch
            if number == 0 and self.case.damage != "none":
                (k if self.case.damage == "key" else v)[4, 0, 1] = torch.nan
            part = self.cache.step(
                q.to(self.device),
                k.to(self.device),
                v.to(self.device),
                starts,
                self._scoring(),
                sink_logits=None if self.logits is None else self.logits.to(self.device),
                splits=self.case.splits,
                precision=self.precision,
            )
            self._remember(k, v, starts)
            self._check_stored()
            self._check_attention(q, starts, part)

    def _make_cache(self) -> KVCache:
        case, seqs = self.case, len(self.steps[0])
        uncompressed = Uncompressed(*case.uncompressed, dtype=case.dtype)
        offsets: list[Tensor | None] = [None, None]
        if case.offset:
            offsets = [torch.randn(case.kv_heads, d, generator=self.rng).to(self.device) * 2 for d in case.dims]
        if case.storage == "contiguous":
            return KVCache.contiguous(
                self.format, seqs, case.kv_heads, 0, self.device, uncompressed=uncompressed,
                key_offset=offsets[0], value_offset=offsets[1], backend=self.backend,
            )  # fmt: skip
        if case.storage == "ring":
            assert case.window is not None
            return KVCache.ring(
                self.format, seqs, case.kv_heads, case.window, case.sinks, self.device, page_size=case.page_size,
                chunk=8, uncompressed=uncompressed, key_offset=offsets[0], value_offset=offsets[1],
                backend=self.backend,
            )  # fmt: skip
        tokens = max(map(sum, zip(*self.steps, strict=True)))
        paged = PagePool(
            self.format, seqs * -(-tokens // case.page_size) + 5, case.page_size, case.kv_heads, self.device,
            key_offset=offsets[0], value_offset=offsets[1],
        )  # fmt: skip
        torch.manual_seed(1)
        paged._free = [paged._free[i] for i in torch.randperm(len(paged._free)).tolist()]  # pages in no order
        return KVCache.paged(paged, seqs, uncompressed=uncompressed, backend=self.backend)

    def _make_logits(self) -> Tensor | None:
        heads = self.case.kv_heads * self.case.group
        if self.case.sink_logits == "none":
            return None
        logits = torch.randn(heads, generator=self.rng)
        if self.case.sink_logits != "normal":
            logits[::2] = float(self.case.sink_logits)
        return logits

    def _scoring(self) -> Scoring:
        case = self.case
        return Scoring(
            causal=case.causal, window=case.window, sinks=case.sinks, softcap=case.softcap, threshold=case.threshold
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.case.dtype)

    def _tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values with log-normal norms, as rows of a wider tensor: not contiguous."""
        result = []
        for dim in self.case.dims:
            wide = self._random(n, self.case.kv_heads, dim + 8)
            norm = torch.exp(torch.randn(n, self.case.kv_heads, 1, generator=self.rng) / 2).to(self.case.dtype)
            result.append((wide * norm)[..., 8:])
        return result[0], result[1]

    def _remember(self, k: Tensor, v: Tensor, starts: list[int]) -> None:
        """What the new tokens must be stored as, by this backend's own encode, itself checked against float64."""
        format, held = self.format, self.cache.pool
        encoded = []
        for x, codec, offset in ((k, format.key, held.key_offset), (v, format.value, held.value_offset)):
            codes = ops.encode(x.to(self.device), codec, offset, backend=self.backend)
            check_codes(codes, x, codec, None if offset is None else offset.cpu())
            encoded.append(_to_cpu(codes))
        decoded = [
            reference.decode(codes, codec, None if o is None else o.cpu(), False, torch.float64)
            for codes, codec, o in zip(
                encoded, (format.key, format.value), (held.key_offset, held.value_offset), strict=True
            )
        ]
        uncompressed = [x.to(self.cache.uncompressed.dtype).double() for x in (k, v)]
        for seq, (a, b) in enumerate(itertools.pairwise(starts)):
            old = self.history[seq]
            new = (decoded[0][a:b], decoded[1][a:b], uncompressed[0][a:b], uncompressed[1][a:b])
            self.history[seq] = History(*(torch.cat(pair) for pair in zip(old, new, strict=True)))
            self.codes[seq].append((_rows(encoded[0], slice(a, b)), _rows(encoded[1], slice(a, b))))

    def _check_stored(self) -> None:
        for seq, chunks in enumerate(self.codes):
            length = sum(len(keys.data) for keys, _ in chunks)
            assert self.cache.lengths[seq] == length, (
                f"sequence {seq} has length {self.cache.lengths[seq]}, not {length}"
            )
            held = self.cache.positions(seq).cpu()
            for side, stored in enumerate(self.cache.codes(seq)):
                data = torch.cat([chunk[side].data for chunk in chunks])[held]
                assert torch.equal(stored.data.cpu(), data), f"sequence {seq}: stored bytes differ from encode"
                if stored.scale is not None:
                    scale = torch.cat([s for chunk in chunks if (s := chunk[side].scale) is not None])[held]
                    same = torch.equal(stored.scale.cpu().nan_to_num(-1.0), scale.nan_to_num(-1.0))
                    assert same, f"sequence {seq}: stored scales differ from encode"

    def _check_attention(self, q: Tensor, starts: list[int], part: Partial) -> None:
        for seq, (a, b) in enumerate(itertools.pairwise(starts)):
            if a == b:
                continue
            end = len(self.history[seq].decoded_k)
            truth = attention(q[a:b], end, self.history[seq], self.rule, self.logits, torch.float64)
            plain = attention(q[a:b], end, self.history[seq], self.rule, self.logits, torch.float32)
            got = Partial(part.out[a:b].cpu(), part.lse[a:b].cpu())
            fast = backends.fast_error(self.backend) if self.precision == "fast" else 0.0
            check_partial(got, truth, plain, max(fast, self.case.threshold * end), f"sequence {seq}")


def check_partial(got: Partial, truth: Answer, plain: Answer, fast_error: float, where: str) -> None:
    """Errors against float64 at most twice those of float32 torch plus rounding, or what the backend states."""
    out, lse = got.out.double(), got.lse.double()
    for name, x, t in (("out", out, truth.out), ("lse", lse, truth.lse)):
        assert x.shape == t.shape, f"{where}: {name} has shape {list(x.shape)}, not {list(t.shape)}"
        assert torch.equal(x.isnan(), t.isnan()), f"{where}: {name} is NaN where it should not be, or the reverse"
    infinite = truth.lse.isinf()
    assert torch.equal(lse[infinite], truth.lse[infinite]), f"{where}: lse must be infinite where nothing is visible"
    unseen = infinite | (truth.size == 0)
    assert not bool(out[unseen & ~out[..., 0].isnan()].any()), f"{where}: out must be 0 where nothing is visible"
    good = ~(truth.out[..., 0].isnan() | unseen)
    if bool(good.any()):
        unit = truth.size[good]
        error = ((out - truth.out)[good].norm(dim=-1) / unit).max().item()
        usual = ((plain.out.double() - truth.out)[good].norm(dim=-1) / unit).max().item()
        rounding = torch.finfo(got.out.dtype).eps
        scores = EPS32 * (4 + truth.lse[good].abs().max().item())  # a weight is as wrong as its score
        allowed = max(2 * (usual + rounding + scores), fast_error + rounding)
        assert error <= allowed, f"{where}: out differs by {error:.2e} of the values' norm, allowed {allowed:.2e}"
    good = ~(truth.lse.isnan() | infinite)
    if bool(good.any()):
        error = (lse - truth.lse)[good].abs().max().item()
        usual = (plain.lse.double() - truth.lse)[good].abs().max().item()
        size = 1 + truth.lse[good].abs().max().item()
        allowed = max(2 * (usual + 4 * EPS32 * size), fast_error * size)
        assert error <= allowed, f"{where}: lse differs by {error:.2e}, allowed {allowed:.2e}"


def check_codes(codes: Codes, x: Tensor, codec: Codec, offset: Tensor | None) -> None:
    """Codes as float64 chooses them, except within rounding of a boundary; scales within rounding of their dtype."""
    if not codec.coded:
        expected = x.to(codec.dtype).contiguous().view(torch.uint8)
        assert torch.equal(codes.data.cpu(), expected), "vectors stored at 16 bits differ from the input"
        return
    assert codes.scale is not None
    data, scale = codes.data.cpu(), codes.scale.cpu().double()
    bad = ~x.double().isfinite().all(-1)
    assert bool(scale[bad].isnan().all()), "a vector that is not finite must get the scale NaN"
    y = codec.rotate((x.double() if offset is None else x.double() - offset.double()).nan_to_num(0.0))
    rms = y.square().mean(-1, keepdim=True).sqrt()
    unit = y / torch.where(rms > 0, rms, 1)
    boundaries = codec.boundary_tensor(torch.float64, unit.device)
    got = unpack(data, codec.bits)
    low = torch.cat([boundaries.new_tensor([-torch.inf]), boundaries])[got]
    high = torch.cat([boundaries, boundaries.new_tensor([torch.inf])])[got]
    slack = 2e-5 * (1 + unit.abs())
    inside = (unit >= low - slack) & (unit <= high + slack)
    assert bool(inside[~bad].all()), "a code is not the nearest level"
    chosen = codec.level_tensor(torch.float64, unit.device)[got]
    energy = chosen.square().sum(-1)
    wanted = (y.square().sum(-1) / energy).sqrt() if codec.scale == "l2" else (y * chosen).sum(-1) / energy
    wanted = torch.where((energy > 0) & (rms[..., 0] > 0), wanted, 0).clamp(max=torch.finfo(codec.dtype).max)
    slack = torch.finfo(codec.dtype).eps * wanted.abs() + torch.finfo(codec.dtype).smallest_normal * 1e-2
    assert bool(((scale - wanted).abs() <= slack + 1e-5 * wanted)[~bad].all()), "a scale is wrong"


def _to_cpu(codes: Codes) -> Codes:
    return Codes(codes.data.cpu(), None if codes.scale is None else codes.scale.cpu())


def _rows(codes: Codes, rows: slice) -> Codes:
    return Codes(codes.data[rows], None if codes.scale is None else codes.scale[rows])

"""The CPU in C++: a library without torch or Python, called through ctypes with plain structures (native/aura.h).

`native` uses the best instruction set of this processor; `native-avx512`, `native-avx2`, `native-neon` and
`native-generic` are the same with a given one. Arithmetic is int16 on codes (docs/cpu.md states the accuracy), float32
if precision="float32" and in portable kernels; float64 arguments are computed in float32. Threads are torch's
own, their number torch.get_num_threads().
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor

from ...attention.partial import Partial, in_dtype, join
from ...attention.scoring import Scoring
from ...attention.step import Attention, Rows, Run, Step, written
from ...calibration.key_scale import scaled_queries
from ...errors import InputError
from ...format.codec import Codec, Codes, Format, unknown_width
from ...storage.pages import Pages
from . import abi

WIDTHS = (2, 3, 4, 5, 6, 8, 16)  # bits that the library has kernels for
FAST_ERROR = 2e-3  # bound of int16 arithmetic; portable kernels have float32 only


class Native:
    """One instruction set, or the best one if none is given."""

    float64 = False

    def __init__(self, isa: str | None = None) -> None:
        self.name = "native" if isa is None else f"native-{isa}"
        self.fast_error = 0.0 if isa == "generic" else FAST_ERROR
        self._wanted = isa
        self._index: int | str | None = None

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        lib, index = abi.library(), self._find()
        return "" if isinstance(lib, str) or isinstance(index, str) else lib.aura_isa_name(index).decode()

    def _find(self) -> int | str:
        """Index of the instruction set in the library, or why there is none."""
        if self._index is None:
            self._index = self._search()
        return self._index

    def _search(self) -> int | str:
        lib = abi.library()
        if isinstance(lib, str):
            return lib
        for i in range(lib.aura_isa_count()):
            name = lib.aura_isa_name(i).decode()
            if self._wanted in (None, name) and lib.aura_isa_supported(i):
                return i
            if self._wanted == name:
                return f"this processor lacks {abi.NAMES[name]}"
        return f"the native library has no {self._wanted} kernels on this architecture"

    def why_not(self, format: Format | None, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it computes on the CPU, got {device}"
        index = self._find()
        return index if isinstance(index, str) else unknown_width(format, WIDTHS)

    def _call(self, name: str, packed: bytes) -> None:
        getattr(abi.library(), name)(self._index, packed)

    def workspace_bytes(self, pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
        capacity = pages.table.shape[1] * pages.page_size
        lib = cast(ctypes.CDLL, abi.library())
        return lib.aura_attend_workspace(
            pages.seqs, tokens, heads, pages.kv_heads, capacity, pages.format.value.dim, splits or 0
        )

    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None, fit: Tensor | None = None) -> Codes:
        rows = abi.plain(x).reshape(-1, *x.shape[-2:])
        n, heads, _ = rows.shape
        data = torch.empty(*x.shape[:-1], codec.row_bytes, dtype=torch.uint8)
        scale = torch.empty(x.shape[:-1], dtype=codec.dtype) if codec.coded else None
        packed = abi.ENCODE.pack(
            abi.codec_address(codec),
            rows.data_ptr(),
            abi.DTYPES[rows.dtype],
            n,
            heads,
            rows.stride(0),
            rows.stride(1),
            abi.pointer(offset),
            data.data_ptr(),
            abi.pointer(scale),
            *abi.fit(fit),
            abi.thread_count(),
            abi.pool(),
        )
        self._call("aura_encode", packed)
        return Codes(data, scale)

    def decode(self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
        data, scale = abi.side_by_side(codes)
        out = torch.empty(*data.shape[:-1], codec.dim, dtype=torch.float32 if dtype == torch.float64 else dtype)
        heads = data.shape[-2]
        packed = abi.DECODE.pack(
            abi.codec_address(codec),
            data.data_ptr(),
            abi.pointer(scale),
            data.numel() // max(1, heads * codec.row_bytes),
            heads,
            abi.pointer(offset),
            rotated,
            abi.DTYPES[out.dtype],
            out.data_ptr(),
            abi.thread_count(),
            abi.pool(),
        )
        self._call("aura_decode", packed)
        return out.to(dtype)

    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
        data, scale = abi.side_by_side(codes)
        x = abi.plain(q)
        out = torch.empty(*q.shape[:2], data.shape[0], dtype=x.dtype)
        packed = abi.SCORES.pack(
            abi.codec_address(codec),
            data.data_ptr(),
            abi.pointer(scale),
            *data.shape[:2],
            abi.pointer(offset),
            x.data_ptr(),
            abi.DTYPES[x.dtype],
            *q.shape[:2],
            x.stride(0),
            x.stride(1),
            out.data_ptr(),
            abi.thread_count(),
            abi.pool(),
        )
        self._call("aura_scores", packed)
        return out.to(q.dtype)

    def values(self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
        data, scale = abi.side_by_side(codes)
        x = weights.float() if weights.dtype == torch.float64 else weights
        out = torch.empty(*x.shape[:2], codec.dim, dtype=x.dtype)
        packed = abi.VALUES.pack(
            abi.codec_address(codec),
            data.data_ptr(),
            abi.pointer(scale),
            *data.shape[:2],
            abi.pointer(offset),
            x.data_ptr(),
            abi.DTYPES[x.dtype],
            *x.shape[:2],
            *x.stride(),
            threshold,
            out.data_ptr(),
            abi.thread_count(),
            abi.pool(),
        )
        self._call("aura_values", packed)
        return out.to(weights.dtype)

    def append(self, pages: Pages, k: Tensor, v: Tensor, rows: Rows) -> None:
        k, v, starts = abi.plain(k), abi.plain(v), rows.starts.contiguous()
        self._call("aura_append", abi.pack_append(pages, None, k, v, starts))

    def append_codes(self, pages: Pages, keys: Codes, values: Codes, rows: Rows) -> None:
        keys, values, starts = abi.side_by_side(keys), abi.side_by_side(values), rows.starts.contiguous()
        self._call("aura_append", abi.pack_append_codes(pages, keys, values, starts))

    def attend(self, q: Tensor, attention: Attention) -> Partial:
        pages, scoring, workspace = attention.pages, attention.scoring, attention.workspace
        if workspace is not None and workspace.data_ptr() % 4:
            raise InputError("workspace must be aligned to 4 bytes")
        x, starts, ends = abi.plain(q), attention.rows.starts.contiguous(), attention.query_ends.contiguous()
        kind = (x.shape, x.stride(), q.dtype, scoring, attention.splits, attention.precision, abi.pointer(workspace))
        known = pages.memo.get("native attend")
        if known is None or known[0] is not starts or known[1] is not ends or known[2] != kind:
            known = (starts, ends, kind, self._describe(attention, q, x, starts, ends))
            pages.memo["native attend"] = known
        return self._run(None, known[3], pages.format.value.dim, q, x, None, None, attention.sink_logits)

    def attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        key_starts: Tensor,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
    ) -> Partial:
        k, v, key_starts = abi.plain(k), abi.plain(v), key_starts.contiguous()
        dense = ctypes.create_string_buffer(
            abi.DENSE.pack(
                abi.raw_codec_address(k.shape[2], k.dtype),
                abi.raw_codec_address(v.shape[2], v.dtype),
                k.data_ptr(),
                v.data_ptr(),
                k.stride(0),
                k.stride(1),
                v.stride(0),
                v.stride(1),
                key_starts.data_ptr(),
                k.shape[1],
            )
        )
        x, where, source = abi.plain(q), (rows.starts.contiguous(), ends.contiguous()), (0, ctypes.addressof(dense), 0)
        packed = abi.pack_attend(source, x, k.shape[2], where, scoring, (0, True, 0))
        return self._run(None, packed, v.shape[2], q, x, None, None, sink_logits)

    def prepare_step(self, step: Step, q: Tensor, k: Tensor | None, v: Tensor | None) -> Run:
        """One call of the library for both. All is packed here but the addresses of the arguments, the only thing that
        changes between two tokens."""
        pages, starts = step.pages, step.rows.starts.contiguous()
        factors = None if step.key_scale is None else step.key_scale.to(torch.float32).contiguous()
        x, append = abi.plain(q), None
        as_they_are = x is q
        if k is not None and v is not None:
            new_k, new_v = abi.plain(k), abi.plain(v)
            also = step.uncompressed if step.uncompressed_too else None
            append = abi.pack_append(pages, also, new_k, new_v, starts, factors)
            as_they_are = as_they_are and new_k is k and new_v is v
        ends = step.query_ends.contiguous()
        coded, uncompressed = step.over_codes(), step.read_uncompressed()
        attend = self._describe(coded, q, x, starts, ends, uncompressed, factors)
        held = (step, starts, ends, factors, coded, uncompressed)  # their addresses are packed
        dim, sink_logits = pages.format.value.dim, step.sink_logits
        copies = step.copies
        new = starts.diff() if step.counted and append is not None else None

        def run(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
            if k is not None and v is not None:
                for each in copies:
                    each.store(k, v, factors, starts)
            if new is not None:
                held[0].pages.lengths.sub_(new)
            if as_they_are:
                return self._run(append, attend, dim, q, q, k, v, sink_logits, out)
            k, v = (None if y is None else abi.plain(y) for y in (k, v))
            return self._run(append, attend, dim, q, abi.plain(q), k, v, sink_logits, out)

        recent = step.over_recent()
        if recent is None:
            return run

        def with_recent(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor | None = None) -> Partial:
            part = join(run(q, k, v), self.attend(scaled_queries(q, factors), recent))
            return written(in_dtype(part, q.dtype), out)

        return with_recent

    def _describe(
        self,
        attention: Attention,
        q: Tensor,
        x: Tensor,
        starts: Tensor,
        ends: Tensor,
        uncompressed: Pages | None = None,
        key_scale: Tensor | None = None,
    ) -> bytes:
        """What a call of `attend` needs but for the addresses that change from call to call."""
        pages, scoring = attention.pages, attention.scoring
        source = (abi.pages_address(pages), 0, 0 if uncompressed is None else abi.pages_address(uncompressed))
        float32 = attention.precision == "float32" or q.dtype == torch.float64
        options = (attention.splits or 0, float32, abi.pointer(attention.workspace))
        return abi.pack_attend(source, x, pages.format.key.dim, (starts, ends), scoring, options, key_scale)

    def _run(
        self,
        append: bytes | None,
        attend: bytes,
        value_dim: int,
        q: Tensor,
        x: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sink_logits: Tensor | None,
        given: Tensor | None = None,
    ) -> Partial:
        """What was packed, with the addresses of these arguments and of the results."""
        sink = None if sink_logits is None else sink_logits.to(torch.float32).contiguous()
        fits = given is not None and given.dtype == x.dtype and given.is_contiguous()
        out = given if given is not None and fits else torch.empty((*x.shape[:2], value_dim), dtype=x.dtype)
        lse = torch.empty((x.shape[0], x.shape[1]), dtype=torch.float32)
        cast(ctypes.CDLL, abi.library()).aura_step(
            self._index, append, attend, x.data_ptr(), abi.pointer(k), abi.pointer(v),
            out.data_ptr(), lse.data_ptr(), abi.pointer(sink), abi.thread_count(),
        )  # fmt: skip
        part = Partial(out, lse) if q.dtype != torch.float64 else Partial(out.double(), lse.double())
        return part if fits else written(part, given)


backends = {backend.name: backend for backend in (Native(), *map(Native, abi.NAMES))}

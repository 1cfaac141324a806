"""The CPU in C++: a library without torch or Python, called through ctypes with plain structures (native/aura.h).

`native` uses the best instruction set of this processor; `native-avx512`, `native-avx2` and `native-generic` are
the same with a given one. Arithmetic is int16 on codes (docs/cpu.md states the accuracy), float32 if precision="exact";
float64 arguments are computed in float32. Threads are torch's own, their number torch.get_num_threads().
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..codebook import boundaries
from ..codec import Codec, Codes, Format
from ..errors import InputError
from ..pages import Pages
from ..partial import Partial
from ..rotation import base_order, hadamard, signs
from ..scoring import Scoring

FAST_ERROR = 2e-3  # bound of int16 arithmetic; portable kernels have float32 only

_LIBRARY = "_native.so"
_VERSION = 3  # AURA_VERSION of native/aura.h
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NAMES = {
    "avx512": "AVX-512 with VNNI and VBMI",
    "avx2": "AVX2 with FMA and BMI2",
    "generic": "",
}

# The structures of native/aura.h: Q is a pointer, q an int64_t, d a double.
_PAGES = struct.Struct("8Q11q")
_DENSE = struct.Struct("4Q4qQq")
_ATTEND = struct.Struct("4Q3q4Q3qQd3qd3qd2qQqQ")
_ENCODE = struct.Struct("2Q5q3QqQ")
_APPEND = struct.Struct("3Q6q2QqQqqQ")
_DECODE = struct.Struct("3Q2qQ2qQqQ")
_SCORES = struct.Struct("3Q2q2Q5qQqQ")
_VALUES = struct.Struct("3Q2q2Q6qdQqQ")

_forked = False


def _after_fork() -> None:
    """The threads of torch's pool do not exist in a forked child: it computes on one."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The compiled library, or one sentence that says why there is none."""
    places = [Path(place) / _LIBRARY for place in sys.modules[__package__].__path__]  # several when editable
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return (
            "the native library was not built when aurakv was installed (it needs a C++17 compiler: GCC 10, Clang 14"
            " or newer; reinstall with one)"
        )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    if lib.aura_version() != _VERSION:
        return "the native library was built for another version of aurakv: reinstall it"
    lib.aura_isa_name.restype = ctypes.c_char_p
    lib.aura_codec.restype = ctypes.c_void_p
    lib.aura_attend_workspace.restype = ctypes.c_int64
    lib.aura_attend_workspace.argtypes = [ctypes.c_int64] * 6
    for name in ("attend", "encode", "append", "decode", "scores", "values"):
        function = getattr(lib, f"aura_{name}")
        function.restype, function.argtypes = None, [ctypes.c_int64, ctypes.c_char_p]
    lib.aura_step.restype = None
    lib.aura_step.argtypes = [ctypes.c_int64, *[ctypes.c_char_p] * 2, *[ctypes.c_void_p] * 6, ctypes.c_int64]
    return lib


@functools.cache
def _pool() -> int:
    """Address of torch_parallel_for, with which torch (from 2.10 on) lends its threads; 0 where it has none."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


@functools.lru_cache(maxsize=1024)
def _codec(codec: Codec) -> int:
    """Address of the codec as the library knows it. It lives as long as the process: a few kilobytes each."""
    if not codec.coded:
        return _raw_codec(codec.dim, codec.dtype)
    base = base_order(codec.dim)
    numbers = (codec.dim, codec.bits, _DTYPES[codec.dtype], int(codec.scale == "lsq"), base)
    root = codec.dim**-0.5
    floats = (
        codec.levels,
        boundaries(codec.levels),
        [s * root for s in signs(codec.dim, codec.seed)],
        hadamard(codec.dim)[:base, :base].flatten().tolist(),
    )
    arrays = [(ctypes.c_float * len(x))(*x) for x in floats]
    return cast(ctypes.CDLL, _library()).aura_codec((ctypes.c_int64 * 5)(*numbers), *arrays)


@functools.lru_cache(maxsize=1024)
def _raw_codec(dim: int, dtype: torch.dtype) -> int:
    numbers = (ctypes.c_int64 * 5)(dim, 16, _DTYPES[dtype], 0, 1)
    return cast(ctypes.CDLL, _library()).aura_codec(numbers, None, None, None, None)


def _pages(pages: Pages) -> int:
    """Address of the pages as the library knows them, remembered in the object."""
    known = pages.__dict__.get("_native")
    if known is None:
        f, layout = pages.format, pages.format.layout(pages.page_size)
        packed = _PAGES.pack(
            _codec(f.key),
            _codec(f.value),
            pages.data.data_ptr(),
            pages.table.data_ptr(),
            pages.lengths.data_ptr(),
            pages.overflow.data_ptr(),
            _pointer(pages.key_offset),
            _pointer(pages.value_offset),
            pages.data.shape[0],
            pages.kv_heads,
            *pages.table.shape,
            pages.page_size,
            pages.pinned,
            pages.ring,
            layout.bytes,
            layout.key_scales,
            layout.value_codes,
            layout.value_scales,
        )
        buffer = ctypes.create_string_buffer(packed, len(packed))
        known = (ctypes.addressof(buffer), buffer)
        object.__setattr__(pages, "_native", known)
    return known[0]


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _threads() -> int:
    return 1 if _forked else torch.get_num_threads()


def _plain(x: Tensor) -> Tensor:
    """As the library reads tensors: float32, float16 or bfloat16, coordinates side by side, any other stride."""
    if x.dtype == torch.float64:
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
        lib, index = _library(), self._find()
        return "" if isinstance(lib, str) or isinstance(index, str) else lib.aura_isa_name(index).decode()

    def _find(self) -> int | str:
        """Index of the instruction set in the library, or why there is none."""
        if self._index is None:
            self._index = self._search()
        return self._index

    def _search(self) -> int | str:
        lib = _library()
        if isinstance(lib, str):
            return lib
        for i in range(lib.aura_isa_count()):
            name = lib.aura_isa_name(i).decode()
            if self._wanted in (None, name) and lib.aura_isa_supported(i):
                return i
            if self._wanted == name:
                return f"this processor lacks {_NAMES[name]}"
        return f"the native library has no {self._wanted} kernels on this architecture"

    def why_not(self, format: Format | None, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it computes on the CPU, got {device}"
        index = self._find()
        return index if isinstance(index, str) else None

    def _call(self, name: str, packed: bytes) -> None:
        getattr(_library(), name)(self._index, packed)

    def workspace_bytes(self, pages: Pages, tokens: int, heads: int, splits: int | None) -> int:
        capacity = pages.table.shape[1] * pages.page_size
        lib = cast(ctypes.CDLL, _library())
        return lib.aura_attend_workspace(tokens, heads, pages.kv_heads, capacity, pages.format.value.dim, splits or 0)

    def encode(self, x: Tensor, codec: Codec, offset: Tensor | None) -> Codes:
        rows = _plain(x).reshape(-1, *x.shape[-2:])
        n, heads, _ = rows.shape
        data = torch.empty(*x.shape[:-1], codec.row_bytes, dtype=torch.uint8)
        scale = torch.empty(x.shape[:-1], dtype=codec.dtype) if codec.coded else None
        packed = _ENCODE.pack(
            _codec(codec),
            rows.data_ptr(),
            _DTYPES[rows.dtype],
            n,
            heads,
            rows.stride(0),
            rows.stride(1),
            _pointer(offset),
            data.data_ptr(),
            _pointer(scale),
            _threads(),
            _pool(),
        )
        self._call("aura_encode", packed)
        return Codes(data, scale)

    def decode(self, codes: Codes, codec: Codec, offset: Tensor | None, rotated: bool, dtype: torch.dtype) -> Tensor:
        data, scale = codes.data.contiguous(), None if codes.scale is None else codes.scale.contiguous()
        out = torch.empty(*data.shape[:-1], codec.dim, dtype=torch.float32 if dtype == torch.float64 else dtype)
        heads = data.shape[-2]
        packed = _DECODE.pack(
            _codec(codec),
            data.data_ptr(),
            _pointer(scale),
            data.numel() // max(1, heads * codec.row_bytes),
            heads,
            _pointer(offset),
            rotated,
            _DTYPES[out.dtype],
            out.data_ptr(),
            _threads(),
            _pool(),
        )
        self._call("aura_decode", packed)
        return out.to(dtype)

    def scores(self, q: Tensor, codes: Codes, codec: Codec, offset: Tensor | None) -> Tensor:
        data, scale = codes.data.contiguous(), None if codes.scale is None else codes.scale.contiguous()
        x = _plain(q)
        out = torch.empty(*q.shape[:2], data.shape[0], dtype=x.dtype)
        packed = _SCORES.pack(
            _codec(codec),
            data.data_ptr(),
            _pointer(scale),
            *data.shape[:2],
            _pointer(offset),
            x.data_ptr(),
            _DTYPES[x.dtype],
            *q.shape[:2],
            x.stride(0),
            x.stride(1),
            out.data_ptr(),
            _threads(),
            _pool(),
        )
        self._call("aura_scores", packed)
        return out.to(q.dtype)

    def values(self, weights: Tensor, codes: Codes, codec: Codec, offset: Tensor | None, threshold: float) -> Tensor:
        data, scale = codes.data.contiguous(), None if codes.scale is None else codes.scale.contiguous()
        x = weights.float() if weights.dtype == torch.float64 else weights
        out = torch.empty(*x.shape[:2], codec.dim, dtype=x.dtype)
        packed = _VALUES.pack(
            _codec(codec),
            data.data_ptr(),
            _pointer(scale),
            *data.shape[:2],
            _pointer(offset),
            x.data_ptr(),
            _DTYPES[x.dtype],
            *x.shape[:2],
            *x.stride(),
            threshold,
            out.data_ptr(),
            _threads(),
            _pool(),
        )
        self._call("aura_values", packed)
        return out.to(weights.dtype)

    def append(self, pages: Pages, k: Tensor, v: Tensor, starts: Tensor) -> None:
        k, v = _plain(k), _plain(v)
        strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        types = (_DTYPES[k.dtype], _DTYPES[v.dtype])
        self._append(pages, k, v, types, strides, (0, 0), starts)

    def append_codes(self, pages: Pages, keys: Codes, values: Codes, starts: Tensor) -> None:
        k, v = keys.data.contiguous(), values.data.contiguous()
        scales = [None if x is None else x.contiguous() for x in (keys.scale, values.scale)]
        self._append(pages, k, v, None, (0, 0, 0, 0), (_pointer(scales[0]), _pointer(scales[1])), starts)

    def _append(
        self,
        pages: Pages,
        k: Tensor,
        v: Tensor,
        types: tuple[int, int] | None,
        strides: tuple[int, int, int, int],
        scales: tuple[int, int],
        starts: Tensor,
    ) -> None:
        starts = starts.contiguous()
        self._call("aura_append", _pack_append(pages, k, v, types, strides, scales, starts))

    def attend(
        self,
        q: Tensor,
        pages: Pages,
        starts: Tensor,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
        splits: int | None,
        precision: str,
        workspace: Tensor | None,
    ) -> Partial:
        if workspace is not None and workspace.data_ptr() % 4:
            raise InputError("workspace must be aligned to 4 bytes")
        exact = precision == "exact" or q.dtype == torch.float64
        f, source = pages.format, (_pages(pages), 0, 0)
        options = (splits or 0, exact, _pointer(workspace))
        return self._attend(source, q, f.key.dim, f.value.dim, (starts, ends), scoring, sink_logits, options)

    def attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        ends: Tensor,
        scoring: Scoring,
        sink_logits: Tensor | None,
    ) -> Partial:
        k, v, key_starts = _plain(k), _plain(v), key_starts.contiguous()
        dense = ctypes.create_string_buffer(
            _DENSE.pack(
                _raw_codec(k.shape[2], k.dtype),
                _raw_codec(v.shape[2], v.dtype),
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
        source, rows = (0, ctypes.addressof(dense), 0), (starts, ends)
        return self._attend(source, q, k.shape[2], v.shape[2], rows, scoring, sink_logits, (0, True, 0))

    def _attend(
        self,
        source: tuple[int, int, int],
        q: Tensor,
        key_dim: int,
        value_dim: int,
        rows: tuple[Tensor, Tensor],
        scoring: Scoring,
        sink_logits: Tensor | None,
        options: tuple[int, bool, int],
    ) -> Partial:
        x, sink = _plain(q), _sink(sink_logits)
        out, lse = _results(x, value_dim)
        results = (out.data_ptr(), lse.data_ptr(), _pointer(sink))
        rows = (rows[0].contiguous(), rows[1].contiguous())
        self._call("aura_attend", _pack_attend(source, x, key_dim, results, rows, scoring, options))
        return Partial(out.to(q.dtype), lse.double() if q.dtype == torch.float64 else lse)

    def step(
        self,
        pages: Pages,
        beside: Pages | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: list[int],
        scoring: Scoring,
        sink_logits: Tensor | None,
        splits: int | None,
        precision: str,
    ) -> Partial:
        """Append and attend in one call. The exact tokens lie in `beside`, if any. What a call of the same kind needs
        is packed once and remembered in the pages: between two tokens only the addresses of the arguments change."""
        x, k, v = _plain(q), _plain(k), _plain(v)
        kind = (bounds, x.shape, x.stride(), q.dtype, k.stride(), k.dtype, v.stride(), v.dtype, scoring, splits, precision)
        known = pages.__dict__.get("_native_step")
        if known is None or known[0] is not beside or known[1] != kind:
            starts = torch.tensor(bounds, dtype=torch.int32)
            types, strides = (_DTYPES[k.dtype], _DTYPES[v.dtype]), (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
            append = _pack_append(pages, k, v, types, strides, (0, 0), starts)
            exact = precision == "exact" or q.dtype == torch.float64
            source = (_pages(pages), 0, 0 if beside is None else _pages(beside))
            rows, options = (starts, pages.lengths), (splits or 0, exact, 0)
            attend = _pack_attend(source, x, pages.format.key.dim, (0, 0, 0), rows, scoring, options)
            known = (beside, kind, append, attend, starts)
            object.__setattr__(pages, "_native_step", known)
        sink = None if sink_logits is None else _sink(sink_logits)
        out, lse = _results(x, pages.format.value.dim)
        cast(ctypes.CDLL, _library()).aura_step(
            self._index, known[2], known[3],
            x.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), _pointer(sink), _threads(),
        )  # fmt: skip
        return Partial(out, lse) if q.dtype != torch.float64 else Partial(out.double(), lse.double())


def _sink(logits: Tensor | None) -> Tensor | None:
    return None if logits is None else logits.to(torch.float32).contiguous()


def _results(x: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    out = torch.empty((x.shape[0], x.shape[1], value_dim), dtype=x.dtype)
    return out, torch.empty((x.shape[0], x.shape[1]), dtype=torch.float32)


def _pack_append(
    pages: Pages,
    k: Tensor,
    v: Tensor,
    types: tuple[int, int] | None,
    strides: tuple[int, int, int, int],
    scales: tuple[int, int],
    starts: Tensor,
) -> bytes:
    return _APPEND.pack(
        _pages(pages),
        k.data_ptr(),
        v.data_ptr(),
        *(types or (0, 0)),
        *strides,
        *scales,
        types is None,
        starts.data_ptr(),
        k.shape[0],
        _threads(),
        _pool(),
    )


def _pack_attend(
    source: tuple[int, int, int],
    x: Tensor,
    key_dim: int,
    results: tuple[int, int, int],
    rows: tuple[Tensor, Tensor],
    scoring: Scoring,
    options: tuple[int, bool, int],
) -> bytes:
    out, lse, sink = results
    return _ATTEND.pack(
        *source,
        x.data_ptr(),
        _DTYPES[x.dtype],
        x.stride(0),
        x.stride(1),
        out,
        lse,
        rows[0].data_ptr(),
        rows[1].data_ptr(),
        x.shape[0],
        x.shape[1],
        rows[0].shape[0] - 1,
        sink,
        scoring.multiplier(key_dim),
        scoring.causal,
        scoring.window or 0,
        scoring.sinks,
        scoring.softcap or 0.0,
        scoring.first,
        scoring.recent,
        scoring.exact,
        scoring.threshold,
        *options,
        _threads(),
        _pool(),
    )


backends = {backend.name: backend for backend in (Native(), Native("avx512"), Native("avx2"), Native("generic"))}

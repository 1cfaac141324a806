"""The border to the C++ library: loading it, and its structures (native/aura.h) from what Python has."""

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

from ...attention.scoring import Scoring
from ...format.codec import Codec, Codes
from ...format.levels import boundaries
from ...format.rotation import base_order, hadamard
from ...storage.pages import Pages

LIBRARY = "_native.so"
VERSION = 6  # AURA_VERSION of native/aura.h
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NAMES = {
    "avx512": "AVX-512 with VNNI and VBMI",
    "avx2": "AVX2 with FMA and BMI2",
    "neon": "NEON",
    "generic": "",
}

# The structures of native/aura.h: Q is a pointer, q an int64_t, d a double.
PAGES = struct.Struct("8Q11qQqQq")
DENSE = struct.Struct("4Q4qQq")
ATTEND = struct.Struct("4Q3q4Q3q2Qd3qd3qd2qQqQ")
ENCODE = struct.Struct("2Q5q3QQqqQ")
APPEND = struct.Struct("4Q6q3QqQqqQ")
DECODE = struct.Struct("3Q2qQ2qQqQ")
SCORES = struct.Struct("3Q2q2Q5qQqQ")
VALUES = struct.Struct("3Q2q2Q6qdQqQ")

_forked = False


def _after_fork() -> None:
    """The threads of torch's pool do not exist in a forked child: it computes on one."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _built() -> Path | None:
    """The library. An editable package has two places: for the one installed with it, and, beside the sources, for one
    of `make native`. The later one counts."""
    places = [Path(place) / LIBRARY for place in sys.modules["aurakv.backends"].__path__]
    return max((place for place in places if place.exists()), key=lambda place: place.stat().st_mtime, default=None)


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or one sentence that says why there is none."""
    path = _built()
    if path is None:
        return (
            "the native library was not built when aurakv was installed (it needs a C++17 compiler: GCC 10, Clang 14"
            " or newer; reinstall with one)"
        )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native library cannot be loaded: {error}"
    if lib.aura_version() != VERSION:
        return "the native library was built for another version of aurakv: reinstall it"
    lib.aura_isa_name.restype = ctypes.c_char_p
    lib.aura_codec.restype = ctypes.c_void_p
    lib.aura_attend_workspace.restype = ctypes.c_int64
    lib.aura_attend_workspace.argtypes = [ctypes.c_int64] * 7
    for name in ("encode", "append", "decode", "scores", "values"):
        function = getattr(lib, f"aura_{name}")
        function.restype, function.argtypes = None, [ctypes.c_int64, ctypes.c_char_p]
    lib.aura_step.restype = None
    lib.aura_step.argtypes = [ctypes.c_int64, *[ctypes.c_char_p] * 2, *[ctypes.c_void_p] * 6, ctypes.c_int64]
    return lib


@functools.cache
def pool() -> int:
    """Address of torch_parallel_for, with which torch (from 2.10 on) lends its threads; 0 where it has none."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


@functools.lru_cache(maxsize=1024)
def codec_address(codec: Codec) -> int:
    """Address of the codec as the library knows it. It lives as long as the process: a few kilobytes each."""
    if not codec.coded:
        return raw_codec_address(codec.dim, codec.dtype)
    base = base_order(codec.dim) if codec.rotates else 0
    numbers = (codec.dim, codec.bits, DTYPES[codec.dtype], int(codec.scale == "lsq"), base)
    root = codec.dim**-0.5
    floats = (
        codec.levels,
        boundaries(codec.levels),
        [s * root for s in codec.sign_list()] if codec.rotates else (),
        hadamard(codec.dim)[:base, :base].flatten().tolist(),
    )
    arrays = [(ctypes.c_float * len(x))(*x) for x in floats]
    return cast(ctypes.CDLL, library()).aura_codec((ctypes.c_int64 * 5)(*numbers), *arrays)


@functools.lru_cache(maxsize=1024)
def raw_codec_address(dim: int, dtype: torch.dtype) -> int:
    numbers = (ctypes.c_int64 * 5)(dim, 16, DTYPES[dtype], 0, 1)
    return cast(ctypes.CDLL, library()).aura_codec(numbers, None, None, None, None)


def pages_address(pages: Pages) -> int:
    """Address of the pages as the library knows them, remembered in the object."""
    known = pages.memo.get("native")
    if known is None:
        f, layout = pages.format, pages.format.layout(pages.page_size)
        packed = PAGES.pack(
            codec_address(f.key),
            codec_address(f.value),
            pages.data.data_ptr(),
            pages.table.data_ptr(),
            pages.lengths.data_ptr(),
            pages.overflow.data_ptr(),
            pointer(pages.key_offset),
            pointer(pages.value_offset),
            pages.data.shape[0],
            pages.kv_heads,
            *pages.table.shape,
            pages.page_size,
            pages.pinned,
            pages.ring,
            pages.data.shape[2],
            layout.key_scales,
            layout.value_codes,
            layout.value_scales,
            *fit(pages.key_fit),
            *fit(pages.value_fit),
        )
        buffer = ctypes.create_string_buffer(packed, len(packed))
        known = (ctypes.addressof(buffer), buffer)
        pages.memo["native"] = known
    return known[0]


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def fit(x: Tensor | None) -> tuple[int, int]:
    """The structure Fit."""
    return (0, -1) if x is None else (x.data_ptr(), x.shape[1])


def thread_count() -> int:
    return 1 if _forked else torch.get_num_threads()


def plain(x: Tensor) -> Tensor:
    """As the library reads tensors: float32, float16 or bfloat16, coordinates side by side, any other stride."""
    if x.dtype == torch.float64:
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def side_by_side(codes: Codes) -> Codes:
    return Codes(codes.data.contiguous(), None if codes.scale is None else codes.scale.contiguous())


def pack_append(
    pages: Pages,
    uncompressed: Pages | None,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_scale: Tensor | None = None,
) -> bytes:
    return APPEND.pack(
        pages_address(pages),
        0 if uncompressed is None else pages_address(uncompressed),
        k.data_ptr(),
        v.data_ptr(),
        DTYPES[k.dtype],
        DTYPES[v.dtype],
        *k.stride()[:2],
        *v.stride()[:2],
        0,
        0,
        pointer(key_scale),
        False,
        starts.data_ptr(),
        k.shape[0],
        thread_count(),
        pool(),
    )


def pack_append_codes(pages: Pages, keys: Codes, values: Codes, starts: Tensor) -> bytes:
    return APPEND.pack(
        pages_address(pages),
        0,
        keys.data.data_ptr(),
        values.data.data_ptr(),
        *(0, 0, 0, 0, 0, 0),
        pointer(keys.scale),
        pointer(values.scale),
        0,
        True,
        starts.data_ptr(),
        keys.data.shape[0],
        thread_count(),
        pool(),
    )


def pack_attend(
    source: tuple[int, int, int],
    x: Tensor,
    key_dim: int,
    rows: tuple[Tensor, Tensor],
    scoring: Scoring,
    options: tuple[int, bool, int],
    key_scale: Tensor | None = None,
) -> bytes:
    """Without what changes from call to call: the addresses of queries, results and sinks, which aura_step is given."""
    return ATTEND.pack(
        *source,
        0,
        DTYPES[x.dtype],
        x.stride(0),
        x.stride(1),
        0,
        0,
        rows[0].data_ptr(),
        rows[1].data_ptr(),
        x.shape[0],
        x.shape[1],
        rows[0].shape[0] - 1,
        0,
        pointer(key_scale),
        scoring.multiplier(key_dim),
        scoring.causal,
        scoring.window or 0,
        scoring.sinks,
        scoring.softcap or 0.0,
        scoring.first,
        scoring.recent,
        scoring.only_uncompressed,
        scoring.threshold,
        *options,
        thread_count(),
        pool(),
    )

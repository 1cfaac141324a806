"""One attention call on codes against torch on uncompressed tensors. No number without a right result of its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import backends, checks
from ..attention.ops import attend, encode
from ..attention.scoring import Scoring
from ..attention.step import Attention
from ..backends.triton import backend as triton
from ..errors import AuraError
from ..format.codec import Format
from ..storage.cache import KVCache
from ..storage.pages import Pages
from ..storage.pool import PagePool
from .timing import Call, Timer

T = TypeVar("T")

CPU_RIVALS = {"bf16": torch.bfloat16, "fp32": torch.float32, "bf16 enable_gqa": torch.bfloat16}
CUDA_RIVALS = {"bf16 cuDNN": SDPBackend.CUDNN_ATTENTION, "bf16 flash": SDPBackend.FLASH_ATTENTION}
TOLERANCE = {
    "cpu": 1e-3,
    "mps": 1e-3,
    "cuda": 1e-2,
}  # of the norm of the result: on a GPU it is bfloat16, a mean of random values


class Shape(NamedTuple):
    """`batch` sequences of `tokens` tokens, each with one query."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    page: int | None = None  # tokens a page; None: one page per sequence

    def bytes(self, format: Format) -> int:
        """What a call reads of the codes."""
        return format.bytes_per_token * self.batch * self.kv_heads * self.tokens


def cycle(make: Callable[[], T], size: int, timer: Timer) -> list[T]:
    """Enough buffers of this size that calls which walk through them find none in a cache."""
    return [make() for _ in range(max(1, min(64, timer.cycle // size)))]


def fill(format: Format, shape: Shape, device: torch.device) -> Callable[[], Pages]:
    """A function that makes a cache with this many tokens in each sequence."""
    keys, values = (
        encode(torch.randn(shape.batch * shape.tokens, shape.kv_heads, codec.dim, device=device), codec)
        for codec in (format.key, format.value)
    )
    starts = list(range(0, shape.batch * shape.tokens + 1, shape.tokens))

    def make() -> Pages:
        if shape.page is None:
            cache = KVCache.contiguous(format, shape.batch, shape.kv_heads, capacity=shape.tokens, device=device)
        else:
            pages = shape.batch * -(-shape.tokens // shape.page)
            cache = KVCache.paged(PagePool(format, pages, shape.page, shape.kv_heads, device), shape.batch)
        cache.append_codes(keys, values, starts)
        return cache.pages

    return make


def check(q: torch.Tensor, pages: Pages, backend: str | None, starts: list[int] | None = None) -> float:
    """Error of the result relative to float64 on the same codes; refuses to time a wrong one."""
    device = q.device
    got = attend(q, pages, starts, backend=backend).out
    if q.device.type == "mps":  # it has no float64
        got, q, pages = got.cpu(), q.cpu(), _on_cpu(pages)
    got = got.double()
    truth = attend(q.double(), pages, starts, backend="reference").out
    error = ((got - truth).norm() / truth.norm()).item()
    if not error < TOLERANCE[device.type]:
        raise AuraError(
            f"{pages.format} with {backend or 'the best backend'}: relative error {error:.1e}, nothing is timed"
        )
    return error


def decode(
    timer: Timer,
    shape: Shape,
    formats: Iterable[str],
    device: torch.device | str = "cpu",
    backend: str | None = None,
    rivals: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """A row for each rival of torch and each format, measured together. Ratios are to the fastest bfloat16 rival."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    q = torch.randn(shape.batch, shape.heads, shape.dim, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    calls: dict[str, Call] = {}
    for rival in rivals if rivals is not None else CUDA_RIVALS if cuda else ("bf16",):
        call = (_cuda_rival if cuda else _plain_rival)(rival, q, shape, timer)
        if call is not None:
            calls[f"torch {rival}"] = call
    names: dict[str, str] = {}
    runs: dict[str, str] = {}
    for name in formats:
        format = Format.parse(name, shape.dim)
        pages = cycle(fill(format, shape, device), shape.bytes(format), timer)
        check(q, pages[0], backend)
        method = name if backend is None else f"{backend} {name}"
        calls[method] = _ours(q, pages, backend)
        names[method], runs[method] = name, _runs(q, pages[0], backend)
    times = timer.compare(calls)
    rows: list[dict[str, Any]] = []
    best = min((x["us"] for method, x in times.items() if method.startswith("torch bf16")), default=None)
    for method, measured in times.items():
        row = {"what": "decode", **shape._asdict(), "method": method, **measured}
        if method in names:
            row["format"], row["runs"] = names[method], runs[method]
            row["GB/s"] = round(shape.bytes(Format.parse(names[method], shape.dim)) / measured["us"] / 1e3, 1)
            row["times bf16"] = None if best is None else round(best / measured["us"], 2)
        rows.append(row)
    return rows


def _on_cpu(pages: Pages) -> Pages:
    tensors = ("data", "table", "lengths", "overflow")
    return dataclasses.replace(pages, **{name: getattr(pages, name).cpu() for name in tensors})


def _runs(q: torch.Tensor, pages: Pages, backend: str | None) -> str:
    """The backend of a call, on a GPU with its kernel."""
    chosen = backends.select(backend, pages.format, q.device, q.dtype)
    if chosen.name != triton.name:
        return chosen.name
    rows = checks.rows_of("starts", None, pages.seqs, q.shape[0], q.device)
    return f"{chosen.name}, {triton.kernel(q, Attention(pages, rows, Scoring()))}"


def _ours(q: torch.Tensor, pages: list[Pages], backend: str | None) -> Call:
    return lambda i: attend(q, pages[i % len(pages)], backend=backend)


def _plain_rival(name: str, q: torch.Tensor, shape: Shape, timer: Timer) -> Call:
    dtype = CPU_RIVALS[name]
    size = 2 * shape.batch * shape.kv_heads * shape.tokens * shape.dim * dtype.itemsize

    def make() -> torch.Tensor:
        return torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim, device=q.device).to(dtype)

    k, v = (cycle(make, size, timer) for _ in "kv")
    if "gqa" in name:
        x = q.to(dtype)[:, :, None]
        return lambda i: F.scaled_dot_product_attention(x, k[i % len(k)], v[i % len(v)], enable_gqa=True)
    x = q.to(dtype).view(shape.batch, shape.kv_heads, -1, shape.dim)  # the group as queries: each key is read once
    return lambda i: F.scaled_dot_product_attention(x, k[i % len(k)], v[i % len(v)])


def _cuda_rival(name: str, q: torch.Tensor, shape: Shape, timer: Timer) -> Call | None:
    """None where this machine does not have it."""
    k, v = (
        torch.randn(shape.batch, shape.kv_heads, shape.tokens, shape.dim, device=q.device, dtype=q.dtype) for _ in "kv"
    )
    x, chosen = q[:, :, None], CUDA_RIVALS[name]

    def call(_: int) -> object:
        with sdpa_kernel([chosen]):
            return F.scaled_dot_product_attention(x, k, v, enable_gqa=True)

    try:
        call(0)
    except RuntimeError:
        return None
    return call

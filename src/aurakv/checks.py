"""Arguments from outside, checked before anything is written: one sentence with what, what is allowed, what came."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .arguments import index, instance, shown, whole
from .attention.scoring import Scoring
from .attention.step import Rows
from .errors import InputError, counted
from .format.codec import Codec, Codes
from .storage.pages import Pages

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PRECISIONS = ("fast", "float32")

Starts = Sequence[int] | Tensor | None


def floating(name: str, x: Tensor, device: torch.device | None = None) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise InputError(f"{name} must be float32, float16, bfloat16 or float64, got {x.dtype}")
    if x.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got one of the layout {x.layout}")
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} requires grad and aurakv computes no gradients: use torch.no_grad() or {name}.detach()"
        )
    if device is not None and x.device != device:
        raise InputError(f"{name} must be on {device} like the cache, got {x.device}")


def queries(q: Tensor, kv_heads: int, dim: int, device: torch.device) -> None:
    """q [tokens, heads, dim] with a whole number of query heads per KV head."""
    floating("q", q, device)
    if q.ndim != 3 or q.shape[2] != dim or q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise InputError(
            f"q must be [tokens, heads, {dim}] with heads a multiple of {kv_heads} KV heads, got {list(q.shape)}"
        )


def new_tokens(k: Tensor, v: Tensor, pages: Pages) -> None:
    """k, v [tokens, kv_heads, dim] for an append."""
    for name, x, codec in (("k", k, pages.format.key), ("v", v, pages.format.value)):
        floating(name, x, pages.data.device)
        if x.ndim != 3 or x.shape[1:] != (pages.kv_heads, codec.dim):
            raise InputError(f"{name} must be [tokens, {pages.kv_heads}, {codec.dim}], got {list(x.shape)}")
    if k.shape[0] != v.shape[0]:
        raise InputError(f"k and v must have as many tokens as each other, got {k.shape[0]} and {v.shape[0]}")


def reach(pages: Pages, scoring: Scoring) -> None:
    """A ring holds a window and its pinned pages; what a scoring may see beyond them is overwritten."""
    if not pages.ring:
        return
    back, front = (scoring.recent, scoring.first) if scoring.only_uncompressed else (scoring.window, scoring.sinks)
    pinned = pages.pinned * pages.page_size
    if back is None or back > pages.wrap or front > pinned:
        raise InputError(
            f"this ring holds {pages.wrap} recent tokens and the first {pinned}, so its scoring needs a window and"
            f" sinks within them, got a window of {back} and {front} sinks"
        )


def rows(name: str, codes: Codes, codec: Codec, ndim: int | None = None) -> None:
    """Codes [..., kv_heads, row_bytes] with their scales."""
    instance(name, codes, Codes)
    data, scale = codes
    if data.dtype != torch.uint8 or data.ndim < 2 or data.shape[-1] != codec.row_bytes or ndim not in (None, data.ndim):
        shape = "..., kv_heads" if ndim is None else "n, kv_heads"
        raise InputError(f"{name} data must be uint8 [{shape}, {codec.row_bytes}], got {data.dtype} {list(data.shape)}")
    if ndim is not None and data.shape[-2] == 0:
        raise InputError(f"{name} must have at least one KV head, got {list(data.shape)}")
    if not codec.coded:
        if scale is not None:
            raise InputError(f"{name} stored at 16 bits have no scale")
    elif scale is None or scale.shape != data.shape[:-1] or scale.dtype != codec.dtype or scale.device != data.device:
        got = "none" if scale is None else f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        raise InputError(f"{name} scale must be {codec.dtype} {list(data.shape[:-1])} on {data.device}, got {got}")


def new_codes(keys: Codes, values: Codes, pages: Pages) -> None:
    """Encoded tokens [tokens, kv_heads] for an append."""
    for name, codes, codec in (("keys", keys, pages.format.key), ("values", values, pages.format.value)):
        rows(name, codes, codec, ndim=3)
        if codes.data.shape[1] != pages.kv_heads or codes.data.device != pages.data.device:
            raise InputError(
                f"{name} must have {pages.kv_heads} KV heads on {pages.data.device},"
                f" got {codes.data.shape[1]} on {codes.data.device}"
            )
    if keys.data.shape[0] != values.data.shape[0]:
        raise InputError(f"keys and values must be equally many, got {keys.data.shape[0]} and {values.data.shape[0]}")


def logits(sink_logits: Tensor | None, heads: int, device: torch.device) -> None:
    if sink_logits is None:
        return
    floating("sink_logits", sink_logits, device)
    if sink_logits.shape != (heads,):
        raise InputError(f"sink_logits must be [{heads}] (query heads), got {list(sink_logits.shape)}")


def rows_of(name: str, given: Starts, seqs: int, tokens: int, device: torch.device) -> Rows:
    """Row boundaries [seqs + 1] as int32 on the device: from a list or tensor; if None, as `bounds` has them.

    A tensor that already is on a GPU is not read here: kernels stay in bounds whatever it holds.
    """
    if given is None and tokens == seqs:
        return Rows(_one_each(seqs, device), single=True)
    if isinstance(given, Tensor):
        if given.dtype not in (torch.int32, torch.int64) or given.shape != (seqs + 1,):
            raise InputError(f"{name} must be int32 or int64 [{seqs + 1}], got {given.dtype} {list(given.shape)}")
        if given.device.type != "cpu":
            if given.device != device:
                raise InputError(f"{name} must be on {device} or the CPU, got {given.device}")
            return Rows(given.to(torch.int32))
        bounds(name, given, seqs, tokens)
        return Rows(given.to(device=device, dtype=torch.int32))
    return on_device(bounds(name, given, seqs, tokens), device)


def on_device(listed: list[int], device: torch.device) -> Rows:
    """Rows with boundaries that the host has checked."""
    if listed == list(range(len(listed))):
        return Rows(_one_each(len(listed) - 1, device), single=True)
    return Rows(torch.tensor(listed, dtype=torch.int32, device=device))


def bounds(name: str, given: Starts, seqs: int, tokens: int) -> list[int]:
    """Row boundaries on the host: rising from 0 to the number of tokens. If None, one token per sequence, or all of
    them for a single one."""
    if given is None:
        if seqs == 1:
            return [0, tokens]
        if tokens != seqs:
            raise InputError(
                f"{counted(tokens, 'token')} for {counted(seqs, 'sequence')} need {name}: sequence i owns rows"
                f" {name}[i]:{name}[i+1]"
            )
        return list(range(seqs + 1))
    rows = listed(name, given, f"{seqs + 1} ")
    rising = all(a <= b for a, b in itertools.pairwise(rows))
    if len(rows) != seqs + 1 or rows[0] != 0 or rows[-1] != tokens or not rising:
        raise InputError(
            f"{name} must rise from 0 to {counted(tokens, 'token')} in {counted(seqs + 1, 'number')}, got {shown(rows)}"
        )
    return rows


def ends(given: Tensor | Sequence[int] | None, lengths: Tensor) -> Tensor:
    """The position after the last query of each sequence; by default its length. On a GPU they are not read here."""
    if given is None:
        return lengths
    seqs = lengths.shape[0]
    if isinstance(given, Tensor):
        if given.shape != lengths.shape or given.dtype not in (torch.int32, torch.int64):
            raise InputError(f"ends must be int32 or int64 [{seqs}], got {given.dtype} {list(given.shape)}")
        if given.device.type != "cpu":
            return given.to(device=lengths.device, dtype=torch.int32)
    positions = listed("ends", given, f"{seqs} ")
    if len(positions) != seqs or not all(0 <= end < 2**31 for end in positions):
        raise InputError(f"ends must be {counted(seqs, 'number')} from 0 to 2^31 - 1, got {shown(positions)}")
    return torch.tensor(positions, dtype=torch.int32, device=lengths.device)


def key_scale(x: Tensor, pages: Pages) -> None:
    floating("key_scale", x, pages.data.device)
    if x.shape != (pages.kv_heads, pages.format.key.dim):
        raise InputError(f"key_scale must be [{pages.kv_heads}, {pages.format.key.dim}], got {list(x.shape)}")


def reserve(tokens: int | Sequence[int], seqs: int) -> list[int]:
    """How many tokens each sequence shall have room for: one number for all, or one each."""
    each = index(tokens)
    new = listed("tokens", tokens, f"{seqs} ") if each is None else [each] * seqs  # type: ignore[arg-type]
    if len(new) != seqs or min(new, default=0) < 0:
        raise InputError(f"reserve needs {seqs} whole numbers of at least 0, got {shown(new)}")
    return new


def truncate(seq: int, length: int, most: int) -> int:
    found = index(length)
    if found is None or not 0 <= found <= most:
        raise InputError(f"sequence {seq} can be truncated to 0 … {most} tokens, got {shown(length)}")
    return found


def precision(given: str) -> None:
    if given not in PRECISIONS:
        renamed = ": what was 'exact' is 'float32' now" if given == "exact" else ""
        raise InputError(f"precision must be one of {list(PRECISIONS)}, got {shown(given)}{renamed}")


def splits(given: int | None) -> int | None:
    """As a plain number."""
    return None if given is None else whole("splits", given, 1)


def workspace(given: Tensor | None, needed: int, device: torch.device) -> None:
    if given is None:
        return
    if given.dtype != torch.uint8 or not given.is_contiguous() or given.device != device or given.numel() < needed:
        raise InputError(
            f"workspace must be contiguous uint8 with at least {needed} bytes on {device},"
            f" got {given.dtype} with {given.numel()} on {given.device}"
        )


def listed(name: str, given: Sequence[int] | Tensor, count: str = "") -> list[int]:
    """Whole numbers in a row. A mask of True and False is not taken for numbers."""
    row = given.tolist() if isinstance(given, Tensor) else given
    numbers = [index(number) for number in row] if isinstance(row, Iterable) else [None]
    found = [number for number in numbers if number is not None]
    if len(found) < len(numbers):
        raise InputError(f"{name} must be {count}whole numbers, got {shown(row)}")
    return found


@functools.lru_cache(maxsize=64)
def _one_each(seqs: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached: must not become an inference tensor
        return torch.arange(seqs + 1, dtype=torch.int32, device=device)

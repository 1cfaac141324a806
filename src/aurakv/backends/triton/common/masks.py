"""Device functions: which keys a block of queries sees (Scoring).

UNCOMPRESSED: 0 all keys, 1 those that are not kept uncompressed, 2 only those."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def key_spans(
    lowest,
    highest,
    low,
    length,
    window,
    sinks,
    first,
    recent,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    UNCOMPRESSED: tl.constexpr,
):
    """Two disjoint ranges of positions that hold every key visible to queries lowest … highest, among low … length − 1.

    UNCOMPRESSED: 0 all keys, 1 those not kept uncompressed, 2 only those (Scoring.only_uncompressed)."""
    stop = length
    if CAUSAL:
        stop = tl.minimum(length, highest + 1)
    a_start = low
    a_stop = low
    b_start = low
    if WINDOW:
        b_start = tl.maximum(low, lowest - window + 1)
        a_stop = tl.minimum(sinks, b_start)
    b_stop = stop
    if UNCOMPRESSED == 1:
        a_start = tl.maximum(low, first)
        b_start = tl.maximum(b_start, first)
        if recent > 0:
            b_stop = tl.minimum(stop, highest - recent + 1)
            a_stop = tl.minimum(a_stop, highest - recent + 1)
    if UNCOMPRESSED == 2:
        near = stop
        if recent > 0:
            near = lowest - recent + 1
        if WINDOW:  # sinks are near too when the window is shorter than what is recent
            far = tl.where(first > b_start, first, tl.minimum(first, a_stop))
            a_stop = tl.where(near < a_stop, a_stop, far)
        else:
            a_stop = first
        b_start = tl.maximum(tl.maximum(b_start, near), a_stop)
    a_stop = tl.minimum(a_stop, stop)
    a_start = tl.minimum(a_start, a_stop)
    b_start = tl.maximum(b_start, low)
    return a_start, a_stop, b_start, tl.maximum(b_start, b_stop)


@triton.jit
def tiles_of(a_start, a_stop, b_start, b_stop, KEYS: tl.constexpr):
    """Tiles of KEYS keys that hold two disjoint ranges, none of them twice: where those of the first range begin and
    how many they are; where the others begin; how many there are in all."""
    a_base = a_start // KEYS * KEYS
    a_tiles = tl.where(a_stop > a_start, tl.cdiv(a_stop - a_base, KEYS), 0)
    b_base = tl.maximum(b_start // KEYS * KEYS, tl.where(a_tiles > 0, a_base + a_tiles * KEYS, 0))
    more = tl.where(b_stop > tl.maximum(b_start, b_base), tl.cdiv(b_stop - b_base, KEYS), 0)
    return a_base, a_tiles, b_base, a_tiles + more


@triton.jit
def whole_tiles(
    base,
    start,
    stop,
    lowest,
    highest,
    window,
    recent,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    UNCOMPRESSED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Of tiles that begin at `base`, the first and the last + 1 whose keys all queries lowest … highest see, and that
    lie within start … stop − 1."""
    if WINDOW:
        start = tl.maximum(start, highest - window + 1)
    if CAUSAL:
        stop = tl.minimum(stop, lowest + 1)
    if UNCOMPRESSED == 1:
        stop = tl.where(recent > 0, tl.minimum(stop, lowest - recent + 1), stop)
    if UNCOMPRESSED == 2:
        stop = start
    first = tl.cdiv(tl.maximum(start - base, 0), KEYS)
    return first, tl.maximum(first, tl.maximum(stop - base, 0) // KEYS)


@triton.jit
def visible(
    query, key, window, sinks, first, recent, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UNCOMPRESSED: tl.constexpr
):
    """Scoring.visible of queries [rows] and keys [keys]."""
    q, k = query[:, None], key[None, :]
    seen = (q == q) & (k == k)
    if CAUSAL:
        seen = seen & (k <= q)
    if WINDOW:
        seen = seen & ((k > q - window) | (k < sinks))
    if UNCOMPRESSED > 0:
        uncompressed = (k < first) | ((k > q - recent) & (recent > 0))
        seen = seen & (uncompressed == (UNCOMPRESSED == 2))
    return seen

"""The caches of the original kernels in plain numpy, written from their definitions: nothing of aurakv is used here.

A maker looks for the nearest entries of a codebook and packs codes and norms into buffers in which a ring lies as those
kernels have it. A reader walks over the slots of such buffers and attends in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LLOYD_MAX_4 = np.array(
    [
        -2.7325896,
        -2.0690172,
        -1.6180464,
        -1.2562312,
        -0.9423405,
        -0.6567591,
        -0.3880483,
        -0.128395,
        0.128395,
        0.3880483,
        0.6567591,
        0.9423405,
        1.2562312,
        1.6180464,
        2.0690172,
        2.7325896,
    ],
    dtype=np.float32,
)


def walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """Butterflies over the last axis, divided by √dim: its own inverse."""
    y, h = x.astype(np.float64).copy(), 1
    dim = y.shape[-1]
    while h < dim:
        for i in range(0, dim, 2 * h):
            a, b = y[..., i : i + h].copy(), y[..., i + h : i + 2 * h].copy()
            y[..., i : i + h], y[..., i + h : i + 2 * h] = a + b, a - b
        h *= 2
    return y / np.sqrt(dim)


def orthogonal(dim: int, seed: int) -> np.ndarray:
    """Any rotation: what a caller of AURA may have."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., dim] -> [..., ⌈dim·bits/32⌉] uint32: code d begins at bit d·bits and may go on in the next word."""
    dim = codes.shape[-1]
    words = np.zeros((*codes.shape[:-1], (dim * bits + 31) // 32), dtype=np.uint64)
    for d in range(dim):
        word, shift = d * bits // 32, d * bits % 32
        wide = codes[..., d].astype(np.uint64) << np.uint64(shift)
        words[..., word] |= wide & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            words[..., word + 1] |= wide >> np.uint64(32)
    return words.astype(np.uint32)


def unpack_words(words: np.ndarray, dim: int, bits: int) -> np.ndarray:
    codes = np.zeros((*words.shape[:-1], dim), dtype=np.int64)
    for d in range(dim):
        word, shift = d * bits // 32, d * bits % 32
        low = words[..., word].astype(np.uint64) >> np.uint64(shift)
        if shift + bits > 32:
            low |= words[..., word + 1].astype(np.uint64) << np.uint64(32 - shift)
        codes[..., d] = (low & np.uint64(2**bits - 1)).astype(np.int64)
    return codes


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    codes = np.zeros((*data.shape[:-1], 2 * data.shape[-1]), dtype=np.int64)
    codes[..., 0::2], codes[..., 1::2] = data % 16, data // 16
    return codes


def nearest(y: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.abs(y[..., None] - codebook.astype(np.float64)).argmin(-1)


@dataclass
class Side:
    """Buffers [kv_heads, capacity, …] of keys or values. Slots without a token hold rubbish."""

    packed: np.ndarray
    norms: np.ndarray
    codebook: np.ndarray
    dim: int
    bits: int
    family: str

    def rotated(self) -> np.ndarray:
        """What the kernels decode in each slot: [kv_heads, capacity, dim], not rotated back."""
        norms = self.norms.astype(np.float64)
        if self.family == "aura":
            return self.codebook[unpack_words(self.packed, self.dim, self.bits)].astype(np.float64) * norms[..., None]
        levels = self.codebook[unpack_nibbles(self.packed)].astype(np.float64) / np.sqrt(self.dim)
        return levels * (np.repeat(norms, 256, axis=2) if norms.ndim == 3 else norms[..., None])


def make_side(
    vectors: np.ndarray, family: str, bits: int, capacity: int, ring_start: int, codebook: np.ndarray, blocks: int = 1
) -> Side:
    """vectors [tokens, kv_heads, dim] that already are rotated, token i in slot (ring_start + i) mod capacity."""
    tokens, heads, dim = vectors.shape
    rng = np.random.default_rng(tokens + dim)
    if family == "aura":  # the codebook is for coordinates of unit vectors
        norms = np.linalg.norm(vectors, axis=-1)
        codes = nearest(vectors / norms[..., None], codebook)
        packed = pack_words(codes, bits)
    else:
        split = vectors.reshape(tokens, heads, blocks, dim // blocks)
        norms = np.linalg.norm(split, axis=-1) * np.sqrt(blocks)
        unit = split / norms[..., None] * np.sqrt(dim)
        codes = nearest(unit.reshape(tokens, heads, dim), codebook)
        packed, norms = pack_nibbles(codes), norms if blocks > 1 else norms[..., 0]
    buffer = rng.integers(0, 256, (heads, capacity, packed.shape[-1])).astype(packed.dtype)
    norm_buffer = np.full((heads, capacity, *norms.shape[2:]), np.nan, dtype=np.float32)
    for i in range(tokens):
        slot = (ring_start + i) % capacity
        buffer[:, slot], norm_buffer[:, slot] = packed[i], norms[i]
    return Side(buffer, norm_buffer, codebook, dim, bits, family)


def attend(
    q_rotated: np.ndarray,
    keys: Side,
    values: Side,
    length: int,
    ring_start: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One query a head, [heads, dim], rotated, at the last token; the output stays rotated. window 0: all."""
    heads, capacity = q_rotated.shape[0], keys.packed.shape[1]
    group = heads // keys.packed.shape[0]
    out, decoded_keys, decoded_values = np.zeros((heads, values.dim)), keys.rotated(), values.rotated()
    for head in range(heads):
        scores, rows = [], []
        for slot in range(capacity):
            age = (slot - ring_start) % capacity  # 0: the oldest
            if age >= length or (window and age < length - window):
                continue
            score = scale * float(q_rotated[head] @ decoded_keys[head // group, slot])
            scores.append(softcap * np.tanh(score / softcap) if softcap else score)
            rows.append(decoded_values[head // group, slot])
        top = max([*scores, -np.inf if sinks is None else sinks[head]])
        weights = np.exp(np.array(scores) - top)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
        out[head] = weights @ np.array(rows) / total
    return out

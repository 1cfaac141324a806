"""The rotation R = H · diag(s) / √D: a Hadamard matrix of order D = m·2^k with the signs that a codec names."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import shown
from ..errors import InputError

SEEDED, PLAIN, UNROTATED = "seed", "plain", "unrotated"  # what a codec's signs may be called
_PALEY = {12: 11, 20: 19, 28: 13, 36: 17}  # order -> prime q; q = 3 mod 4 gives order q+1, q = 1 mod 4 order 2(q+1)
MAX_DIM = 1024


def base_order(dim: int) -> int:
    """m of dim = m·2^k, after checking that dim is one we rotate."""
    if isinstance(dim, int) and 16 <= dim <= MAX_DIM and dim % 16 == 0:
        for m in (1, *_PALEY):
            if dim % m == 0 and (dim // m).bit_count() == 1:
                return m
    raise InputError(
        f"head_dim must be m·2^k with m in (1, 12, 20, 28, 36), a multiple of 16 and at most {MAX_DIM}"
        f" (such as 64, 80, 96, 112, 128, 160, 192, 256, 512, 576), got {dim}"
    )


def signs(dim: int, seed: int) -> list[int]:
    """Sign i is the top bit of the i-th output of splitmix64(seed): set means −1."""
    mask = 2**64 - 1
    result = []
    for i in range(1, dim + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        result.append(-1 if z >> 63 else 1)
    return result


def named_signs(dim: int, given: object) -> str:
    """Signs as a codec holds them: "seed", "plain", "unrotated", or dim / 4 hexadecimal digits of given ±1.

    A digit is four signs, the first in its highest bit; set means −1. All +1 become "plain".
    """
    if isinstance(given, str):
        if given in (SEEDED, PLAIN, UNROTATED):
            return given
        if len(given) == dim // 4 and all(c in "0123456789abcdef" for c in given):
            return given if given.strip("0") else PLAIN
    else:
        row = given.tolist() if hasattr(given, "tolist") else given
        numbers = list(row) if isinstance(row, Sequence) else []
        if len(numbers) == dim and all(isinstance(x, (int, float)) and x in (1, -1) for x in numbers):
            bits = "".join("1" if x < 0 else "0" for x in numbers)
            return named_signs(dim, f"{int(bits, 2):0{dim // 4}x}")
    raise InputError(
        f'signs must be "{SEEDED}", "{PLAIN}", "{UNROTATED}", {dim} numbers of ±1 or {dim // 4} hexadecimal digits,'
        f" got {shown(given)}"
    )


def chosen_signs(dim: int, seed: int, name: str) -> list[int]:
    """The signs of a codec that rotates, from its seed and what `named_signs` made of its signs."""
    if name == SEEDED:
        return signs(dim, seed)
    if name == PLAIN:
        return [1] * dim
    return [-1 if bit == "1" else 1 for bit in f"{int(name, 16):0{dim}b}"]


@functools.cache
def hadamard(dim: int) -> Tensor:
    """H of order dim, entries ±1, float64: Sylvester doublings [[H, H], [H, −H]] of a Paley matrix of order m."""
    with torch.device("cpu"):  # whatever the default is: an Apple GPU has no float64
        h = _paley(base_order(dim))
        while len(h) < dim:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        return h


@functools.lru_cache(maxsize=64)
def rotation(dim: int, seed: int, dtype: torch.dtype, device: torch.device, name: str = SEEDED) -> Tensor:
    """R [dim, dim], orthonormal: `x @ R.T` rotates rows, `y @ R` rotates them back."""
    with torch.inference_mode(False), torch.device("cpu"):  # cached: must not become an inference tensor
        sign = torch.tensor(chosen_signs(dim, seed, name), dtype=torch.float64)
        return (hadamard(dim) * sign / math.sqrt(dim)).to(dtype).to(device)  # an Apple GPU has no float64


def _paley(order: int) -> Tensor:
    """Paley's Hadamard matrix: construction I for q = 3 mod 4, construction II for q = 1 mod 4."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    q = _PALEY[order]
    squares = {x * x % q for x in range(1, q)}
    jacobsthal = torch.tensor(
        [[0.0 if i == j else 1.0 if (i - j) % q in squares else -1.0 for j in range(q)] for i in range(q)],
        dtype=torch.float64,
    )
    core = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    core[1:, 1:] = jacobsthal
    core[0, 1:] = 1
    if q % 4 == 3:
        core[1:, 0] = -1
        return core + torch.eye(q + 1, dtype=torch.float64)
    core[1:, 0] = 1
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(core, plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)

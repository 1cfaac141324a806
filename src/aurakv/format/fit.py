"""Fitted codes: which codes stand for a vector best, where errors in some channels cost more than in others.

Rounding each coordinate to its nearest level makes an error that is alike in all directions. A fitted vector is rounded
one coordinate after the other, and each makes up for the errors of those before it, as far as weights say that this
matters; a few scales are tried, and the best result is kept. The bytes decode as always: a decoder cannot tell.

The error e of a rotated vector costs e' G e with G = R diag(weight) R'. Split as G = A' diag(d) A, A lower triangular
with ones on its diagonal, this is the sum of d_i (A e)_i^2. A `fit` is that split, in float16,
[kv_heads, D (D + 1) / 2]: the rows of A up to their diagonal, where d stands instead of 1. A fit of no numbers,
[kv_heads, 0], stands for equal weights: no coordinate can make up for another one, and only scales are tried.

Each coordinate waits for those before it, which suits a CPU. A GPU rounds AT_ONCE neighbours at once if A has zeros
between them (`fit(..., at_once=True)`): no encoder needs to know, such a fit is one like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .codec import Codec

SCALES = (0.76, 0.82, 0.88, 0.94, 1.0, 1.06, 1.12, 1.2)  # times the root mean square of a vector
AT_ONCE = 4
MOST_AT_ONCE = 128  # coordinates of vectors for which GPUs have a kernel that does so
LONGEST = 2.0  # times the nearest multiple: a vector that levels hardly follow must not grow without end
_LEAST = 1e-6  # of the mean weight, added to every channel: a channel that nobody reads still costs something


def fit(codec: Codec, weight: Tensor, at_once: bool = False) -> Tensor:
    """The fit for errors whose squares cost weight [kv_heads, dim], on the device of the weights.

    at_once: AT_ONCE neighbours do not make up for each other."""
    if not codec.coded or weight.ndim != 2 or weight.shape[1] != codec.dim:
        raise InputError(f"weights must be [kv_heads, {codec.dim}] of a codec with codes, got {list(weight.shape)}")
    if not bool((weight.isfinite() & (weight >= 0)).all()) or not bool((weight.sum(1) > 0).all()):
        raise InputError("weights must be finite, not negative and not all zero")
    exact = weight.cpu().double()
    exact = exact / exact.mean(1, keepdim=True) + _LEAST
    rotation = codec.rotate(torch.eye(codec.dim, dtype=torch.float64)).T  # y = rotation x
    cost = (rotation * exact[:, None]) @ rotation.T
    upper = torch.linalg.cholesky(cost.flip(-1, -2)).flip(-1, -2)  # cost = upper upper'
    root = upper.diagonal(dim1=-2, dim2=-1)
    lower = (upper / root[:, None]).transpose(-1, -2).contiguous()
    least = root.square()
    if at_once:
        lower, least = _apart(lower, least)
    lower.diagonal(dim1=-2, dim2=-1).copy_(least)
    row, column = torch.tril_indices(codec.dim, codec.dim)
    return lower[:, row, column].to(torch.float16).to(weight.device)


def _apart(lower: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """A and d of fits whose neighbours do not make up for each other.

    The errors e of neighbours cost (e + B f)' K (e + B f), f the errors before them, where B = A_nn^-1 A_nf and
    K = A_nn' diag(d_n) A_nn. What is left of K is its diagonal."""
    heads, dim = cost.shape
    inside = lower.view(heads, dim // AT_ONCE, AT_ONCE, dim // AT_ONCE, AT_ONCE).diagonal(dim1=1, dim2=3)
    inside = inside.permute(0, 3, 1, 2)  # A_nn [heads, n, AT_ONCE, AT_ONCE]
    apart = torch.linalg.solve_triangular(inside, lower.unflatten(1, (-1, AT_ONCE)), upper=False, unitriangular=True)
    costs = (inside.square() * cost.unflatten(1, (-1, AT_ONCE))[..., None]).sum(2)
    return apart.flatten(1, 2).contiguous(), costs.flatten(1)


def equal(kv_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """The fit for errors that cost the same in all channels."""
    return torch.empty(kv_heads, 0, dtype=torch.float16, device=device)


def split(fit: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A [kv_heads, dim, dim] with ones on its diagonal, and d [kv_heads, dim]."""
    heads = fit.shape[0]
    lower = torch.eye(dim, dtype=dtype, device=fit.device).repeat(heads, 1, 1)
    if not fit.shape[1]:
        return lower, lower.new_ones(heads, dim)
    row, column = torch.tril_indices(dim, dim, device=fit.device)
    lower[:, row, column] = fit.to(dtype)
    cost = lower.diagonal(dim1=-2, dim2=-1).clone()
    lower.diagonal(dim1=-2, dim2=-1).fill_(1)
    return lower, cost


def scale(own: Tensor, mixed: Tensor, energy: Tensor) -> Tensor:
    """Of l, for y, with y'Gy, y'Gl and l'Gl: what is stored has no error along y.

    The nearest multiple of l, y'Gl / l'Gl, is shorter than y. Errors across y differ from token to token, so attention
    averages them out; a shortage is the same for all tokens, and stays.
    """
    return mixed / energy * (own * energy / mixed.square()).clamp(max=LONGEST)


def check_fit(name: str, fit: Tensor | None, codec: Codec, kv_heads: int, device: torch.device) -> None:
    if fit is None:
        return
    if not isinstance(fit, Tensor) or not codec.coded:
        raise InputError(f"{name} is made by aurakv.format.fit for a side with codes, got {type(fit).__name__}")
    sizes = 0, codec.dim * (codec.dim + 1) // 2
    if fit.dtype != torch.float16 or fit.ndim != 2 or fit.shape[0] != kv_heads or fit.shape[1] not in sizes:
        raise InputError(
            f"{name} must be float16 [{kv_heads}, {sizes[1]}] or [{kv_heads}, 0], got {fit.dtype} {list(fit.shape)}"
        )
    if not fit.is_contiguous() or fit.device != device:
        raise InputError(f"{name} must be contiguous and on {device} like the data, got {fit.device}")

"""The attention function `aurakv` and its mask, as transformers calls them.

The mask is small: `reach` [seqs, tokens so far] says how far back queries see a token: 0 never (padding), w within the
last w tokens. None: no padding and no window. Patterns that are not causal windows stay the masks of `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..errors import InputError
from .compiled import hf_attend, hf_attend_again
from .handles import Handle
from .mask_reader import FOREVER

NAME = "aurakv"  # a name with sdpa, flash or flex_attention in it would be treated as one of those


def register() -> None:
    """Make `aurakv` known to transformers as an attention function, for `model.set_attn_implementation("aurakv")`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Called once per forward for each kind of layer: full attention, or windows of `local_size`."""
    causal = allow_is_causal_skip and not use_vmap and isinstance(q_offset, int | torch.SymInt)
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    end = kv_offset + kv_length
    partial = attention_mask is not None and attention_mask.shape[1] != end
    if not causal or chunked or partial or q_offset + q_length != end:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    if attention_mask is None and local_size is None:
        return None
    far = FOREVER if local_size is None else local_size
    if attention_mask is None:
        return torch.full((batch_size, end), far, dtype=torch.int32, device=device)
    return attention_mask.to(torch.int32) * far


def attention(
    module: torch.nn.Module,
    query: Tensor,  # [seqs, heads, t, dim]
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention on the codes of an AuraCache; over plain tensors (no cache, other caches) the same in plain torch."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for name in ("position_bias", "cache", "output_attentions", "head_mask"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise InputError(f"the attention function 'aurakv' does not serve {name}: use another one for this model")
    if not isinstance(key, Handle):
        return _plain(query, key, value, attention_mask, scaling, dropout, softcap, s_aux, causal), None
    update = key.update
    if not torch.compiler.is_compiling():
        update.layer.pending = None  # a refused call stores nothing
    if update is not getattr(value, "update", None) or update.dense is not None:
        raise InputError("the attention function 'aurakv' needs the keys and values of one update, unchanged")
    if not causal or dropout:
        raise InputError("attention on compressed keys is causal and without dropout: call model.eval()")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            "attention on compressed keys serves causal masks, windows and padding masks that cover all tokens,"
            " past and new; for a mask of your own use the attention function 'sdpa' or 'eager'"
        )
    (k, v), layer, again = update.new, update.layer, update.attended
    update.attended = True
    if again and torch.compiler.is_compiling():
        return hf_attend_again(query, k, v, s_aux, layer.token, scaling, softcap), None
    if again:
        return layer.attend_again(query, k, v, s_aux, scaling, softcap), None
    if torch.compiler.is_compiling():
        return hf_attend(query, k, v, attention_mask, s_aux, layer.token, scaling, softcap), None
    return layer.attend(query, k, v, attention_mask, s_aux, scaling, softcap), None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    causal: bool,
) -> Tensor:
    """[seqs, t, heads, dim] from key and value [seqs, kv_heads, n, dim]; queries are the last tokens."""
    t, n, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if causal and (mask.ndim == 2 if mask is not None else 1 < t < n):
        distance = (torch.arange(n - t, n, device=key.device)[:, None] - torch.arange(n, device=key.device))[None, None]
        seen = distance >= 0
        mask = seen if mask is None else seen & (distance < mask[:, None, None, -n:])
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    if softcap is None and s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal and mask is None and t > 1, scale=scaling
        )
        return out.transpose(1, 2).contiguous()
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and t > 1:
        mask = torch.ones(t, n, dtype=torch.bool, device=key.device).tril(n - t)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    weights = scores.float().softmax(3).to(query.dtype)[..., :n]
    return (torch.nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()

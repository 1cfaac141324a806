"""all_merge: attention whose keys lie with several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.partial import Partial, merge
from ..errors import InputError
from .agreement import together
from .group import Group

# A second collective costs this many bytes' worth of time: about 10 µs at 50 GB/s.
LATENCY_BYTES = 2**19


def all_merge(partial: Partial, group: dist.ProcessGroup | None = None) -> Partial:
    """Attention over the keys of all ranks of a group: every rank gets the merge of all partial results, bit for bit
    the same. Shapes and dtypes must be equal on all ranks, which one small message finds out before.

    Ranks are merged in their order, in the dtype of lse, whatever path the bytes take. Learned sink logits count once:
    merge them afterwards, on every rank. A rank that is gone or late raises PeerError on the others.
    """
    members = Group(group)
    return merged(together(members, "all_merge", lambda: _checked(partial), lambda found: found), members)


def merged(partial: Partial, group: Group) -> Partial:
    """The merge of partial results, whose shapes are alike. Few bytes go to everybody at once. Of many, each rank
    merges a share and hands the result round: two results' worth of bytes move instead of one for each rank."""
    out, lse = partial
    if group.size == 1 or not lse.numel():
        return partial
    records = _pack(partial).to(group.wire(out.device))
    if records.nbytes * (group.size - 2) <= LATENCY_BYTES:
        everyone = group.gather(records, "all_merge").to(out.device)
        result = merge(*(_unpack(one, partial) for one in everyone))
    else:
        rows = records.shape[0]
        share = -(-rows // group.size)
        padded = torch.cat([records, records.new_zeros(share * group.size - rows, records.shape[1])])
        mine = group.exchange(padded.view(group.size, share, -1), "all_merge").to(out.device)
        part = merge(*(_unpack(one, partial) for one in mine))
        whole = group.gather(_pack(part).to(records.device), "all_merge").flatten(0, 1)[:rows]
        result = _unpack(whole.to(out.device), partial)
    return Partial(result.out.view(out.shape), result.lse.view(lse.shape))


def _checked(partial: Partial) -> Partial:
    out, lse = partial
    if out.shape[:-1] != lse.shape or lse.dtype not in (torch.float32, torch.float64):
        raise InputError(
            "a partial result is out [tokens, heads, dim] and float32 or float64 lse [tokens, heads],"
            f" got {list(out.shape)} and {lse.dtype} {list(lse.shape)}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise InputError("out requires grad and aurakv computes no gradients: use torch.no_grad() or out.detach()")
    return partial


def _pack(partial: Partial) -> Tensor:
    """One record of bytes for each row: its lse, then its out."""
    rows = partial.lse.numel()
    lse = partial.lse.detach().contiguous().view(rows, 1)
    out = partial.out.detach().contiguous().view(rows, -1)
    return torch.cat([lse.view(torch.uint8), out.view(torch.uint8)], 1)


def _unpack(records: Tensor, like: Partial) -> Partial:
    width = like.lse.element_size()
    lse = records[:, :width].contiguous().view(like.lse.dtype)[:, 0]
    return Partial(records[:, width:].contiguous().view(like.out.dtype), lse)

"""One attention layer over pages that an engine owns: append and attend for a ragged batch. Knows nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention import ops
from ..attention.scoring import Scoring
from ..calibration.key_scale import scaled_keys, scaled_queries
from ..calibration.policy import LayerPolicy
from ..errors import InputError
from ..format.codec import Format
from ..storage.pages import Pages

TOKENS = 16  # a block holds a multiple of this many tokens: then the parts of a page need no padding
FAST_TOKENS = 64  # and best this many on a GPU: a tile of the decode kernel
MAX_KNOWN = 4096  # descriptions of pages that a group of layers keeps: a few for each layer


class Lengths:
    """Buffers that live as long as the engine's memory: captured graphs keep their addresses."""

    def __init__(self, seqs: int, device: torch.device) -> None:
        self.pages: dict[tuple[object, ...], Pages] = {}  # of each layer and table; goes with the memory it describes
        self.before = torch.zeros(seqs, dtype=torch.int32, device=device)
        self.now = torch.zeros(seqs, dtype=torch.int32, device=device)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)


@dataclass
class Step:
    """One forward pass of the engine: which rows belong to which sequence, and where its tokens lie."""

    tokens: int  # rows of the batch that count
    starts: Tensor  # [seqs + 1] int32: sequence i owns rows starts[i]:starts[i+1]
    ends: Tensor  # [seqs] int32: its length with them
    table: Tensor  # [seqs, width] int32 block indices
    buffers: Lengths
    before: Tensor = field(init=False)  # [seqs] int32: its length without them
    seen: bool = field(default=False, init=False)  # whether the host has looked at the contents

    def __post_init__(self) -> None:
        seqs = self.ends.shape[0]
        if self.table.shape[0] != seqs or self.starts.shape[0] != seqs + 1 or seqs > self.buffers.before.shape[0]:
            raise InputError(
                f"{seqs} sequences need as many table rows, one more start and buffers of that size,"
                f" got {self.table.shape[0]}, {self.starts.shape[0]} and {self.buffers.before.shape[0]}"
            )
        self.before = self.buffers.before[:seqs]
        torch.sub(self.ends, self.starts.diff(), out=self.before)

    def look(self, pages: Pages) -> None:
        """Refuse contents that are out of range, before the first layer writes. Waits for the device."""
        pages.check_values()
        if bool((self.before < 0).any()):
            raise InputError(f"sequences have more new rows than tokens: {self.ends.tolist()}, {self.starts.tolist()}")
        self.seen = True


class Layer:
    """What a layer needs beside the batch: its format, offsets and scoring."""

    def __init__(
        self,
        format: Format,
        scoring: Scoring,
        *,
        sink_logits: Tensor | None = None,
        policy: LayerPolicy | None = None,
    ) -> None:
        self.format = format
        self.scoring = scoring
        self.sink_logits = sink_logits
        self.policy = policy or LayerPolicy(format.name)
        self._offsets: tuple[Tensor | None, Tensor | None] | None = None  # on the device
        self._key_scale: Tensor | None = None  # on the device

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, blocks: Tensor, step: Step, out: Tensor) -> None:
        """Store the new tokens, if they come along, and write attention of all queries to out [rows, heads, dim].

        blocks: [blocks, kv_heads, tokens, bytes of a token] uint8, the engine's memory.
        """
        pages = self._pages(blocks, step)
        n = step.tokens
        key_scale = self._key_scale_on(q.device)
        if not step.seen and blocks.device.type == "cpu":
            pages.lengths.copy_(step.ends)
            step.look(pages)
        if k is not None and v is not None:  # else the layer shares the keys of an earlier one
            pages.lengths.copy_(step.before)
            ops.append(pages, scaled_keys(k[:n], key_scale), v[:n], step.starts)
        else:
            pages.lengths.copy_(step.ends)
        part = ops.attend(
            scaled_queries(q[:n], key_scale),
            pages,
            step.starts,
            self.scoring,
            ends=step.ends,
            sink_logits=self.sink_logits,
        )
        out[:n] = part.out

    def _key_scale_on(self, device: torch.device) -> Tensor | None:
        if self._key_scale is None and self.policy.key_scale is not None:
            self._key_scale = self.policy.key_scale.to(device)
        return self._key_scale

    def _pages(self, blocks: Tensor, step: Step) -> Pages:
        """The engine's memory as pages. Made once per table: engines reuse theirs."""
        known = step.buffers.pages
        key = (self, blocks.data_ptr(), blocks.shape[0], step.table.data_ptr(), *step.table.shape)
        pages = known.get(key)
        if pages is None:
            count, heads, tokens, size = blocks.shape
            data = blocks.view(count, heads, tokens * size)
            now = step.buffers.now[: step.table.shape[0]]
            if self._offsets is None:
                self._offsets = _on(self.policy.key_offset, data), _on(self.policy.value_offset, data)
            pages = Pages(
                self.format,
                tokens,
                data,
                step.table,
                now,
                step.buffers.overflow,
                key_offset=self._offsets[0],
                value_offset=self._offsets[1],
            )
            object.__setattr__(pages, "trusted", True)  # each step looks at the contents once for all layers
            if len(known) >= MAX_KNOWN:
                known.clear()
            known[key] = pages
        return pages


def _on(offset: Tensor | None, like: Tensor) -> Tensor | None:
    return None if offset is None else offset.to(like.device)

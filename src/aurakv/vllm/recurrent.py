"""Models with a recurrent state beside attention: which layers attend, and a state while a text is read at start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from ..errors import InputError
from ..hf.support import slots


def attention_numbers(config: VllmConfig) -> list[int]:
    """The numbers of the layers that store keys and values; a policy has an entry for each of them, in this order."""
    model = config.model_config
    if not model.is_hybrid:
        return list(range(model.get_total_num_hidden_layers()))
    try:
        return [number for number, slot in enumerate(slots(model.hf_config)) if slot.other is None]
    except InputError as error:
        raise InputError(f"aurakv cannot tell which layers of this model a policy is for: {error}") from error


@contextlib.contextmanager
def fresh_states(config: VllmConfig, tokens: int, device: torch.device) -> Iterator[dict[str, Any] | None]:
    """What every layer is told of a pass over one new sequence of so many tokens; None where no layer has a state.

    vLLM gives such layers their states when it sets memory aside, which comes later: here they get one of their own,
    for this pass. Attention layers are told nothing.
    """
    layers = config.compilation_config.static_forward_context
    recurrent = {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}
    if not recurrent:
        yield None
        return
    told: dict[str, Any] = dict.fromkeys(layers)
    before = {name: layer.kv_cache for name, layer in recurrent.items() if hasattr(layer, "kv_cache")}
    drafts = config.num_speculative_tokens
    common = _one_sequence(tokens, 1 + drafts, device)
    made: dict[tuple[Any, ...], Any] = {}
    try:
        for name, layer in recurrent.items():
            spec = MambaSpec(
                block_size=tokens,  # one state for the whole sequence
                shapes=tuple(layer.get_state_shape()),
                dtypes=layer.get_state_dtype(),
                mamba_type=layer.mamba_type,
                num_speculative_blocks=drafts,
            )
            builder = layer.get_attn_backend().get_builder_cls()
            if (builder, spec) not in made:
                made[builder, spec] = builder(spec, [name], config, device).build(0, common)
            told[name] = made[builder, spec]
            shape = (2 + drafts, 1, 1, spec.page_size_bytes)  # vLLM keeps block 0 free
            layer.bind_kv_cache(torch.zeros(shape, dtype=torch.int8, device=device))
        yield told
    finally:
        for name, layer in recurrent.items():
            vars(layer).pop("kv_cache", None)
            if name in before:
                layer.kv_cache = before[name]


def _one_sequence(tokens: int, blocks: int, device: torch.device) -> CommonAttentionMetadata:
    starts, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=length.to(device),
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        block_table_tensor=torch.arange(1, 1 + blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(tokens, device=device),
        is_prefilling=torch.tensor([True]),
        seq_lens_cpu_upper_bound=length,
    )

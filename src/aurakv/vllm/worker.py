"""AuraWorker: a worker of vLLM that decides, between loading a model and setting memory aside, what each layer stores.

The numbers come from a policy, from what is kept for this model, or from a text that the loaded model reads here: one
forward pass on every rank, in which our layers attend without a cache and watch keys and queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
)
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..calibration import texts
from ..calibration.calibration import Calibration, KeyCalibration
from ..calibration.observer import KeyObserver
from ..calibration.policy import FIRST, FITTED_ON, LayerPolicy
from ..calibration.statistics import ENOUGH, SINKS, Turns
from ..errors import FileError, InputError
from ..format.codec import Format
from ..hf.support import turns
from . import connectors
from .adapter import AuraBackend, AuraImpl
from .layer import BLOCK_TOKENS
from .recurrent import attention_numbers, fresh_states
from .switch import Switch, shard

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker

TOKENS = 2048  # of the text
DRAFT = LayerPolicy("k8v8")  # of a draft model: what it proposes is checked anyway

_logger = init_logger("vllm.aurakv")


class AuraWorker(StockWorker):  # type: ignore[misc]
    """The platform's worker; `--worker-cls` may name one that derives from this."""

    def load_model(self, **options: Any) -> None:
        if current_platform.is_cpu():  # it knows one backend only, which can be another
            register_backend(AttentionBackendEnum.CPU_ATTN, f"{AuraBackend.__module__}.{AuraBackend.__qualname__}")
        try:
            super().load_model(**options)
        finally:
            if current_platform.is_cpu():
                AttentionBackendEnum.CPU_ATTN.clear_override()
        if self.vllm_config.lora_config is not None:  # the text is read without an adapter
            most = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.model_runner.lora_manager.set_active_adapters(set(), LoRAMapping((0,) * most, (0,), is_prefill=True))
        decide(self.vllm_config, self.get_model(), self.device)
        prefer_blocks(self.vllm_config)


def prefer_blocks(config: VllmConfig) -> None:
    """On CUDA, where the user names no size: blocks of BLOCK_TOKENS. vLLM asks a backend for the size it prefers only
    where a model has one kind of backend; with several, as layers of different formats have, it takes 16 tokens."""
    cache = config.cache_config
    if current_platform.is_cuda() and not cache.user_specified_block_size:
        cache.block_size, cache.user_specified_block_size = BLOCK_TOKENS, True


def decide(config: VllmConfig, model: torch.nn.Module, device: torch.device) -> None:
    """Tell every attention layer of the model what it stores."""
    switch = Switch.parse(config.additional_config)
    assert switch is not None
    connectors.check_device(config, device.type)
    ours = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if isinstance(getattr(layer, "impl", None), AuraImpl)
    }
    for layer in ours.values():
        layer.impl.shares = layer.kv_sharing_target_layer_name  # drafts of Gemma 4 learn it after they were made
    own = {module.layer_name for module in model.modules() if isinstance(module, Attention)} & set(ours)
    numbers = {name: extract_layer_index(name) for name in own if ours[name].impl.shares is None}
    if switch.policy is not None:
        policies = dict(zip(attention_numbers(config), (x.on(device.type) for x in switch.policy.layers), strict=True))
    elif switch.measured:
        policies = _measured(switch, config, model, device, {numbers[name]: ours[name] for name in numbers})
    else:
        policies = dict.fromkeys(numbers.values(), LayerPolicy(str(switch.format)))
    seqs = config.scheduler_config.max_num_seqs
    # entries of uncompressed tokens belong to one builder
    kept = (0, 0) if config.parallel_config.use_ubatching else (switch.first, switch.recent)
    if kept != (switch.first, switch.recent):
        _logger.warning_once("with microbatches aurakv keeps no first and no recent tokens uncompressed: more is lost")
    connectors.check_folders(config, switch)
    draft = DRAFT
    if not _all(
        one_kind(config, {numbers[name]: ours[name] for name in numbers})
    ):  # larger blocks would pad all others
        draft = LayerPolicy(max((policy.format for policy in policies.values()), key=_size))
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    for name, layer in ours.items():
        source = layer.impl.shares or name
        policy = policies[extract_layer_index(source)] if source in own else draft
        uncompressed = kept if source in own else (0, 0)  # a policy says nothing of a draft model
        layer.impl.give(layer, shard(policy, rank, ranks, layer.impl.num_kv_heads), *uncompressed, seqs, device)


def _measured(
    switch: Switch, config: VllmConfig, model: torch.nn.Module, device: torch.device, layers: dict[int, Attention]
) -> dict[int, LayerPolicy]:
    identity = _identity(config)
    found = _kept(identity, device) if identity else None
    ranks = get_tensor_model_parallel_world_size() // copies(config)
    shapes = {number: (layer.impl.num_kv_heads * ranks, layer.head_size) for number, layer in layers.items()}
    better = found is not None and found.limited is not None and found.limited < _limit(config)
    better = better and not connectors.disks(config)
    fits = (
        found is not None
        and not better
        and all(
            number in found.layers and tuple(found.layers[number].key_scale.shape) == shape
            for number, shape in shapes.items()
        )
    )
    if not _all(fits):  # what one rank finds another may not: all read, or none
        found = _read(config, model, device, layers, identity)
        _logger.info_once(f"aurakv calibrated {len(found.layers)} layers on {found.source}")
        if identity and get_world_group().rank == 0:
            try:
                _logger.info_once(f"aurakv keeps this calibration in {found.keep()}")
            except FileError as error:
                _logger.warning_once(f"this calibration is made again at the next start: {error}")
    assert found is not None
    chosen = found.chosen(switch.format, switch.plain, device.type)
    formats = {layer.format for layer in chosen.layers.values()}
    if len(formats) > 1 and not _all(one_kind(config, layers)):
        widest = max(formats, key=_size)
        _logger.info_once(f"aurakv stores {widest} in all layers: blocks of this model must have one size")
        chosen = found.chosen(widest, device_type=device.type)
    if chosen.note is not None:
        _logger.warning_once(chosen.note)
    wide = {number: layer.format for number, layer in chosen.layers.items() if switch.format is None}
    if len(set(wide.values())) > 1:
        _logger.info_once(f"aurakv stores keys wider in some layers: {wide}")
    return chosen.layers


def _kept(identity: str, device: torch.device) -> Calibration | None:
    try:
        return Calibration.kept(identity, device.type in FITTED_ON)
    except FileError as error:
        _logger.warning_once(f"the calibration that was kept is of no use, and aurakv makes a new one: {error}")
        return None


def _size(format: str) -> int:
    return Format.parse(format, 64).bytes_per_token


def one_kind(config: VllmConfig, layers: dict[int, Attention]) -> bool:
    """Whether layers differ in neither window nor state; vLLM gives blocks of all kinds the same size."""
    return not config.model_config.is_hybrid and len({layer.impl.sliding_window for layer in layers.values()}) < 2


def copies(config: VllmConfig) -> int:
    """Tensor-parallel ranks that share a KV head."""
    return max(1, get_tensor_model_parallel_world_size() // config.model_config.get_total_num_kv_heads())


def _identity(config: VllmConfig) -> str:
    """Of the model; empty where it has no files that tell."""
    try:
        return connectors.identity(config)
    except FileError as error:
        _logger.warning_once(f"aurakv calibrates at every start: {error}")
        return ""


def _all(good: bool) -> bool:
    """Whether it is so on every rank."""
    group = get_world_group()
    if group.world_size == 1:
        return good
    bad = torch.tensor([0 if good else 1])
    torch.distributed.all_reduce(bad, group=group.cpu_group)
    return int(bad) == 0


@torch.inference_mode()
def _read(
    config: VllmConfig,
    model: torch.nn.Module,
    device: torch.device,
    layers: dict[int, Attention],
    identity: str,
) -> Calibration:
    """Let the model read a text, and put together what the layers of all ranks saw."""
    ids, source = _ids(config)
    turned = _turned(config)
    for number, layer in layers.items():
        layer.impl.observer = KeyObserver(turned[number] if number < len(turned) else None, layer.impl.scoring)
    try:
        _forward(config, model, ids.to(device))
        seen = {
            number: layer.impl.observer.calibration(FIRST if layer.impl.keeps_first(layer) else 0, device.type)
            for number, layer in layers.items()
        }
    finally:
        for layer in layers.values():
            layer.impl.observer = None
    limit = _limit(config)
    return Calibration(
        _gathered(seen, copies(config)), source, FIRST, identity, limited=limit if limit < TOKENS else None
    )


def _turned(config: VllmConfig) -> list[Turns | None]:
    """How positions turn keys in each layer, as far as it is known."""
    try:
        return turns(config.model_config.hf_config)
    except InputError:  # layers that only vLLM knows
        return []


def _limit(config: VllmConfig) -> int:
    """How many tokens of a text this engine can read at once, of those that a calibration wants."""
    if config.model_config.skip_tokenizer_init:
        return 0
    return _most(config)


def _most(config: VllmConfig) -> int:
    return min(TOKENS, config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens)


def _ids(config: VllmConfig) -> tuple[Tensor, str]:
    model, count = config.model_config, _most(config)
    if count < ENOUGH + SINKS:
        raise InputError(
            f"aurakv calibrates on at least {ENOUGH + SINKS} tokens, and --max-model-len and --max-num-batched-tokens"
            f" allow {count}: run aurakv calibrate {model.model} before, or raise them"
        )
    if model.skip_tokenizer_init:
        ids = torch.randint(model.get_vocab_size(), (count,), generator=torch.Generator().manual_seed(0))
        return ids, f"{count:,} random tokens, because the engine has no tokenizer"
    tokenizer = cached_tokenizer_from_config(model)
    ids = texts.ids_of(texts.builtin(), tokenizer, model.hf_config)[0, :count]
    return ids, f"{len(ids):,} tokens of alice"


def _forward(config: VllmConfig, model: torch.nn.Module, ids: Tensor) -> None:
    """One pass through this rank's part of the model, without torch.compile."""
    positions = torch.arange(len(ids), device=ids.device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    before, pipeline = None, get_pp_group()
    with (
        fresh_states(config, len(ids), ids.device) as told,
        set_forward_context(told, config, num_tokens=len(ids), skip_compiled=True),
    ):
        if not pipeline.is_first_rank:
            before = IntermediateTensors(pipeline.recv_tensor_dict(all_gather_group=get_tp_group()))
        after = model(input_ids=ids, positions=positions, intermediate_tensors=before, inputs_embeds=None)
        if not pipeline.is_last_rank:
            pipeline.send_tensor_dict(after.tensors, all_gather_group=get_tp_group())


def _gathered(seen: dict[int, KeyCalibration], copies: int) -> dict[int, KeyCalibration]:
    """All KV heads of all layers, the same on every rank."""
    group = get_world_group()
    mine = (get_pp_group().rank_in_group, get_tensor_model_parallel_rank(), seen)
    parts: list[Any] = [mine]
    if group.world_size > 1:
        parts = [None] * group.world_size
        torch.distributed.all_gather_object(parts, mine, group=group.cpu_group)
    ranks: dict[int, list[KeyCalibration]] = {}
    for _, _, part in sorted(parts, key=lambda part: part[:2]):
        for number, layer in part.items():
            ranks.setdefault(number, []).append(layer)
    return {number: whole(parts, copies) for number, parts in sorted(ranks.items())}


def whole(parts: list[KeyCalibration], copies: int) -> KeyCalibration:
    """One layer from what each tensor-parallel rank saw of its KV heads; `copies` ranks share each head."""
    different = parts[::copies]

    def mean(name: str) -> dict[int, float]:
        each = [getattr(part, name) for part in different]
        return {bits: sum(part[bits] for part in each) / len(each) for bits in each[0]}

    weights = [part.key_weight for part in different if part.key_weight is not None]
    return KeyCalibration(
        torch.cat([part.key_offset for part in different]),
        torch.cat([part.key_scale for part in different]),
        mean("moved"),
        mean("moved_plain"),
        torch.cat(weights) if len(weights) == len(different) else None,
    )

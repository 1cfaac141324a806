"""What operators use in vLLM's engine: drafts, recurrent states, offloading, parallel stages. Run: make test-vllm"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm installs it")
from aurakv.calibration.calibration import Calibration, KeyCalibration
from aurakv.calibration.identity import identity_of
from aurakv.calibration.policy import LayerPolicy, Policy
from tests.helpers.vllm_answers import LIKELY, Answer, answer, equal, wrong
from tests.vllm.test_engine import GPU, LENGTH, cpu_only, engine, needs_two, random_model, random_prompts, token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("calibrations")]


def said(model: Path, switch: str | bool | None, prompts: list[Any], tokens: int = 16, **options: Any) -> Any:
    with engine(model, switch, skip_tokenizer_init=True, **options) as llm:
        return token_ids(llm, prompts, tokens, detokenize=False)


def predicted(model: Path, switch: str | bool | None, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """The most likely token behind each token of the prompts but the last."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=LIKELY or 1, detokenize=False)
    with engine(model, switch, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [most_likely(out) for out in outputs]


def most_likely(out: Any) -> Answer:
    """From a request for `prompt_logprobs`."""
    positions = out.prompt_logprobs[1:]
    best = [min(position, key=lambda token: position[token].rank) for position in positions]
    return answer(best, positions if LIKELY else None, chained=False)


# drafts


def repeated_prompts() -> list[list[int]]:
    """A few tokens again and again, so that drafts from the prompt are accepted as well as rejected."""
    found = []
    for seed, length in enumerate((30, 60, 100, 200, 240, 64)):
        draw = random.Random(seed)
        found.append(([draw.randrange(512) for _ in range(12)] * 20)[:length])
    return found


def eagle_head(folder: Path) -> Path:
    """One layer of random weights that drafts from the hidden states of `random_model`."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    torch.manual_seed(3)
    shapes = {
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (128, 256),
        "self_attn.v_proj": (128, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.gate_proj": (512, 256),
        "mlp.up_proj": (512, 256),
        "mlp.down_proj": (256, 512),
    }
    weights = {f"layers.0.{name}.weight": 0.05 * torch.randn(shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(256)
    weights["fc.weight"] = 0.05 * torch.randn(256, 512)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


DRAFTS: dict[str, dict[str, Any]] = {
    "a model": {"method": "draft_model", "num_speculative_tokens": 3},
    "a head": {"method": "eagle", "num_speculative_tokens": 2},
    "the prompt": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
}


@pytest.mark.parametrize("switch", ["k16v16", "k8v8"])
@pytest.mark.parametrize("proposer", DRAFTS)
def test_drafts_change_nothing(
    llama: Path, tmp_path: Path, proposer: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 1 + k queries: greedy text is that without drafts, whoever proposes them."""
    how = dict(DRAFTS[proposer])
    if proposer != "the prompt":
        how["model"] = str(llama if proposer == "a model" else eagle_head(tmp_path / "eagle"))
    prompts = repeated_prompts()
    expected = said(llama, switch, prompts, 24)
    if proposer == "the prompt":  # it imports numba, and no second engine starts in a process that has it
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert wrong(said(llama, switch, prompts, 24, speculative_config=how), expected) == []


# models with a recurrent state


def short_convolutions(folder: Path) -> Path:
    """Two layers that convolve, two that attend."""
    import vllm

    if vllm.__version__.startswith("0.31."):
        pytest.skip("the kernel for CPUs of vLLM 0.31 takes convolutions of width 4 only")
    from transformers import AutoModelForCausalLM, Lfm2Config

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=LENGTH,
        layer_types=["conv", "full_attention"] * 2, block_ff_dim=512, block_auto_adjust_ff_dim=False, block_dim=256,
        conv_dim=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def gated_delta_nets(folder: Path) -> Path:
    """As in Qwen3-Next: two layers with a matrix as their state, two that attend."""
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.1, max_position_embeddings=LENGTH,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128,
        layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_short_convolutions_beside_attention(tmp_path: Path) -> None:
    """The text of the stock backend at 16 bits; calibrated by a text that passes all layers; a policy of two layers."""
    folder, prompts = short_convolutions(tmp_path / "model"), random_prompts()
    expected = said(folder, None, prompts)
    assert wrong(said(folder, "k16v16", prompts), expected) == []
    for switch, least in (("k8v8", 90), (True, 40)):  # of 96
        assert equal(said(folder, switch, prompts), expected) >= least
    Policy(2, 64, (LayerPolicy("k16v16"),) * 2).save(tmp_path / "policy.json")
    assert wrong(said(folder, str(tmp_path / "policy.json"), prompts), expected) == []


def test_gated_delta_nets_beside_attention(tmp_path: Path) -> None:
    """vLLM computes them in bfloat16 on a CPU, where a last bit may change a token and with it all later ones: so what
    is compared is the next token behind every token of the prompts, read in chunks."""
    import vllm

    if vllm.__version__.startswith("0.31."):
        pytest.skip("vLLM 0.31 has no group of processes for the experts of this model on a CPU")
    folder, prompts = gated_delta_nets(tmp_path / "model"), random_prompts()
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 1024 if GPU else 128}
    options["additional_config"] = {"gdn_prefill_backend": "triton"}  # needs no FlashInfer
    expected = predicted(folder, None, prompts, **options)
    for switch, least in (("k16v16", 760), ("k8v8", 740)):  # of 784
        assert equal(predicted(folder, switch, prompts, **options), expected) >= least


@pytest.fixture
def right_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernel for CPUs turns keys [tokens, heads, dim], as LFM2 has them, by wrong angles. Not here."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)


@cpu_only  # in float32, as transformers
@pytest.mark.usefixtures("right_turns")
def test_calibration_at_start_sees_what_transformers_sees(tmp_path: Path) -> None:
    """The recurrent layers take part when vLLM reads a text: keys behind them are those of the model."""
    from transformers import AutoModelForCausalLM

    from aurakv.hf.calibrate import calibrate

    folder = short_convolutions(tmp_path / "model")
    said(folder, "k8v8", [[1, 2, 3]], 1)
    made = Calibration.kept(identity_of(folder), True)
    assert made is not None
    ids = torch.randint(512, (1, 2048), generator=torch.Generator().manual_seed(0))  # an engine without tokenizer
    expected = calibrate(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids)
    assert list(made.layers) == list(expected.layers) == [1, 3]
    for number, layer in expected.layers.items():
        torch.testing.assert_close(made.layers[number].key_scale, layer.key_scale, rtol=1e-2, atol=1e-3)


# layers of different kinds


def test_a_policy_with_blocks_of_different_sizes(tmp_path: Path) -> None:
    """Layers with a window and layers without one: vLLM pads the smaller blocks."""
    folder, prompts = random_model(tmp_path / "model", "gemma2"), random_prompts()
    expected = said(folder, None, prompts)
    Policy(2, 64, (LayerPolicy("k16v16"), LayerPolicy("k8v8")) * 2).save(tmp_path / "policy.json")
    assert equal(said(folder, str(tmp_path / "policy.json"), prompts), expected) >= 86  # of 96


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_layers_with_windows_and_head_dims_of_their_own(tmp_path: Path, kind: str) -> None:
    """Gemma 4 has larger heads in layers without a window."""
    folder, prompts = gemma(tmp_path / "model", kind), random_prompts()
    expected = said(folder, None, prompts)
    assert wrong(said(folder, "k16v16", prompts), expected) == []
    assert equal(said(folder, "k8v8", prompts), expected) >= 80  # of 96


def gemma(folder: Path, kind: str) -> Path:
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, Gemma4TextConfig

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.1,
        "max_position_embeddings": LENGTH, "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    if kind == "gemma3":
        config: Any = Gemma3TextConfig(**common)
    else:
        config = Gemma4TextConfig(
            **common, global_head_dim=128, num_global_key_value_heads=2, hidden_size_per_layer_input=0,
            num_kv_shared_layers=0, vocab_size_per_layer_input=512,
        )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


# adapters and stages


def adapter(folder: Path) -> Path:
    """A LoRA adapter of `random_model` with random numbers."""
    import json

    from safetensors.torch import save_file

    torch.manual_seed(5)
    folder.mkdir()
    weights = {}
    for layer in range(4):
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = 0.2 * torch.randn(8, 256)
            weights[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn(rows, 8)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


def test_adapters(llama: Path, tmp_path: Path) -> None:
    """The same prompts with an adapter and without one, in one engine: each as with the stock backend."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    path, prompts, found = adapter(tmp_path / "adapter"), random_prompts(), {}
    for switch in (None, "k16v16", "k8v8"):
        options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "skip_tokenizer_init": True}
        with engine(llama, switch, **options) as llm:
            params = SamplingParams(
                temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=LIKELY or None
            )
            for request in (None, LoRARequest("one", 1, str(path))):
                given = [{"prompt_token_ids": prompt} for prompt in prompts]
                outputs = llm.generate(given, params, use_tqdm=False, lora_request=request)
                said_now = [out.outputs[0] for out in outputs]
                found[switch, request is None] = [answer(each.token_ids, each.logprobs) for each in said_now]
    assert equal(found[None, True], found[None, False]) < 48, "the adapter was meant to change the text"
    for plain in (True, False):
        assert wrong(found["k16v16", plain], found[None, plain]) == []
    alone = said(llama, "k8v8", prompts)
    assert wrong(found["k8v8", True], alone) == [], "adapters were meant not to change the calibration"


@needs_two
def test_pipeline_parallel(llama: Path) -> None:
    """Two processes, each with half of the layers, calibrate together and say what one says."""
    # vLLM's second stage gets its input buffers while a model is compiled, so not in eager mode
    compiled: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    expected = said(llama, "k8v8", random_prompts(), **compiled)
    assert wrong(said(llama, "k8v8", random_prompts(), **compiled, **stages), expected) == []


# connectors


def configured(model: Path, switch: str, connector: str | None = None, **options: Any) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    if connector is not None:
        extra = options.pop("extra", {})
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        )
    additional = {"aurakv": switch}
    return EngineArgs(str(model), additional_config=additional, skip_tokenizer_init=True, **options)


def created(args: Any) -> Any:
    return args.create_engine_config()


def test_host_memory_is_allowed(llama: Path) -> None:
    for args in (
        configured(llama, "k4v4", kv_offloading_size=1.0),
        configured(llama, "k4v4", "OffloadingConnector", extra={"cpu_bytes_to_use": 1 << 20}),
        configured(llama, "k4v4", "SimpleCPUOffloadConnector", extra={"cpu_bytes_to_use": 1 << 20}),
    ):
        assert created(args).kv_transfer_config.kv_connector.endswith(("OffloadingConnector", "OffloadConnector"))


@cpu_only
def test_host_memory_needs_a_gpu(llama: Path) -> None:
    """vLLM's own connectors fail on a CPU, one of them with an AttributeError."""
    with (
        pytest.raises(Exception, match="SimpleCPUOffloadConnector has no use on a CPU"),
        engine(llama, "k8v8", kv_transfer_config=created_transfer(), skip_tokenizer_init=True),
    ):
        pass


def created_transfer() -> Any:
    from vllm.config import KVTransferConfig

    extra = {"cpu_bytes_to_use": 1 << 20}
    return KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )


REFUSED = {
    "LMCache": ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "must be native, got lmcache"),
    "another engine": ({"connector": "NixlConnector"}, "which move blocks as bytes, got NixlConnector"),
    "another tier": (
        {
            "connector": "OffloadingConnector",
            "extra": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "obj"}]},
        },
        r"tier fs, .* got \['obj'\]",
    ),
    "another spec": (
        {"connector": "OffloadingConnector", "extra": {"spec_name": "Mine", "spec_module_path": "mine"}},
        "spec_name of OffloadingConnector must be one of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_connectors_are_refused(llama: Path, name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(Exception, match=message):
        created(configured(llama, "k4v4", **options))


def test_bytes_on_disk_are_found_by_format_and_calibration(llama: Path, tmp_path: Path) -> None:
    """Two engines share a folder on disk only if they would write the same bytes."""
    tiers = [{"type": "fs", "root_dir": str(tmp_path / "blocks")}]

    def root(switch: str) -> str:
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers}
        config = created(configured(llama, switch, "OffloadingConnector", extra=extra))
        return str(config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["root_dir"])

    with pytest.raises(Exception, match="must be made before: aurakv calibrate"):
        root("k4v4")
    uncompressed = root("k16v4")  # nothing of it is measured
    scale = torch.ones(2, 64)
    moved = dict.fromkeys((2, 3, 4, 5, 6, 8), 0.0)

    def keep(factor: float) -> None:
        layers = {number: KeyCalibration(0 * scale, factor * scale, moved, moved, scale) for number in range(4)}
        Calibration(layers, "a text", 0, identity_of(llama)).keep()

    keep(1.0)
    first, wider, plain = root("k4v4"), root("k8v4"), root("plain:k4v4")
    assert root("k4v4") == first
    keep(1.5)
    policies = []
    for format in ("k4v4", "k8v4"):
        Policy(2, 64, (LayerPolicy(format),) * 4).save(tmp_path / f"{format}.json")
        policies.append(root(str(tmp_path / f"{format}.json")))
    found = [uncompressed, first, wider, plain, root("k4v4"), root("k16v8"), *policies]
    assert len(set(found)) == len(found)
    assert all(Path(each).parent == tmp_path / "blocks" for each in found)
    assert tiers == [{"type": "fs", "root_dir": str(tmp_path / "blocks")}], "what the caller has stays as it is"
